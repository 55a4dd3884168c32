"""What keyed dropout costs a training step on the host.

A transformer of two layers (128 wide, 512 inside) over 256 histories of 20 events, forward and backward, one
thread, dropout 0.3. A measurement is RAYREC_BENCH_STEPS steps. Bars, ratios of steps per second:

* `keyed-dropout-step`: against the same hashes as operations of torch, which other devices compute.
* `keyed-dropout-plain`: against torch's own dropout, whose masks depend on how a batch is divided.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base import keyed_random
from rayrec.models.base.keyed_random import KeyedDropout, token_keys
from rayrec.models.sequence.backbones.transformer import CausalTransformer

HISTORIES, EVENTS, DIM = 256, 20, 128
DROPOUT = 0.3


def bench(options: BenchOptions) -> list[Bar]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step = _step()
        ours = _rate(step, options.steps)

        def by_operations() -> float:
            with patch.object(keyed_random, "_has_kernel", lambda x_ND: False):
                return ours()

        def by_generator() -> float:
            with patch.object(KeyedDropout, "forward", lambda _, x, keys: functional.dropout(x, DROPOUT)):
                return ours()

        peers = {
            "keyed-dropout-step": (by_operations, "the hashes as operations of torch"),
            "keyed-dropout-plain": (by_generator, "torch's own dropout"),
        }
        return [
            Bar.of(name, interleaved(ours, peer, options.pairs), peer_name, 1.0)
            for name, (peer, peer_name) in peers.items()
        ]
    finally:
        torch.set_num_threads(threads)


def _step() -> Callable[[], None]:
    model = CausalTransformer(DIM, 2, 2, 4 * DIM, EVENTS, DROPOUT)
    layout = JaggedLayout.from_offsets(np.arange(HISTORIES + 1) * EVENTS, torch.device("cpu"))
    keys_N = token_keys(0, 0, layout.row_N, layout.place_N)
    events_ND = torch.randn(len(keys_N), DIM)

    def step() -> None:
        model.zero_grad()
        model(events_ND, layout, keys_N).square().mean().backward()

    return step


def _rate(step: Callable[[], None], num_steps: int) -> Callable[[], float]:
    def measure() -> float:
        step()
        started = time.perf_counter()
        for _ in range(num_steps):
            step()
        return num_steps / (time.perf_counter() - started)

    return measure
