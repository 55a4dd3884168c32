"""A trained language model in one process: it judges records, answers them, and becomes a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.models.base.config import QuantizationConfig
from rayrec.models.language.adapters import merge_adapters
from rayrec.models.language.text_program import TextProgram
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import ProgramPlacement
from rayrec.models.quantization.compressed_tensors import quantization_section, state_of
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.tasks.language import LanguageTask, TextQuestion, TextValidation
from rayrec.pipelines.tasks.text_rows import READ
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.keys import row_keys
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.features.text_features import TextFeatures, said
from rayrec.samples.prepare.writer import whole_folder
from rayrec.samples.text.records import SCHEMA, Record
from rayrec.samples.text.tokens import TextTokenizer


class TextWriter:
    """Says how texts go on. Not thread-safe."""

    def __init__(self, model: TrainedModel) -> None:
        """
        Raises:
            InputError: the model is none of language, or its base is not the one that it was trained beside.
        """
        task, features = model.assembly.task, model.assembly.features
        if not isinstance(task, LanguageTask):
            raise InputError(f"{model.run}: {task.config.model.name!r} is no language model")
        assert isinstance(features, TextFeatures), "those of the task"
        self.run, self.committed_step = model.run, model.state.committed_step
        self.task, self.features = task, features
        program = task.program(model.assembly.dense_optimizer()).build(
            ProgramPlacement(get_device(task.config.device).torch, task.config.seed)
        )
        assert isinstance(program, TextProgram)
        self.program = program
        try:
            program.load(dict(model.weights), optimizer_state=None)
        except ValueError as error:
            raise InputError(f"{model.run}: {error}") from error

    @classmethod
    def load(
        cls, run: str | Path, which: str = "best", device: str | None = None, data: str | Path | None = None
    ) -> TextWriter:
        """Load a run's `best` or `last` snapshot.

        Raises:
            InputError: no such run, one of another kind of model, or an incomplete or changed snapshot.
        """
        return cls(TrainedModel.load(run, which, device, data))

    def figures(self, split: Split, on_question: Any = None) -> tuple[dict[str, Estimate], TextValidation]:
        """(How good the model is on the records of a split, with counts of them); answers are written for the
        first ones.

        Args:
            on_question: called with the records that are judged so far.
        """
        validation = TextValidation(self.task, split)
        found = validation.report(self._answered(validation.batches(), on_question))
        return found, validation

    def answers(self, records: Sequence[Record], batch_size: int = 64) -> list[str]:
        """What the model says of what is asked in each record, held to `evaluation.form` if there is one."""
        answers: list[str] = []
        for step, start in enumerate(range(0, len(records), batch_size)):
            part = pa.Table.from_pylist([one.row() for one in records[start : start + batch_size]], SCHEMA)
            (rows,) = part.select(READ).combine_chunks().to_batches()
            keys_B = row_keys(np.zeros(len(part), dtype=np.int64), np.arange(start, start + len(part)))
            prompts = self.features.prompts(step, RowBatch(keys_B, rows))
            found = self.program.generate(prompts, {}, self.task.answer_tokens)
            answers += [said(self.task.tokenizer.decode(tokens.tolist())) for tokens in found]
        return answers

    def _answered(
        self, questions: Iterable[TextQuestion], on_question: Any
    ) -> Iterator[tuple[TextQuestion, Any]]:
        done = 0
        for question in questions:
            if question.what == "answer":
                prompts = self.features.prompts(question.step, question.rows)
                tokens = self.program.generate(prompts, {}, self.task.answer_tokens)
                yield question, (tokens, prompts.counts)
                continue
            make = self.features.options if question.what == "choose" else self.features.judged
            batch = make(question.step, question.rows)
            yield question, (self.program.log_likelihoods(batch, {}), batch.targets_B, batch.counts)
            if question.what == "judge":
                done += len(question.records)
                if on_question is not None:
                    on_question(done)

    def export(self, folder: Path) -> None:
        """Write the network, with what adapters have learned in its weights, and the tokenizer, as a folder
        that transformers loads.

        Args:
            folder: made here.
        """
        task, is_adapted = self.task, self.task.model.lora is not None
        write_network(
            folder, self.program.model.network, task.tokenizer, task.vocabulary, is_adapted, self.made
        )

    @property
    def made(self) -> dict[str, Any]:
        """Where a folder of its network comes from."""
        task = self.task
        return {
            "run": self.run,
            "step": self.committed_step + 1,
            "dataset_fingerprint": task.fingerprint,
            "semantic_ids_version": task.tokenizer.info.semantic_ids_version,
            "template": task.model.template,
            "max_length": task.model.max_length,
        }


def write_network(
    folder: Path,
    network: Any,
    tokenizer: TextTokenizer,
    vocabulary: Vocabulary,
    is_adapted: bool,
    made: Mapping[str, Any],
    quantization: QuantizationConfig | None = None,
) -> None:
    """Write a network of transformers and its tokenizer as a folder that transformers loads.

    Args:
        folder: made here.
        network: used up where it is adapted: its adapters are merged.
        made: where it comes from, for `rayrec.json`.
        quantization: of its layers, which are written in the layout of compressed-tensors.
    """
    if is_adapted:
        merge_adapters(network)
    state = None
    if quantization is not None:
        network.config.quantization_config = quantization_section(network, quantization)
        state = state_of(network)
    network.config.eos_token_id = network.generation_config.eos_token_id = list(vocabulary.ends)
    network.config.pad_token_id = network.generation_config.pad_token_id = vocabulary.pad
    with whole_folder(folder) as draft:
        tokenizer.save(draft)
        # With its ends of texts, not the base's.
        network.save_pretrained(draft, state_dict=state, safe_serialization=True)
        (draft / "rayrec.json").write_text(json.dumps(made, indent=2) + "\n")
