"""What the pieces of a step cost in processor time and waiting, and how that is fitted to measured windows.

Each role's processor time is a sum of counts (rows, ids, bytes, calls) times costs that are not below 0. They
are fitted role by role, so that a window says six things and not one. What a trainer waits for is fitted to
the time of steps afterwards (`calibrate`). Errors are relative ones: a step of 10 ms counts as much as one of
1 s.

Source: Lawson & Hanson, Solving Least Squares Problems, 1974 (no coefficient is below 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import nnls

from rayrec.pipelines.capacity.windows import StepTimes
from rayrec.pipelines.capacity.workload import ServerLoad, Workload

CALLS_PER_STEP = {"sync": 2, "bounded_stale": 2, "exact_prefetch": 3}
"""Of a trainer to every server: rows and gradients; one more where both are split by what the batch before
changes."""

DENSE_WEIGHT = 0.5
"""Of a clock, which others on the machine disturb, against processor time."""


@dataclass(frozen=True)
class Costs:
    """Seconds, on one core of the calibrated machine."""

    read_per_step: float = 0.0
    read_per_row: float = 0.0
    features_per_step: float = 0.0
    features_per_token: float = 0.0
    server_per_step: float = 0.0
    """Of each server, whatever is asked of it."""
    server_per_near_call: float = 0.0
    server_per_far_call: float = 0.0
    server_per_id: float = 0.0
    server_per_byte: float = 0.0
    server_per_far_byte: float = 0.0
    """Beside `server_per_byte`, where rows travel as Ray's objects."""
    client_per_near_call: float = 0.0
    """Of a trainer that sends a call and takes its answer."""
    client_per_far_call: float = 0.0
    client_per_id: float = 0.0
    client_per_far_byte: float = 0.0
    dense_per_step: float = 0.0
    """Python, and the launch of operations; of the client, too."""
    dense_per_flop: float = 0.0
    dense_per_token: float = 0.0
    """Of every occurrence of an id, whatever its width."""
    dense_per_byte: float = 0.0
    """Of vectors that are gathered for every occurrence of an id, and of their gradients."""
    driver_per_step: float = 0.0
    driver_per_call: float = 0.0
    ray_per_step: float = 0.0
    """Of Ray's own processes on a node, whatever is called."""
    ray_per_call: float = 0.0
    """For a call that the driver submits."""
    ray_per_far_call: float = 0.0
    """For a call of a trainer to a server that is an object of Ray's."""

    reader_idle: float = 0.0
    """Share of a core that a reader takes however long steps are: threads that look for work, heartbeats."""
    worker_idle: float = 0.0
    server_idle: float = 0.0
    driver_idle: float = 0.0
    ray_idle: float = 0.0

    step_latency: float = 0.0
    """From a trainer's report to its next batch: Ray's calls, and features that are fetched."""
    near_latency: float = 0.0
    """Until a call through shared memory is answered, work aside."""
    far_latency: float = 0.0
    reduce_latency: float = 0.0
    """Of a sum over trainers, on the calibrated machine."""
    hidden_exact: float = 0.0
    """Share of what can be read ahead that a trainer does not wait for."""
    hidden_stale: float = 0.0

    def hidden(self, mode: str) -> float:
        """Share of the exchange that can be read ahead, and that hides behind dense compute."""
        return {"sync": 0.0, "exact_prefetch": self.hidden_exact, "bounded_stale": self.hidden_stale}[mode]


@dataclass(frozen=True)
class Measured:
    """One configuration's work, and what its windows took."""

    workload: Workload
    times: StepTimes
    spread: float = 0.0
    """Of its windows: half the range of their steps over the median."""
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def driver_calls(work: Workload) -> float:
    """Calls that the driver submits for a step: a read, features, two of each trainer or group."""
    return 2.0 + 2.0 * work.num_callers


def server_calls(work: Workload) -> float:
    """Calls that one server answers in a step."""
    return float(CALLS_PER_STEP[work.mode] * work.num_callers) if work.num_servers else 0.0


def client_calls(work: Workload) -> float:
    """Calls that one caller makes in a step."""
    return float(CALLS_PER_STEP[work.mode] * work.num_servers)


Counts = dict[str, float]


def read_counts(work: Workload) -> Counts:
    return {"read_per_step": 1.0, "read_per_row": work.rows}


def features_counts(work: Workload) -> Counts:
    return {"features_per_step": 1.0, "features_per_token": work.tokens * work.num_trainers}


def server_counts(work: Workload, load: ServerLoad | None = None) -> Counts:
    """Of one server.

    Args:
        load: of the server; None: the mean of all.
    """
    if load is None:
        servers = max(work.num_servers, 1)
        counted = work.caller_ids, work.moved_bytes, work.wire_bytes
        ids, num_bytes, wire_bytes = (work.num_callers * each / servers for each in counted)
    else:
        _, ids, num_bytes, wire_bytes = load
    calls = server_calls(work)
    return {
        "server_per_step": 1.0,
        "server_per_near_call" if work.is_near else "server_per_far_call": calls,
        "server_per_id": ids,
        "server_per_byte": num_bytes,
        **({} if work.is_near else {"server_per_far_byte": wire_bytes}),
    }


def client_counts(work: Workload) -> Counts:
    """Of one caller: a trainer outside of dense compute, or what calls for several."""
    return {
        "client_per_near_call" if work.is_near else "client_per_far_call": client_calls(work),
        "client_per_id": work.caller_ids,
        **({} if work.is_near else {"client_per_far_byte": work.wire_bytes}),
    }


def dense_counts(work: Workload) -> Counts:
    return {
        "dense_per_step": 1.0,
        "dense_per_flop": work.flops,
        "dense_per_token": work.tokens,
        "dense_per_byte": work.gathered_bytes,
    }


def driver_counts(work: Workload) -> Counts:
    return {"driver_per_step": 1.0, "driver_per_call": driver_calls(work)}


def ray_counts(work: Workload) -> Counts:
    far = 0.0 if work.is_near else work.num_callers * client_calls(work)
    return {"ray_per_step": 1.0, "ray_per_call": driver_calls(work), "ray_per_far_call": far}


def seconds(costs: Costs, counts: Counts) -> float:
    """Counts times costs."""
    return sum(count * getattr(costs, name) for name, count in counts.items())


def fit_costs(measured: Sequence[Measured]) -> Costs:
    """Processor time of every role, by least squares of relative errors.

    Args:
        measured: of at least two configurations.
    """
    found: dict[str, float] = {}

    def fit(rows: Sequence[tuple[Counts, float]], weights: Sequence[float] | None = None) -> None:
        found.update(fit_counts(rows, weights))

    fit(
        [
            (
                read_counts(each.workload) | {"reader_idle": each.workload.num_readers * each.times.step_s},
                each.times.read_cpu_s,
            )
            for each in measured
        ]
    )
    fit(
        [
            (
                features_counts(each.workload)
                | {"worker_idle": each.workload.num_feature_workers * each.times.step_s},
                each.times.features_cpu_s,
            )
            for each in measured
        ]
    )
    with_servers = [each for each in measured if each.workload.num_servers]
    fit(
        [
            (
                server_counts(each.workload) | {"server_idle": each.times.step_s},
                each.times.servers_cpu_s / each.workload.num_servers,
            )
            for each in with_servers
        ]
    )
    trainers = [
        (
            client_counts(each.workload) | dense_counts(each.workload),
            each.times.trainers_cpu_s / each.workload.num_trainers,
        )
        for each in measured
    ]
    # What of it is dense compute, the clock of an only trainer says; several wait for each other in there.
    alone = [
        (dense_counts(each.workload), min(each.times.dense_s, each.times.trainers_cpu_s))
        for each in measured
        if each.workload.num_trainers == 1
    ]
    fit([*trainers, *alone], [1.0] * len(trainers) + [DENSE_WEIGHT] * len(alone))
    fit(
        [
            (driver_counts(each.workload) | {"driver_idle": each.times.step_s}, each.times.driver_cpu_s)
            for each in measured
        ]
    )
    fit(
        [
            (ray_counts(each.workload) | {"ray_idle": each.times.step_s}, each.times.ray_cpu_s)
            for each in measured
        ]
    )
    return Costs(**found)


def fit_counts(
    rows: Sequence[tuple[Counts, float]], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Costs, not below 0, of least squared relative error.

    Args:
        rows: counts by name of their cost, and the seconds that all of them took; rows without any are left
            out.
        weights: of the rows' errors; None: all alike.
    """
    weights = [1.0] * len(rows) if weights is None else weights
    kept = [(*row, weight) for row, weight in zip(rows, weights, strict=True) if row[1] > 0]
    names = sorted({name for counts, _, _ in kept for name in counts})
    if not kept or not names:
        return {}
    matrix = np.array(
        [[weight * counts.get(name, 0.0) / value for name in names] for counts, value, weight in kept]
    )
    wanted = np.array([weight for _, _, weight in kept])
    # Counts differ by ten orders of magnitude; columns of one size condition the problem.
    sizes = np.linalg.norm(matrix, axis=0)
    sizes[sizes == 0] = 1.0
    solution, _ = nnls(matrix / sizes, wanted)
    return {name: float(cost) for name, cost in zip(names, solution / sizes, strict=True)}
