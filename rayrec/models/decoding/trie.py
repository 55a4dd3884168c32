"""The prefix tree of all items' code tuples, as flat tensors.

Depth d holds the distinct prefixes of d codes; the root is the only node of
depth 0 and the leaves, at depth L, are the items. The children of a node are
neighbors, ordered by code, and the nodes of a depth are numbered in the order
of their prefixes: so a child's number at depth d + 1 is also its place in that
depth's arrays, and walking the tree is two gathers.

    depth d                child_offsets[d]    child_codes[d]       depth d + 1
    node n ───────────────► [n], [n + 1] ─────► one entry per child = its node

Axes: I items (leaves), L codes of an item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from rayrec.platform.arrays import BoolArray, Int64Array

IntArray = NDArray[np.integer]


@dataclass(frozen=True)
class CodeTrie:
    """Compressed sparse rows of every depth; all tensors int64 on one device."""

    child_offsets: tuple[Tensor, ...]
    """Per depth [nodes + 1]: node n owns child_codes[depth][offsets[n]:offsets[n + 1]]."""
    child_codes: tuple[Tensor, ...]
    """Per depth [children]: the code that leads to each node of the next depth."""
    leaf_items_I: Tensor
    """Catalog position of each leaf."""
    first_leaves: tuple[Tensor, ...]
    """Per depth, leaves included, [nodes + 1]: below node n are leaves first[n] to first[n + 1] - 1."""
    max_children: tuple[int, ...]
    """Per depth, the most children of one node: a plain number, so that decoding asks no device for it."""
    child_keys: tuple[Tensor, ...]
    """Per depth [children], ascending: parent * number of codes + code, by which `child` finds a node."""
    num_codes: tuple[int, ...]
    """Per depth, one more than the largest code."""

    @property
    def depth(self) -> int:
        """Codes of an item, L."""
        return len(self.child_codes)

    @property
    def num_items(self) -> int:
        return len(self.leaf_items_I)

    @property
    def device(self) -> torch.device:
        return self.leaf_items_I.device

    def num_nodes(self, depth: int) -> int:
        """Distinct prefixes of `depth` codes."""
        return len(self.child_codes[depth - 1]) if depth else 1

    def children(
        self, depth: int, nodes: Tensor, count: int, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """So many children of nodes [...] of a depth.

        Args:
            start: [...] the first child of each that is wanted; None: its first.

        Returns:
            [..., count] nodes of the next depth, and whether each is a child: rows with fewer are filled up
            with arbitrary nodes. Node -1 has none.
        """
        offsets = self.child_offsets[depth]
        known = nodes.clamp(min=0)
        first = offsets[known] if start is None else offsets[known] + start
        children = first.unsqueeze(-1) + torch.arange(count, device=self.device)
        is_child = children < torch.where(nodes < 0, 0, offsets[known + 1]).unsqueeze(-1)
        return children.clamp(max=len(self.child_codes[depth]) - 1), is_child

    def child(self, depth: int, nodes: Tensor, codes: Tensor) -> Tensor:
        """[...] the child of each node [...] by a code [...]; -1 where there is none, or for node -1."""
        num_codes, keys = self.num_codes[depth], self.child_keys[depth]
        wanted = nodes * num_codes + codes
        found = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        is_there = (keys[found] == wanted) & (nodes >= 0) & (codes < num_codes)
        return torch.where(is_there, found, -1)

    # What is kept is made outside of inference mode, even if that asks first: training reads it, too.

    @cached_property
    @torch.inference_mode(False)
    def leaf_of_I(self) -> Tensor:
        """Leaf of each catalog position: the inverse of `leaf_items_I`."""
        leaf_of_I = torch.empty_like(self.leaf_items_I)
        leaf_of_I[self.leaf_items_I] = torch.arange(self.num_items, device=self.device)
        return leaf_of_I

    @cached_property
    @torch.inference_mode(False)
    def nodes_IL(self) -> Tensor:
        """[I, L] the node of each prefix of each item, by catalog position."""
        return torch.stack(
            [torch.searchsorted(first, self.leaf_of_I, right=True) - 1 for first in self.first_leaves[1:]],
            dim=1,
        )

    @classmethod
    def from_codes(cls, codes_IL: ArrayLike | Tensor) -> CodeTrie:
        """Build the tree on the CPU.

        Args:
            codes_IL: [I, L] non-negative integers, one distinct tuple per
                catalog position.

        Raises:
            ValueError: no items, a negative code, or items that share a tuple.
        """
        codes = codes_IL.cpu().numpy() if isinstance(codes_IL, Tensor) else np.asarray(codes_IL)
        if codes.ndim != 2 or 0 in codes.shape or codes.dtype.kind not in "iu":
            raise ValueError(
                f"expected integer codes of shape [items, levels], got {codes.dtype} of shape {codes.shape}"
            )
        if codes.min() < 0:
            position = int(np.argmax((codes < 0).any(axis=1)))
            raise ValueError(f"codes must not be negative, got {codes[position].tolist()} at item {position}")
        num_codes = (codes.max(axis=0).astype(np.int64) + 1).tolist()
        order_I, columns = _sorted(codes, num_codes)
        # True where a row starts a new prefix; a prefix that is new stays new at greater depths.
        starts_I = np.zeros(len(codes), dtype=np.bool_)
        starts_I[0] = True
        offsets, children, keys, first_leaves = [], [], [], [np.array([0, len(codes)])]
        num_parents = 1
        for depth, column_I in enumerate(columns):
            level = _level(column_I, starts_I, num_codes[depth])
            offsets.append(level[0])
            children.append(level[1])
            keys.append(level[2])
            first_leaves.append(level[3])
            num_parents = len(level[1])
        if num_parents < len(codes):
            raise ValueError(
                f"{len(codes)} items have only {num_parents} distinct code tuples; "
                "apply a collision policy before building the trie"
            )
        max_children = tuple(int(np.diff(depth_offsets).max()) for depth_offsets in offsets)
        return cls(
            tuple(map(_tensor, offsets)),
            tuple(map(_tensor, children)),
            _tensor(order_I),
            tuple(map(_tensor, first_leaves)),
            max_children,
            tuple(map(_tensor, keys)),
            tuple(num_codes),
        )

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> CodeTrie:
        """A copy on another device."""
        return CodeTrie(
            tuple(offsets.to(device) for offsets in self.child_offsets),
            tuple(codes.to(device) for codes in self.child_codes),
            self.leaf_items_I.to(device),
            tuple(first.to(device) for first in self.first_leaves),
            self.max_children,
            tuple(keys.to(device) for keys in self.child_keys),
            self.num_codes,
        )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))


def _sorted(codes_IL: IntArray, num_codes: Sequence[int]) -> tuple[Int64Array, Iterator[Int64Array]]:
    """Positions in the order of their tuples, equal ones as they come; and each level in that order.

    Args:
        num_codes: one more than the largest code of each level.
    """
    widths = [(size - 1).bit_length() for size in num_codes]
    position_bits = len(codes_IL).bit_length()
    if sum(widths) + position_bits > 63:
        order_I = np.lexsort(codes_IL.T[::-1])
        return order_I, (codes_I[order_I].astype(np.int64) for codes_I in codes_IL.T)
    # A tuple and its position in one number: sorting those takes a fifth of sorting tuples, and nothing is
    # looked up at random, which takes as long again for ten million.
    packed_I = np.zeros(len(codes_IL), dtype=np.int64)
    for codes_I, width in zip(codes_IL.T, widths, strict=True):
        packed_I <<= width
        packed_I |= codes_I
    packed_I <<= position_bits
    packed_I |= np.arange(len(codes_IL))
    packed_I.sort()
    below = [position_bits + sum(widths[level + 1 :]) for level in range(len(widths))]
    columns = ((packed_I >> shift) & ((1 << width) - 1) for shift, width in zip(below, widths, strict=True))
    return packed_I & ((1 << position_bits) - 1), columns


def _level(
    column_I: Int64Array, starts_I: BoolArray, num_codes: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """The nodes of one more depth, of rows in the order of their codes.

    Args:
        column_I: the code that leads there.
        starts_I: where a node of the depth before begins; on return, of this one.
        num_codes: one more than the largest code.

    Returns:
        Offsets of each parent's nodes, codes, keys and first leaves, as in `CodeTrie`.
    """
    starts_parent_I = starts_I.copy()
    starts_I[1:] |= column_I[1:] != column_I[:-1]
    first = np.flatnonzero(starts_I)
    codes, is_first_child = column_I[first], starts_parent_I[first]
    parents = np.cumsum(is_first_child) - 1
    offsets = np.append(np.flatnonzero(is_first_child), len(first))
    return offsets, codes, parents * num_codes + codes, np.append(first, len(column_I))
