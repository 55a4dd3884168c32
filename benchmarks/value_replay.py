"""What the choice by value earns of a budget of computing time: a log of requests, replayed.

    first log: masses, seconds ─► ValueCurves, mean costs ─► Allocator, whose price finds its level
    second log, in order ─► Allocator.decide ─► value served, seconds

Values are Pareto's (α = 1.5). What beams and events find of a request is random around a curve, and so is
what they take. Requests come at 1.25, 1.5, 2 and 3 times the rate at which full effort would keep the device
as busy as it may be; clocks are simulated. Bars, of all rates and seeds:

* `value-replay`: value served over the optimum of the linear program that has the whole log at once, and of
  each request what the allocator has: its value, the curves, and mean costs.
  max Σ x v m, Σ x c ≤ budget, Σ_j x = 1.
* `value-replay-known`: the same, where the program knows what no service can, every request's own mass and
  time, and values served are those of the true masses.
* `value-replay-levels`: value served, by true masses, over that of the degradation levels of `rayrec serve`,
  which lower all requests alike by the work that waits, and refuse what finds no room.
* `value-replay-spent`: the budget over what was spent. The budget of a program is what the choice has spent,
  if that was more.

A line for each says the price at the end, too, and what a further second would be worth to the first program.

`RAYREC_BENCH_ROWS` is the number of requests, `RAYREC_BENCH_PAIRS` that of seeds.

Sources: DCAF, arXiv:2006.09684; dual mirror descent, arXiv:2011.10124.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from benchmarks.harness import Bar, BenchOptions
from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.console import log as out
from rayrec.serve.config.actions import ActionConfig
from rayrec.serve.config.admission import StepConfig
from rayrec.serve.config.allocation import AllocateConfig
from rayrec.serve.engine.allocation import Allocator, Facts, level_of
from rayrec.serve.engine.degradation import DegradationPolicy
from rayrec.serve.engine.value_curves import ActionKey, ValueCurves
from rayrec.serve.wire.schemas import ModelInfo

NUM_REQUESTS = 3000
OVERLOADS = (1.25, 1.5, 2.0, 3.0)
BEAMS = 20
ACTIONS = (
    ActionConfig(name="full"),
    ActionConfig(name="half", max_beams=10),
    ActionConfig(name="few", max_beams=5),
    ActionConfig(name="least", max_beams=5, max_events=20),
    ActionConfig(name="near_line", near_line=True),
)
STEPS = [
    StepConfig(do="fewer_beams", to=10, enter=0.2, leave=0.1),
    StepConfig(do="fewer_beams", to=5, enter=0.4, leave=0.2),
    StepConfig(do="shorter_history", to=20, enter=0.6, leave=0.4),
    StepConfig(do="cached_answer", enter=0.8, leave=0.6),
]
"""The same actions, one after the other; everybody is taken to have a cached answer."""
BUSY = 0.85
"""Share of the time that the device may be busy."""
TIMES_BEFORE = 4
"""That the first log is played: what has piled up before the price is there is to be worked off by then."""
MOST_WAITING = 500
"""Requests at the budget's cost whose work may wait before the levels refuse."""


@dataclass(frozen=True)
class Requests:
    """Axes: N requests, A actions."""

    values_N: Float64Array
    num_events_N: Int64Array
    masses_NA: Float64Array
    seconds_NA: Float64Array

    @classmethod
    def random(cls, number: int, seed: int) -> Requests:
        """Users of all lengths: with more events there is more to read, and more is lost without it."""
        random = np.random.default_rng(seed)
        num_events_N = np.clip(random.lognormal(3.0, 1.0, number), 2, 1000).astype(np.int64)
        full_N = random.beta(2, 8, number)  # the mass that full effort finds
        needs_N = random.lognormal(np.log(5.0), 0.4, number)  # beams that find two thirds
        recency_N = random.beta(2, 2, number)  # how much of what is known is in the newest events
        masses, seconds = [], []
        for action in ACTIONS:
            beams = BEAMS if action.max_beams is None else action.max_beams
            read_N = np.minimum(num_events_N, action.max_events or 1000)
            found_N = (1 - np.exp(-beams / needs_N)) / (1 - np.exp(-BEAMS / needs_N))
            found_N *= (read_N / num_events_N) ** (0.5 * (1 - recency_N))
            cost_N = (0.2 + 0.004 * read_N + 0.05 * beams) * random.lognormal(0.0, 0.1, number) / 1000
            if action.near_line:
                found_N, cost_N = random.beta(6, 6, number), np.full(number, 1e-6)
            masses.append(full_N * found_N)
            seconds.append(cost_N)
        values_N = 1 + random.pareto(1.5, number)
        return cls(values_N, num_events_N, np.stack(masses, axis=1), np.stack(seconds, axis=1))

    def earned(self, actions_N: Int64Array) -> Earned:
        """What these actions make of the requests."""
        rows = np.arange(len(actions_N))
        return Earned(
            float(self.values_N @ self.masses_NA[rows, actions_N]),
            float(self.seconds_NA[rows, actions_N].sum()),
        )


@dataclass(frozen=True)
class Earned:
    """What a policy has made of a log."""

    value: float
    seconds: float


def bench(options: BenchOptions) -> list[Bar]:
    number = options.rows or NUM_REQUESTS
    of_optimum, of_known, of_levels, of_budget = (list[float]() for _ in range(4))
    for seed in range(options.pairs):
        before, requests = (Requests.random(number, 2 * seed + each) for each in range(2))
        expected = expected_of(before, requests)
        for overload in OVERLOADS:
            rate = overload * BUSY / float(requests.seconds_NA[:, 0].mean())
            budget = BUSY * number / rate
            actions_N, price = by_value(before, requests, rate)
            ours, as_expected = requests.earned(actions_N), expected.earned(actions_N)
            levels = by_levels(requests, budget)
            best, _ = optimum(requests, max(budget, ours.seconds))
            best_expected, of_program = optimum(expected, max(budget, as_expected.seconds))
            of_optimum.append(as_expected.value / best_expected)
            of_known.append(ours.value / best)
            of_levels.append(ours.value / levels.value)
            of_budget.append(budget / ours.seconds)
            out.print(
                f"{overload} x: of the optimum {of_optimum[-1]:.3f}, of all that could be known "
                f"{of_known[-1]:.3f}, levels {levels.value / best:.3f}; spent {1 / of_budget[-1]:.3f} of the "
                f"budget, levels {levels.seconds / budget:.3f}; price {price:.3g}, the program's "
                f"{of_program:.3g}",
                highlight=False,
                soft_wrap=True,
            )
    return [
        Bar.of("value-replay", of_optimum, "the linear program, by curves", 0.95),
        Bar.of("value-replay-known", of_known, "the linear program, by what nobody knows", 0.9),
        Bar.of("value-replay-levels", of_levels, "degradation levels, for all alike", 1.0),
        Bar.of("value-replay-spent", of_budget, "what was spent, of the budget", 0.95),
    ]


def curves_of(before: Requests) -> ValueCurves:
    """What a log has told."""
    return ValueCurves.fit(
        "synthetic@1",
        [ActionKey(each.max_beams, each.max_events, each.rank, each.near_line) for each in ACTIONS],
        before.num_events_N,
        before.masses_NA,
        before.masses_NA[:, 0],
        before.seconds_NA,
    )


def expected_of(before: Requests, requests: Requests) -> Requests:
    """The requests as an allocator sees them: shares by curves, and mean costs."""
    curves = curves_of(before)
    shares_NA = [[curves.of(events, key) for key in curves.actions] for events in requests.num_events_N]
    costs_NA = np.tile(before.seconds_NA.mean(axis=0), (len(requests.values_N), 1))
    return replace(requests, masses_NA=np.array(shares_NA), seconds_NA=costs_NA)


def by_value(before: Requests, requests: Requests, rate: float) -> tuple[Int64Array, float]:
    """[N] the actions that the allocator chooses, and the last price; it has seen the first log, some times.

    Args:
        rate: requests per second.
    """
    now = waiting = 0.0
    curves, costs = curves_of(before), before.seconds_NA.mean(axis=0).tolist()

    def shares(model: ModelInfo, num_events: int) -> list[float]:
        return [curves.of(num_events, key) or 0.0 for key in curves.actions]

    config = AllocateConfig(actions=ACTIONS, curves="measured before", busy=BUSY)
    allocator = Allocator(config, shares, lambda: costs, lambda: waiting, lambda: now)
    model, names = ModelInfo(run="synthetic", step=1), [action.name for action in ACTIONS]
    random, chosen = np.random.default_rng(0), list[int]()
    for log in (*[before] * TIMES_BEFORE, requests):
        chosen = []
        for row, (num_events, value) in enumerate(zip(log.num_events_N, log.values_N, strict=True)):
            now += 1 / rate
            draw = 2 * int(random.integers(2**63))
            decision = allocator.decide(Facts(None, int(num_events), draw), str(value), model)
            chosen.append(names.index(decision.action))
            waiting = max(waiting + float(log.seconds_NA[row, chosen[-1]]) - 1 / rate, 0.0)
    return np.array(chosen), allocator.price.value


def by_levels(requests: Requests, budget: float) -> Earned:
    """All requests alike, by the work that waits: today's degradation levels."""
    policy, levels = DegradationPolicy(STEPS), [level_of(action) for action in ACTIONS]
    number, value, spent, waiting = len(requests.values_N), 0.0, 0.0, 0.0
    per_request = budget / number
    most = MOST_WAITING * per_request
    for row in range(number):
        level = policy.update(waiting / most)
        action = len(ACTIONS) - 1 if level.takes_cached else levels.index(level)
        seconds = float(requests.seconds_NA[row, action])
        if waiting + seconds <= most:
            value += float(requests.values_N[row] * requests.masses_NA[row, action])
            spent, waiting = spent + seconds, waiting + seconds
        waiting = max(waiting - per_request, 0.0)
    return Earned(value, spent)


def optimum(requests: Requests, budget: float) -> tuple[float, float]:
    """The value of the linear program, and what a further second would be worth."""
    worth_NA = requests.values_N[:, None] * requests.masses_NA
    number, num_actions = worth_NA.shape
    found = linprog(
        -worth_NA.ravel(),
        A_ub=sparse.csr_array(requests.seconds_NA.reshape(1, -1)),
        b_ub=[budget],
        A_eq=sparse.kron(sparse.eye_array(number), np.ones((1, num_actions)), format="csr"),
        b_eq=np.ones(number),
        bounds=(0, None),
        method="highs",
    )
    assert found.success, found.message
    return -float(found.fun), -float(found.ineqlin.marginals[0])
