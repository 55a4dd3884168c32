"""The tree of items' code tuples as arrays, without torch: feature workers walk it, and tries are made of it.

Nodes of a depth are the distinct prefixes of so many codes, numbered in the order of their prefixes. The
children of a node are neighbors, so that a child's number is its index in the arrays of its depth.

Axes: I items, L codes of an item, V nodes of a depth, C nodes of the next, N any nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.hashing import as_uint64, mix64

IntArray = NDArray[np.integer]
ROOT_HASH = np.uint64(0)


@dataclass(frozen=True)
class CodeTree:
    """Compressed sparse rows of every depth."""

    offsets: tuple[Int64Array, ...]
    """Per depth [V + 1]: node n has the children offsets[n] to offsets[n + 1] - 1."""
    codes: tuple[Int64Array, ...]
    """Per depth [C]: the code that leads to each node of the next depth."""
    keys: tuple[Int64Array, ...]
    """Per depth [C], ascending: parent * number of codes + code."""
    first_items: tuple[Int64Array, ...]
    """Per depth, leaves included, [V + 1]: below node n are the items order_I[first[n]:first[n + 1]]."""
    order_I: Int64Array
    """Positions of the items in the order of their tuples; items with the same one as they come."""
    num_codes: tuple[int, ...]
    """Per depth, one more than the largest code."""

    @classmethod
    def of(cls, codes_IL: ArrayLike) -> CodeTree:
        """Build the tree; items may share a tuple.

        Args:
            codes_IL: [I, L] non-negative integers.

        Raises:
            ValueError: no items, or a negative code.
        """
        codes = np.asarray(codes_IL)
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
        offsets, children, keys, first_items = [], [], [], [np.array([0, len(codes)])]
        for depth, column_I in enumerate(columns):
            level = _level(column_I, starts_I, num_codes[depth])
            offsets.append(level[0])
            children.append(level[1])
            keys.append(level[2])
            first_items.append(level[3])
        return cls(
            tuple(offsets), tuple(children), tuple(keys), tuple(first_items), order_I, tuple(num_codes)
        )

    @property
    def depth(self) -> int:
        """Codes of an item, L."""
        return len(self.codes)

    def num_nodes(self, depth: int) -> int:
        """Distinct prefixes of `depth` codes."""
        return len(self.codes[depth - 1]) if depth else 1

    @property
    def max_children(self) -> tuple[int, ...]:
        """Per depth, the most children of one node."""
        return tuple(int(np.diff(offsets).max()) for offsets in self.offsets)

    def child(self, depth: int, nodes_N: Int64Array, codes_N: IntArray) -> Int64Array:
        """[N] the child of each node of a depth by a code; -1 where there is none, or for node -1."""
        num_codes, keys = self.num_codes[depth], self.keys[depth]
        wanted_N = nodes_N * num_codes + codes_N
        found_N = np.minimum(np.searchsorted(keys, wanted_N), len(keys) - 1)
        return np.where((keys[found_N] == wanted_N) & (nodes_N >= 0) & (codes_N < num_codes), found_N, -1)

    def prefix_ids(self, depth: int) -> Int64Array:
        """[V] ids of the prefixes of `depth` codes, see `extended_hashes`."""
        return ids_of_nodes(self.offsets[:depth], self.codes[:depth])


def extended_hashes(hashes: NDArray[np.uint64], codes: IntArray) -> NDArray[np.uint64]:
    """Hashes of prefixes that are one code longer; as integers with a sign, the ids of their rows.

    They depend on the codes alone, so a prefix keeps its row when a catalog grows, and equal
    `combine64(c1, ..., cd)`. Two of ten million prefixes have the same one with probability 3e-6.

    Args:
        hashes: of the prefixes so far; `ROOT_HASH` for the empty one. Any shape that fits that of the codes.
    """
    return mix64(hashes ^ as_uint64(codes))


def num_levels_within(sizes: Sequence[int], most: int) -> int:
    """How many of the first levels have no more than so many nodes together."""
    return int((np.cumsum(sizes) <= most).sum())


def ids_of_nodes(offsets: Sequence[Int64Array], codes: Sequence[Int64Array]) -> Int64Array:
    """[V] ids of all nodes of a depth, from the arrays of the depths before it (`CodeTree`)."""
    hashes_V = np.full(1, ROOT_HASH)
    for offsets_V1, codes_C in zip(offsets, codes, strict=True):
        hashes_V = extended_hashes(np.repeat(hashes_V, np.diff(offsets_V1)), codes_C)
    return hashes_V.view(np.int64)


def prefix_ids(codes_NL: IntArray) -> Int64Array:
    """[N, L] ids of all prefixes of each tuple, the shortest first."""
    hashes_N, ids = np.full(len(codes_NL), ROOT_HASH), []
    for codes_N in codes_NL.T:
        hashes_N = extended_hashes(hashes_N, codes_N)
        ids.append(hashes_N.view(np.int64))
    return np.stack(ids, axis=1)


def _sorted(codes_IL: IntArray, num_codes: Sequence[int]) -> tuple[Int64Array, Iterator[Int64Array]]:
    """Positions in the order of their tuples, equal ones as they come; and each level in that order.

    Args:
        num_codes: one more than the largest code of each level.
    """
    widths = [(size - 1).bit_length() for size in num_codes]
    order_I, packed_I = sorted_tuples(codes_IL, widths)
    if packed_I is None:
        return order_I, (codes_I[order_I].astype(np.int64) for codes_I in codes_IL.T)
    below = [sum(widths[level + 1 :]) for level in range(len(widths))]
    columns = ((packed_I >> shift) & ((1 << width) - 1) for shift, width in zip(below, widths, strict=True))
    return order_I, columns


def sorted_tuples(codes_IL: IntArray, widths: Sequence[int]) -> tuple[Int64Array, Int64Array | None]:
    """Positions in the order of their tuples, equal ones as they come; and each tuple as a number, in order.

    Args:
        widths: bits that hold every code of each level.

    Returns:
        None in place of the numbers where tuples and positions do not fit into 63 bits.
    """
    position_bits = len(codes_IL).bit_length()
    if sum(widths) + position_bits > 63:
        return np.lexsort(codes_IL.T[::-1]), None
    # A tuple and its position in one number: sorting those takes a fifth of sorting tuples, and nothing is
    # looked up at random, which takes as long again for ten million.
    packed_I = np.zeros(len(codes_IL), dtype=np.int64)
    for codes_I, width in zip(codes_IL.T, widths, strict=True):
        packed_I <<= width
        packed_I |= codes_I
    packed_I <<= position_bits
    packed_I |= np.arange(len(codes_IL))
    packed_I.sort()
    order_I = packed_I & ((1 << position_bits) - 1)
    packed_I >>= position_bits
    return order_I, packed_I


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
