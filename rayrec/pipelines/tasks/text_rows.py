"""From a run's settings to records of text and their tokens.

Imports no torch: feature workers make their features with this, and start within a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from rayrec.models.language.config import LanguageModelConfig, TunedBase
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.training_rows import compiled
from rayrec.pipelines.tasks.wanted_columns import WantedColumn
from rayrec.platform.errors import InputError
from rayrec.samples.features.text_features import TextFeatures, TextRules, end_of_turn
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.reading.read_plan import ReadPlan
from rayrec.samples.text.chat import ChatTemplate
from rayrec.samples.text.dataset import TextDataset
from rayrec.samples.text.records import SCHEMA
from rayrec.samples.text.tokens import INFO_FILE, TextTokenizer

READ = tuple(name for name in SCHEMA.names if name != "record_id")


@dataclass(frozen=True)
class TextRows:
    """The rows of a data set of text."""

    config: RunConfig
    dataset: TextDataset

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def wanted_columns(self) -> Mapping[str, WantedColumn]:
        return text_columns()

    def own_rows(self) -> ReadPlan:
        config = self.config
        return ReadPlan.of_files(
            self.dataset.root,
            self.dataset.train_files,
            config.training.batch_size,
            config.seed,
            config.data.window_rows,
        )


def text_rows(config: RunConfig) -> TextRows:
    """The records that a config trains on.

    Raises:
        InputError: there is no such data set.
    """
    return TextRows(config, TextDataset.open(config.data.path, checksums=False))


def text_columns() -> Mapping[str, WantedColumn]:
    """Those of a record."""
    return {
        name: WantedColumn(partial(_is, SCHEMA.field(name).type), str(SCHEMA.field(name).type))
        for name in READ
    }


def text_features_of(config: RunConfig, model: LanguageModelConfig, columns: pa.Schema) -> TextFeatures:
    """For the process of a feature worker, whenever it starts."""
    return text_features(config, model, compiled(config, text_columns(), columns))


def text_features(config: RunConfig, model: LanguageModelConfig, program: FeatureProgram) -> TextFeatures:
    tokenizer = tokenizer_of(model)
    return TextFeatures(
        program,
        tokenizer,
        ChatTemplate.of_folder(tokenizer.folder) if model.template == "chat" else None,
        TextRules(model.max_length, model.long_rows, model.learn, answer_tokens(config, model)),
        seed=config.seed,
        num_trainers=config.pipeline.num_trainers,
        is_prepared=config.data.cache is not None,
    )


def answer_tokens(config: RunConfig, model: LanguageModelConfig) -> int:
    """Tokens of an answer at most: what is set, and no more than half of what the model reads."""
    return min(config.evaluation.max_new_tokens, model.max_length // 2)


def tokenizer_of(model: LanguageModelConfig) -> TextTokenizer:
    """The tokenizer of a model's base.

    Raises:
        InputError: none is named, or its folder has none.
    """
    folder = tokenizer_folder(model)
    if (Path(folder) / INFO_FILE).is_file():
        return TextTokenizer.load(folder)
    return TextTokenizer.extended(folder)


def tokenizer_folder(model: TunedBase) -> str:
    """Where the tokenizer of a base is.

    Raises:
        InputError: none is named.
    """
    folder = model.tokenizer or (model.base.folder if model.base.kind == "folder" else None)
    if folder is None:
        own = "; `rayrec text tokenizer` writes that of the file to one" if model.base.kind == "gguf" else ""
        raise InputError(
            f"model.tokenizer: name the folder of a tokenizer; a base of kind {model.base.kind} has none{own}"
        )
    return folder


def vocabulary_of(model: LanguageModelConfig, tokenizer: TextTokenizer) -> Vocabulary:
    """What a network has to know of the tokens, the end of an answer as the chat template writes it included.

    Raises:
        InputError: the template writes no token behind an answer that could end it.
    """
    info = tokenizer.info
    ends = info.ends
    if model.template == "chat":
        template = ChatTemplate.of_folder(tokenizer.folder)
        try:
            ends = tuple(dict.fromkeys([end_of_turn(template, tokenizer), *ends]))
        finally:
            template.close()
    return Vocabulary(info.num_tokens, info.first_new, info.pad, ends)


def _is(expected: pa.DataType, found: pa.DataType) -> bool:
    return bool(expected.equals(found))
