"""The task of language models: how a text goes on, judged by likelihood and by answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.base.meta_device import MetaWeights
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.language.held_answers import HeldForm, check_shortest
from rayrec.models.language.tensor_parallel import NO_ADAPTERS, check_divides
from rayrec.models.language.text_program import build_language_model
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import ProgramSpec
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.text_metrics import is_json, mean, ratio, span_f1
from rayrec.pipelines.tasks.task import Task
from rayrec.pipelines.tasks.text_rows import (
    READ,
    TextRows,
    answer_tokens,
    text_features,
    tokenizer_folder,
    tokenizer_of,
    vocabulary_of,
)
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.keys import row_keys
from rayrec.samples.dataset.manifest import EVALUATION_FILES, Split
from rayrec.samples.features.text_features import (
    CUT,
    NO_TARGET,
    PROMPTS_CUT,
    TOO_LONG,
    TextFeatures,
    answer_of,
    answers_expected,
    chat_of,
    is_rebuilt,
    said,
    spans_in,
)
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.text.chat import ChatTemplate
from rayrec.samples.text.dataset import TextDataset
from rayrec.samples.text.records import Record
from rayrec.samples.text.tokens import TextTokenizer

LOG_LIKELIHOOD = "log_likelihood"
"""Per token that is learned; its opposite is the loss."""


@dataclass(frozen=True)
class LanguageTask(Task):
    """A data set of text."""

    config: RunConfig
    model: LanguageModelConfig
    dataset: TextDataset
    tokenizer: TextTokenizer

    @classmethod
    def open(cls, config: RunConfig, model: LanguageModelConfig, checksums: bool = True) -> LanguageTask:
        """Open the data set of text and the tokenizer.

        Raises:
            InputError: the data set or the tokenizer is missing or damaged, or the base does not fit.
        """
        task = cls(config, model, TextDataset.open(config.data.path, checksums), tokenizer_of(model))
        network: Any = task.network()  # which refuses a base that does not fit
        if task.form is not None:
            task.form.begin(task.vocabulary)  # which refuses what cannot be held
        if config.training.parallel == "tensor":
            if model.lora is not None:
                raise InputError(NO_ADAPTERS)
            check_divides(network.network, config.pipeline.num_trainers, "model.base")
        return task

    @property
    def row_source(self) -> TextRows:
        return TextRows(self.config, self.dataset)

    @property
    def semantic_ids_version(self) -> str | None:
        return self.tokenizer.info.semantic_ids_version

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.model, self.tokenizer)

    @property
    def form(self) -> HeldForm | None:
        """What answers are held to."""
        form = self.config.evaluation.form
        return None if form is None else HeldForm(form, tokenizer_folder(self.model))

    @property
    def answer_tokens(self) -> int:
        """Of an answer at most."""
        return answer_tokens(self.config, self.model)

    def check_goes_on_from(self, earlier: Task, where: str) -> None:
        """Any text goes: what tokens stand for is compared before."""

    def check_split(self, split: Split) -> None:
        if not self.dataset.manifest.rows[split]:
            raise InputError(
                f"{self.dataset.root}: there are no records in the split {split!r}; prepare the data set "
                f"with a larger {split}_fraction, or with files of their own"
            )
        if self.form is not None:
            self._check_answers(self.form, split)

    def _check_answers(self, form: HeldForm, split: Split) -> None:
        """Refuse a form that an answer cannot have: else the first validation would end the run."""
        begin, left = form.begin(self.vocabulary), self.config.evaluation.answers
        for question in TextValidation(self, split).batches():
            if question.what == "answer":
                left -= len(question.records)
                for record in question.records:
                    asked = chat_of(record)[-2].content
                    try:
                        check_shortest(begin(asked), self.answer_tokens)
                    except InputError as error:
                        raise InputError(
                            f"{self.dataset.root}: the answer to {asked[:60]!r} in the split {split!r} "
                            f"cannot be held to evaluation.form: {error}"
                        ) from error
            if left <= 0:
                return

    def features(self, program: FeatureProgram) -> TextFeatures:
        return text_features(self.config, self.model, program)

    def program(self, optimizer: DenseOptimizerSettings) -> ProgramSpec:
        return self.model.program(self.vocabulary, optimizer, self.form)

    def ids_of(self, table: str) -> int:
        raise AssertionError(f"no rule for the ids of table {table!r}")

    def most_batch_ids(self, table: str) -> int:
        raise AssertionError(f"no rule for the ids of table {table!r}")

    def network(self) -> nn.Module:
        with MetaWeights():
            return build_language_model(self.model, self.vocabulary, self.config.seed)

    def validation(self, features: TextFeatures) -> TextValidation:
        return TextValidation(self, "valid", self.config.evaluation.max_users)

    @property
    def metric(self) -> str:
        return LOG_LIKELIHOOD

    @property
    def judged_by(self) -> dict[str, bool]:
        return {LOG_LIKELIHOOD: True, **{name: name != "loss" for name in FIGURES if name not in NOT_WHOLE}}

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        return ("loss", *(name for name in FIGURES if name != "loss"))


NOT_WHOLE = (CUT, TOO_LONG, NO_TARGET, PROMPTS_CUT)
"""Shares of the records that were judged, or of the prompts that were answered, where there are such."""
FIGURES = ("loss", "exact_match", "span_f1", "rebuilt", "choice_accuracy", "valid_json", *NOT_WHOLE)
"""In the order in which they are shown; those that a split has records for."""


class TextQuestion(NamedTuple):
    """Records, and what is asked of a model that reads them."""

    what: str
    """`judge`: how likely their answers are; `answer`: what it says; `choose`: how likely each option is."""
    step: int
    rows: RowBatch
    records: tuple[Record, ...]


@dataclass(frozen=True)
class TextValidation:
    """Judge and answer the records of a split."""

    task: LanguageTask
    split: Split
    max_records: int | None = None
    """The first so many, of all that are judged."""
    counts: Counter[str] = field(default_factory=Counter)
    """After `report`: records and prompts that were not read whole, by which."""
    num_judged: dict[str, int] = field(default_factory=dict)
    """After `report`: records behind each figure."""

    def batches(self) -> Iterator[TextQuestion]:
        """Every record is judged; the first ones of those with an answer are answered, choices are chosen."""
        task, evaluation = self.task, self.task.config.evaluation
        dataset, size = task.dataset, evaluation.batch_size
        table = dataset.split_table(self.split, list(READ))
        table = table.slice(0, self.max_records)
        file_number = len(dataset.train_files) + list(EVALUATION_FILES).index(self.split)
        answered = 0
        for step, start in enumerate(range(0, len(table), size)):
            part = table.slice(start, min(size, len(table) - start)).combine_chunks()
            (rows,) = part.to_batches(max_chunksize=None) or [None]
            places_B = np.arange(start, start + len(part))
            keys_B = row_keys(np.full(len(part), file_number), places_B)
            records = tuple(map(Record.of_row, part.to_pylist()))
            yield TextQuestion("judge", step, RowBatch(keys_B, rows), records)
            choices = [place for place, record in enumerate(records) if record.kind == "choice"]
            if choices:
                yield _some("choose", step, rows, keys_B, records, choices)
            said = [place for place, record in enumerate(records) if record.kind not in ("text", "choice")][
                : max(evaluation.answers - answered, 0)
            ]
            if said:
                answered += len(said)
                yield _some("answer", step, rows, keys_B, records, said)

    def ask(self, worker: Any, trainer: Any, batch: TextQuestion) -> Any:
        if batch.what == "answer":
            prompts = worker.prompts.remote(batch.step, batch.rows)
            return trainer.generate.remote(prompts, self.task.answer_tokens)
        if batch.what == "choose":
            return trainer.log_likelihoods.remote(worker.options.remote(batch.step, batch.rows))
        return trainer.log_likelihoods.remote(worker.judged.remote(batch.step, batch.rows))

    def report(self, answers: Iterable[tuple[TextQuestion, Any]]) -> dict[str, Estimate]:
        judged, chosen, answered = [], [], []
        counts = self.counts
        counts.clear()
        judged_by = self.num_judged
        judged_by.clear()
        for question, (*answer, own_counts) in answers:
            if question.what == "judge":
                judged.append(answer)
                counts.update(own_counts)
            elif question.what == "choose":
                chosen += _right_choices(question.records, *answer)
            else:
                counts.update(own_counts)
                (tokens,) = answer
                texts = [self._decoded(each) for each in tokens]
                answered += list(zip(question.records, texts, strict=True))
        log_R = np.concatenate([log_B for log_B, _ in judged]).astype(np.float64)
        targets_R = np.concatenate([targets_B for _, targets_B in judged]).astype(np.float64)
        if not targets_R.sum():
            raise InputError(
                f"{self.task.dataset.root}: no record of the split {self.split!r} fits the model "
                f"(model.max_length: {self.task.model.max_length}), so nothing can be judged"
            )
        found = {LOG_LIKELIHOOD: ratio(log_R, targets_R), "loss": ratio(-log_R, targets_R)}
        judged_by |= dict.fromkeys(found, len(log_R))
        if answered:
            expected = self._expected([record for record, _ in answered])
            pairs = zip(answered, expected, strict=True)
            found["exact_match"] = mean([text == right for (_, text), right in pairs])
            judged_by["exact_match"] = len(answered)
        if spans := [(record, text) for record, text in answered if record.kind == "spans"]:
            # An answer does not say which of several equal parts is meant: the right one is read likewise.
            right = [spans_in(record.text, answer_of(record)) or () for record, _ in spans]
            found["span_f1"] = span_f1([spans_in(record.text, text) or () for record, text in spans], right)
            judged_by["span_f1"] = len(spans)
        if whole := [
            (record.text, text) for record, text in spans if is_rebuilt(record.text, answer_of(record))
        ]:
            found["rebuilt"] = mean([is_rebuilt(text, answer) for text, answer in whole])
            judged_by["rebuilt"] = len(whole)
        if wanted := [text for record, text in answered if is_json(answer_of(record))]:
            found["valid_json"] = mean([is_json(text) for text in wanted])
            judged_by["valid_json"] = len(wanted)
        if chosen:
            found["choice_accuracy"] = mean(chosen)
            judged_by["choice_accuracy"] = len(chosen)
        return found | {
            name: mean((np.arange(total) < counts[name]).astype(np.float64))
            for name, total in [(name, len(log_R)) for name in NOT_WHOLE[:-1]]
            + [(PROMPTS_CUT, len(answered))]
            if counts[name]
        }

    def _decoded(self, tokens: np.ndarray) -> str:
        return said(self.task.tokenizer.decode(tokens.tolist()))

    def _expected(self, records: Sequence[Record]) -> list[str]:
        """What the model would have answered if it were right."""
        task = self.task
        template = ChatTemplate.of_folder(task.tokenizer.folder) if task.model.template == "chat" else None
        try:
            return answers_expected(records, template, task.tokenizer, task.vocabulary.ends)
        finally:
            if template is not None:
                template.close()


def _some(
    what: str,
    step: int,
    rows: pa.RecordBatch,
    keys_B: np.ndarray,
    records: tuple[Record, ...],
    places: list[int],
) -> TextQuestion:
    return TextQuestion(
        what,
        step,
        RowBatch(keys_B[places], rows.take(pa.array(places))),
        tuple(records[place] for place in places),
    )


def _right_choices(records: tuple[Record, ...], log_B: np.ndarray, targets_B: np.ndarray) -> list[bool]:
    """Of each record, whether the likeliest of its options is the right one. An option that the model cannot
    read is not chosen, and where that is the right one, nobody can say."""
    ends = np.cumsum([len(record.options) for record in records])
    each = np.split(np.where(targets_B > 0, log_B, -np.inf), ends[:-1])
    return [
        int(one.argmax()) == record.choice
        for record, one in zip(records, each, strict=True)
        if one[record.choice] > -np.inf
    ]
