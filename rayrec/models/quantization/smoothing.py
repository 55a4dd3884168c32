"""Scales by which outliers of activations move into weights, where activations are quantized, too.

A few inputs of a layer are often a hundred times as large as the others. Where a row shares one scale, the
others then round to nothing. Dividing each input by a scale s and multiplying the weight's column by it
leaves the product as it was, and shares the difficulty out:  s = max|x|^a / max|w|^(1 - a).

Source: Xiao et al., "SmoothQuant", ICML 2023, arXiv:2211.10438, equation 4.

Axes: K inputs of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

STRENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""a that are tried where none is given: the best one differs from layer to layer."""
_LEAST = 1e-5


def candidates(
    largest_K: Tensor, weights: Sequence[Tensor], strength: float | None = None
) -> Iterator[Tensor]:
    """[K] scales to choose among.

    Args:
        largest_K: of the absolute inputs.
        weights: [O, K] of the layers that read them.
        strength: a; None tries some.
    """
    of_weights_K = torch.cat(list(weights)).abs().amax(0).clamp(min=_LEAST)
    of_inputs_K = largest_K.clamp(min=_LEAST)
    for alpha in STRENGTHS if strength is None else (strength,):
        scale_K = of_inputs_K**alpha / of_weights_K ** (1 - alpha)
        yield scale_K.clamp(min=_LEAST)
