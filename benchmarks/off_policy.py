"""Off-policy estimates: whether their intervals cover what is true.

* `off-policy-coverage-NAME`: of 200 synthetic logs of 1,000 rows each, sampled from a world whose true value
is
  known, the share in which the 95 % interval of an estimate covers it, over 0.95. A share of 200 varies by
  3 % at a time, so the bar is 0.96 of 0.95. `NAME` is of an estimate that has all that it needs: propensities
  that are right, and a fitted reward model. What happens where the model is of something else, or the
  propensities are wrong and the model is that of the world, is printed: the doubly robust estimate has to
  stand either.
* `RAYREC_BENCH_DATA` may name the Open Bandit Dataset (a folder with bts/all and random/all): the uniform
  policy is evaluated on the log of the other one and compared with its mean reward in a log of its own,
  and the other way round. There are 42 and 38 clicks, so this is a check, and no bar.

`RAYREC_BENCH_ROWS` is the number of logs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import expit

from benchmarks.harness import Bar, BenchOptions
from benchmarks.synthetic_bandit import World
from rayrec.platform.arrays import Float64Array
from rayrec.platform.console import log as out
from rayrec.rl.off_policy.estimators import (
    diagnostics,
    direct_method,
    doubly_robust,
    estimates,
    inverse_propensity,
    self_normalized,
)
from rayrec.rl.off_policy.intervals import Terms
from rayrec.rl.off_policy.logs import BanditLog, read_log
from rayrec.rl.off_policy.policies import logged_frequencies, uniform
from rayrec.rl.off_policy.reward_model import cross_fitted

NUM_LOGS, NUM_ROWS, RESAMPLES = 200, 1000, 499
NOMINAL, TARGET = 0.95, 0.96

Estimator = Callable[[BanditLog, Float64Array, Float64Array], Terms]
ESTIMATORS: dict[str, Estimator] = {
    "direct-method": lambda log, target_NA, model_NA: direct_method(log, target_NA, model_NA),
    "inverse-propensity": lambda log, target_NA, model_NA: inverse_propensity(log, target_NA),
    "self-normalized": lambda log, target_NA, model_NA: self_normalized(log, target_NA),
    "doubly-robust": doubly_robust,
}


def bench(options: BenchOptions) -> list[Bar]:
    if options.data is not None:
        _open_bandit(options.data)
    num_logs = options.rows or NUM_LOGS
    world = World.random()
    cover = {
        name: _coverage(world, num_logs, model, propensities)
        for name, (model, propensities) in {
            "all right": ("fitted", True),
            "the reward model wrong": ("wrong", True),
            "the propensities wrong": ("exact", False),
        }.items()
    }
    for name, shares in cover.items():
        shown = ", ".join(
            f"{estimator} {share:.3f} (bias {bias:+.4f})" for estimator, (share, bias) in shares.items()
        )
        out.print(f"{name}: {shown}", highlight=False)
    return [
        Bar.once(f"off-policy-coverage-{name}", share / NOMINAL, f"{NOMINAL} of {num_logs} logs", TARGET)
        for name, (share, _) in cover["all right"].items()
        if name != "direct-method"  # its interval knows nothing of the error of the model
    ]


def _coverage(
    world: World, num_logs: int, model: str, propensities_are_right: bool
) -> dict[str, tuple[float, float]]:
    """Of each estimator the share of logs whose interval has the true value, and its bias."""
    truth = world.true_value
    hits: dict[str, list[bool]] = {name: [] for name in ESTIMATORS}
    values: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    for number in range(num_logs):
        log = world.log(NUM_ROWS, seed=number)
        target_NA = world.target_probs(log.contexts_NF)
        match model:
            case "fitted":
                model_NA = cross_fitted(log, interactions=True, seed=number)
            case "exact":
                model_NA = world.means(log.contexts_NF)
            case _:  # of something else altogether
                model_NA = expit(np.tile(log.contexts_NF[:, :1], log.num_actions))
        if not propensities_are_right:
            wrong_N = np.full(len(log), 1.0 / log.num_actions)
            log = BanditLog(log.contexts_NF, log.actions_N, log.rewards_N, wrong_N, log.num_actions)
        for name, estimator in ESTIMATORS.items():
            found = estimator(log, target_NA, model_NA).estimate(RESAMPLES, number)
            hits[name].append(found.covers(truth))
            values[name].append(found.value)
    return {name: (float(np.mean(hits[name])), float(np.mean(values[name])) - truth) for name in ESTIMATORS}


def _open_bandit(folder: Path) -> None:
    logs = {name: read_log(folder / name / "all") for name in ("bts", "random")}
    for name, log_of in (("random", "bts"), ("bts", "random")):
        own, log = logs[name], logs[log_of]
        earned = Terms(own.rewards_N).estimate()
        target_NA = uniform(log) if name == "random" else logged_frequencies(log, own)
        out.print(f"{name}: earned {earned.shown}", highlight=False)
        for estimator, found in estimates(log, target_NA, cross_fitted(log)).items():
            out.print(f"  by the log of {log_of}, {estimator}: {found.shown}", highlight=False)
        trust = diagnostics(log, target_NA)
        out.print(
            f"  weights leave {trust.effective_rows:,.0f} rows, the largest is {trust.largest_weight:.2f}",
            highlight=False,
        )
