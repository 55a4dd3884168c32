"""Rows of tokens and tiny language models for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.language.text_program import TextProgram, TextProgramSpec
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import ProgramPlacement
from rayrec.platform.schedule import RateSchedule

NUM_TOKENS, FIRST_NEW = 40, 36
VOCABULARY = Vocabulary(NUM_TOKENS, FIRST_NEW, pad=0, ends=(1,))
ROWS = ((5, 9, 11, 1), (7, 1), (3, 8, 37, 20, 21, 39, 22, 1), (4, 30, 31, 1))
PROMPTS = (1, 1, 3, 2)
"""Tokens of each row that are given."""
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {"model_type": "llama", **SHAPE, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Lookup:
    ids_M: np.ndarray
    inverse: np.ndarray


@dataclass(frozen=True)
class Text:
    """As feature workers make it."""

    tokens_N: np.ndarray
    is_target_N: np.ndarray
    offsets_B1: np.ndarray
    num_targets: int
    step: int = 0
    filled_P: dict[str, np.ndarray] = field(default_factory=dict)
    lookups: dict[str, Lookup] = field(default_factory=dict)

    @property
    def row_keys_B(self) -> np.ndarray:
        return np.arange(len(self.offsets_B1) - 1)


def text(rows=ROWS, prompts=PROMPTS, step=0) -> Text:
    offsets_B1 = np.cumsum([0, *map(len, rows)])
    is_target_N = np.concatenate(
        [np.arange(len(row)) >= given for row, given in zip(rows, prompts, strict=True)]
    )
    return Text(np.concatenate(rows), is_target_N, offsets_B1, int(is_target_N.sum()), step)


def config(settings=LLAMA, **more) -> LanguageModelConfig:
    base = settings if "kind" in settings else {"kind": "settings", "settings": settings}
    return LanguageModelConfig.parse(
        {"name": "language_model", "base": base, "max_length": 16, "attention": "reference", **more}
    )


def optimizer(**settings) -> DenseOptimizerSettings:
    given = {"learning_rate": 1e-2, "weight_decay": 0.0, "max_grad_norm": None, "fused": True} | settings
    return DenseOptimizerSettings(schedule=RateSchedule(), **given)


def program(settings=LLAMA, seed=0, vocabulary=VOCABULARY, **more) -> TextProgram:
    weights = more.pop("optimizer", optimizer())
    spec = TextProgramSpec(config(settings, **more), vocabulary, weights)
    return spec.build(ProgramPlacement(torch.device("cpu"), seed))
