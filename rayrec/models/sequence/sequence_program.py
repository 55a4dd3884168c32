"""A `SequenceModel` as a program: it is trained on histories, and recommends items for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.config import QuantizationConfig
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.decoding.beam_policy import Beams
from rayrec.models.decoding.leaf_filter import ItemSets
from rayrec.models.program.flops import ModelFlops
from rayrec.models.program.program import AllowedItems, ProgramPlacement, RankedItems, Rows, SumOverTrainers
from rayrec.models.program.torch_program import TorchProgram
from rayrec.models.quantization.linear import with_quantized_layers
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_model import ReadRows, SequenceModel
from rayrec.models.sequence.tensor_batch import Features, TensorBatch
from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.errors import InputError


class SequenceModelSettings(Protocol):
    """What this needs of a `SequenceModelConfig`."""

    @property
    def quantization(self) -> QuantizationConfig | None:
        """How linear layers are quantized; None: they are not."""

    def build(self, catalog: Catalog, attention_file: Path | None = None) -> SequenceModel:
        """The network, with initial weights from torch's default generator."""


def build_model(
    settings: SequenceModelSettings, catalog: Catalog, seed: int, attention_file: Path | None = None
) -> SequenceModel:
    """Build the network on the CPU; its initial weights depend on the seed and the shapes alone.

    Args:
        attention_file: where measured choices of attention backends are kept; need not exist yet.

    Raises:
        InputError: a file that the settings name is missing or does not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = settings.build(catalog, attention_file)
    if settings.quantization is not None:
        with_quantized_layers(model, settings.quantization)
    return model


class CompiledRanker(Protocol):
    """Ranks with programs that were compiled elsewhere (`rayrec.models.compiled_ranking`)."""

    def recommend(
        self,
        features: Features,
        rows: Rows,
        k: int,
        excluded_BE: np.ndarray | None,
        beams_B: Sequence[Beams] | None = None,
    ) -> RankedItems | None:
        """As `SequenceProgram.recommend`; None for a batch that has no program here."""


class SequenceProgram(TorchProgram):
    """Training as every module of torch's; and ranking."""

    def __init__(
        self,
        model: SequenceModel,
        settings: DenseOptimizerSettings,
        device: torch.device,
        seed: int,
        sum_over_trainers: SumOverTrainers | None = None,
        compute: ComputeSettings = PLAIN,
        flops: ModelFlops | None = None,
    ) -> None:
        super().__init__(model, settings, device, seed, sum_over_trainers, compute, flops)
        self.model = model
        self.table_of_catalog = model.table_of_catalog
        self.compiled: CompiledRanker | None = None
        """Ranks what it has programs for; the rest is ranked eagerly."""

    def _batch(self, features: Features, rows: Rows, training: bool) -> TensorBatch:
        return TensorBatch.build(features, rows, self._seed, self._device, training)

    @torch.inference_mode()
    def recommend(
        self,
        features: Features,
        rows: Rows,
        k: int,
        excluded_BE: np.ndarray | None,
        beams_B: Sequence[Beams] | None = None,
        allowed: AllowedItems | None = None,
    ) -> RankedItems:
        """As `RecommendingProgram.recommend`.

        Args:
            beams_B: beams of each row, see `SequenceModel.recommend`; None: as many as k takes.
            allowed: what may be recommended; None: the catalog.
        """
        empty_B = np.diff(features.offsets_B1) == 0
        if empty_B.all():
            shape = (len(empty_B), k)
            return RankedItems(np.full(shape, -1), np.full(shape, -np.inf, dtype=np.float32))
        # Programs have no input for what is allowed, nor for neighbors, old events or prompts.
        has_more = any(
            each is not None for each in (features.neighbors_NJ, features.old_chunks, features.prompts)
        )
        if self.compiled is not None and allowed is None and not has_more:
            ranked = self.compiled.recommend(features, rows, k, excluded_BE, beams_B)
            if ranked is not None:
                ranked.items_BK[empty_B], ranked.scores_BK[empty_B] = -1, -np.inf
                return ranked
        batch = self._batch(features, rows, training=False)
        self._begin_inference()
        excluded = None if excluded_BE is None else torch.tensor(excluded_BE, device=self._device)
        if allowed is None:
            ranking = self.model.recommend(batch, k, excluded, beams_B)
        else:
            if not self._takes_filters:
                raise InputError(
                    f"{type(self.model).__name__} cannot say what may be shown: its recommend() takes no "
                    "`allowed`; leave the filter out"
                )
            mask_SI, set_B = (torch.as_tensor(each, device=self._device) for each in allowed)
            ranking = self.model.recommend(batch, k, excluded, beams_B, ItemSets(mask_SI, set_B))
        items_BK, scores_BK = ranking.items_BK.cpu().numpy(), ranking.scores_BK.float().cpu().numpy()
        items_BK[empty_B], scores_BK[empty_B] = -1, -np.inf
        return RankedItems(items_BK, scores_BK)

    @torch.inference_mode()
    def item_vectors(self) -> Float32Array:
        """[I, D], see `SequenceModel.item_vectors`."""
        self._begin_inference()
        vectors_ID: Float32Array = self.model.item_vectors().float().cpu().numpy()
        return vectors_ID

    @torch.inference_mode()
    def item_log_probs(self, features: Features, rows: Rows, items_BW: np.ndarray) -> np.ndarray:
        """[B, W] log-probability that each item is next, see `SequenceModel.item_log_probs`; -inf throughout
        for a row without history.

        Raises:
            InputError: the model's scores are no probabilities.
        """
        batch = self._batch(features, rows, training=False)
        self._begin_inference()
        found = self.model.item_log_probs(batch, torch.tensor(items_BW, device=self._device))
        if found is None:
            raise InputError(
                f"{type(self.model).__name__} scores every item, and its scores are no probabilities; give a "
                "generative model"
            )
        log_probs_BW = found.float().cpu().numpy()
        log_probs_BW[np.diff(features.offsets_B1) == 0] = -np.inf
        return log_probs_BW

    @torch.inference_mode()
    def first_log_probs(self, features: Features, rows: Rows) -> np.ndarray | None:
        """As `SequenceModel.first_log_probs`."""
        batch = self._batch(features, rows, training=False)
        self._begin_inference()
        found = self.model.first_log_probs(batch)
        return None if found is None else found.float().cpu().numpy()

    @torch.inference_mode()
    def summarize(self, features: Features) -> np.ndarray:
        """[X, K, D] float32, the vectors that stand for the old chunks of a batch."""
        batch = self._batch(features, {}, training=False)
        self._begin_inference()
        assert batch.old_chunks is not None, "of a model that reads them"
        return self.model.summarize(batch.old_chunks).float().cpu().numpy()

    @functools.cached_property
    def _takes_filters(self) -> bool:
        """Whether the model knows what may be shown; one of another package may not."""
        return "allowed" in inspect.signature(self.model.recommend).parameters

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    def num_beams(self, k: int, max_beams: int | None = None) -> int:
        """Beams of such a `recommend`; 0 of a model that scores every item."""
        return self.model.num_beams(k, max_beams)

    def take_catalog(self, item_ids_I: Int64Array, read_rows: ReadRows) -> None:
        rows_ID = read_rows(self.model.catalog_ids(item_ids_I))
        self.model.set_catalog(torch.tensor(rows_ID, device=self._device))
        self.model.set_row_reader(read_rows)


@dataclass(frozen=True)
class SequenceProgramSpec:
    """What trainers build: a model, for a catalog."""

    model: SequenceModelSettings
    catalog: Catalog
    optimizer: DenseOptimizerSettings

    def build(self, placement: ProgramPlacement) -> SequenceProgram:
        """Build the program with its initial weights; errors as `build_model`."""
        model = build_model(self.model, self.catalog, placement.seed, placement.attention_file)
        return SequenceProgram(
            model,
            self.optimizer,
            placement.device,
            placement.seed,
            placement.sum_over_trainers,
            placement.compute,
            flops=flops_of(model, placement.device),
        )


def flops_of(model: SequenceModel, device: torch.device) -> ModelFlops:
    """What counts the FLOPs of such a model, before it is compiled or split."""

    def build(features: Features, rows: Rows, training: bool) -> TensorBatch:
        return TensorBatch.build(features, rows, 0, device, training)

    def size_of(features: Features) -> tuple[int, int]:
        prompts = features.prompts
        return len(features.offsets_B1) - 1, len(features.items_N if prompts is None else prompts.tokens_N)

    return ModelFlops(model, device, build, size_of)
