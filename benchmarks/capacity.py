"""The planner against what others have published, against itself, and against the clock. Measures no steps.

What is compared with steps of this machine is `benchmarks.capacity_real`. Bars:

* `capacity-madmax`: 10 % over the largest error of steps, exposed communication and throughput of the DLRM
  configurations that MAD-Max ships, computed with the planner's streams.
* `capacity-calculon`: 10 % over the largest error of the Megatron batches of Calculon's validation table,
  against the times that were measured.
* `capacity-young`: 1 % over the largest difference of the snapshot interval from `mlsysim`, over intervals of
  seconds and clusters that fail every minute to every month; not measured without that package.
* `capacity-closed-form`: 5 % over the largest difference of simulated steps from the closed form where
  nothing queues: one trainer in every mode, near and far servers, with no noise.
* `capacity-simulation`: 60 s over the time to simulate 30 days of 10,000 cards, with failures, snapshots and
  spares.

`RAYREC_BENCH_*` do not change it.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.harness import Bar, BenchOptions
from benchmarks.published_steps import dlrm_errors, transformer_errors
from rayrec.embeddings.config import TableConfig
from rayrec.pipelines.capacity.calibration import SHIPPED, Calibration, this_machine
from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.planner import plan_cluster
from rayrec.pipelines.capacity.reliability import young_interval_s
from rayrec.pipelines.capacity.simulate import simulate_run, simulate_steps
from rayrec.pipelines.capacity.workload import Mode, Scale, TableWork, Workload
from rayrec.platform.console import log

CLUSTERS = Path(__file__).parents[1] / "configs/clusters"
PUBLISHED, YOUNG, CLOSED_FORM, SIMULATED_S = 0.10, 0.01, 0.05, 60.0
DAYS = 30
LEAST = 1e-6
"""An error below this counts as this: a ratio needs a divisor."""

EXAMPLE = Workload(
    rows=1024,
    tokens=16_384,
    flops=196e6,
    dense_parameters=29_137,
    tables=(TableWork("feature", 16, 76.0, 491_011, 7_580, 0.75, 0.825),),
    num_servers=2,
)
"""A step of `configs/synthetic-dlrm.yaml` with 16 columns of 50,000 ids each, as `workload_of` counts it."""


def bench(options: BenchOptions) -> list[Bar]:
    dlrm, megatron = dlrm_errors(), transformer_errors()
    for name, error in (dlrm | megatron).items():
        log.print(f"capacity: {name} {error:+.1%}", highlight=False)
    return [
        _bar("capacity-madmax", PUBLISHED, max(map(abs, dlrm.values())), "MAD-Max's DLRM steps"),
        _bar("capacity-calculon", PUBLISHED, max(map(abs, megatron.values())), "Megatron's measured batches"),
        _young(),
        _bar("capacity-closed-form", CLOSED_FORM, closed_form_difference(), "the closed form"),
        _simulation(),
    ]


def _bar(name: str, limit: float, value: float, peer: str) -> Bar:
    return Bar.once(name, limit / max(value, LEAST), peer, 1.0)


def young_difference() -> float | None:
    """Largest difference of the snapshot interval from mlsysim's, as a share; None without that package."""
    if importlib.util.find_spec("mlsysim") is None:
        return None
    from mlsysim.physics import calc_young_daly_interval

    found = 0.0
    for cost_s, mtbf_s in product((1.0, 10.0, 60.0), (600.0, 3600.0, 86_400.0, 30 * 86_400.0)):
        theirs = calc_young_daly_interval(cost_s, mtbf_s).m_as("second")
        found = max(found, abs(young_interval_s(cost_s, mtbf_s) / theirs - 1))
    return found


def _young() -> Bar:
    difference = young_difference()
    if difference is None:
        log.print("capacity-young: mlsysim is not installed; pip install mlsysim")
        return Bar.of("capacity-young", [], "mlsysim", 1.0)
    return _bar("capacity-young", YOUNG, difference, "mlsysim")


def closed_form_difference() -> float:
    """Largest difference of simulated steps from the closed form, where nothing queues."""
    calibration, machine = Calibration.load(SHIPPED), this_machine(8)
    modes: tuple[Mode, ...] = ("sync", "exact_prefetch", "bounded_stale")
    found = 0.0
    for mode, is_near, servers, batch in product(modes, (True, False), (1, 4), (256, 4096)):
        work = replace(EXAMPLE, is_near=is_near).scaled(Scale(servers=servers, batch=batch, mode=mode))
        plan = calibration.plan(work, machine)
        simulated = simulate_steps(work, machine, plan, noise=False)
        found = max(found, abs(simulated.mean_s / plan.seconds - 1))
    return found


def large_run() -> tuple[Workload, ClusterSpec, TableConfig]:
    """10 TB of rows and 10 B dense weights on 10,000 cards."""
    work = replace(EXAMPLE, is_near=False, is_sharded=True, mode="bounded_stale").scaled(
        Scale(
            trainers=10_000,
            servers=4_096,
            readers=10_000,
            feature_workers=10_000,
            batch=10_000 * 4096,
            dense_parameters=10e9,
            sparse_bytes=10e12,
            dim=64,
        )
    )
    return work, ClusterSpec.load(CLUSTERS / "npu-10000.yaml"), TableConfig(name="feature", dim=64, seed=1)


def _simulation() -> Bar:
    work, cluster, table = large_run()
    plan = plan_cluster(work, [table], cluster, Calibration.load(SHIPPED))
    began = time.perf_counter()
    run = simulate_run(plan, DAYS * 86_400)
    took_s = time.perf_counter() - began
    log.print(
        f"capacity-simulation: {took_s:.1f} s; {run.failures} failures, {run.snapshots} snapshots, "
        f"{run.useful_share:.1%} of the steps count",
        highlight=False,
    )
    return _bar("capacity-simulation", SIMULATED_S, took_s, f"{DAYS} days of 10,000 cards")
