"""Which items a request may be given: a set of leaves of the trie per row, known for every prefix, too.

The leaves below a node are neighbors, so how many of a row's set are among them are two binary searches in
its sorted leaves: no mask over the catalog is made, and a prefix under which nothing may be given is known
before it takes a beam's place.

Axes: B rows, E leaves of a row's set, N nodes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.decoding.trie import CodeTrie


@dataclass(frozen=True)
class LeafFilter:
    """What each row may be given."""

    leaves_BE: Tensor
    """[B, E] int64 distinct leaves, ascending; behind a row's last one, the number of leaves."""
    are_allowed: bool
    """Whether nothing but these may be given, or everything else."""

    @staticmethod
    def excluding(trie: CodeTrie, items_BE: Tensor) -> LeafFilter:
        """Everything but these items: what a user has seen, say.

        Args:
            items_BE: [B, E] int64 catalog positions, -1 for padding; repetitions do not matter.
        """
        return LeafFilter(_leaves(trie, items_BE), are_allowed=False)

    @staticmethod
    def allowing(trie: CodeTrie, items_BE: Tensor) -> LeafFilter:
        """These items alone: those of a shop, say. Arguments as those of `excluding`."""
        return LeafFilter(_leaves(trie, items_BE), are_allowed=True)

    def admits(self, first_BN: Tensor, end_BN: Tensor) -> Tensor:
        """[B, N] whether any of the leaves `first` to `end - 1` of a node may be given."""
        below_BN = torch.searchsorted(self.leaves_BE, end_BN) - torch.searchsorted(self.leaves_BE, first_BN)
        return below_BN > 0 if self.are_allowed else below_BN < end_BN - first_BN


def _leaves(trie: CodeTrie, items_BE: Tensor) -> Tensor:
    """Sorted leaves of items, each once."""
    num_items = trie.num_items
    leaves_BE = torch.where(items_BE < 0, num_items, trie.leaf_of_I[items_BE.clamp(min=0)]).sort(dim=1).values
    is_again_BE = torch.zeros_like(leaves_BE, dtype=torch.bool)
    is_again_BE[:, 1:] = leaves_BE[:, 1:] == leaves_BE[:, :-1]
    return leaves_BE.masked_fill(is_again_BE, num_items).sort(dim=1).values
