"""From the vectors of history events to what is known after each of them.

Axes: N history events of all rows, D width of a vector.
"""

from __future__ import annotations

from torch import Tensor

from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.tensor_batch import TensorBatch


def contexts(backbone: CausalTransformer, events_ND: Tensor, batch: TensorBatch) -> Tensor:
    """[N, D] what is known after each event: of the events up to it and, where it has a row, of the user."""
    if "user" in batch.rows:
        events_ND = events_ND + batch.embed("user").index_select(0, batch.layout.row_N)
    return backbone(events_ND, batch.layout, batch.keys_N)


def last_contexts(backbone: CausalTransformer, events_ND: Tensor, batch: TensorBatch) -> Tensor:
    """[B, D] what is known at the end of each row; those of rows without events mean nothing."""
    return contexts(backbone, events_ND, batch).index_select(0, batch.layout.last_B)
