"""What steps of a real run take, measured in short windows of its pipeline on a connected cluster.

    warm-up (compilation, connections) ─► clocks ─► num_steps ─► clocks ─► num_steps ─► ...

The actors are those of `rayrec train`, with nothing of it left out but validation and snapshots. Besides the
time of a step, every process says how much processor time it took: that hardly changes when others use the
machine, while the time of a step does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayrec.pipelines.metrics.stage_stats import StageStats
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.training.pipeline import TrainingPipeline
from rayrec.pipelines.training.ray_stages import running_stages
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.errors import InputError
from rayrec.platform.health.burn_in import MOST_BUSY, cpu_load
from rayrec.platform.processors import num_processors

RAY = "ray"
ROLES = ("readers", "feature_workers", "servers", "trainers")
HANG_TIMEOUT_S = 300.0
LEAST_FREE = 0.1
"""Cores that are left at least: whatever others take, a process goes on."""
QUIET_PATIENCE_S = 1.0
"""Longest wait before a window for others to be done with the machine."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: of the whole, and of each stage's busiest member."""

    step_s: float
    read_busy_s: float
    features_busy_s: float
    servers_busy_s: float
    """Within lookups and updates; not in calls."""
    dense_s: float
    exchange_s: float
    """A trainer's time outside of dense compute: client, waiting for rows, for updates to be taken."""
    read_cpu_s: float
    """Processor time of all readers; likewise the following."""
    features_cpu_s: float
    servers_cpu_s: float
    trainers_cpu_s: float
    driver_cpu_s: float
    ray_cpu_s: float = 0.0
    """Of Ray's own processes, where this process has started them; else 0, which is not known."""
    free_cores: float = 0.0
    """Cores of this machine that others have left; 0: not known."""

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def bottleneck(self) -> str:
        """The stage that is busy for the largest part of a step.

        `sparse` is the longer one of a trainer's exchange with servers and a server's own work.
        """
        busy = {
            "read": self.read_busy_s,
            "features": self.features_busy_s,
            "sparse": max(self.servers_busy_s, self.exchange_s),
            "dense": self.dense_s,
            "driver": self.driver_cpu_s,
        }
        return max(busy, key=busy.__getitem__)


def measure_windows(
    name: str, assembly: Assembly, num_windows: int, num_steps: int, warm_up: int, least_s: float = 1.0
) -> list[StepTimes]:
    """Train some steps on the connected cluster and say what they took.

    Args:
        name: of the run, which is not kept.
        num_steps: of a window, at least.
        least_s: seconds of a window, at least: of short steps it has more.

    Raises:
        InputError: the data has too few rows for so many steps.
        Exception: as the pipeline of `rayrec train`.
    """
    num_timed = max(2, warm_up // 2)
    _check_rows(assembly, warm_up + num_timed + num_windows * num_steps)  # before anything is started
    with running_stages(name, assembly, None, HANG_TIMEOUT_S) as stages:
        pipeline = TrainingPipeline(stages, assembly.config.pipeline.queue_depth)
        first = _drive(pipeline, 0, warm_up)
        started = time.perf_counter()
        first = _drive(pipeline, first, first + num_timed)
        each_s = (time.perf_counter() - started) / num_timed
        num_steps = max(num_steps, round(least_s / each_s))
        _check_rows(assembly, first + num_windows * num_steps)
        found = []
        for _ in range(num_windows):
            wait_for_quiet()
            found.append(_window(stages, pipeline, first, num_steps))
            first += num_steps
        return found


def wait_for_quiet(
    patience_s: float = QUIET_PATIENCE_S,
    load: Callable[[], float | None] = cpu_load,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until the machine has nothing else to do, for some seconds at most; says whether it has."""
    until = clock() + patience_s
    while (busy := load()) is not None and busy > MOST_BUSY:
        if clock() >= until:
            return False
    return True


def _check_rows(assembly: Assembly, num_steps: int) -> None:
    total = assembly.total_steps
    if total is not None and total < num_steps:
        raise InputError(
            f"{assembly.config.data.path}: {num_steps:,} steps are measured and the run has {total:,}; "
            "raise training.epochs, lower training.batch_size, or use more data"
        )


def _drive(pipeline: TrainingPipeline, first: int, stop: int) -> int:
    for _ in pipeline.run(first, stop):
        pass
    return stop


def _window(stages: Stages, pipeline: TrainingPipeline, first: int, num_steps: int) -> StepTimes:
    before, cpu_before = stages.stats(), _processor_s(stages)
    driver_before, machine_before, began = time.process_time(), machine_busy_s(), time.perf_counter()
    # The pipeline fills and empties once; the time between reports in between is that of a step.
    times = []
    for _ in pipeline.run(first, first + num_steps):
        times.append(time.perf_counter())
    driver_s, machine_after = time.process_time() - driver_before, machine_busy_s()
    wall_s = time.perf_counter() - began
    after, cpu_after = stages.stats(), _processor_s(stages)
    step_s = (times[-1] - times[0]) / (len(times) - 1)
    cpu = {role: (cpu_after[role] - cpu_before[role]) / num_steps for role in ROLES}
    ours_s = driver_s + sum(cpu_after[role] - cpu_before[role] for role in (*ROLES, RAY))
    free_cores = 0.0
    if machine_before is not None and machine_after is not None:
        others = max(0.0, machine_after - machine_before - ours_s) / wall_s
        left = float(os.cpu_count() or 1) - others
        free_cores = min(float(num_processors()), max(LEAST_FREE, left))
    return StepTimes(
        free_cores=free_cores,
        step_s=step_s,
        read_busy_s=_most(before, after, "readers", num_steps),
        features_busy_s=_most(before, after, "feature_workers", num_steps),
        servers_busy_s=max(
            (
                (new.shard.busy_s - old.shard.busy_s) / num_steps
                for old, new in zip(before.servers, after.servers, strict=True)
            ),
            default=0.0,
        ),
        dense_s=max(
            (new.dense_s - old.dense_s) / num_steps
            for old, new in zip(before.trainers, after.trainers, strict=True)
        ),
        exchange_s=max(
            (_in_batch_s(new) - _in_batch_s(old)) / num_steps
            for old, new in zip(before.trainers, after.trainers, strict=True)
        ),
        read_cpu_s=cpu["readers"],
        features_cpu_s=cpu["feature_workers"],
        servers_cpu_s=cpu["servers"],
        trainers_cpu_s=cpu["trainers"],
        driver_cpu_s=driver_s / num_steps,
        ray_cpu_s=max(0.0, cpu_after[RAY] - cpu_before[RAY]) / num_steps,
    )


def _most(before: StageStats, after: StageStats, role: str, num_steps: int) -> float:
    """Busy seconds of a step of the busiest member; of several readers, each has a part of the steps."""
    pairs = zip(getattr(before, role), getattr(after, role), strict=True)
    return max((new.busy_s - old.busy_s) / num_steps for old, new in pairs)


def _in_batch_s(stats: Any) -> float:
    """A trainer's time in batches that is not dense compute."""
    return float(stats.stage.busy_s + stats.stage.blocked_s - stats.dense_s)


def _processor_s(stages: Stages) -> Mapping[str, float]:
    """Processor seconds so far, of all members of a stage together."""
    import ray

    answers = {
        role: ray.get([actor.__ray_call__.remote(_cpu_of_actor) for actor in getattr(stages, role)])
        for role in ROLES
    }
    actors = {process for role in answers.values() for process, _ in role}
    found = {role: sum(seconds for _, seconds in of_role) for role, of_role in answers.items()}
    found[RAY] = sum(seconds for process, seconds in children_cpu_s().items() if process not in actors)
    return found


def _cpu_of_actor(_: Any) -> tuple[int, float]:
    return os.getpid(), time.process_time()


def machine_busy_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds in which this machine's cores were in use, since its start; None where that is not known."""
    try:
        words = stat.read_text().partition("\n")[0].split()
    except OSError:
        return None
    if not words or words[0] != "cpu" or len(words) < 9:
        return None
    times = [float(word) for word in words[1:9]]
    # Not idle, nor waiting for the disk; what the host of a virtual machine takes counts as in use.
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def children_cpu_s(root: Path = Path("/proc")) -> dict[int, float]:
    """Processor seconds of every process that this one has started, directly or not; empty where the system
    does not say it."""
    tick = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    found: dict[int, float] = {}
    for folder in root.glob("[0-9]*"):
        try:
            # Behind the name, which may have anything in it: state, parent, ..., user and system time.
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[int(folder.name)] = int(words[1])
        found[int(folder.name)] = (int(words[11]) + int(words[12])) / tick

    def is_child(process: int) -> bool:
        above = parents[process]
        while above in parents and above != os.getpid():
            above = parents[above]
        return above == os.getpid()

    return {process: seconds for process, seconds in found.items() if is_child(process)}
