"""From the vectors of history events to what is known after each of them.

Axes: N history events of all rows, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.past import Grown, KeysAndValues, Past
from rayrec.models.sequence.tensor_batch import TensorBatch

if TYPE_CHECKING:
    from rayrec.models.sequence.backbones.transformer import CausalTransformer


class HistoryReader(Protocol):
    """A network of `backbones`."""

    num_dropouts: int
    """Indices taken by its dropouts; those of what is built on it start after them."""

    def __call__(
        self, x_ND: Tensor, layout: JaggedLayout, keys_N: Tensor, times_N: Tensor | None = None
    ) -> Tensor:
        """[N, D] vectors of events to [N, D] contexts, each knowing the events of its row up to its own.

        Args:
            keys_N: of the events, for dropout; see `keyed_random`.
            times_N: UNIX seconds of the events, for networks that read them.
        """


def contexts(backbone: HistoryReader, events_ND: Tensor, batch: TensorBatch) -> Tensor:
    """[N, D] what is known after each event: of the events up to it and, where it has a row, of the user."""
    if "user" in batch.rows:
        events_ND = events_ND + batch.users_of(batch.layout.row_N)
    return backbone(events_ND, batch.layout, batch.keys_N, batch.times_N)


def read_on(
    backbone: CausalTransformer, events_ND: Tensor, batch: TensorBatch, past: Past
) -> tuple[Tensor, Sequence[KeysAndValues]]:
    """([B, D] what is known at the end of each row, what the layers have of whole rows).

    Args:
        events_ND: of whole rows.
    """
    behind, tokens_N = batch.layout.behind(past.lengths_B)
    grown = Grown(past, behind)
    contexts_ND = backbone.read_on(events_ND[tokens_N], grown, batch.keys_N[tokens_N])
    return behind.last(contexts_ND), grown.layers


def last_contexts(backbone: HistoryReader, events_ND: Tensor, batch: TensorBatch) -> Tensor:
    """[B, D] what is known at the end of each row; those of rows without events mean nothing."""
    return batch.layout.last(contexts(backbone, events_ND, batch))
