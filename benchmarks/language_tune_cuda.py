"""How fast a language model is tuned on a GPU: our packed rows against a padded loop of transformers.

A network of the shape of Qwen2.5-0.5B (24 layers of width 896, 14 query and 2 key heads, 151,936 tokens),
random weights, on batches of rows of which a few are long and whose second halves are learned. Ours is
`TextProgram`, what trainers run, without the pipeline around it: forward, backward and AdamW, with products
in bfloat16 by autocast (`packed`), and with weights that are bfloat16 and have float32 masters
(`packed_masters`). `padded` is a plain loop: each batch padded to its longest row, transformers' own
attention and loss, autocast, the same optimizer.

For each it prints tokens per second (those given or learned; padding does not count), MFU (model FLOPs of
these tokens over the rate of a large product in bfloat16, measured in the same process), and the memory that
it took at most. Before that, both tune a small network in float32 for some steps: their losses have to be
equal to 1e-3 relative.

Needs torch, numpy, transformers, pydantic and PyYAML, and no Ray; `python -m benchmarks.gpu` runs it too:

    python -m benchmarks.language_tune_cuda
    python -m benchmarks.language_tune_cuda --device cpu --small      # checks the program itself
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_piece import device_and_size
from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.language.text_program import TextProgram, TextProgramSpec
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import ProgramPlacement
from rayrec.platform.devices import device_memory, synchronize
from rayrec.platform.health.burn_in import matrix_rate
from rayrec.platform.schedule import RateSchedule

QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
}
QWEN_TOKENS = 151_936
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
SMALL_TOKENS = 512
LOGNORMAL = (5.0, 0.8)
"""Of the lengths of rows: 200 tokens on average."""
WARM_UP = 3
EQUAL_STEPS = 6
MOST_DIFFERENCE = 1e-3
"""Of a loss, relative, in float32."""
NARROW = ComputeSettings(precision="bfloat16")
NARROW_WEIGHTS = ComputeSettings(precision="bfloat16", weights="bfloat16_with_master")


@dataclass(frozen=True)
class Sizes:
    """What is tuned."""

    settings: Mapping[str, object]
    num_tokens: int
    longest: int
    rows: int
    """Of a batch."""
    steps: int


LARGE = Sizes(QWEN2_5_0_5B, QWEN_TOKENS, longest=1024, rows=16, steps=30)
TINY = Sizes(QWEN2_5_0_5B | SMALL, SMALL_TOKENS, longest=256, rows=4, steps=3)


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, as feature workers make them."""

    step: int
    tokens_N: np.ndarray
    is_target_N: np.ndarray
    offsets_B1: np.ndarray
    filled_P: dict[str, np.ndarray] = field(default_factory=dict)
    lookups: dict[str, Any] = field(default_factory=dict)

    @property
    def row_keys_B(self) -> np.ndarray:
        return np.arange(len(self.offsets_B1) - 1)

    @property
    def num_targets(self) -> int:
        return int(self.is_target_N.sum())

    @property
    def longest(self) -> int:
        return int(np.diff(self.offsets_B1).max())

    def padded(self, device: torch.device) -> dict[str, Tensor]:
        """As a network of transformers takes it."""
        shape = (len(self.offsets_B1) - 1, self.longest)
        tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        labels = np.full(shape, -100)
        for row, (start, stop) in enumerate(pairwise(self.offsets_B1)):
            tokens[row, : stop - start] = self.tokens_N[start:stop]
            labels[row, : stop - start] = np.where(
                self.is_target_N[start:stop], self.tokens_N[start:stop], -100
            )
            mask[row, : stop - start] = 1
        arrays = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def batches(sizes: Sizes, steps: int) -> list[Batch]:
    random = np.random.default_rng(0)
    found = []
    for step in range(steps):
        lengths_B = np.clip(random.lognormal(*LOGNORMAL, sizes.rows), 4, sizes.longest).astype(int)
        offsets_B1 = np.cumsum([0, *lengths_B])
        place_N = np.concatenate([np.arange(length) for length in lengths_B])
        is_target_N = place_N >= np.repeat(lengths_B // 2, lengths_B)
        tokens_N = random.integers(2, sizes.num_tokens, size=len(place_N))
        found.append(Batch(step, tokens_N, is_target_N, offsets_B1))
    return found


def program(device: torch.device, sizes: Sizes, rate: float, compute: ComputeSettings) -> TextProgram:
    """Equal weights each time."""
    base = {"kind": "settings", "settings": dict(sizes.settings)}
    model = LanguageModelConfig.parse({"name": "language_model", "base": base, "max_length": sizes.longest})
    vocabulary = Vocabulary(sizes.num_tokens, sizes.num_tokens, pad=0, ends=(1,))
    optimizer = DenseOptimizerSettings(rate, 0.01, RateSchedule(), max_grad_norm=None, fused=True)
    spec = TextProgramSpec(model, vocabulary, optimizer)
    return spec.build(ProgramPlacement(device, 0, compute=compute))


class Packed:
    """Steps of our program."""

    def __init__(self, device: torch.device, sizes: Sizes, rate: float, compute: ComputeSettings) -> None:
        self.program = program(device, sizes, rate, compute)

    def step(self, batch: Batch) -> float:
        found = self.program.backward(batch, {})
        self.program.update()
        return found.loss_sum / batch.num_targets


class Padded:
    """Steps of a plain loop."""

    def __init__(self, device: torch.device, sizes: Sizes, rate: float, compute: ComputeSettings) -> None:
        self._device, self._compute = device, compute
        self._network: Any = program(device, sizes, rate, PLAIN).model.network.train()
        self._network.set_attn_implementation("sdpa")
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(), lr=rate, weight_decay=0.01, fused=True
        )

    def step(self, batch: Batch) -> Tensor:
        """The loss, for which nobody waits here."""
        with self._compute.autocast(self._device):
            loss: Tensor = self._network(**batch.padded(self._device), use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def largest_difference(device: torch.device) -> float:
    """Of the losses of a small network, relative.

    Raises:
        SystemExit: it is too large.
    """
    small = batches(TINY, EQUAL_STEPS)
    packed, padded = (kind(device, TINY, 1e-2, PLAIN) for kind in (Packed, Padded))
    losses = np.array([[packed.step(batch), float(padded.step(batch))] for batch in small])
    found = float(np.max(np.abs(losses[:, 0] / losses[:, 1] - 1)))
    if not found <= MOST_DIFFERENCE:
        raise SystemExit(f"losses of packed and padded rows differ by {found:.3g}: {losses.tolist()}")
    return found


def measure(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """All figures."""
    difference = largest_difference(device)
    given = batches(sizes, WARM_UP + sizes.steps)
    lengths_R = np.concatenate([np.diff(batch.offsets_B1) for batch in given])
    flops = _flops(device, sizes, given[WARM_UP:])
    rate = matrix_rate(device, torch.bfloat16)
    made: dict[str, Callable[[], Packed | Padded]] = {
        "packed": lambda: Packed(device, sizes, 1e-5, NARROW),
        "packed_masters": lambda: Packed(device, sizes, 1e-5, NARROW_WEIGHTS),
        "padded": lambda: Padded(device, sizes, 1e-5, NARROW),
    }
    found = {name: _speed(device, make, given, flops / rate) for name, make in made.items()}
    for name, figures in found.items():
        said = f"{name}: {figures['tokens_per_s']:,.0f} tokens/s, MFU {figures['mfu']:.3f}"
        print(said, file=sys.stderr, flush=True)
    return {
        "largest_loss_difference": difference,
        "mean_length": float(lengths_R.mean()),
        "mean_longest": float(np.mean([batch.longest for batch in given])),
        "matrix_tflops_per_s": rate / 1e12,
        "model_flops_per_token": flops / _num_tokens(given[WARM_UP:]),
        **found,
        "times_as_fast_as_padded": {
            name: figures["tokens_per_s"] / found["padded"]["tokens_per_s"] for name, figures in found.items()
        },
    }


def _num_tokens(given: Sequence[Batch]) -> int:
    return sum(len(batch.tokens_N) for batch in given)


def _flops(device: torch.device, sizes: Sizes, given: Sequence[Batch]) -> float:
    counting = program(device, sizes, 1e-5, PLAIN)
    return sum(counting.flops(batch, {}) for batch in given)


def _speed(
    device: torch.device, make: Callable[[], Packed | Padded], given: Sequence[Batch], least_s: float
) -> dict[str, float]:
    """Of the steps behind those that warm up.

    Args:
        least_s: seconds that they would take if products of matrices were all there is.
    """
    # One network and its optimizer at a time: what was measured before is given back.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tuned = make()
    for batch in given[:WARM_UP]:
        tuned.step(batch)
    synchronize(device)
    started = time.perf_counter()
    for batch in given[WARM_UP:]:
        tuned.step(batch)
    synchronize(device)
    seconds = time.perf_counter() - started
    figures = {
        "tokens_per_s": _num_tokens(given[WARM_UP:]) / seconds,
        "mfu": least_s / seconds,
        "step_ms": 1e3 * seconds / (len(given) - WARM_UP),
    }
    if (memory := device_memory(device)) is not None:
        figures["most_mib"] = memory.peak / 2**20
    return figures


def main() -> None:
    device, is_small = device_and_size(__doc__)
    print(json.dumps(measure(device, TINY if is_small else LARGE)))


if __name__ == "__main__":
    main()
