"""Which prefixes of semantic IDs a batch reads: those of its items, and those that its targets' compete with.

A hierarchical softmax along the tree of codes normalizes the prefix of a target over the children of its
parent. So what a batch needs of a catalog of any size are the children along the paths of its targets. Of
parents with many children a sample may do: children are taken in the order of a hash of (seed, step, child),
so that all trainers and all targets below one parent see the same, and the loss corrects for the share that
they are.

Axes: N targets, L codes of an item, P parents, A alternatives, C candidates.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.code_tree import ROOT_HASH, CodeTree, IntArray, extended_hashes, prefix_ids
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.hashing import combine64
from rayrec.samples.base.batches import PathLevel
from rayrec.samples.base.jagged import concatenated_ranges, offsets_from_lengths

_SIBLINGS_STREAM = 5
"""Children of a parent with more than are asked for are those with the smallest hashes of (seed, 5, step,
id)."""


class PrefixPaths:
    """Finds the prefixes that a batch reads of the table `prefix`."""

    def __init__(
        self, codes_IL: IntArray, num_siblings: int | None, trained_I: BoolArray | None, seed: int
    ) -> None:
        """
        Args:
            codes_IL: of the catalog; items may share all of them.
            num_siblings: alternatives of a parent with more children; None: all children.
            trained_I: items that training has events of. Prefixes without one are no alternatives, but for
                those whose last code no trained item has at that level; None: all items are trained.
        """
        self._codes_IL = codes_IL
        self._num_siblings = num_siblings
        self._trained_I = trained_I
        self._seed = seed

    @cached_property
    def tree(self) -> CodeTree:
        """Of the catalog. Ranking needs none."""
        return CodeTree.of(self._codes_IL)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes to make training features."""
        tree = self.tree
        arrays = (*tree.offsets, *tree.codes, *tree.keys, *tree.first_items)
        return sum(array.nbytes for array in (self._codes_IL, tree.order_I, *arrays))

    @cached_property
    def _are_alternatives(self) -> list[BoolArray | None]:
        """Per depth [C] whether targets are told apart from a node of the next depth; None: from all.

        Nodes that lead to no trained item would only ever be negatives. A code that no trained item has at
        its level means nothing, so its prefixes stay.
        """
        if self._trained_I is None:
            return [None] * self.tree.depth
        num_trained_I1 = offsets_from_lengths(self._trained_I[self.tree.order_I])
        are_alternatives: list[BoolArray | None] = []
        for depth, codes_C in enumerate(self.tree.codes):
            is_trained_C = np.diff(num_trained_I1[self.tree.first_items[depth + 1]]) > 0
            has_meaning_K = np.zeros(self.tree.num_codes[depth], dtype=np.bool_)
            has_meaning_K[codes_C[is_trained_C]] = True
            are_alternatives.append(is_trained_C | ~has_meaning_K[codes_C])
        return are_alternatives

    def ids_of(self, items_N: Int64Array) -> Int64Array:
        """[N, L] ids of the prefixes of items, by catalog position."""
        return prefix_ids(self._codes_IL[items_N])

    def most_candidates(self, num_targets: int) -> int:
        """Most candidates of so many targets, over all levels."""
        most = 0
        for depth, widest in enumerate(self.tree.max_children):
            parents = min(num_targets, self.tree.num_nodes(depth))
            siblings = widest if self._num_siblings is None else min(widest, self._num_siblings)
            most += min(parents * siblings + num_targets, self.tree.num_nodes(depth + 1))
        return most

    def levels(self, step: int, targets_N: Int64Array) -> tuple[tuple[PathLevel, ...], Int64Array]:
        """The levels of targets, by catalog position, and the ids of all their candidates one after the
        other."""
        levels, ids = [], []
        nodes_N, hashes_N = np.zeros_like(targets_N), np.full(len(targets_N), ROOT_HASH)
        for depth, codes_N in enumerate(self._codes_IL[targets_N].T):
            children_N = self.tree.child(depth, nodes_N, codes_N)
            level, hashes_C = self._level(step, depth, nodes_N, hashes_N, children_N)
            levels.append(level)
            ids.append(hashes_C.view(np.int64))
            nodes_N, hashes_N = children_N, extended_hashes(hashes_N, codes_N)
        return tuple(levels), np.concatenate(ids)

    def _level(
        self,
        step: int,
        depth: int,
        nodes_N: Int64Array,
        hashes_N: NDArray[np.uint64],
        children_N: Int64Array,
    ) -> tuple[PathLevel, NDArray[np.uint64]]:
        """One level, and the hashes of its candidates.

        Args:
            nodes_N: each target's prefix so far, with its hash.
            children_N: the prefix that is one code longer.
        """
        tree = self.tree
        nodes_P, parents_N = deduplicate(nodes_N)
        hashes_P = np.empty(len(nodes_P), dtype=np.uint64)
        hashes_P[parents_N] = hashes_N
        starts_P = tree.offsets[depth][nodes_P]
        counts_P = tree.offsets[depth][nodes_P + 1] - starts_P
        children_A = concatenated_ranges(starts_P, counts_P)
        parents_A = np.repeat(np.arange(len(nodes_P)), counts_P)
        if (is_alternative_V := self._are_alternatives[depth]) is not None:
            is_chosen_A = is_alternative_V[children_A]
            children_A, parents_A = children_A[is_chosen_A], parents_A[is_chosen_A]
            counts_P = np.bincount(parents_A, minlength=len(nodes_P))
        hashes_A = extended_hashes(hashes_P[parents_A], tree.codes[depth][children_A])
        held_P = counts_P
        if self._num_siblings is not None and (counts_P > self._num_siblings).any():
            chosen_A = self._sampled(step, parents_A, counts_P, hashes_A)
            children_A, parents_A, hashes_A = children_A[chosen_A], parents_A[chosen_A], hashes_A[chosen_A]
            held_P = np.minimum(counts_P, self._num_siblings)
        order_A = np.argsort(children_A, kind="stable")
        found_N = np.searchsorted(children_A, children_N, sorter=order_A)
        targets_N = np.append(order_A, len(children_A))[found_N]
        is_among_N = np.append(children_A, -1)[targets_N] == children_N
        more, more_N = deduplicate(children_N[~is_among_N])
        targets_N[~is_among_N] = len(children_A) + more_N
        hashes_E = np.empty(len(more), dtype=np.uint64)
        hashes_E[more_N] = extended_hashes(hashes_N[~is_among_N], tree.codes[depth][children_N[~is_among_N]])
        level = PathLevel(
            codes_C=tree.codes[depth][np.concatenate([children_A, more])],
            offsets_P1=offsets_from_lengths(held_P),
            log_shares_P=np.log(np.maximum(held_P, 1) / np.maximum(counts_P, 1)).astype(np.float32),
            parents_N=parents_N,
            targets_N=targets_N,
        )
        return level, np.concatenate([hashes_A, hashes_E])

    def _sampled(
        self, step: int, parents_A: Int64Array, counts_P: Int64Array, hashes_A: NDArray[np.uint64]
    ) -> Int64Array:
        """Which children are taken, ascending: all of a parent with few, a sample of one with many."""
        assert self._num_siblings is not None, "else all are taken"
        drawn_A = combine64(self._seed, _SIBLINGS_STREAM, step, hashes_A)
        order_A = np.lexsort((drawn_A, parents_A))
        rank_A = concatenated_ranges(np.zeros_like(counts_P), counts_P)
        return np.sort(order_A[rank_A < self._num_siblings])
