"""Which items a request may be given: a set of leaves of the trie per row, known for every prefix, too.

The leaves below a node are neighbors, so how many of a row's set are among them are two binary searches in
its sorted leaves: no mask over the catalog is made, and a prefix under which nothing may be given is known
before it takes a beam's place.

Sets that many rows share, of everything in stock say, are given as masks: how many of them are below each
node is the difference of two running counts, whatever their size.

Axes: B rows, E leaves of a row's set, N nodes of a row, S sets, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.decoding.trie import CodeTrie


@dataclass(frozen=True)
class ItemSets:
    """Which items each row may be given at all."""

    mask_SI: Tensor
    """[S, I] bool whether a set has the item at a catalog position."""
    set_B: Tensor
    """[B] int64 the set of each row."""

    @property
    def mask_BI(self) -> Tensor:
        """[B, I] bool whether a row may be given an item."""
        return self.mask_SI[self.set_B]


@dataclass(frozen=True)
class LeafFilter:
    """What each row may be given."""

    leaves_BE: Tensor
    """[B, E] int64 distinct leaves, ascending; behind a row's last one, the number of leaves."""
    are_allowed: bool
    """Whether nothing but these may be given, or everything else."""
    counts_SI1: Tensor | None = None
    """[S, I + 1] how many of the first leaves are in a set, of which nothing but what `leaves_BE` excludes
    may be given; None: all are."""
    set_B: Tensor | None = None
    """[B] the set of each row."""

    @staticmethod
    def excluding(trie: CodeTrie, items_BE: Tensor, sets: ItemSets | None = None) -> LeafFilter:
        """Everything but these items: what a user has seen, say.

        Args:
            items_BE: [B, E] int64 catalog positions, -1 for padding; repetitions do not matter.
            sets: that everything is taken from; None: from the catalog.
        """
        if sets is None:
            return LeafFilter(_leaves(trie, items_BE), are_allowed=False)
        # What a set lacks is not counted there, so it must not be counted among what is left out of it.
        is_there_BE = sets.mask_SI[sets.set_B[:, None], items_BE.clamp(min=0)]
        counts_SI = sets.mask_SI[:, trie.leaf_items_I].cumsum(dim=1)
        return LeafFilter(
            _leaves(trie, items_BE.where(is_there_BE, -1)),
            are_allowed=False,
            counts_SI1=torch.nn.functional.pad(counts_SI, (1, 0)),
            set_B=sets.set_B,
        )

    @staticmethod
    def allowing(trie: CodeTrie, items_BE: Tensor) -> LeafFilter:
        """These items alone: those of a shop, say. Arguments as those of `excluding`."""
        return LeafFilter(_leaves(trie, items_BE), are_allowed=True)

    def some_rows(self, rows: slice) -> LeafFilter:
        """The filter of some rows; what rows share is not made again."""
        set_B = None if self.set_B is None else self.set_B[rows]
        return LeafFilter(self.leaves_BE[rows], self.are_allowed, self.counts_SI1, set_B)

    def admits(self, first_BN: Tensor, end_BN: Tensor) -> Tensor:
        """[B, N] whether any of the leaves `first` to `end - 1` of a node may be given."""
        below_BN = torch.searchsorted(self.leaves_BE, end_BN) - torch.searchsorted(self.leaves_BE, first_BN)
        if self.are_allowed:
            return below_BN > 0
        if self.counts_SI1 is None or self.set_B is None:
            return below_BN < end_BN - first_BN
        set_B1 = self.set_B[:, None]
        return below_BN < self.counts_SI1[set_B1, end_BN] - self.counts_SI1[set_B1, first_BN]


def _leaves(trie: CodeTrie, items_BE: Tensor) -> Tensor:
    """Sorted leaves of items, each once."""
    num_items = trie.num_items
    leaves_BE = torch.where(items_BE < 0, num_items, trie.leaf_of_I[items_BE.clamp(min=0)]).sort(dim=1).values
    is_new_BE = torch.ones_like(leaves_BE, dtype=torch.bool)
    is_new_BE[:, 1:] = leaves_BE[:, 1:] != leaves_BE[:, :-1]
    # Each to its place among the distinct ones; repetitions write the same value there.
    place_BE = is_new_BE.cumsum(dim=1).sub_(1).clamp_(min=0)
    return torch.full_like(leaves_BE, num_items).scatter_(1, place_BE, leaves_BE)
