"""Quantized layers in the layout of compressed-tensors, which vLLM and transformers read.

A folder of a network has, beside the tensors of its layers, a section `quantization_config` of its
`config.json`. Weights that are multiplied by activations as they are come packed into int32 (format
`pack-quantized`), others as int8 (`int-quantized`) or float8 (`float-quantized`).

Source: the package compressed-tensors 0.20 and its documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.models.base.config import QuantizationConfig
from rayrec.models.quantization.linear import quantized_layers
from rayrec.models.quantization.schemes import QuantizedWeight, packed_int32, reads_numbers

_FORMATS = {
    "w8a8": "int-quantized",
    "w8a8_static": "int-quantized",
    "w8a16": "pack-quantized",
    "w4a16": "pack-quantized",
    "fp8": "float-quantized",
}


def quantization_section(model: nn.Module, settings: QuantizationConfig) -> dict[str, Any]:
    """The section `quantization_config` of a network whose layers are quantized; it names other linear layers
    as ignored."""
    ignored = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    weights = _numbers(settings) | {
        "strategy": "channel" if settings.group_size is None else "group",
        "group_size": settings.group_size,
        "dynamic": False,
    }
    activations = None
    if reads_numbers(settings):
        is_static = settings.scheme == "w8a8_static"
        activations = _numbers(settings) | {
            "strategy": "tensor" if is_static else "token",
            "dynamic": not is_static,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[settings.scheme],
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
    }


def layer_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of every quantized layer of a network, by name."""
    found: dict[str, Tensor] = {}
    for name, layer in quantized_layers(model):
        found |= {f"{name}.{part}": tensor for part, tensor in _tensors(layer.quantized).items()}
    return found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a network, by name: those of quantized layers in the layout, others as they are."""
    quantized = {name for name, _ in quantized_layers(model)}
    state: Mapping[str, Tensor] = model.state_dict()
    others = {name: each for name, each in state.items() if name.rpartition(".")[0] not in quantized}
    return others | layer_tensors(model)


def _numbers(settings: QuantizationConfig) -> dict[str, Any]:
    return {
        "num_bits": 4 if settings.scheme == "w4a16" else 8,
        "type": "float" if settings.scheme == "fp8" else "int",
        "symmetric": True,
    }


def _tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Parts of one layer."""
    scheme, values_OK = weight.settings.scheme, weight.values_OK
    found = {"weight_scale": weight.scale_OG}
    if _FORMATS[scheme] == "pack-quantized":
        found["weight_packed"] = packed_int32(values_OK, 4 if scheme == "w4a16" else 8)
        found["weight_shape"] = torch.tensor(values_OK.shape)
    else:
        found["weight"] = values_OK
    if weight.input_scale is not None:
        found["input_scale"] = weight.input_scale
    if weight.bias_O is not None:
        found["bias"] = weight.bias_O
    return found
