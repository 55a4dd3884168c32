"""What each scheme means: numbers and scales of a weight, and of activations.

    weight [O, K] float32 ──► values in few bits, and scales ──┐
    activations [N, K]   ──► values in few bits, and scales ──┴─► product of values × scales + bias

Everything here is float32 arithmetic on plain tensors. Kernels compute the same with other instructions.

Axes: N rows, K inputs, O outputs, G groups of inputs.

Sources: Dettmers et al. (LLM.int8()), arXiv:2208.07339, for scales by row and by output channel; Micikevicius
et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.base.config import QuantizationConfig

MOST_INT8 = 127
"""What the largest weight or activation becomes; a static range may clip at -128."""
MOST_INT4 = 7
FLOAT8 = torch.float8_e4m3fn
MOST_FLOAT8 = 448.0
_LEAST_SCALE = 1e-12
"""Of values that are all zero."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A layer's numbers."""

    settings: QuantizationConfig
    values_OK: Tensor
    """int8, or float8."""
    scale_OG: Tensor
    """float32; one column where a channel has one scale."""
    bias_O: Tensor | None = None
    input_scale: Tensor | None = None
    """[1] float32 of all activations, of `w8a8_static`."""

    @property
    def dequantized_OK(self) -> Tensor:
        """float32, what the numbers stand for."""
        return times_scales(self.values_OK.float(), self.scale_OG)


def most_of_weights(settings: QuantizationConfig) -> float:
    """The largest number that a weight may become."""
    if settings.scheme == "fp8":
        return MOST_FLOAT8
    if settings.scheme == "w4a16":
        return MOST_INT4
    return MOST_INT8 if settings.weight_bits == 8 else MOST_INT8 // 2


def quantize_weight(
    weight_OK: Tensor, settings: QuantizationConfig, shrink_OG: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(Numbers [O, K] int8 or float8, scales [O, G]).

    Args:
        shrink_OG: share of the largest weight that the range reaches up to; what is larger is clipped.
            None: 1.
    """
    num_groups = 1 if settings.group_size is None else weight_OK.shape[1] // settings.group_size
    groups_OGS = weight_OK.float().unflatten(1, (num_groups, -1))
    reach_OG = groups_OGS.abs().amax(2)
    if shrink_OG is not None:
        reach_OG = reach_OG * shrink_OG
    most = most_of_weights(settings)
    scale_OG = (reach_OG / most).clamp(min=_LEAST_SCALE)
    scaled_OK = (groups_OGS / scale_OG[:, :, None]).clamp(-most, most).flatten(1)
    if settings.scheme == "fp8":
        return scaled_OK.to(FLOAT8), scale_OG
    return scaled_OK.round().to(torch.int8), scale_OG


def rounded_weight(
    weight_OK: Tensor, settings: QuantizationConfig, shrink_OG: Tensor | None = None
) -> Tensor:
    """[O, K] float32: the weight as it is after quantization."""
    values_OK, scale_OG = quantize_weight(weight_OK, settings, shrink_OG)
    return times_scales(values_OK.float(), scale_OG)


def times_scales(values_OK: Tensor, scale_OG: Tensor) -> Tensor:
    groups_OGS = values_OK.unflatten(1, (scale_OG.shape[1], -1))
    return (groups_OGS * scale_OG[:, :, None]).flatten(1)


def scaled_rows(
    x: Tensor, settings: QuantizationConfig, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """([..., K] activations divided by their scales, scales [..., 1], or [1] where there is one for all).

    A row's scale depends on the row alone, so an answer is the same in every batch.
    """
    if input_scale is not None:
        return x / input_scale, input_scale
    most = MOST_FLOAT8 if settings.scheme == "fp8" else MOST_INT8
    scale = x.abs().amax(-1, keepdim=True).div_(most).clamp_(min=_LEAST_SCALE)
    return x / scale, scale


def quantize_rows(
    x: Tensor, settings: QuantizationConfig, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(Numbers [..., K] as float32, scales as `scaled_rows` has them)."""
    scaled, scale = scaled_rows(x, settings, input_scale)
    if settings.scheme == "fp8":
        return scaled.clamp(-MOST_FLOAT8, MOST_FLOAT8).to(FLOAT8).float(), scale
    return scaled.round().clamp(-MOST_INT8 - 1, MOST_INT8), scale


def reads_numbers(settings: QuantizationConfig) -> bool:
    """Whether activations are quantized, too."""
    return settings.scheme in ("w8a8", "w8a8_static", "fp8")


def product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """[..., O]: quantize, round, and compute in float32. This is what a scheme means."""
    if not reads_numbers(weight.settings):
        return functional.linear(x, weight.dequantized_OK, weight.bias_O)
    numbers, scale = quantize_rows(x, weight.settings, weight.input_scale)
    sums = functional.linear(numbers, weight.values_OK.float())
    return scaled(sums * weight.scale_OG[:, 0], scale, weight.bias_O)


def scaled(sums: Tensor, scale: Tensor, bias_O: Tensor | None) -> Tensor:
    """[..., O] outputs, of sums that have the scales of their channel already; by these operations, which
    kernels repeat to the bit."""
    return sums * scale if bias_O is None else torch.addcmul(bias_O, sums, scale)


def packed_int32(values_OK: Tensor, bits: int) -> Tensor:
    """[O, K bits / 32] int32 of numbers of so few bits: the first in the lowest bits, and half of their range
    added, which takes the signs away.

    As compressed-tensors packs them.
    """
    per_int32 = 32 // bits
    numbers = (values_OK.to(torch.int32) + (1 << (bits - 1))).unflatten(1, (-1, per_int32))
    packed = torch.zeros(numbers.shape[:2], dtype=torch.int32, device=values_OK.device)
    for place in range(per_int32):
        packed |= numbers[:, :, place] << (bits * place)
    return packed


def unpacked_int32(packed: Tensor, bits: int) -> Tensor:
    """[O, K] int8, of `packed_int32`."""
    mask = (1 << bits) - 1
    numbers = [(packed >> (bits * place)) & mask for place in range(32 // bits)]
    return (torch.stack(numbers, dim=2).flatten(1) - (1 << (bits - 1))).to(torch.int8)
