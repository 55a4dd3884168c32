"""Layers of every scheme for tests."""

import torch

from rayrec.models.base.config import QuantizationConfig
from rayrec.models.quantization.linear import QuantizedLinear
from rayrec.models.quantization.schemes import QuantizedWeight, quantize_weight

SCHEMES = ("w8a8", "w8a8_static", "w8a16", "w4a16", "fp8")


def settings(scheme, weight_bits=8, kernel="auto", group_size=32):
    return QuantizationConfig(
        scheme=scheme,
        group_size=group_size if scheme == "w4a16" else None,
        weight_bits=weight_bits,
        modules=("layer",),
        kernel=kernel,
    )


def made_layer(config, inputs=64, outputs=48, bias=True, seed=0):
    """(A quantized layer, the weight and the bias that it was made of)."""
    generator = torch.Generator().manual_seed(seed)
    weight_OK = torch.randn(outputs, inputs, generator=generator)
    bias_O = torch.randn(outputs, generator=generator) if bias else None
    layer = QuantizedLinear(inputs, outputs, bias, config)
    input_scale = torch.tensor([3.5 / 127]) if config.scheme == "w8a8_static" else None
    layer.take(QuantizedWeight(config, *quantize_weight(weight_OK, config), bias_O, input_scale))
    return layer, weight_OK, bias_O


def rows(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
