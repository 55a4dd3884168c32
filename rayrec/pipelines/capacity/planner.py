"""One plan: does it fit, how long is a step, what decides, what fails, what does it cost.

workload ─► memory_fit ─► step_model ─► reliability ─► ClusterPlan ─► report
              refuses         └► sensitivity: the same with one number 20 % lower, and higher
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayrec.embeddings.config import TableConfig
from rayrec.pipelines.capacity.calibration import Calibration
from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.costs import Costs
from rayrec.pipelines.capacity.memory_fit import MemoryFit, memory_fit, server_row_bytes
from rayrec.pipelines.capacity.reliability import (
    Losses,
    cluster_mtbf_s,
    daly_interval_s,
    expected_losses,
    young_interval_s,
)
from rayrec.pipelines.capacity.step_model import StepPlan, layout_of, step_plan
from rayrec.pipelines.capacity.workload import Workload
from rayrec.platform.errors import InputError

SNAPSHOT_COST = 0.38
"""Share of the time in which a snapshot is written that steps lose: their rate is 0.62 of that without
(docs/benchmarks/training.md)."""
SNAPSHOT_RATE = 0.34e9
"""Bytes per second that one server writes at most: 1.12 GB in 3.3 s, at the same place."""
CHANGE = 0.2
"""Of a number, for sensitivities."""

NOT_MODELED = (
    "memory of activations, which the framework decides about",
    "skew of ids beyond what Heaps' law and hashing say: a single id that all trainers update is one row",
    "congestion of switches: every node has its link to itself",
    "validation, publishing, and increments of snapshots",
    "readers' storage: reading is what decoding takes of a core",
    "admission, eviction, tables with rows on disk or on some of the servers, and caches of rows",
)


@dataclass(frozen=True)
class Sensitivity:
    """How the step moves with one number."""

    what: str
    lower: float
    """Change of the step with the number 20 % lower, as a share."""
    higher: float

    @property
    def size(self) -> float:
        return max(abs(self.lower), abs(self.higher))


@dataclass(frozen=True)
class SnapshotPlan:
    """When to write snapshots, and what failures take."""

    mtbf_s: float
    """Of all nodes that the run has processes on."""
    write_s: float
    cost_s: float
    """Of steps lost to one snapshot."""
    load_s: float
    restart_s: float
    """From a failure until the next step, where a spare node is left."""
    interval_s: float
    """Young's."""
    daly_s: float
    losses: Losses


@dataclass(frozen=True)
class ClusterPlan:
    """Everything that a plan says."""

    work: Workload
    cluster: ClusterSpec
    memory: MemoryFit
    step: StepPlan
    low_s: float
    high_s: float
    sensitivities: tuple[Sensitivity, ...]
    snapshots: SnapshotPlan
    calibration: Calibration

    @property
    def rows_per_s(self) -> float:
        """Without losses."""
        return self.work.rows / self.step.seconds

    @property
    def useful_rows_per_s(self) -> float:
        """What is left of it after snapshots, restarts and steps that are trained again."""
        return self.rows_per_s * (1 - self.snapshots.losses.total)

    @property
    def money_per_billion(self) -> float:
        """For a billion rows, losses included."""
        if not self.useful_rows_per_s:
            return float("inf")
        return self.cluster.money_per_h / 3600 / self.useful_rows_per_s * 1e9


def plan_cluster(
    work: Workload, tables: Sequence[TableConfig], cluster: ClusterSpec, calibration: Calibration
) -> ClusterPlan:
    """Plan a run on a cluster.

    Args:
        work: of the run, scaled.
        tables: of the run's config.

    Raises:
        InputError: the cluster has too few cards or places for servers, or the model does not fit; names the
            component.
    """
    check_room(work, cluster)
    memory = memory_fit(work, tables, cluster)
    memory.check(cluster, work)
    step = calibration.plan(work, cluster)
    low, high = calibration.step_range(work, cluster)
    return ClusterPlan(
        work,
        cluster,
        memory,
        step,
        low,
        high,
        sensitivities(work, cluster, calibration.costs),
        snapshot_plan(work, cluster, memory),
        calibration,
    )


def check_room(work: Workload, cluster: ClusterSpec) -> None:
    """Refuse more trainers than cards, more servers than the nodes have places for, and tables on others.

    Raises:
        InputError: says how many there are.
    """
    if cluster.trainers.card is not None and work.num_trainers > cluster.num_cards:
        raise InputError(
            f"{work.num_trainers:,} trainers need a card each, and the cluster has {cluster.num_cards:,}; "
            "lower pipeline.num_trainers (--scale trainers=...), or use more nodes"
        )
    for table in work.tables:
        if work.num_servers > 1 and table.servers is not None and table.servers[-1] >= work.num_servers:
            raise InputError(
                f"table {table.table!r} lies on server {table.servers[-1]} (sparse.tables.{table.table}."
                f"servers), and there would be {work.num_servers:,}, numbered from 0; name others there, or "
                "use more servers (--scale servers=...)"
            )
    if cluster.servers is not None:
        places = int(cluster.servers.count) * int(cluster.servers.servers_per_node)
        if work.num_servers > places:
            raise InputError(
                f"{work.num_servers:,} parameter servers do not fit the {places:,} places of the servers' "
                "nodes; lower sparse.num_servers (--scale servers=...), or raise servers_per_node"
            )


def snapshot_plan(work: Workload, cluster: ClusterSpec, memory: MemoryFit) -> SnapshotPlan:
    """Of full snapshots: each server writes its rows, and trainers the dense weights."""
    failures, storage = cluster.failures, cluster.storage
    mtbf_s = cluster_mtbf_s(list(failing_nodes(work, cluster).values()))
    rate = min(storage.write.value, SNAPSHOT_RATE * cluster.core_speed.value)
    rows, dense = server_row_bytes(memory), 12.0 * work.dense_parameters
    write_s = max(rows / rate, dense / storage.write.value)
    load_s = max(rows, dense) / storage.read.value
    cost_s = SNAPSHOT_COST * write_s
    restart_s = failures.detect.value + failures.restart.value + load_s
    # A snapshot has to be written before the next one begins.
    interval = max(young_interval_s(cost_s, mtbf_s), write_s)
    return SnapshotPlan(
        mtbf_s,
        write_s,
        cost_s,
        load_s,
        restart_s,
        interval,
        daly_interval_s(cost_s, mtbf_s),
        expected_losses(interval, cost_s, mtbf_s, restart_s),
    )


def failing_nodes(work: Workload, cluster: ClusterSpec) -> dict[str, tuple[int, float]]:
    """By kind, (nodes that a run has processes on, mean time in seconds between failures of one of them)."""
    failures, layout = cluster.failures, layout_of(work, cluster)
    groups = {"trainers": (layout.trainer_nodes, failures.trainer_node_mtbf.value)}
    if cluster.servers is not None:
        mtbf = failures.server_node_mtbf or failures.trainer_node_mtbf
        groups["servers"] = (layout.server_nodes, mtbf.value)
    return groups


_GROUPS: dict[str, tuple[str, ...]] = {
    "processor time of a server's call": ("server_per_near_call", "server_per_far_call", "server_per_step"),
    "processor time of a server's rows": ("server_per_id", "server_per_byte", "server_per_far_byte"),
    "processor time of a trainer's calls and ids": (
        "client_per_near_call",
        "client_per_far_call",
        "client_per_id",
        "client_per_far_byte",
    ),
    "processor time of dense compute": (
        "dense_per_step",
        "dense_per_flop",
        "dense_per_token",
        "dense_per_byte",
    ),
    "processor time of the driver's calls": ("driver_per_step", "driver_per_call"),
    "processor time of reading": ("read_per_step", "read_per_row"),
    "processor time of features": ("features_per_step", "features_per_token"),
    "latency of calls": ("step_latency", "near_latency", "far_latency"),
    "latency of sums over trainers": ("reduce_latency",),
    "hidden share of the exchange": ("hidden_exact", "hidden_stale"),
}
_PLACES = (
    "core_speed",
    "trainers.cores",
    "servers.cores",
    "trainers.card.matrix_rate",
    "trainers.card.memory_rate",
    "trainers.within.peak",
    "trainers.between.peak",
    "network.peak",
    "network.latency",
)


def sensitivities(work: Workload, cluster: ClusterSpec, costs: Costs) -> tuple[Sensitivity, ...]:
    """How the step moves with each number 20 % lower and higher, the largest effect first."""
    base = step_plan(work, cluster, costs).seconds
    found = []
    known = dict(cluster.numbers())
    for place in _PLACES:
        if place in known:
            lower, higher = (
                step_plan(work, cluster.with_number(place, times), costs).seconds / base - 1
                for times in (1 - CHANGE, 1 + CHANGE)
            )
            found.append(Sensitivity(f"cluster: {place}", lower, higher))
    for what, names in _GROUPS.items():
        lower, higher = (
            step_plan(work, cluster, _changed(costs, names, times)).seconds / base - 1
            for times in (1 - CHANGE, 1 + CHANGE)
        )
        found.append(Sensitivity(what, lower, higher))
    for what, name in (
        ("servers", "num_servers"),
        ("readers", "num_readers"),
        ("feature workers", "num_feature_workers"),
    ):
        count = getattr(work, name)
        if count >= 5:  # a fifth of fewer is no whole number
            lower, higher = (
                step_plan(replace(work, **{name: round(count * times)}), cluster, costs).seconds / base - 1
                for times in (1 - CHANGE, 1 + CHANGE)
            )
            found.append(Sensitivity(f"number of {what}", lower, higher))
    return tuple(sorted(found, key=lambda each: -each.size))


def _changed(costs: Costs, names: tuple[str, ...], times: float) -> Costs:
    most = {"hidden_exact": 1.0, "hidden_stale": 1.0}
    return replace(
        costs, **{name: min(getattr(costs, name) * times, most.get(name, float("inf"))) for name in names}
    )


@dataclass(frozen=True)
class Change:
    """One change of a run, and the step with it."""

    what: str
    work: Workload
    step: StepPlan


def changes(work: Workload, cluster: ClusterSpec, costs: Costs) -> list[Change]:
    """What could be changed about a run alone, the fastest step first; the cluster stays as it is."""
    per_node = layout_of(work, cluster).trainers_per_node
    tried = {
        "twice the feature workers": replace(work, num_feature_workers=2 * work.num_feature_workers),
        "twice the readers": replace(work, num_readers=2 * work.num_readers),
    }
    if work.num_servers:  # a run whose rows are dense weights has nobody to call
        tried |= {
            "twice the servers": replace(work, num_servers=2 * work.num_servers),
            "half the servers": replace(work, num_servers=max(1, work.num_servers // 2)),
            "mode bounded_stale": replace(work, mode="bounded_stale"),
            f"one caller for the {per_node} trainers of a node": replace(work, group_size=per_node),
        }
        if not work.is_near:  # what a node keeps to itself costs no bytes
            tried["rows and gradients in bfloat16 (sparse.wire)"] = replace(work, wire="bfloat16")
    found = []
    for what, changed in tried.items():
        if changed == work:
            continue
        try:
            check_room(changed, cluster)
        except InputError:
            continue
        found.append(Change(what, changed, step_plan(changed, cluster, costs)))
    return sorted(found, key=lambda change: change.step.seconds)
