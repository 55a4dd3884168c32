"""What health checks find, and what watching costs. Bars:

* `health-stragglers`: simulated runs of 40 in which a trainer of four that is slowed down 1.5 times is found
  within three windows, and nobody else, over 38.
* `health-quiet-hours`: simulated hours of 10 in which nobody is called slow, over 10.
* `health-replay`: of 20 runs with one flipped bit in a snapshot (weights, optimizer state, rows) or one wrong
  gradient in a step, those in which a replay names what differs, over 20.
* `health-burn-in`: 10 % over the spread of the matrix rate between burn-ins, as the distance of the second
  largest from the second smallest of `pairs`. Not measured on a machine that is busy.
* `health-watching`: 0.5 % over the processor seconds of a look at a node with GPUs once a minute, as a share
  of those of a run with one trainer there. Ray's own part of a look is in it, Ray at rest is not.

`RAYREC_BENCH_PAIRS` is the number of burn-ins and of measurements of looks.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.health_faults import flip_bit_of_row, flip_bit_of_tensor, wrong_bit_in_gradient
from benchmarks.health_simulation import STEP_S, simulated_work
from benchmarks.processes import ProcessorTime
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.health.replay import replay
from rayrec.pipelines.metrics.stragglers import StragglerConfig, StragglerWatch
from rayrec.pipelines.runs.snapshots import OPTIMIZER, WEIGHTS
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log
from rayrec.platform.health.burn_in import RATES, BurnIn, burn_in
from rayrec.platform.health.counters import read_counters
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare

SLOWED, FOUND_AT_LEAST = 40, 38
HOURS = 10
FLIPS = 20
REPEATS_WITHIN, TRIES = 0.1, 20
"""Tries for each burn-in, on a machine that others use now and then."""
COST, EVERY_S = 0.005, 60.0
LOOKS = 10
"""That are measured together; /proc counts hundredths of a second."""
SNAPSHOTS = (4, 8, 12)


def bench(options: BenchOptions) -> list[Bar]:
    return [
        _stragglers(),
        _quiet_hours(),
        _replay(),
        _burn_in(options.pairs),
        _watching(options.pairs),
    ]


def _stragglers() -> Bar:
    config, found = StragglerConfig(), 0
    for seed in range(SLOWED):
        watch, slow = StragglerWatch(4), seed % 4
        steps = simulated_work(seed, 4, config.windows * config.window_steps, slow)
        windows = [scores for step in steps if (scores := watch.add(step)) is not None]
        found += [each.member for window in windows for each in window.found] == [slow]
    log.print(
        f"{found} of {SLOWED} slow trainers were found within {config.windows} windows", highlight=False
    )
    return Bar.once("health-stragglers", found / FOUND_AT_LEAST, f"{FOUND_AT_LEAST} of {SLOWED}", 1.0)


def _quiet_hours() -> Bar:
    quiet = 0
    for seed in range(HOURS):
        watch, steps = StragglerWatch(4), simulated_work(1000 + seed, 4, int(3600 / STEP_S))
        quiet += not any(scores.slow for step in steps if (scores := watch.add(step)) is not None)
    log.print(f"{quiet} of {HOURS} hours had no alarm", highlight=False)
    return Bar.once("health-quiet-hours", quiet / HOURS, "no alarm", 1.0)


@dataclass
class Fault:
    """One of the faults that a replay has to name."""

    step: int
    """Of the snapshot that has it."""
    file: str | None
    """Of the snapshot, in which a bit is flipped; None: a gradient is wrong while the step is computed."""
    column: str | None = None
    """Of rows."""


def _replay() -> Bar:
    random = np.random.default_rng(0)
    named = 0
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        config = tiny_run(Path(folder))
        train(config, Path(folder) / "run", cluster=in_process)
        for number in range(FLIPS):
            step = SNAPSHOTS[number % len(SNAPSHOTS)]
            fault = (
                Fault(step, WEIGHTS),
                Fault(step, OPTIMIZER),
                Fault(step, "item-00000.parquet", "weights"),
                Fault(step, "item-00000.parquet", "state"),
                Fault(step, None),
            )[number % 5]
            run = Path(folder) / f"run-{number}"
            expected = inject(fault, config, Path(folder) / "run", run, random)
            report = replay(run, step, in_process)
            is_named = report.verdict == "bad" and any(
                expected in str(difference) for difference in report.differences[:1]
            )
            named += is_named
            if not is_named:
                log.print(f"not named: {fault}, {report.differences}", highlight=False)
            shutil.rmtree(run)
    log.print(f"{named} of {FLIPS} faults were named", highlight=False)
    return Bar.once("health-replay", named / FLIPS, f"{FLIPS} of {FLIPS}", 1.0)


def tiny_run(folder: Path) -> RunConfig:
    """The settings of a run of some seconds, and a data set for it in the folder."""
    places = [(user, place) for user in range(40) for place in range(7)]
    users = [f"u{user}" for user, _ in places]
    items = [f"i{(user + place) % 20}" for user, place in places]
    times = [1000 + place for _, place in places]
    source = folder / "source"
    source.mkdir()
    pq.write_table(
        pa.table({"user_id": users, "item_id": items, "timestamp": times}), source / "interactions.parquet"
    )
    prepare(source, folder / "data", PrepareConfig(rows_per_group=4, rows_per_file=16, num_partitions=3))
    backbone = {"dim": 8, "num_layers": 1, "num_heads": 2, "feedforward_dim": 16, "max_length": 8}
    return RunConfig.parse(
        {
            "data": {"path": str(folder / "data")},
            "model": {
                "name": "sasrec",
                "item_matrix": "sparse",
                "num_negatives": 16,
                "user_embedding": True,
                "backbone": backbone,
            },
            "sparse": {"num_servers": 1, "optimizer": {"kind": "adam", "lr": 0.03}},
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 8, "epochs": 3},
            "evaluation": {"every_steps": SNAPSHOTS[0]},
            "snapshots": {"keep": 9},
        }
    )


def inject(fault: Fault, config: RunConfig, whole: Path, run: Path, random: np.random.Generator) -> str:
    """Make a copy of a run that has a fault; returns what has to be in what is said of it first."""
    if fault.file is None:
        # One of the steps between the snapshot before and this one.
        at_update = fault.step - int(random.integers(SNAPSHOTS[0]))
        with wrong_bit_in_gradient(at_update, random):
            train(config, run, cluster=in_process)
        return ""
    shutil.copytree(whole, run)
    path = run / "snapshots" / f"step-{fault.step:09d}" / fault.file
    if fault.column is None:
        return f" {flip_bit_of_tensor(path, random)}: 1 of "
    row = flip_bit_of_row(path, fault.column, random)
    return f"rows of item: {fault.column} of 1 of 20 rows, the first of id {row}"


def _burn_in(repeats: int) -> Bar:
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        results: list[BurnIn] = []
        for _ in range(TRIES * repeats):
            result = burn_in("cpu", folder)
            if result.busy is None:
                results.append(result)
            if len(results) == repeats:
                break
            time.sleep(1.0)
        else:
            log.print(f"burn-in: {len(results)} of {repeats} times; last: {result.busy}", highlight=False)
    if len(results) < repeats:
        return Bar("health-burn-in", None, None, "10 % on a quiet machine", 1.0, None)
    spreads = {name: _spread([getattr(result, name) for result in results]) for name in RATES}
    log.print(", ".join(f"{name} {spread:.1%}" for name, spread in spreads.items()), highlight=False)
    assert len({result.checksums for result in results}) == 1
    value = REPEATS_WITHIN / max(spreads["matrix_flops_per_s"], 1e-6)
    return Bar.once("health-burn-in", value, "10 % on a quiet machine", 1.0)


def _spread(values: list[float]) -> float:
    ordered = sorted(values)[1:-1] or values
    return ordered[-1] / ordered[0] - 1


def _watching(repeats: int) -> Bar:
    run_rate = _rate_of_a_run()
    tools_s = _tools_s()
    log.print(f"drivers' tools: {1000 * tools_s:.0f} ms", highlight=False)
    ratios = []
    with ray_cluster(ClusterConfig(dashboard=False), 1):
        from rayrec.pipelines.cluster.nodes import cluster_nodes
        from rayrec.pipelines.health.sweep import Sweep

        sweep = Sweep()
        sweep.look(cluster_nodes())  # starts the process of its tasks

        def looks() -> None:
            for _ in range(LOOKS):
                sweep.look(cluster_nodes())

        for _ in range(repeats):
            began = time.perf_counter()
            busy_s = _processor_s(looks)
            wall_s = time.perf_counter() - began
            resting_s = _processor_s(lambda wall_s=wall_s: time.sleep(wall_s))
            look_s = max(busy_s - resting_s, 1e-3) / LOOKS + tools_s
            share = look_s / (EVERY_S * run_rate)
            log.print(f"a look: {1000 * look_s:.0f} ms, {share:.2%}", highlight=False)
            ratios.append(COST / share)
    return Bar.of("health-watching", ratios, "0.5 % of a run's processor time", 1.0)


def _tools_s() -> float:
    """Of what a look at a GPU node starts: they end too soon to be seen in /proc.

    Without a driver, the reader of NVML starts, and finds that.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(LOOKS):
        read_counters(expected={"cuda": None})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / LOOKS


def _processor_s(work: Callable[[], None]) -> float:
    with ProcessorTime(interval_s=0.1) as spent:
        work()
    return spent.seconds


def _rate_of_a_run() -> float:
    """Processors that training keeps busy, with one thread of a trainer."""
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        config = tiny_run(Path(folder))
        longer = config.model_copy(update={"training": config.training.model_copy(update={"epochs": 60})})
        longer = longer.model_copy(
            update={"evaluation": longer.evaluation.model_copy(update={"every_steps": 100_000})}
        )
        began = time.perf_counter()
        spent = _processor_s(lambda: train(longer, Path(folder) / "run", cluster=in_process) and None)
        rate = spent / (time.perf_counter() - began)
    log.print(f"the run keeps {rate:.2f} processors busy", highlight=False)
    return rate
