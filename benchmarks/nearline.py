"""What users with long histories cost.

One bar:

* `nearline-prefix-miss`: 1 ms over what the prefix cache takes for a user of 5,000 events of whom it has
  nothing, beside 1,000 users whom it has. The network is left out: it is the search that must not grow with
  the square of the history.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, BenchOptions
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.past import KeysAndValues, Past
from rayrec.models.generative.prefix_cache import PrefixCache
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.console import log

NUM_ITEMS, NUM_EVENTS, NUM_KEPT, CALLS = 100_000, 5_000, 1_000, 50
LIMIT_S = 1e-3


class _NoNetwork:
    """Keeps one number of each event."""

    tokens_per_event = 1

    def read_on(self, batch: TensorBatch, past: Past) -> tuple[SimpleNamespace, Sequence[KeysAndValues]]:
        values = torch.zeros(len(batch.items_N), 1, 1)
        return SimpleNamespace(), [KeysAndValues(values, values)]


def bench(options: BenchOptions) -> list[Bar]:
    cache, random = PrefixCache[Any](_NoNetwork(), 1 << 30), np.random.default_rng(0)
    for _ in range(NUM_KEPT):
        cache.of(_user(random))
    ratios = [LIMIT_S / _miss_s(cache, random) for _ in range(options.pairs)]
    log.print(f"{1e3 * LIMIT_S / statistics.median(ratios):.2f} ms a miss", highlight=False)
    return [Bar.of("nearline-prefix-miss", ratios, "1 ms", 1.0)]


def _miss_s(cache: PrefixCache[Any], random: np.random.Generator) -> float:
    """Median of some users."""
    took = []
    for _ in range(CALLS):
        batch, began = _user(random), time.perf_counter()
        cache.of(batch)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _user(random: np.random.Generator) -> TensorBatch:
    items_N = random.integers(0, NUM_ITEMS, NUM_EVENTS)
    offsets_B1 = np.array([0, NUM_EVENTS])
    zeros_N = torch.zeros(NUM_EVENTS, dtype=torch.int64)
    layout = JaggedLayout.from_offsets(offsets_B1, torch.device("cpu"))
    return TensorBatch(layout, zeros_N, torch.tensor(items_N), None, None, inverse={}, rows={})
