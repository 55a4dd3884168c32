"""A plan in words and numbers: the tables that `rayrec plan --cluster` prints, and what `--json` gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rayrec.pipelines.capacity.planner import NOT_MODELED, Change, ClusterPlan, failing_nodes
from rayrec.pipelines.capacity.quantity import Mark
from rayrec.platform.memory import human_size

SHOWN_SENSITIVITIES = 6
SAME = 0.005
"""Change of a step, as a share, below which nothing is said of it."""
STAGE_WORDS = {
    "read": "reading samples",
    "features": "making features",
    "sparse": "exchange with the parameter servers",
    "dense": "dense compute and the sum over trainers",
    "driver": "the driver's calls",
}


class Section(NamedTuple):
    """A titled list of lines."""

    title: str
    rows: list[tuple[str, str]]


def sections(plan: ClusterPlan, changes: Sequence[Change] = ()) -> list[Section]:
    """The report, part by part.

    Args:
        changes: what could be changed, with their steps.
    """
    return [
        _step(plan),
        _stages(plan),
        _memory(plan),
        _snapshots(plan),
        _money(plan),
        *([_changes(plan, changes)] if changes else []),
        _sensitivities(plan),
        _sources(plan),
        Section("Not modeled", [("", line) for line in NOT_MODELED]),
    ]


def _step(plan: ClusterPlan) -> Section:
    step, work = plan.step, plan.work
    first, second = step.order[:2]
    named = STAGE_WORDS[first]
    if first == "sparse":
        named += f", most of it {step.sparse_reason}"
    rows = [
        ("a step", f"{duration(step.seconds)} ({duration(plan.low_s)} to {duration(plan.high_s)})"),
        ("rows a second", f"{plan.rows_per_s:,.0f}, of {work.rows:,.0f} a step"),
        ("bottleneck", f"{named}: {duration(step.stages[first])}"),
        ("the next one", f"{STAGE_WORDS[second]}: {duration(step.stages[second])}"),
    ]
    if step.mfu:
        rows.append(("of the cards' peak", f"{step.mfu:.1%}"))
    return Section(
        f"Steps of {work.num_trainers:,} trainers and {work.num_servers:,} parameter servers", rows
    )


def _stages(plan: ClusterPlan) -> Section:
    parts = plan.step.parts
    return Section(
        "Where a step goes, each piece with a core of its own",
        [
            ("reading, features", f"{duration(parts.read)}, {duration(parts.features)}"),
            ("a server's work", duration(parts.server)),
            ("a trainer's calls and ids", duration(parts.client)),
            ("latency of calls", duration(parts.calls)),
            ("network", duration(parts.network)),
            ("hidden behind dense compute", f"{parts.hidden:.0%} of the exchange"),
            ("dense compute", duration(parts.dense)),
            ("sum over trainers", duration(parts.all_reduce)),
            ("between two batches", duration(parts.between)),
            ("driver", duration(parts.driver)),
            ("longer because cores are shared", f"{plan.step.stretch:.2f} times"),
        ],
    )


def _memory(plan: ClusterPlan) -> Section:
    memory = plan.memory
    rows = []
    if memory.server is not None:
        rows += [
            ("the fullest server", f"{human_size(memory.server.peak_bytes)} at its peak"),
            ("of it buffers of a step", human_size(memory.server.step_bytes)),
            (
                "a servers' node",
                f"{human_size(memory.server_node_bytes)} of {human_size(memory.server_node_limit)}",
            ),
        ]
    rows.append(
        (
            "a trainers' node",
            f"{human_size(memory.trainer_node_bytes)} of {human_size(memory.trainer_node_limit)}",
        )
    )
    if memory.card_limit is not None:
        rows.append(
            (
                "a card, activations aside",
                f"{human_size(memory.card_bytes)} of {human_size(memory.card_limit)}",
            )
        )
    return Section("Memory", rows)


def _snapshots(plan: ClusterPlan) -> Section:
    snapshots = plan.snapshots
    losses = snapshots.losses
    return Section(
        "Failures and snapshots",
        [
            ("a failure somewhere", f"every {duration(snapshots.mtbf_s)}"),
            (
                "a snapshot",
                f"{duration(snapshots.write_s)}, of which steps lose {duration(snapshots.cost_s)}",
            ),
            (
                "one every",
                f"{duration(snapshots.interval_s)} (Young; {duration(snapshots.daly_s)} by Daly)",
            ),
            (
                "lost work",
                f"{losses.total:.1%}: {losses.snapshots:.1%} to snapshots, "
                f"{losses.rework:.1%} trained again, {losses.restarts:.1%} to restarts",
            ),
        ],
    )


def _money(plan: ClusterPlan) -> Section:
    cluster = plan.cluster
    if not cluster.money_per_h:
        return Section("Money", [("", "prices are 0")])
    used = sum(num_nodes for num_nodes, _ in failing_nodes(plan.work, cluster).values())
    nodes = f"all {cluster.num_nodes} nodes" if used < cluster.num_nodes else "the cluster"
    if used < cluster.num_nodes:
        nodes += f", of which the run has processes on {used} (--scale lets it fill them)"
    return Section(
        "Money",
        [
            (nodes, f"{amount(cluster.money_per_h)} {cluster.currency} an hour"),
            ("a billion rows, with losses", f"{amount(plan.money_per_billion)} {cluster.currency}"),
        ],
    )


def _changes(plan: ClusterPlan, changes: Sequence[Change]) -> Section:
    rows = []
    for change in changes:
        gain = plan.step.seconds / change.step.seconds
        if abs(gain - 1) < SAME:
            continue
        rows.append(
            (
                change.what,
                f"{duration(change.step.seconds)}, {gain:.2f} times as fast; then "
                f"{STAGE_WORDS[change.step.bottleneck]}",
            )
        )
    return Section("What single changes of the run do", rows or [("", "none of those tried changes a step")])


def _sensitivities(plan: ClusterPlan) -> Section:
    rows = [
        (each.what, f"{each.lower:+.1%} with 20 % less, {each.higher:+.1%} with 20 % more")
        for each in plan.sensitivities[:SHOWN_SENSITIVITIES]
        if each.size >= SAME
    ]
    return Section("A step, if a number is off", rows or [("", "no single number changes it")])


def _sources(plan: ClusterPlan) -> Section:
    calibration = plan.calibration
    return Section(
        "Where the numbers are from",
        [
            ("software", f"measured {calibration.measured_on} on {calibration.machine}"),
            ("its error on itself", f"{math.expm1(calibration.residual):.0%}, one standard deviation"),
            *((f"cluster: {mark}", count) for mark, count in _by_mark(plan).items()),
        ],
    )


def _by_mark(plan: ClusterPlan) -> dict[Mark, str]:
    places: dict[Mark, list[str]] = {}
    for place, quantity in plan.cluster.numbers():
        places.setdefault(quantity.mark, []).append(place)
    return {mark: f"{len(found)} numbers ({', '.join(found)})" for mark, found in places.items()}


def to_json(plan: ClusterPlan, changes: Sequence[Change] = ()) -> dict[str, Any]:
    """The plan as plain values, in base units."""
    memory = plan.memory
    return {
        "step_s": plan.step.seconds,
        "step_low_s": plan.low_s,
        "step_high_s": plan.high_s,
        "rows_per_s": plan.rows_per_s,
        "bottleneck": plan.step.bottleneck,
        "next_bottleneck": plan.step.order[1],
        "stages_s": dict(plan.step.stages),
        "parts_s": plan.step.parts._asdict(),
        "stretch": plan.step.stretch,
        "mfu": plan.step.mfu,
        "workload": asdict(plan.work),
        "memory": {
            "server_bytes": 0 if memory.server is None else memory.server.peak_bytes,
            "server_step_bytes": 0 if memory.server is None else memory.server.step_bytes,
            "server_node_bytes": memory.server_node_bytes,
            "trainer_node_bytes": memory.trainer_node_bytes,
            "card_bytes": memory.card_bytes,
        },
        "snapshots": asdict(plan.snapshots),
        "money_per_billion_rows": plan.money_per_billion,
        "sensitivities": [asdict(each) for each in plan.sensitivities],
        "changes": [
            {"what": change.what, "step_s": change.step.seconds, "bottleneck": change.step.bottleneck}
            for change in changes
        ],
        "not_modeled": list(NOT_MODELED),
    }


def amount(money: float) -> str:
    """Whole from a hundred on, else with two digits that count: `1,033`, `4.10`, `0.012`."""
    if money >= 100:
        return f"{money:,.0f}"
    return f"{money:.2f}" if money >= 1 else f"{money:.2g}"


def duration(seconds: float) -> str:
    """In the largest unit that leaves at least one of it: `3.2 ms`, `1.5 h`."""
    if math.isinf(seconds):
        return "never"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.0f} us"
