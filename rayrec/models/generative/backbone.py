"""What a network has to offer to generate semantic IDs: one small interface for training, decoding and RL.

A row's history is encoded once (`encode_context`); whatever grows from it, beams and samples alike, shares
that. Codes are then scored one level after the other (`step`), or, where they are known, at once
(`sequence_logprob`).

Axes: B rows, W sequences of a row, L code levels, K codes of a level, N history events of all rows,
D width of a vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor, nn

from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.decoding.prefixes import JaggedStep, Step
from rayrec.models.generative.code_softmax import ALL_CODES, CodeSoftmax
from rayrec.models.sequence.sequence_model import ReadRows
from rayrec.models.sequence.tensor_batch import ChunkBatch, TensorBatch
from rayrec.platform.arrays import Int64Array


class Context(Protocol):
    """What all sequences of a row share."""

    def __len__(self) -> int:
        """B."""

    def some_rows(self, rows: slice) -> Self:
        """The context of neighboring rows alone; start and stop are given."""


@dataclass(frozen=True)
class VectorContext:
    """A history that was read into one vector."""

    vectors_BD: Tensor

    def __len__(self) -> int:
        return len(self.vectors_BD)

    def some_rows(self, rows: slice) -> VectorContext:
        return VectorContext(self.vectors_BD[rows])


C = TypeVar("C", bound=Context)


def weighted_sum(losses_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """Scalar: the sum of losses, each as often as it counts."""
    return (losses_N if weights_N is None else losses_N * weights_N).sum()


class GenerativeBackbone(nn.Module, ABC, Generic[C]):
    """A network that scores the codes of the next item."""

    has_jagged_step = False
    """Whether `start_jagged` gives a jagged step."""
    table_of_catalog: str | None = None
    """Table of which rows are needed to generate items, beside those of histories."""
    catalog_VD: Tensor | None = None
    """The rows of `catalog_ids`."""
    code_softmax: CodeSoftmax = ALL_CODES
    """What is trained, of backbones that have no loss of their own."""
    read_rows: ReadRows | None = None
    """What reads others of that table."""

    @property
    def reads_rows(self) -> bool:
        """Whether any of those are asked for."""
        return False

    def row_ids(self) -> dict[str, Int64Array]:
        """As `SequenceModel.row_ids`, by names in this network; weights of codes belong to no item."""
        return {}

    def catalog_ids(self) -> Int64Array:
        """Ids of the rows that are held to generate items, of backbones with a `table_of_catalog`."""
        raise AssertionError(f"{type(self).__name__} generates items by its weights alone")

    @abstractmethod
    def loss(self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Scalar: minus the log-probability of the next item's codes, summed over all history events.

        Args:
            codes_NL: codes of the item that follows each event.
            weights_N: how much each of them counts; None: all alike, once.
        """

    @abstractmethod
    def encode_context(self, batch: TensorBatch) -> C:
        """Read each row's history."""

    def summarize(self, chunks: ChunkBatch) -> Tensor:
        """As `SequenceModel.summarize`."""
        raise AssertionError(f"{type(self).__name__} reads no summaries")

    @abstractmethod
    def step(self, context: C, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        """[B, W, K] logits of the next code of each sequence.

        Args:
            cache: what earlier steps kept of these sequences, in their order.
            depth: d, codes of each sequence so far.
        """

    @abstractmethod
    def sequence_logits(self, context: C, codes_BWL: Tensor) -> Sequence[Tensor]:
        """For every level [B, W, K]: logits of its code, given those before it in the sequence.

        What `step` gives one level after the other, computed at once and differentiable.
        """

    def sequence_logprob(self, context: C, codes_BWL: Tensor) -> Tensor:
        """[B, W, L] log-probability of each code, in the distribution that was trained.

        That is what `code_softmax` says, unless a backbone has its own. What it is under a trie and its
        filters, as items are drawn, is `rayrec.models.decoding.prefixes.item_log_probs`.
        """
        return self.code_softmax.log_probs(self.sequence_logits(context, codes_BWL), codes_BWL)

    def start(self, context: C) -> Step:
        """Begin to decode: a `Step` with caches of its own."""
        return self._start(context, BeamCache())

    def start_jagged(self, context: C) -> tuple[Step, JaggedStep | None]:
        """The same, and what goes on with it where rows have different numbers of sequences; None where a
        network has no such step."""
        return self.start(context), None

    def _start(self, context: C, cache: BeamCache) -> Step:

        def next_logits(depth: int, codes_BWd: Tensor, parent_BW: Tensor | None) -> Tensor:
            if parent_BW is not None:
                cache.reorder(parent_BW)
            return self.step(context, cache, depth, codes_BWd)

        return next_logits
