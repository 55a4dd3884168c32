"""Beam search over the trie of semantic IDs: the most probable items, for evaluation and requests.

A beam as wide as the catalogue ranks every item. What it finds was not drawn: it has a log-probability under
the model and none of having been chosen; `rayrec.models.decoding.sampling` draws.

Axes: B rows, W beams of a row, C children of a node, K codes of a level,
E excluded items, N = W * C candidates of a row.

Source: semantic IDs, Rajput et al., arXiv:2305.05065; the constraint is that of `prefixes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.decoding.prefixes import ItemDistribution, Prefixes, Step
from rayrec.models.decoding.trie import CodeTrie


@dataclass(frozen=True)
class BeamResult:
    """Items of each row, most probable first; equally probable ones in the trie's order of leaves."""

    items_BW: Tensor
    """[B, W] int64 catalogue positions, -1 after the last."""
    log_probs_BW: Tensor
    """[B, W] log-probabilities under the trie-renormalised model, -inf after the last item."""
    num_valid_B: Tensor
    """[B] int64 items found."""


def beam_search(
    step: Step, trie: CodeTrie, beam_width: int, num_rows: int, excluded_items_BE: Tensor | None = None
) -> BeamResult:
    """Find the `beam_width` most probable items of each row.

    Probabilities are those of `rayrec.models.decoding.prefixes.ItemDistribution` without a filter.

    Excluded items (those the user has seen, say) are removed from the leaves
    before the last selection. Their probability is not given to the others, and
    while decoding their prefixes still compete: as each excluded item keeps at
    most one beam from another, choose a beam wider than the items wanted by
    about the number of excluded ones.

    Args:
        step: Scores the next code; its dtype is that of the result (at least
            float32). Logits must be finite: a beam with NaN is dropped.
        trie: On the device where `step` computes.
        beam_width: Prefixes kept per depth, W of the result. At least the
            number of items makes the ranking exhaustive.
        num_rows: B.
        excluded_items_BE: [B, E] int64 catalogue positions, -1 for padding.

    Returns:
        As many columns as `beam_width`; rows with fewer items are padded.
    """
    if beam_width < 1:
        raise ValueError(f"beam_width must be at least 1, got {beam_width}")
    prefixes = Prefixes(ItemDistribution(step, trie, num_rows))
    for depth in range(trie.depth):
        log_probs_BWC = prefixes.expand(depth)
        candidates_BN = (prefixes.log_probs_BW[:, :, None] + log_probs_BWC).flatten(1)
        if depth == trie.depth - 1 and excluded_items_BE is not None:
            items_BN = trie.leaf_items_I[prefixes.children_BWC.flatten(1)]
            excluded_BN = _is_member(items_BN, excluded_items_BE)
            candidates_BN = candidates_BN.masked_fill(excluded_BN, -torch.inf)
        # Prefixes of a row are distinct nodes, so there is no use for more of them than nodes.
        width = min(beam_width, candidates_BN.shape[1], trie.num_nodes(depth + 1))
        chosen_BW = _largest(candidates_BN, width)
        num_children = trie.max_children[depth]
        prefixes.keep(depth, chosen_BW // num_children, chosen_BW % num_children)
        scores_BW = candidates_BN.gather(1, chosen_BW)

    return _ranked(trie, prefixes.nodes_BW, scores_BW, beam_width)


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
    smallest_kept_B1 = values_BN.topk(width, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above_BN = values_BN > smallest_kept_B1
    tied_BN = values_BN == smallest_kept_B1
    num_tied_kept_B1 = width - above_BN.sum(dim=1, keepdim=True)
    kept_BN = above_BN | (tied_BN & (tied_BN.cumsum(dim=1) <= num_tied_kept_B1))
    # Exactly `width` are kept; the others are written to one more column, which is cut off.
    place_BN = torch.where(kept_BN, kept_BN.cumsum(dim=1) - 1, width)
    chosen = torch.zeros(len(values_BN), width + 1, dtype=torch.int64, device=values_BN.device)
    return chosen.scatter_(1, place_BN, indices_BN)[:, :width]


def _is_member(items_BN: Tensor, excluded_items_BE: Tensor) -> Tensor:
    """[B, N]: whether each item is among its row's excluded ones."""
    if not excluded_items_BE.shape[1]:
        return torch.zeros_like(items_BN, dtype=torch.bool)
    sorted_BE = excluded_items_BE.sort(dim=1).values
    place_BN = torch.searchsorted(sorted_BE, items_BN).clamp(max=sorted_BE.shape[1] - 1)
    return sorted_BE.gather(1, place_BN) == items_BN


def _ranked(trie: CodeTrie, leaves_BW: Tensor, scores_BW: Tensor, width: int) -> BeamResult:
    """Leaves by falling score, padded to `width` columns."""
    ranked = scores_BW.sort(dim=1, descending=True, stable=True)
    valid_BW = ranked.values > -torch.inf
    items_BW = trie.leaf_items_I[leaves_BW.gather(1, ranked.indices)].masked_fill(~valid_BW, -1)
    missing = width - items_BW.shape[1]
    return BeamResult(
        torch.nn.functional.pad(items_BW, (0, missing), value=-1),
        torch.nn.functional.pad(ranked.values, (0, missing), value=-torch.inf),
        valid_BW.sum(dim=1),
    )
