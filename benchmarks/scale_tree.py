"""What a step costs driver, parameter servers and the processes beside trainers, by the number of trainers.

The actors are light processes that do everything but the arithmetic (`light_stages`); driver, servers,
groups, lookups, transport and watch are the product's. Each number of trainers is measured with groups of
eight, and up to sixteen also without. A process takes a share of a core while it waits for another, and a
machine with more processes than cores makes steps long: what the driver takes while it waits and no step is
made is measured, too, and left out. Bars:

* `scale-tree-driver`: twice the driver's processor time of a step with 8 trainers over that with 64, all in
  groups.
* `scale-tree-calls`: calls that a server gets of a step without groups over those with, of 16 trainers.
* `scale-tree-bytes`: the same for the bytes of ids, rows and gradients.
* `scale-tree-server`: the same for the server's processor time.

`RAYREC_BENCH_ROWS` sets the most trainers (fewer than 64 give no bars), `RAYREC_BENCH_STEPS` the steps of one
measurement. What was measured is written to `benchmarks/quality/scale-tree.json`, and drawn as
`docs/images/scale-tree.svg` where matplotlib is installed. It takes half an hour.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import ray

from benchmarks.harness import Bar, BenchOptions
from benchmarks.light_stages import (
    TABLE,
    CountingServer,
    LightFeatureWorker,
    LightReader,
    LightTrainer,
    StepPlan,
)
from rayrec.actors.group_caller import GroupSpec, spawn_trainer_groups
from rayrec.actors.parameter_server import ServerSpec
from rayrec.actors.spawning import RayHost
from rayrec.pipelines.cluster.watch import Watch
from rayrec.pipelines.training.pipeline import TrainingPipeline
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log

GROUP, MOST_TRAINERS, MOST_ALONE = 8, 64, 16
NUM_SERVERS, WINDOWS, QUEUE_DEPTH = 2, 3, 4
IDLE_S, WAIT_S = 3.0, 600.0
RECORD = Path(__file__).parent / "quality/scale-tree.json"
PICTURE = Path(__file__).parents[1] / "docs/images/scale-tree.svg"


@dataclass(frozen=True)
class Cost:
    """Of one step, in a run of so many trainers."""

    trainers: int
    group: int
    driver_ms: float
    """Processor's milliseconds, without `waiting_ms`."""
    waiting_ms: float
    """Of the driver, too: what it takes in as much time while it waits for a stage and no step is made. Work
    that Ray's threads do by the clock, for processes that are there, is in this."""
    server_ms: float
    """Of one server."""
    caller_ms: float
    """Of the process beside the first group; 0 without groups."""
    calls: float
    """That one server gets."""
    kilobytes: float
    """Of ids, rows and gradients, to and from one server."""
    step_ms: float
    """Of the clock: what so many processes on this machine take together."""


def bench(options: BenchOptions) -> list[Bar]:
    most = options.rows or MOST_TRAINERS
    costs = []
    for trainers in (2**power for power in range(most.bit_length())):
        for group in (1, GROUP) if trainers <= MOST_ALONE else (GROUP,):
            if group == 1 or trainers > 1:
                costs.append(measure(trainers, min(group, trainers), options.steps))
                log.print(_line(costs[-1]))
    RECORD.write_text(
        json.dumps({"date": str(date.today()), "costs": [asdict(cost) for cost in costs]}, indent=1)
    )
    _draw(costs)
    by = {(cost.trainers, cost.group): cost for cost in costs}
    if most < MOST_TRAINERS:
        return []
    most, alone, together = costs[-1].trainers, by[MOST_ALONE, 1], by[MOST_ALONE, GROUP]
    return [
        Bar.once(
            "scale-tree-driver",
            2 * by[GROUP, GROUP].driver_ms / by[most, GROUP].driver_ms,
            f"twice a step with {GROUP} trainers",
            1.0,
        ),
        Bar.once("scale-tree-calls", alone.calls / together.calls, "calls without groups", 0.9 * GROUP),
        Bar.once("scale-tree-bytes", alone.kilobytes / together.kilobytes, "bytes without groups", 1.0),
        Bar.once("scale-tree-server", alone.server_ms / together.server_ms, "a server without groups", 1.0),
    ]


def measure(trainers: int, group: int, steps: int) -> Cost:
    with _running(trainers, group) as run:
        run.train(steps)  # kernels are loaded, and connections made
        costs = [run.train(steps) for _ in range(WINDOWS)]
    return Cost(
        trainers,
        group,
        **{
            name: statistics.median(getattr(cost, name) for cost in costs)
            for name in ("driver_ms", "waiting_ms", "server_ms", "caller_ms", "calls", "kilobytes", "step_ms")
        },
    )


@dataclass
class _Running:
    """A run whose steps can be counted."""

    trainers: int
    group: int
    stages: Stages
    pipeline: TrainingPipeline
    next_step: int = 0

    def train(self, steps: int) -> Cost:
        idle_before = self._waiting_share()
        before = self._counters()
        driver, started = time.process_time(), time.perf_counter()
        for _ in self.pipeline.run(self.next_step, self.next_step + steps):
            pass
        self.next_step += steps
        took_s = time.perf_counter() - started
        driver_s = time.process_time() - driver
        calls, num_bytes, server_s, caller_s = (
            (after - first) / steps for after, first in zip(self._counters(), before, strict=True)
        )
        waiting_s = took_s * (idle_before + self._waiting_share()) / 2
        return Cost(
            self.trainers,
            self.group,
            1e3 * (driver_s - waiting_s) / steps,
            1e3 * waiting_s / steps,
            1e3 * server_s,
            1e3 * caller_s,
            calls,
            num_bytes / 1e3,
            1e3 * took_s / steps,
        )

    def _waiting_share(self) -> float:
        """Of a core, that the driver takes while it waits for a stage as it does between two reports."""
        used, started = time.process_time(), time.perf_counter()
        self.stages.watch.get([self.stages.readers[0].rest.remote(IDLE_S)])
        return (time.process_time() - used) / (time.perf_counter() - started)

    def _counters(self) -> tuple[float, float, float, float]:
        calls, num_bytes, server_s = ray.get(self.stages.servers[0].traffic.remote())
        of_callers = [caller.__ray_call__.remote(_cpu_s) for caller in self.stages.callers[:1]]
        return calls, num_bytes, server_s, sum(ray.get(of_callers))


def _cpu_s(actor: object) -> float:
    return time.process_time()


@contextmanager
def _running(trainers: int, group: int) -> Iterator[_Running]:
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15
    with ray_cluster(ClusterConfig(dashboard=False), 2.0):
        host = RayHost("light")
        try:
            stages = _spawn(host, trainers, group)
            yield _Running(trainers, group, stages, TrainingPipeline(stages, QUEUE_DEPTH))
        finally:
            host.close()


def _spawn(host: RayHost, trainers: int, group: int) -> Stages:
    spec = GroupSpec((TABLE,), trainers, group, "auto", WAIT_S)
    free = {"num_cpus": 0}

    def server(shard: int) -> Any:
        of_shard = ServerSpec((TABLE,), NUM_SERVERS, shard, spec.num_groups, WAIT_S)
        threads = {"max_concurrency": 4 * spec.num_groups + 4}
        return host.spawn(CountingServer, "parameter_server", shard, (of_shard,), free | threads)

    servers = [server(shard) for shard in range(NUM_SERVERS)]
    callers = spawn_trainer_groups(host, spec, servers)
    members = []
    for rank in range(trainers):
        of_rank = ([callers[rank // group]] if callers else servers, "auto", group)
        members.append(host.spawn(LightTrainer, "trainer", rank, of_rank, free))
        if len(members) % GROUP == 0:  # more processes that start at once do not answer in Ray's time
            ray.get([actor.handle.stats.remote() for actor in host.spawned])
    reader = host.spawn(LightReader, "sample_reader", 0, (), free)
    worker = host.spawn(LightFeatureWorker, "feature_worker", 0, (trainers, group, callers), free)
    ray.get([actor.handle.stats.remote() for actor in host.spawned])
    watch = Watch(None, frozenset(), WAIT_S)  # type: ignore[arg-type]  # nobody hangs here
    stages = Stages(StepPlan(), [reader], [worker], servers, members, watch, callers, group_size=group)
    return stages.led_by_groups()


def _line(cost: Cost) -> str:
    return (
        f"{cost.trainers} trainers in groups of {cost.group}: driver {cost.driver_ms:.1f} ms (and "
        f"{cost.waiting_ms:.1f} ms of waiting), a server "
        f"{cost.server_ms:.1f} ms for {cost.calls:.1f} calls and {cost.kilobytes:.0f} kB, a group's process "
        f"{cost.caller_ms:.1f} ms of processor a step"
    )


def _draw(costs: list[Cost]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        log.print("matplotlib is not installed: no picture; pip install 'rayrec[bench]'")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name, title in (
        (left, "driver_ms", "driver: ms of processor a step"),
        (right, "server_ms", "a server: ms of processor a step"),
    ):
        for is_grouped, label in ((True, f"groups of {GROUP}"), (False, "each by itself")):
            some = [cost for cost in costs if (cost.group > 1) == is_grouped]
            axes.plot(
                [cost.trainers for cost in some], [getattr(cost, name) for cost in some], "o-", label=label
            )
        axes.set(xscale="log", yscale="log", xlabel="trainers", title=title)
        axes.set_xticks([cost.trainers for cost in costs], [str(cost.trainers) for cost in costs])
        axes.minorticks_off()
    left.legend()
    figure.savefig(PICTURE)
