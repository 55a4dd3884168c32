"""A run on a cluster, simulated: calls that queue, stragglers, failures, snapshots, spares.

    steps   readers ─► feature workers ─► trainers ◄─► servers (one queue each), one after another, as long as
            a window lasts ─► the time of a step with its spread
    days    the run between events: snapshot, failure, node repaired, actors up again; steps in between are
            counted and not simulated, so that 10,000 cards and 30 days are some thousand events

What a step's pieces take is that of the closed form; what the simulation adds is who waits for whom. The same
seed gives the same run.

Sources: SimPy, a process-based simulator of discrete events; failures, repair and spares as in AIReSim
(arXiv:2603.07041).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import simpy

from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.planner import SNAPSHOT_COST, ClusterPlan, failing_nodes
from rayrec.pipelines.capacity.report import duration
from rayrec.pipelines.capacity.step_model import StepPlan
from rayrec.pipelines.capacity.workload import Workload

Process = Generator[simpy.Event, Any, None]

QUEUE_DEPTH = 4
"""Batches between reading and update, as `pipeline.queue_depth`."""
WINDOW_STEPS = 12
WARM_UP_STEPS = 4
"""Of these, which fill the pipeline."""
MOST_CALLERS = 1_000
"""That are simulated one by one; of more, so many, each for several: with as many slow ones among them."""
NEVER_S = 1e300


@dataclass(frozen=True)
class SimulatedSteps:
    """Steps of a window."""

    mean_s: float
    p95_s: float
    server_busy: float
    """Share of the time that a server works."""
    steps_s: tuple[float, ...]


def simulate_steps(
    work: Workload,
    cluster: ClusterSpec,
    plan: StepPlan,
    num_steps: int = WINDOW_STEPS,
    seed: int = 0,
    noise: bool = True,
) -> SimulatedSteps:
    """Simulate some steps, call by call.

    Args:
        plan: of the closed form, which says what each piece takes.
        noise: whether trainers differ from step to step, and some cards are slow.
    """
    window = _Window(work, cluster, plan, num_steps + WARM_UP_STEPS, seed, noise)
    ends = window.run()
    steps = np.diff(ends)[WARM_UP_STEPS - 1 :]
    return SimulatedSteps(
        float(steps.mean()),
        float(np.quantile(steps, 0.95)),
        window.server_busy_s / float(ends[-1]),
        tuple(float(step) for step in steps),
    )


class _Window:
    """The pipeline of one run, with one server, the fullest: the others do the same at the same time."""

    def __init__(
        self, work: Workload, cluster: ClusterSpec, plan: StepPlan, num_steps: int, seed: int, noise: bool
    ) -> None:
        self._environment = environment = simpy.Environment()
        self._parts, self._stretch, self._server_stretch = plan.parts, plan.stretch, plan.server_stretch
        self._num_steps = num_steps
        self._work = work
        # Callers beyond the bound are simulated as fewer of more work each.
        self._num_callers = min(work.num_callers, MOST_CALLERS)
        self._per_caller = work.num_trainers / self._num_callers
        random = np.random.default_rng(seed)
        sigma = cluster.noise.steps.value if noise else 0.0
        shape = (num_steps, self._num_callers)
        self._factor_SC = np.exp(sigma * random.standard_normal(shape) - sigma * sigma / 2)
        if noise:
            # A caller is as slow as its slowest trainer.
            chance = 1 - (1 - cluster.noise.slow_cards.value) ** self._per_caller
            self._factor_SC[:, random.random(self._num_callers) < chance] *= cluster.noise.slowdown.value
        self._readers = simpy.Resource(environment, work.num_readers)
        self._workers = simpy.Resource(environment, work.num_feature_workers)
        self._driver = simpy.Resource(environment, 1)
        self._server = simpy.Resource(environment, 1)
        self._ready = [environment.event() for _ in range(num_steps)]
        self._done = [environment.event() for _ in range(num_steps)]
        self._computed = [_Barrier(environment, self._num_callers) for _ in range(num_steps)]
        self._updated = [_Barrier(environment, self._num_callers) for _ in range(num_steps)]
        self._ends: list[float] = []
        self.server_busy_s = 0.0

    def run(self) -> np.ndarray:
        """When each step was done."""
        for step in range(self._num_steps):
            self._environment.process(self._feed(step))
        for caller in range(self._num_callers):
            self._environment.process(self._train(caller))
        self._environment.run(self._done[-1])
        return np.array(self._ends)

    def _feed(self, step: int) -> Process:
        """Stages 1 and 2, and the driver that submits them."""
        parts, work, stretch = self._parts, self._work, self._stretch
        if step >= QUEUE_DEPTH:
            yield self._done[step - QUEUE_DEPTH]
        for resource, seconds in (
            (self._driver, parts.driver),
            (self._readers, parts.read * work.num_readers),
            (self._workers, parts.features * work.num_feature_workers),
        ):
            with resource.request() as turn:
                yield turn
                yield self._environment.timeout(seconds * stretch)
        self._ready[step].succeed()

    def _train(self, caller: int) -> Process:
        """Stages 3 to 5 of one caller's trainers, step by step."""
        environment, parts, stretch = self._environment, self._parts, self._stretch
        shown = 1 - parts.hidden
        own_s = shown * (parts.client * stretch + parts.calls + parts.network) / 2
        served_s = parts.server * self._server_stretch / self._num_callers / 2
        for step in range(self._num_steps):
            yield self._ready[step]
            yield environment.timeout(parts.between)
            # Rows: what is read ahead was asked for before, and only keeps the server busy.
            environment.process(self._serve(parts.hidden * served_s))
            yield environment.timeout(own_s)
            yield from self._serve(shown * served_s)
            dense_s = parts.on_cores * stretch + (parts.dense - parts.on_cores)
            yield environment.timeout(dense_s * self._factor_SC[step, caller])
            yield self._computed[step].arrive()
            yield environment.timeout(parts.all_reduce)
            # Gradients: a step is committed when those of all are there.
            environment.process(self._serve(parts.hidden * served_s))
            yield environment.timeout(own_s)
            yield from self._serve(shown * served_s)
            yield self._updated[step].arrive()
            if not self._done[step].triggered:
                self._ends.append(environment.now)
                self._done[step].succeed()

    def _serve(self, seconds: float) -> Process:
        if seconds <= 0:
            return
        with self._server.request() as turn:
            yield turn
            yield self._environment.timeout(seconds)
            self.server_busy_s += seconds


class _Barrier:
    """Lets all go on when the last one has come."""

    def __init__(self, environment: simpy.Environment, count: int) -> None:
        self._left, self._all = count, environment.event()

    def arrive(self) -> simpy.Event:
        self._left -= 1
        if self._left == 0:
            self._all.succeed()
        return self._all


@dataclass(frozen=True)
class SimulatedRun:
    """What became of a run in some days."""

    seconds: float
    step_s: float
    """Mean of the simulated window, stragglers and queues included."""
    steps: int
    """That count: those trained again count once."""
    steps_lost: float
    """Trained and lost to a failure."""
    failures: int
    expected_failures: float
    """Of the closed form, with a spare always left; what a seed gives differs by some square root of it."""
    snapshots: int
    down_s: float
    """From a failure until steps go on."""
    waiting_for_nodes_s: float
    """Of these, with no spare left."""
    rows: float

    @property
    def useful_share(self) -> float:
        """Of the steps that an undisturbed run of the same days would have made."""
        return self.steps * self.step_s / self.seconds

    def lines(self) -> list[tuple[str, str]]:
        """For a table."""
        return [
            ("a step, with queues and stragglers", duration(self.step_s)),
            ("steps that count", f"{self.steps:,}, {self.useful_share:.1%} of an undisturbed run's"),
            (
                "failures",
                f"{self.failures:,}; expected {self.expected_failures:,.1f}, give or take "
                f"{math.sqrt(self.expected_failures):,.1f} from run to run",
            ),
            ("snapshots", f"{self.snapshots:,}"),
            ("steps trained again", f"{self.steps_lost:,.0f}"),
            (
                "standing still",
                f"{duration(self.down_s)}, of it without a spare {duration(self.waiting_for_nodes_s)}",
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"useful_share": self.useful_share}


def simulate_run(plan: ClusterPlan, seconds: float, seed: int = 0) -> SimulatedRun:
    """Simulate days of a run: events one by one, steps between them at once.

    Args:
        seconds: of simulated time.
    """
    steps = simulate_steps(plan.work, plan.cluster, plan.step, seed=seed)
    return _Days(plan, steps.mean_s, seconds, seed).run()


class _Days:
    """The run, its nodes, and what happens to them."""

    def __init__(self, plan: ClusterPlan, step_s: float, seconds: float, seed: int) -> None:
        self._environment = environment = simpy.Environment()
        self._plan, self._step_s, self._seconds = plan, step_s, seconds
        self._random = np.random.default_rng([seed, 1])
        self._groups = groups = failing_nodes(plan.work, plan.cluster)
        spares = int(plan.cluster.failures.spares)
        # Kinds of nodes have spares of their own.
        self._spares = {
            name: simpy.Container(environment, init=spares) if spares else simpy.Container(environment)
            for name in groups
        }
        self._progress = 0.0
        """Steps so far, in fractions of one."""
        self._saved = 0.0
        """Of the last snapshot that is whole."""
        self._lost = self._down = self._waited = 0.0
        self._failures = self._snapshots = 0

    def run(self) -> SimulatedRun:
        main = self._environment.process(self._train())
        self._environment.process(self._stop(main))
        self._environment.run()
        return SimulatedRun(
            self._seconds,
            self._step_s,
            math.floor(self._progress),
            self._lost,
            self._failures,
            self._seconds / (self._plan.snapshots.mtbf_s + self._plan.snapshots.restart_s),
            self._snapshots,
            self._down,
            self._waited,
            math.floor(self._progress) * self._plan.work.rows,
        )

    def _stop(self, main: simpy.Process) -> Process:
        yield self._environment.timeout(self._seconds)
        if main.is_alive:
            main.interrupt()

    def _train(self) -> Process:
        try:
            while True:
                yield from self._until_failure()
                yield from self._recover()
        except simpy.Interrupt:
            return

    def _until_failure(self) -> Process:
        """Steps and snapshots, until a node fails."""
        environment, snapshots = self._environment, self._plan.snapshots
        rate = sum(count / mtbf for count, mtbf in self._groups.values())
        left_s = float(self._random.exponential(1 / rate)) if rate else NEVER_S
        while True:
            # An interval without a snapshot, then the time in which one is written.
            for seconds, speed in (
                (max(snapshots.interval_s - snapshots.write_s, 0.0), 1.0),
                (snapshots.write_s, 1 - SNAPSHOT_COST),
            ):
                at_begin = self._progress
                spent_s = min(seconds, left_s)
                yield from self._steps(spent_s, speed)
                left_s -= spent_s
                if left_s <= 0:
                    return
                if speed < 1:
                    self._saved, self._snapshots = at_begin, self._snapshots + 1
            if snapshots.interval_s <= 0:
                yield environment.timeout(left_s)
                return

    def _steps(self, seconds: float, speed: float) -> Process:
        """Train for so long; of an interrupted time, what has passed counts."""
        began = self._environment.now
        try:
            yield self._environment.timeout(seconds)
        finally:
            self._progress += (self._environment.now - began) * speed / self._step_s

    def _recover(self) -> Process:
        """Back to the last snapshot, on a spare node."""
        environment, failures, snapshots = (
            self._environment,
            self._plan.cluster.failures,
            self._plan.snapshots,
        )
        began = environment.now
        self._failures += 1
        self._lost += self._progress - self._saved
        self._progress = self._saved
        rates = {name: count / mtbf for name, (count, mtbf) in self._groups.items()}
        chances = np.array(list(rates.values())) / sum(rates.values())
        failed = str(self._random.choice(list(rates), p=chances))
        environment.process(self._repair(failed))
        try:
            yield environment.timeout(failures.detect.value)
            asked = environment.now
            try:
                yield self._spares[failed].get(1)
            finally:
                self._waited += environment.now - asked
            yield environment.timeout(failures.restart.value + snapshots.load_s)
        finally:
            self._down += environment.now - began

    def _repair(self, kind: str) -> Process:
        yield self._environment.timeout(self._plan.cluster.failures.repair.value)
        yield self._spares[kind].put(1)
