"""A `CtrModel` as a program: it is trained on impressions, and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.ctr.losses import LabelLoss, LabelWeights, label_loss
from rayrec.models.ctr.model import CtrModel
from rayrec.models.ctr.tensors import Impressions, ImpressionTensors
from rayrec.models.program.flops import ModelFlops
from rayrec.models.program.program import ProgramPlacement, Rows
from rayrec.models.program.torch_program import TorchProgram
from rayrec.platform.impression_schema import ImpressionSchema


class CtrModelSettings(LabelWeights, Protocol):
    """What this needs of an `ImpressionModelConfig`."""

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> CtrModel:
        """The network, with initial weights from torch's default generator."""


def build_ctr_model(settings: CtrModelSettings, schema: ImpressionSchema, seed: int) -> CtrModel:
    """Build the network; its initial weights depend on the seed and the shapes alone.

    It is made on torch's default device: the CPU, or `meta` to know its shapes without their memory.

    Raises:
        InputError: settings name a column that the data does not have, or nothing could be learned.
    """
    loss = label_loss(settings, schema)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return settings.build(schema, loss)


class CtrProgram(TorchProgram):
    """Training as every module of torch's; and scoring."""

    def __init__(
        self,
        model: CtrModel,
        settings: DenseOptimizerSettings,
        placement: ProgramPlacement,
        flops: ModelFlops | None = None,
    ) -> None:
        super().__init__(
            model,
            settings,
            placement.device,
            placement.seed,
            placement.sum_over_trainers,
            placement.compute,
            flops,
        )
        self.model = model

    def _batch(self, features: Impressions, rows: Rows, training: bool) -> ImpressionTensors:
        return ImpressionTensors.build(features, rows, self._seed, self._device, training)

    @torch.inference_mode()
    def predict(self, features: Impressions, rows: Rows) -> np.ndarray:
        """[B, T] probabilities."""
        self._begin_inference()
        predicted: np.ndarray = self.model.predict(self._batch(features, rows, training=False)).cpu().numpy()
        return predicted


@dataclass(frozen=True)
class CtrProgramSpec:
    """What trainers build: a model, for impressions of a schema."""

    model: CtrModelSettings
    schema: ImpressionSchema
    optimizer: DenseOptimizerSettings

    def build(self, placement: ProgramPlacement) -> CtrProgram:
        model = build_ctr_model(self.model, self.schema, placement.seed)
        return CtrProgram(model, self.optimizer, placement, flops_of(model, placement.device))


def flops_of(model: CtrModel, device: torch.device) -> ModelFlops:
    """What counts the FLOPs of such a model, before it is compiled or split."""

    def build(features: Impressions, rows: Rows, training: bool) -> ImpressionTensors:
        return ImpressionTensors.build(features, rows, 0, device, training)

    def size_of(features: Impressions) -> tuple[int, int]:
        num_rows = len(features.row_keys_B)
        return num_rows, num_rows + _num_elements(list(features.list_offsets_B1.values()))

    return ModelFlops(model, device, build, size_of)


def _num_elements(offsets: Sequence[np.ndarray]) -> int:
    return sum(int(offsets_B1[-1]) for offsets_B1 in offsets)
