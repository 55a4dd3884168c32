"""The optimizer's step of dense weights: torch's fused AdamW, by lists of tensors, and weight by weight.

10 million weights in 50 matrices and as many vectors, float32, as a transformer has them; one thread, on the
device that is asked for (`RAYREC_BENCH_DEVICE`, the host by default). A measurement is RAYREC_BENCH_STEPS
steps, gradients stay as they are. Bars, ratios of steps per second:

* `adamw-fused`: fused against the loop over weights. This is what runs use where the device has it.
* `adamw-foreach`: by lists of tensors against the loop. This is what they use elsewhere; nothing is claimed
  of it on the host, where torch has no kernels for lists and every operation on one makes a new list.
* `clip-foreach`: clipping the norm of all gradients by lists of tensors against the loop, likewise.
* `bfloat16-masters`: a whole step of a small network, forward and backward, under autocast with bfloat16
  weights and float32 masters, against float32 weights under autocast. Nothing is claimed of it: it costs
  memory and the rounding of masters, and spares that of forward; which is more depends on the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.models.program.master_weights import MasterWeights
from rayrec.platform.devices import HOST, autocast, get_device, synchronize

NUM_MATRICES, WIDTH = 50, 447
"""10 million weights."""
NETWORK_LAYERS, NETWORK_WIDTH, NETWORK_TOKENS = 10, 1000, 16
"""10 million weights, too."""


def bench(options: BenchOptions) -> list[Bar]:
    device = get_device(os.environ.get("RAYREC_BENCH_DEVICE", HOST.kind)).torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loop = _step(device, fused=False, foreach=False)
        compared = {
            "adamw-fused": (_step(device, fused=True, foreach=False), loop, "AdamW, weight by weight"),
            "adamw-foreach": (_step(device, fused=False, foreach=True), loop, "AdamW, weight by weight"),
            "clip-foreach": (_clip(device, True), _clip(device, False), "clip_grad_norm_, weight by weight"),
            "bfloat16-masters": (
                _network_step(device, with_masters=True),
                _network_step(device, with_masters=False),
                "float32 weights under autocast",
            ),
        }
        targets = {"adamw-fused": 1.0, "adamw-foreach": 0.0, "clip-foreach": 0.0, "bfloat16-masters": 0.0}
        return [
            Bar.of(
                name,
                interleaved(
                    _rate(ours, options.steps, device), _rate(peer, options.steps, device), options.pairs
                ),
                peer_name,
                targets[name],
            )
            for name, (ours, peer, peer_name) in compared.items()
        ]
    finally:
        torch.set_num_threads(threads)


def _rate(step: Callable[[], None], num_steps: int, device: torch.device) -> Callable[[], float]:
    def measure() -> float:
        step()
        synchronize(device)
        started = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize(device)
        return num_steps / (time.perf_counter() - started)

    return measure


def _weights(device: torch.device) -> list[Tensor]:
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * NUM_MATRICES
    weights = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def _step(device: torch.device, fused: bool, foreach: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(_weights(device), lr=1e-3, weight_decay=0.01, fused=fused, foreach=foreach)
    return lambda: optimizer.step() and None


def _clip(device: torch.device, foreach: bool) -> Callable[[], None]:
    weights = _weights(device)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1e9, foreach=foreach)

    return clip


def _network_step(device: torch.device, with_masters: bool) -> Callable[[], None]:
    layers = [nn.Linear(NETWORK_WIDTH, NETWORK_WIDTH) for _ in range(NETWORK_LAYERS)]
    network = nn.Sequential(*layers).to(device)
    masters = MasterWeights(network) if with_masters else None
    weights = list(network.parameters()) if masters is None else list(masters.by_name.values())
    fused = get_device(device.type).fused_optimizer
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=fused, foreach=not fused)
    tokens = torch.randn(NETWORK_TOKENS, NETWORK_WIDTH, device=device)
    if masters is not None:
        masters.narrow()

    def step() -> None:
        optimizer.zero_grad()
        with autocast(device, enabled=True):
            loss = network(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        if masters is not None:
            masters.hand_down()

    return step
