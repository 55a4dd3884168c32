"""Children of prefixes, without one wide node making all others as wide.

Children stand in a matrix, whose width is that of the largest node. Where few nodes have many children (ten
thousand items with one text share all codes but the last), nearly all of that matrix would be empty. There, a
prefix has as many rows of `SEGMENT` columns as its children need, one after the other, and what is normalized
is normalized over all rows of a prefix.

Their number depends on the data and is asked for on the CPU alone: a device would have to be waited for, and
a compiled program has fixed shapes. These keep one row per prefix.

Axes: B rows of a batch, W prefixes of each, R >= W rows of children, S columns of them;
L levels, K codes of a level, C children of its widest node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.decoding.trie import CodeTrie
from rayrec.platform.devices import values_may_decide

SEGMENT = 64
"""Columns where nodes are of very different widths."""


@dataclass(frozen=True)
class Children:
    """The children of some prefixes, those of each in ascending order."""

    nodes_BRS: Tensor
    """Of the next depth; arbitrary ones behind the last child."""
    is_child_BRS: Tensor
    prefix_BR: Tensor | None
    """Which prefix's each row is, ascending; None: each its own, R is W."""
    first_BW: Tensor | None
    """Where the rows of each prefix begin."""
    codes_BRS: Tensor
    """That lead to them."""

    @classmethod
    def of(cls, trie: CodeTrie, depth: int, nodes_BW: Tensor) -> Children:
        """The children of nodes of a depth; node -1 has none."""
        if not is_uneven(trie, depth) or not values_may_decide(nodes_BW.device):
            children_BWS, is_child_BWS = trie.children(depth, nodes_BW, trie.max_children[depth])
            codes_BWS = trie.codes_of_children(depth, nodes_BW, children_BWS)
            return cls(children_BWS, is_child_BWS, None, None, codes_BWS)
        known_BW = nodes_BW.clamp(min=0)
        count_BW = trie.child_offsets[depth][known_BW + 1] - trie.child_offsets[depth][known_BW]
        rows_BW = (count_BW.masked_fill(nodes_BW < 0, 0) + SEGMENT - 1).div(SEGMENT, rounding_mode="floor")
        rows_BW = rows_BW.clamp(min=1)
        end_BW = rows_BW.cumsum(dim=1)
        num_rows = int(end_BW[:, -1].max())
        row_BR = torch.arange(num_rows).expand(len(nodes_BW), -1).contiguous()
        prefix_BR = torch.searchsorted(end_BW, row_BR, right=True)
        is_row_BR = prefix_BR < nodes_BW.shape[1]  # others fill up rows of a batch with fewer
        prefix_BR = prefix_BR.clamp(max=nodes_BW.shape[1] - 1)
        first_BW = end_BW - rows_BW
        start_BR = (row_BR - first_BW.gather(1, prefix_BR)) * SEGMENT
        node_BR = nodes_BW.gather(1, prefix_BR).masked_fill(~is_row_BR, -1)
        children_BRS, is_child_BRS = trie.children(depth, node_BR, SEGMENT, start_BR)
        codes_BRS = trie.child_codes[depth][children_BRS]
        return cls(children_BRS, is_child_BRS, prefix_BR, first_BW, codes_BRS)

    def of_prefix(self, values_BW: Tensor) -> Tensor:
        """[B, R] what each row's prefix has."""
        return values_BW if self.prefix_BR is None else values_BW.gather(1, self.prefix_BR)

    def place(self, prefix_BN: Tensor, child_BN: Tensor) -> Tensor:
        """[B, N] where the n-th child of a prefix stands among all R * S."""
        if self.first_BW is None:
            return prefix_BN * self.nodes_BRS.shape[2] + child_BN
        return self.first_BW.gather(1, prefix_BN) * self.nodes_BRS.shape[2] + child_BN

    def prefix_at(self, place_BN: Tensor) -> Tensor:
        """[B, N] whose child stands at each place."""
        row_BN = place_BN.div(self.nodes_BRS.shape[2], rounding_mode="floor")
        return row_BN if self.prefix_BR is None else self.prefix_BR.gather(1, row_BN)

    def largest(self, values_BRS: Tensor) -> Tensor:
        """[B, R] the largest value of any child of each row's prefix."""
        largest_BR = values_BRS.amax(dim=2)
        return largest_BR if self.prefix_BR is None else _of_groups(largest_BR, self.prefix_BR, "amax")

    def place_of_largest(self, values_BRS: Tensor) -> Tensor:
        """[B, W] where the child with the largest value of each prefix stands; of equal ones the first."""
        num_rows, num_columns = values_BRS.shape[1:]
        row_BR = torch.arange(num_rows, device=values_BRS.device).expand(values_BRS.shape[:2])
        column_BR = values_BRS.argmax(dim=2)
        if self.prefix_BR is None or self.first_BW is None:
            return row_BR * num_columns + column_BR
        is_largest_BR = values_BRS.amax(dim=2) == self.largest(values_BRS)
        row_BW = torch.full_like(self.first_BW, num_rows - 1).scatter_reduce(
            1, self.prefix_BR, row_BR.masked_fill(~is_largest_BR, num_rows - 1), "amin"
        )
        return row_BW * num_columns + column_BR.gather(1, row_BW)

    def count(self, is_it_BRS: Tensor) -> Tensor:
        """[B, R] for how many children of each row's prefix something holds."""
        count_BR = is_it_BRS.sum(dim=2)
        return count_BR if self.prefix_BR is None else _of_groups(count_BR, self.prefix_BR, "sum")

    def log_softmax(self, logits_BRS: Tensor) -> Tensor:
        """[B, R, S] normalized over the children of each prefix; no number where it has none but -inf."""
        if self.prefix_BR is None:
            return logits_BRS.log_softmax(dim=2)
        # As `log_softmax_of_groups`, bit for bit, with what a row of children shares computed once.
        largest_BR = self.largest(logits_BRS.detach())
        shifted_BRS = logits_BRS - largest_BR.masked_fill(largest_BR == -torch.inf, 0.0)[:, :, None]
        prefix_BN = self.prefix_BR[:, :, None].expand_as(logits_BRS).flatten(1)
        total_BR = torch.zeros_like(largest_BR).scatter_reduce(
            1, prefix_BN, shifted_BRS.exp().flatten(1), "sum"
        )
        log_total_BR = total_BR.clamp(min=torch.finfo(total_BR.dtype).tiny).log()
        return shifted_BRS - self.of_prefix(log_total_BR)[:, :, None]


def log_probs_among_children(trie: CodeTrie, logits: Iterable[Tensor], codes_BWL: Tensor) -> Tensor:
    """[B, W, L] log-probability of each code of sequences among those that lead to an item.

    Args:
        logits: [B, W, K] of every level, of the code that follows those before it in the sequence.

    Returns:
        -inf for a code that leads to none.
    """
    log_probs = []
    parent_BW = torch.zeros(codes_BWL.shape[:2], dtype=torch.int64, device=codes_BWL.device)
    for depth, logits_BWK in enumerate(logits):
        children_BWC, is_child_BWC = trie.children(depth, parent_BW, trie.max_children[depth])
        codes_BWC = trie.codes_of_children(depth, parent_BW, children_BWC)
        log_probs_BWC = (
            logits_BWK.gather(2, codes_BWC).masked_fill(~is_child_BWC, -torch.inf).log_softmax(dim=2)
        )
        node_BW = trie.child(depth, parent_BW, codes_BWL[:, :, depth])
        # Children are neighbors: where one stands among them is its distance from the first.
        place_BW = (node_BW - trie.child_offsets[depth][parent_BW.clamp(min=0)]).clamp(min=0)
        chosen_BW = log_probs_BWC.gather(2, place_BW[:, :, None])[:, :, 0]
        log_probs.append(chosen_BW.masked_fill(node_BW < 0, -torch.inf))
        parent_BW = node_BW
    return torch.stack(log_probs, dim=2)


def log_softmax_of_groups(logits_BN: Tensor, group_BN: Tensor) -> Tensor:
    """[B, N] normalized over the values of each group, which are numbered from 0; -inf stays -inf."""
    largest_BN = _of_groups(logits_BN.detach(), group_BN, "amax")
    shifted_BN = logits_BN - largest_BN.masked_fill(largest_BN == -torch.inf, 0.0)
    total_BN = _of_groups(shifted_BN.exp(), group_BN, "sum")
    return shifted_BN - total_BN.clamp(min=torch.finfo(total_BN.dtype).tiny).log()


def is_uneven(trie: CodeTrie, depth: int) -> bool:
    """Whether most of a matrix as wide as the widest node of a depth would be empty."""
    widest = trie.max_children[depth]
    return widest > 4 * SEGMENT and widest * trie.num_nodes(depth) > 4 * trie.num_nodes(depth + 1)


def _of_groups(values_BR: Tensor, group_BR: Tensor, reduce: str) -> Tensor:
    """[B, R] the largest value or the sum of the group of each."""
    start = torch.zeros_like(values_BR)  # there are no more groups than values
    return start.scatter_reduce(1, group_BR, values_BR, reduce, include_self=reduce == "sum").gather(
        1, group_BR
    )
