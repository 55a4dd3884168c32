"""Workloads, costs and clusters with round numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from rayrec.pipelines.capacity.calibration import this_machine
from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.costs import (
    Costs,
    Measured,
    client_counts,
    dense_counts,
    driver_counts,
    features_counts,
    read_counts,
    seconds,
    server_counts,
)
from rayrec.pipelines.capacity.step_model import step_plan
from rayrec.pipelines.capacity.windows import StepTimes
from rayrec.pipelines.capacity.workload import Mode, Scale, TableWork, Workload

COSTS = Costs(
    read_per_step=2e-3,
    read_per_row=1e-6,
    features_per_step=3e-3,
    features_per_token=1e-7,
    server_per_near_call=1e-3,
    server_per_far_call=2e-3,
    server_per_id=1e-7,
    client_per_near_call=1e-3,
    client_per_far_call=2e-3,
    client_per_id=1e-7,
    dense_per_step=5e-3,
    dense_per_flop=1e-10,
    driver_per_step=1e-3,
    driver_per_call=1e-3,
    near_latency=1e-3,
    far_latency=5e-3,
    reduce_latency=4e-3,
    hidden_exact=0.5,
    hidden_stale=1.0,
)
TABLE = TableWork("feature", dim=16, row_bytes=76.0, rows=1e6, ids=10_000, early=0.8, heaps=0.5)
WORK = Workload(
    rows=1000, tokens=16_000, flops=1e8, dense_parameters=1e6, tables=(TABLE,), num_servers=2, mode="sync"
)

CLUSTER: dict[str, Any] = {
    "trainers": {
        "count": "4 nodes, assumed",
        "cards_per_node": "8 cards, data sheet",
        "card": {
            "kind": "card",
            "matrix_rate": "100 TFLOP/s, data sheet",
            "matrix_achieved": "0.5 of peak, assumed",
            "memory": "80 GB, data sheet",
            "memory_rate": "2000 GB/s, data sheet",
            "memory_achieved": "0.8 of peak, assumed",
        },
        "within": {
            "peak": "200 GB/s, data sheet",
            "achieved": "0.5 of peak, measured: here",
            "latency": "10 us, assumed",
        },
        "cores": "64 cores, assumed",
        "memory": "1 TB, assumed",
        "price": "10 USD/h, assumed",
    },
    "servers": {
        "count": "2 nodes, assumed",
        "servers_per_node": "8 servers, assumed",
        "cores": "64 cores, assumed",
        "memory": "1 TB, assumed",
        "price": "1 USD/h, assumed",
    },
    "network": {
        "peak": "400 Gbit/s, data sheet",
        "achieved": "0.5 of peak, measured: here",
        "latency": "20 us, assumed",
    },
    "storage": {"write": "1 GB/s, assumed", "read": "1 GB/s, assumed"},
    "failures": {
        "trainer_node_mtbf": "100 days, assumed",
        "detect": "60 s, assumed",
        "restart": "120 s, assumed",
        "repair": "1 days, assumed",
        "spares": "1 nodes, assumed",
    },
    "noise": {"steps": "5 %, assumed", "slow_cards": "1 %, assumed", "slowdown": "1.2 times, assumed"},
    "core_speed": "1 times, assumed",
}


def cluster_with(place: str = "", value: Any = None) -> ClusterSpec:
    """The cluster above with one number changed; None leaves it out."""
    values = _copied(CLUSTER)
    if place:
        *path, name = place.split(".")
        part = values
        for each in path:
            part = part[each]
        if value is None:
            part.pop(name)
        else:
            part[name] = value
    return ClusterSpec.parse(values, source="cluster.yaml")


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in values.items()}


def far(work: Workload = WORK) -> Workload:
    """With servers on other nodes."""
    return replace(work, is_near=False)


def large(**sizes: Any) -> Workload:
    """Of 32 trainers and 16 servers, unless told otherwise."""
    return far(WORK.scaled(Scale(**({"trainers": 32, "servers": 16} | sizes))))


CORES = 64.0
"""So many that no process has to share one."""


def made_of_costs(work: Workload, costs: Costs = COSTS) -> Measured:
    """A window as these costs would make it."""
    plan = step_plan(work, this_machine(CORES), costs)
    trainers = seconds(costs, client_counts(work)) + seconds(costs, dense_counts(work))
    times = StepTimes(
        step_s=plan.seconds,
        read_busy_s=plan.stages["read"],
        features_busy_s=plan.stages["features"],
        servers_busy_s=plan.parts.server,
        dense_s=plan.stages["dense"],
        exchange_s=plan.exposed,
        read_cpu_s=seconds(costs, read_counts(work)),
        features_cpu_s=seconds(costs, features_counts(work)),
        servers_cpu_s=work.num_servers * seconds(costs, server_counts(work)),
        trainers_cpu_s=work.num_trainers * trainers,
        driver_cpu_s=seconds(costs, driver_counts(work)),
    )
    return Measured(work, times, 0.05, "made")


def variants() -> list[Workload]:
    """In which every cost shows."""
    modes: tuple[Mode, ...] = ("sync", "exact_prefetch", "bounded_stale")
    work = [
        replace(WORK, is_near=is_near).scaled(Scale(batch=500 if number % 3 else 4000, mode=mode))
        for number, (mode, is_near) in enumerate(product(modes, (True, False)))
    ]
    return [
        *work,
        WORK.scaled(Scale(trainers=2, servers=3)),
        WORK.scaled(Scale(servers=4, dense_parameters=3e6)),
    ]
