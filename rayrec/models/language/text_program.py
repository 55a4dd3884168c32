"""A `LanguageModel` as a program: it is trained on rows of tokens, judges them, and continues them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.generation.forms import Begin
from rayrec.models.language.held_answers import HeldAnswers, HeldForm
from rayrec.models.language.language_model import LanguageModel
from rayrec.models.language.tensor_parallel import NO_ADAPTERS, TensorParallel, together
from rayrec.models.language.text_tensors import AskedRows, TextRows, TextTensors
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.flops import ModelFlops
from rayrec.models.program.program import DenseGradients, ProgramPlacement, Rows
from rayrec.models.program.sharding import SplitModel
from rayrec.models.program.torch_program import TorchProgram
from rayrec.platform.shares import balanced_bounds

TOKENS_AT_ONCE = 8192
"""Of rows that are judged."""


class LanguageModelSettings(Protocol):
    """What this needs of a `LanguageModelConfig`."""

    def build(self, vocabulary: Vocabulary) -> LanguageModel:
        """The network, with initial weights from torch's default generator."""


def build_language_model(settings: LanguageModelSettings, vocabulary: Vocabulary, seed: int) -> LanguageModel:
    """Build the network; weights that are not read depend on the seed and the shapes alone.

    Raises:
        InputError: a file that the settings name is missing or does not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return settings.build(vocabulary)


class TextProgram(TorchProgram):
    """Training as every module of torch's; log-likelihoods, and greedy continuations."""

    def __init__(
        self,
        model: LanguageModel,
        vocabulary: Vocabulary,
        settings: DenseOptimizerSettings,
        placement: ProgramPlacement,
        flops: ModelFlops | None = None,
        form: HeldForm | None = None,
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
        self._vocabulary, self._form = vocabulary, form

    @cached_property
    def _begin_answer(self) -> Begin | None:
        return None if self._form is None else self._form.begin(self._vocabulary)

    def _split(self) -> SplitModel:
        if self._compute.parallel != "tensor":
            return super()._split()
        if self._frozen.names:
            raise ValueError(NO_ADAPTERS)
        parts = TensorParallel(self.model.network, self._device, self.model.packed)
        self.model.to(self._device)
        return parts

    def backward(self, features: TextRows, rows: Rows) -> DenseGradients:
        if self._compute.parallel != "tensor":
            return super().backward(features, rows)
        found = super().backward(together(features), rows)
        # Losses of trainers are added up, and each has computed that of all.
        return DenseGradients(found.loss_sum / torch.distributed.get_world_size(), found.row_grads)

    def _batch(self, features: TextRows, rows: Rows, training: bool) -> TextTensors:
        batch = TextTensors.build(features, rows, self._device, training)
        if not training or not self.model.input_dropout.probability:
            return batch
        row_keys_B = torch.from_numpy(features.row_keys_B).to(self._device)
        return batch.keyed(row_keys_B, self._seed, features.step)

    @torch.inference_mode()
    def log_likelihoods(self, features: TextRows, rows: Rows) -> np.ndarray:
        """[B] sum over each row's targets of the logarithm of their probability."""
        self._begin_inference()
        found: list[np.ndarray] = []
        with self._compute.autocast(self._device):
            for part in self._bounded(features, rows):
                found.append(self.model.log_likelihoods(part).float().cpu().numpy())
        return np.concatenate(found)

    @torch.inference_mode()
    def target_log_probs(self, features: TextRows, rows: Rows) -> Iterator[Tensor]:
        """[P, V] as `LanguageModel.target_log_probs`, of all rows."""
        self._begin_inference()
        for part in self._bounded(features, rows):
            if part.layout.num_tokens and bool(part.is_target_N.any()):
                yield from self.model.target_log_probs(part)

    def _bounded(self, features: TextRows, rows: Rows) -> Iterator[TextTensors]:
        """A batch in parts: records may be long, and have many options, so what is computed at once is
        bounded by tokens."""
        batch = self._batch(features, rows, training=False)
        lengths_B = (
            batch.lengths_B if self.model.packed else np.full_like(batch.lengths_B, batch.layout.longest)
        )
        bounds = balanced_bounds(lengths_B, max(1, -(-int(lengths_B.sum()) // TOKENS_AT_ONCE)))
        for start, stop in pairwise(bounds):
            yield batch.some_rows(slice(start, stop))

    @torch.inference_mode()
    def generate(self, features: AskedRows, rows: Rows, max_new_tokens: int) -> list[np.ndarray]:
        """What each row is most probably continued by, token by token, up to the first that ends a text.

        Raises:
            InputError: the form that answers are held to allows none of so few tokens.
        """
        self._begin_inference()
        held = None
        if self._begin_answer is not None:
            grammars = [self._begin_answer(text) for text in features.given]
            held = HeldAnswers(grammars, self._vocabulary.ends, max_new_tokens)
        with self._compute.autocast(self._device):
            tokens_BT = self.model.generate(
                self._batch(features, rows, training=False),
                max_new_tokens,
                self._vocabulary.ends,
                self._vocabulary.pad,
                held,
            )
        ends = np.array(self._vocabulary.ends, dtype=np.int64)
        found = []
        for tokens_T in tokens_BT.cpu().numpy():
            is_end_T = np.isin(tokens_T, ends)
            found.append(tokens_T[: int(is_end_T.argmax())] if is_end_T.any() else tokens_T)
        return found


@dataclass(frozen=True)
class TextProgramSpec:
    """What trainers build: a language model over a vocabulary."""

    model: LanguageModelSettings
    vocabulary: Vocabulary
    optimizer: DenseOptimizerSettings
    form: HeldForm | None = None
    """That answers are held to."""

    def build(self, placement: ProgramPlacement) -> TextProgram:
        model = build_language_model(self.model, self.vocabulary, placement.seed)
        return TextProgram(
            model,
            self.vocabulary,
            self.optimizer,
            placement,
            flops_of(model, placement.device),
            self.form,
        )


def flops_of(model: LanguageModel, device: torch.device) -> ModelFlops:
    """What counts the FLOPs of such a model, before it is compiled or split."""

    def build(features: TextRows, rows: Rows, training: bool) -> TextTensors:
        return TextTensors.build(features, rows, device, training)

    def size_of(features: TextRows) -> tuple[int, int]:
        return len(features.row_keys_B), len(features.tokens_N)

    def rows_alone(batch: TextTensors) -> Iterator[TextTensors]:
        for row in np.flatnonzero(batch.lengths_B):
            yield batch.some_rows(slice(int(row), int(row) + 1))

    if model.packed:
        return ModelFlops(model, device, build, size_of)
    return ModelFlops(model, device, build, size_of, rows_alone)
