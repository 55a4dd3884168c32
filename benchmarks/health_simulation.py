"""Trainers that do not exist: their own seconds and tokens, step by step, with the noise of real ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rayrec.actors.trainer import StepWork

STEP_S = 0.25
"""Of a step, so that an hour is 14,400 of them."""
PER_TOKEN_S, PER_STEP_S, TOKENS = 50e-6, 8e-3, 4000
SIGMA = 0.15
"""Of the logarithm of a step's time: caches, clocks, garbage collection."""
SPIKES, TAIL, MOST = 0.02, 1.5, 20.0
"""Share of steps that take a Pareto-distributed multiple of their time, and at most so much."""
BIAS, DRIFT, REMEMBERS = 0.03, 0.04, 0.995
"""Lasting differences between like machines, and those that come and go over some hundred steps."""


def simulated_work(
    seed: int, num_trainers: int, num_steps: int, slow_member: int | None = None, slowdown: float = 1.5
) -> Iterator[list[StepWork]]:
    """What trainers report of each step.

    Args:
        slow_member: whose work takes `slowdown` times as long from the first step on; None for nobody.
    """
    random = np.random.default_rng(seed)
    bias_T = 1 + BIAS * random.standard_normal(num_trainers)
    drift_T = DRIFT * random.standard_normal(num_trainers)
    news = DRIFT * np.sqrt(1 - REMEMBERS**2)
    for _ in range(num_steps):
        drift_T = REMEMBERS * drift_T + news * random.standard_normal(num_trainers)
        tokens_T = np.maximum(1, random.normal(TOKENS, 0.2 * TOKENS, num_trainers)).astype(int)
        noise_T = np.exp(SIGMA * random.standard_normal(num_trainers))
        spikes_T = random.random(num_trainers) < SPIKES
        noise_T[spikes_T] *= np.minimum(1 + random.pareto(TAIL, int(spikes_T.sum())), MOST)
        own_T = (PER_STEP_S + PER_TOKEN_S * tokens_T) * bias_T * np.exp(drift_T) * noise_T
        if slow_member is not None:
            own_T[slow_member] *= slowdown
        yield [StepWork(float(own), int(tokens)) for own, tokens in zip(own_T, tokens_T, strict=True)]
