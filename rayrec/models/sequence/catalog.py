"""What a network has to know about the items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.decoding.trie_file import TrieFile
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.platform.event_labels import Label
from rayrec.platform.item_bags import ItemBags


@dataclass(frozen=True)
class Catalog:
    """The items, by catalog position."""

    num_items: int
    codes_IL: np.ndarray | None = None
    """Semantic IDs, where the model generates them."""
    level_sizes: tuple[int, ...] = ()
    """Number of codes of each level that is learned: all but one that only numbers the items of a tuple."""
    known_I: np.ndarray | None = None
    """Which items a model was trained on, where the catalog has grown since; None: all of them."""
    trained_I: np.ndarray | None = None
    """Which items training has events of, given for training alone; None: all of them, or it is not known."""
    negative_log_q_I: np.ndarray | None = None
    """Log-probability of sampling each item as a negative, where negatives are sampled."""
    labels: Mapping[Label, tuple[str, ...]] = field(default_factory=dict)
    """Names of the codes of each label of events."""
    trie_file: TrieFile | None = None
    """Where the trie of the codes is kept, if it is."""
    content: ItemBags | None = None
    """What is said of each item, as weighted buckets, for models that read it; counted in the items that
    training had events of."""
    vocabulary: Vocabulary | None = None
    """Of a model that reads text: the tokens of its base, behind which those of the codes come."""

    @property
    def codes(self) -> Tensor:
        """[I, L] codes; the memory is that of `codes_IL` where torch may share it, as of a mapped file."""
        assert self.codes_IL is not None, "the model generates semantic IDs, and there are none"
        is_shared = self.codes_IL.flags.writeable and self.codes_IL.flags.c_contiguous
        return torch.from_numpy(self.codes_IL) if is_shared else torch.tensor(self.codes_IL)

    @cached_property
    def trie(self) -> CodeTrie:
        """Of the codes; the same object for all networks of the catalog."""
        assert self.codes_IL is not None, "the model generates semantic IDs, and there are none"
        if self.trie_file is None:
            return CodeTrie.from_codes(self.codes_IL)
        return self.trie_file.trie(self.codes_IL)

    @property
    def learned_codes(self) -> Tensor:
        """[I, L] codes without a level that only numbers the items of a tuple."""
        assert self.codes_IL is not None, "the model generates semantic IDs, and there are none"
        return torch.tensor(self.codes_IL[:, : len(self.level_sizes)])
