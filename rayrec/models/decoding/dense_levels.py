"""Tables of a trie's top levels: what is below a node is read, not computed.

Nodes of the top levels are few and have many children, and every search passes through them. There, a matrix
of all children of all nodes is small: its rows are gathered, where compressed sparse rows take a start and an
end, count on from the one, compare with the other and look up the codes. Finding the child by a code is one
look at another table, instead of a binary search. Both say bit for bit what the sparse rows say, down to what
stands behind the last child.

A level has tables where they are small and not mostly empty; which, follows from the catalog alone.

Axes: V nodes of a depth, one more for node -1, which has no children; C children of the node that has the
most; K codes.

Source: the dense levels of STATIC, arXiv:2602.22647, which are masks and states by the first codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

DENSE_LEVELS = 2
"""Levels that may have tables, from the first on."""
MOST_ENTRIES = 1 << 21
"""Of a table: 34 MiB of children, or 16 of children by code."""
LEAST_FILLED = 0.125
"""Share of a table's entries that are children; a choice, not measured. On a CPU tables gained nothing that
could be measured; on a device they were not measured."""


@dataclass(frozen=True)
class ChildTable:
    """All children of a depth's nodes; the last row is that of node -1."""

    nodes_VC: Tensor
    """Of the next depth; arbitrary ones behind the last child."""
    codes_VC: Tensor
    is_child_VC: Tensor


def is_dense(depth: int, num_entries: int, num_children: int) -> bool:
    """Whether a depth has a table of so many entries for its children."""
    return depth < DENSE_LEVELS and num_entries <= MOST_ENTRIES and num_children >= LEAST_FILLED * num_entries
