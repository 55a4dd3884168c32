"""How a row changes: the sparse optimizers, and their kernels for host and device.

Start at `row_optimizer`, which says what a module of this folder holds.
May import `base`.
"""
