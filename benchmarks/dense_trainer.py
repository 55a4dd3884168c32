"""One of the two trainers of `benchmarks.parallel`; prints a line of JSON for each window.

python -m benchmarks.dense_trainer RANK ADDRESS_OF_THE_FIRST INTERFACE WINDOWS STEPS
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.shaped_link import sent_bytes
from rayrec.actors.collective import TrainerGroup
from rayrec.models.base.compute import ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.language.text_program import TextProgram, TextProgramSpec
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import ProgramPlacement
from rayrec.platform.devices import HOST, HOST_COLLECTIVE_BACKEND
from rayrec.platform.schedule import RateSchedule

PORT = 29_711
ROWS, LENGTH, NUM_TOKENS = 8, 96, 2_000
NETWORK = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 768,
    "tie_word_embeddings": True,
}
"""5.7 million weights."""
VARIANTS = {
    "late": ComputeSettings(reduce_bucket=2**40),
    "buckets": ComputeSettings(),
    "bfloat16": ComputeSettings(reduce_dtype="bfloat16"),
}
"""One bucket cannot be sent before backward has ended."""


@dataclass(frozen=True)
class Share:
    """One trainer's rows of a batch, as feature workers make them."""

    tokens_N: np.ndarray
    is_target_N: np.ndarray
    offsets_B1: np.ndarray
    num_targets: int
    step: int
    filled_P: dict[str, np.ndarray] = field(default_factory=dict)
    lookups: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def row_keys_B(self) -> np.ndarray:
        return np.arange(ROWS)


def share(rank: int, step: int) -> Share:
    random = np.random.default_rng([rank, step])
    tokens_N = random.integers(2, NUM_TOKENS - 2, ROWS * LENGTH)
    is_target_N = np.ones(len(tokens_N), dtype=bool)
    is_target_N[::LENGTH] = False
    offsets_B1 = np.arange(0, len(tokens_N) + 1, LENGTH)
    return Share(tokens_N, is_target_N, offsets_B1, 2 * int(is_target_N.sum()), step)


def made(compute: ComputeSettings, group: TrainerGroup) -> TextProgram:
    config = LanguageModelConfig.parse(
        {
            "name": "language_model",
            "base": {"kind": "settings", "settings": NETWORK},
            "max_length": LENGTH,
            "attention": "reference",
        }
    )
    optimizer = DenseOptimizerSettings(1e-3, 0.01, RateSchedule(), max_grad_norm=1.0, fused=True)
    vocabulary = Vocabulary(NUM_TOKENS, NUM_TOKENS - 1, pad=0, ends=(1,))
    placement = ProgramPlacement(HOST.torch, 0, compute, group.begin_all_reduce)
    return TextProgramSpec(config, vocabulary, optimizer).build(placement)


def main(rank: int, address: str, interface: str, num_windows: int, steps: int) -> None:
    torch.set_num_threads(1)
    group = TrainerGroup(2, rank)
    if rank == 0:
        group.open_at(address, PORT)
    group.join((address, PORT), HOST_COLLECTIVE_BACKEND)
    programs = {name: made(compute, group) for name, compute in VARIANTS.items()}
    for program in programs.values():
        _window(program, group, rank, range(2), interface)
    for window in range(num_windows):
        for name, program in programs.items():
            first = 2 + window * steps
            found = _window(program, group, rank, range(first, first + steps), interface)
            if rank == 0:
                print(json.dumps({"variant": name} | found), flush=True)
    group.leave()


def _window(
    program: TextProgram, group: TrainerGroup, rank: int, steps: range, interface: str
) -> dict[str, object]:
    waited_s, sent, started = group.waited_s, sent_bytes(interface), time.perf_counter()
    losses = []
    for step in steps:
        losses.append(program.backward(share(rank, step), {}).loss_sum)
        program.update()
    return {
        "losses": losses,
        "waited_s": (group.waited_s - waited_s) / len(steps),
        "wall_s": (time.perf_counter() - started) / len(steps),
        "sent": (sent_bytes(interface) - sent) / len(steps),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
