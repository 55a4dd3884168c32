"""Scales and clipping for weights of few bits, chosen by what they do to outputs.

Weights that large activations meet matter most. Scaled up before they are rounded, they lose less, and the
inputs are scaled down instead:  s = mean|x|^a, and a by the error of the outputs. Then the range of each
group is clipped where that lowers the error: a few large weights are worth less than a finer grid for the
others.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization", MLSys 2024, arXiv:2306.00978.

Axes: O outputs, K inputs, G groups of I inputs, S sample rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rayrec.models.base.config import QuantizationConfig
from rayrec.models.quantization.schemes import rounded_weight

STRENGTHS = tuple(step / 20 for step in range(1, 20))
"""a that are tried."""
SHRUNK = tuple(1.0 - step / 20 for step in range(10))
"""Shares of the largest weight of a group that are tried as the end of its range."""
_LEAST = 1e-4


def candidates(mean_K: Tensor) -> Iterator[Tensor]:
    """[K] scales to choose among; the mean of their logarithms is about 0.

    Args:
        mean_K: of the absolute inputs.
    """
    for alpha in STRENGTHS:
        scale_K = mean_K.clamp(min=_LEAST) ** alpha
        yield scale_K / (scale_K.amax() * scale_K.amin()).sqrt()


def clipped(weight_OK: Tensor, sample_SK: Tensor, settings: QuantizationConfig) -> Tensor:
    """[O, G] the share of its largest weight that the range of each group should reach, by the squared error
    of its part of the outputs."""
    size = settings.group_size or weight_OK.shape[1]
    inputs_SGI = sample_SK.unflatten(1, (-1, size))
    # The error of a group's outputs is a quadratic form in that of its weights.
    gram_GII = torch.einsum("sgi,sgj->gij", inputs_SGI, inputs_SGI)
    best_OG = torch.full((len(weight_OK), inputs_SGI.shape[1]), torch.inf)
    share_OG = torch.ones_like(best_OG)
    for share in SHRUNK:
        rounded_OK = rounded_weight(weight_OK, settings, torch.full_like(best_OG, share))
        error_OGI = (rounded_OK - weight_OK).unflatten(1, (-1, size))
        error_OG = (torch.einsum("ogi,gij->ogj", error_OGI, gram_GII) * error_OGI).sum(2)
        is_better_OG = error_OG < best_OG
        best_OG = torch.where(is_better_OG, error_OG, best_OG)
        share_OG = torch.where(is_better_OG, share, share_OG)
    return share_OG
