"""Beam search over the trie of semantic IDs: the most probable items, for evaluation and requests.

A beam as wide as the catalog ranks every item. What it finds was not drawn: it has a log-probability under
the model and none of having been chosen; `rayrec.models.decoding.sampling` draws.

Axes: B rows, W beams of a row that has the most, N candidates of a row, the children of all of its beams.

Source: semantic IDs, Rajput et al., arXiv:2305.05065; the constraint is that of `prefixes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.decoding.beam_policy import Beams, RowBeams, by_level
from rayrec.models.decoding.prefixes import ItemDistribution, Prefixes
from rayrec.models.decoding.trie import CodeTrie
from rayrec.platform.devices import values_may_decide


@dataclass(frozen=True)
class BeamResult:
    """Items of each row, most probable first; equally probable ones in the trie's order of leaves."""

    items_BW: Tensor
    """[B, W] int64 catalog positions, -1 after the last."""
    log_probs_BW: Tensor
    """[B, W] log-probabilities under the distribution, -inf after the last item."""
    num_valid_B: Tensor
    """[B] int64 items found."""


def beams_for(k: int, beam_width: int, max_beams: int | None = None) -> int:
    """Beams that find k items: `beam_width` or `max_beams`, the smaller, or k if that is more.

    Above `beam_width` they are powers of two, so that questions for about as many items cost as much.
    """
    wanted = beam_width if max_beams is None else min(beam_width, max_beams)
    return max(wanted, k) if k <= beam_width else 1 << (k - 1).bit_length()


SEARCH_BEAMS = 48
"""What one search more takes beside its beams, in beams that are searched with for nothing."""
JAGGED_SEARCH_BEAMS = 512
"""The same where no model is asked about such beams (`JaggedStep`), and they are columns that are sorted."""


def searches_of(beams_B: Sequence[Beams], is_jagged: bool = False) -> list[tuple[slice, int]]:
    """(Neighboring rows, most beams of one) of searches that together take the least.

    Rows of fewer beams are searched with wider ones where the beams that they do not use are less work than
    a search of their own.

    Args:
        beams_B: of each row; descending, or there are more searches than need be.
        is_jagged: whether no model is asked about beams that a row does not use.
    """
    most_wasted = JAGGED_SEARCH_BEAMS if is_jagged else SEARCH_BEAMS
    widths_BL = by_level(beams_B)
    searches: list[tuple[slice, int]] = []
    first, wasted = 0, 0
    for row, widths_L in enumerate(widths_BL):
        unused_L = [most - width for most, width in zip(widths_BL[first], widths_L, strict=True)]
        wasted += sum(unused_L)
        if min(unused_L) < 0 or wasted > most_wasted * len(widths_L):
            searches.append((slice(first, row), max(widths_BL[first])))
            first, wasted = row, 0
    if len(widths_BL):
        searches.append((slice(first, len(widths_BL)), max(widths_BL[first])))
    return searches


def beam_search(
    distribution: ItemDistribution, beam_width: int, beams_B: Sequence[Beams] | None = None
) -> BeamResult:
    """Find the `beam_width` most probable items of each row.

    Args:
        distribution: Its logits must be finite: a beam with NaN is dropped. The
            result has their dtype (at least float32).
        beam_width: Prefixes kept per depth, W of the result. At least the
            number of items makes the ranking exhaustive.
        beams_B: of each row, at most `beam_width`; None: all of them so many. A row finds what it would find
            in a search of its own.

    Returns:
        As many columns as `beam_width`; rows with fewer items are padded.

    Raises:
        ValueError: no width.
    """
    if beam_width < 1:
        raise ValueError(f"beam_width must be at least 1, got {beam_width}")
    trie, prefixes = distribution.trie, Prefixes(distribution)
    beams = RowBeams((beam_width,) * trie.depth, None, None)
    if beams_B is not None:
        beams = RowBeams.of(beams_B, trie.depth, trie.device)
    for depth in range(trie.depth):
        log_probs_BRS = prefixes.expand(depth)
        before_BR = prefixes.children.of_prefix(prefixes.log_probs_BW)
        candidates_BN = (before_BR[:, :, None] + log_probs_BRS).flatten(1)
        # Prefixes of a row are distinct nodes, so there is no use for more of them than nodes.
        width = min(beams.most_L[depth], candidates_BN.shape[1], trie.num_nodes(depth + 1))
        prefixes.keep(depth, _largest(candidates_BN, width))
        if beams.widths_BL is not None:
            widths_B1 = beams.widths_BL[:, depth, None].clamp(max=width)
            is_kept_BW = _are_largest(prefixes.log_probs_BW, widths_B1)
            prefixes.log_probs_BW = prefixes.log_probs_BW.masked_fill(~is_kept_BW, -torch.inf)
        if beams.margin_B1 is not None and depth + 1 < trie.depth:
            best_B1 = prefixes.log_probs_BW.amax(dim=1, keepdim=True)
            is_far_BW = prefixes.log_probs_BW < best_B1 - beams.margin_B1
            prefixes.log_probs_BW = prefixes.log_probs_BW.masked_fill(is_far_BW, -torch.inf)
    return _ranked(trie, prefixes, beam_width)


def _largest(values_BN: Tensor, width: int) -> Tensor:
    """[B, width] indices of the largest values, in ascending order of index; of equal values the first.

    Candidates stand in the order of their nodes (beams ascend, so do the
    children of a beam), hence this keeps the beams sorted and lets the lower
    node win a tie, where `topk` promises neither.
    """
    num_values = values_BN.shape[1]
    indices_BN = torch.arange(num_values, device=values_BN.device).expand_as(values_BN)
    if width == num_values:
        return indices_BN
    largest = values_BN.topk(width, dim=1, sorted=False)
    smallest_kept_B1 = largest.values.amin(dim=1, keepdim=True)
    if values_may_decide(values_BN.device) and _are_all(values_BN, largest.values, smallest_kept_B1):
        return largest.indices.sort(dim=1).values
    kept_BN = _are_kept(values_BN, smallest_kept_B1, width)
    # Exactly `width` are kept; the others are written to one more column, which is cut off.
    place_BN = torch.where(kept_BN, kept_BN.cumsum(dim=1) - 1, width)
    chosen = torch.zeros(len(values_BN), width + 1, dtype=torch.int64, device=values_BN.device)
    return chosen.scatter_(1, place_BN, indices_BN)[:, :width]


def _are_all(values_BN: Tensor, largest_BW: Tensor, smallest_kept_B1: Tensor) -> bool:
    """Whether no value that was not kept ties with the smallest that was."""
    num_tied_B = (values_BN == smallest_kept_B1).sum(dim=1)
    return torch.equal(num_tied_B, (largest_BW == smallest_kept_B1).sum(dim=1))


def _are_largest(values_BN: Tensor, widths_B1: Tensor) -> Tensor:
    """[B, N] whether a value is among as many largest of its row; of equal values the first are."""
    smallest_kept_B1 = values_BN.sort(dim=1, descending=True).values.gather(1, widths_B1 - 1)
    return _are_kept(values_BN, smallest_kept_B1, widths_B1)


def _are_kept(values_BN: Tensor, smallest_kept_B1: Tensor, width: int | Tensor) -> Tensor:
    """[B, N] whether a value is among the `width` largest of its row, the least of which is given."""
    above_BN = values_BN > smallest_kept_B1
    tied_BN = values_BN == smallest_kept_B1
    num_tied_kept_B1 = width - above_BN.sum(dim=1, keepdim=True)
    return above_BN | (tied_BN & (tied_BN.cumsum(dim=1) <= num_tied_kept_B1))


def _ranked(trie: CodeTrie, prefixes: Prefixes, width: int) -> BeamResult:
    """Leaves by falling probability, padded to `width` columns."""
    leaves_BW = prefixes.nodes_BW
    ranked = prefixes.log_probs_BW.sort(dim=1, descending=True, stable=True)
    valid_BW = ranked.values > -torch.inf
    items_BW = trie.leaf_items_I[leaves_BW.gather(1, ranked.indices)].masked_fill(~valid_BW, -1)
    missing = width - items_BW.shape[1]
    return BeamResult(
        torch.nn.functional.pad(items_BW, (0, missing), value=-1),
        torch.nn.functional.pad(ranked.values, (0, missing), value=-torch.inf),
        valid_BW.sum(dim=1),
    )
