"""How a row changes: the sparse optimizers, and their kernels for host and device.

Start at `optimizers.make_optimizer`.
May import `base`.
"""
