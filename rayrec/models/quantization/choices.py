"""What is chosen for a network: layer by layer, and then by what the whole network says.

    by outputs      of each layer: the scales with the least error of what reads a norm; clipping
    by divergence   of the network: from the nearer of that and plain rounding, one choice after the other is
                    taken back or weakened where that brings the answers nearer; then, where they are still
                    too far, layers that matter most stay in float32

The error of a layer says little of what the next layers make of it: scales that halve the errors of all
layers can move the answers more than none. On the rows that it is measured by, the outcome is never worse
than plain rounding, unless the strength of the scales was given: then they stay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rayrec.models.quantization import awq, smoothing
from rayrec.models.quantization.draft import Draft, error_of_outputs
from rayrec.models.quantization.schemes import reads_numbers

MOST_FLOAT = 1 / 3
"""Share of the weights that may stay in float32: with more, little is won by quantizing the others."""

Divergence = Callable[[], float]
"""Of a network as it is now from what it was; less is nearer."""


def choose_by_outputs(draft: Draft, strength: float | None) -> None:
    """Scales with the least error of the layers' outputs, where there are better ones than none.

    Args:
        strength: of SmoothQuant; None: some are tried.
    """
    settings = draft.settings
    for fold in draft.folds:
        names = fold.readers.layers
        seen, weights = draft.seen(names[0]), [draft.weight(name) for name in names]
        if reads_numbers(settings):
            tried = smoothing.candidates(seen.largest_K, weights, strength)
        else:
            tried = awq.candidates(seen.mean_K)
        best: Tensor | None = None
        least = error_of_outputs(seen, weights, settings) if strength is None else torch.inf
        for scale_K in tried:
            error = error_of_outputs(seen.over(scale_K), [each * scale_K for each in weights], settings)
            if error < least:
                best, least = scale_K, error
        draft.fold(fold, best)
    if draft.can_clip:
        for name in draft.names:
            draft.clip(name, True)


def choose_by_divergence(draft: Draft, divergence: Divergence, scales_are_fixed: bool = False) -> float:
    """Take back or weaken what was chosen, as long as the answers come nearer; returns how far they are.

    Args:
        scales_are_fixed: they stay as they are, and clipping alone may be taken back.
    """
    draft.put_in_place()
    chosen = [fold.scale_K for fold in draft.folds]
    clipped = [name for name in draft.names if draft.is_clipped(name)]
    least = divergence()
    _choose(draft, chosen if scales_are_fixed else [None] * len(chosen), [])
    if not least < (plain := divergence()):
        least = plain
    else:
        _choose(draft, chosen, clipped)
    for fold, whole_K in zip(draft.folds, chosen, strict=True):
        if whole_K is None or scales_are_fixed:
            continue
        best_K = fold.scale_K
        for scale_K in (None, whole_K.sqrt(), whole_K):
            draft.fold(fold, scale_K)
            if (found := divergence()) < least:
                least, best_K = found, scale_K
        draft.fold(fold, best_K)
    for name in clipped:
        draft.clip(name, not draft.is_clipped(name))
        if (found := divergence()) < least:
            least = found
        else:
            draft.clip(name, not draft.is_clipped(name))
    return least


def keep_in_float(draft: Draft, divergence: Divergence, least: float, wanted: float) -> float:
    """Keep layers in float32 until the answers are as near as is wanted, or too many weights would be: those
    first by which they come nearest for their size. Returns how far the answers are then.

    Args:
        draft: in place.
        least: how far they are before.
    """
    if least <= wanted:
        return least
    gains = {}
    for name in draft.names:
        draft.keep_in_float(name, True)
        gains[name] = (least - divergence()) / draft.num_weights(name)
        draft.keep_in_float(name, False)
    room = MOST_FLOAT * sum(map(draft.num_weights, draft.names))
    for name in sorted(gains, key=lambda each: -gains[each]):
        if gains[name] <= 0 or draft.num_weights(name) > room:
            continue
        draft.keep_in_float(name, True)
        if (found := divergence()) >= least:
            draft.keep_in_float(name, False)  # it does not add to what is kept already
            continue
        least, room = found, room - draft.num_weights(name)
        if least <= wanted:
            break
    return least


def _choose(draft: Draft, scales: list[Tensor | None], clipped: list[str]) -> None:
    for fold, scale_K in zip(draft.folds, scales, strict=True):
        draft.fold(fold, scale_K)
    for name in draft.names:
        draft.clip(name, name in clipped)
