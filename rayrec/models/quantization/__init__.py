"""Linear layers in fewer bits: schemes, what is observed for them, scales, and the layer with its kernels.

Start at `network.quantize`; `linear.QuantizedLinear` is what comes of a layer.
May import `models.base`.
"""
