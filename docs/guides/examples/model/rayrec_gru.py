"""A recurrent network that predicts the next item of a history."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models import Beams, Catalog, SequenceModel, SequenceModelConfig, TensorBatch, TopItems, top_items


class GruConfig(SequenceModelConfig):
    """Settings; each becomes a key of the section `model` of a run."""

    name: Literal["gru"]
    dim: int = Field(64, gt=0)
    max_length: int = Field(50, gt=1)

    @property
    def history_length(self) -> int:
        return self.max_length

    def build(self, catalog: Catalog, attention_file: Path | None = None) -> "GruModel":
        return GruModel(catalog.num_items, self.dim)


class GruModel(SequenceModel):
    """One GRU over the history; every item is scored by an inner product."""

    def __init__(self, num_items: int, dim: int) -> None:
        super().__init__()
        self.items_ID = nn.Parameter(torch.empty(num_items, dim).normal_(std=0.02))
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def states(self, batch: TensorBatch) -> Tensor:
        """[N, D] state after each event of the batch."""
        events_ND = functional.embedding(batch.items_N, self.items_ID)
        states_BTD, _ = self.gru(batch.layout.pad(events_ND))
        return batch.layout.unpad(states_BTD)

    def loss(self, batch: TensorBatch) -> Tensor:
        scores_NI = self.states(batch) @ self.items_ID.T
        return functional.cross_entropy(scores_NI, batch.targets_N, reduction="sum")

    def recommend(
        self, batch: TensorBatch, k: int, excluded_BE: Tensor | None, beams_B: Sequence[Beams] | None = None
    ) -> TopItems:
        scores_BI = batch.layout.last(self.states(batch)) @ self.items_ID.T
        return top_items(scores_BI, k, excluded_BE)

    def row_ids(self, item_ids_I: np.ndarray) -> dict[str, np.ndarray]:
        return {"items_ID": item_ids_I}
