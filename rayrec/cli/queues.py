"""`queue`: what teams are guaranteed of a cluster that they share, and the process that sees to it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from rayrec.cli.app import queue_app
from rayrec.platform.console import Answer, command, new_table, out, print_rows
from rayrec.platform.console import log as console
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.jobs.ledger import JobEntry, Ledger
    from rayrec.jobs.queues import QueueConfig

LedgerOption = Annotated[
    Path | None,
    typer.Option(
        help="File with queues and jobs, on a disk of this machine \\[RAYREC_LEDGER or ~/.rayrec/jobs.db]."
    ),
]
AddressOption = Annotated[
    str | None, typer.Option(help="Ray cluster: host:port \\[RAY_ADDRESS, or the one on this machine].")
]

CELL = re.compile(r"(?:(?P<count>\d+)x)?(?P<resources>[^@]+?)(?:@(?P<within>[\w./-]+))?")


def open_ledger(option: Path | None) -> Ledger:
    """The ledger that an option names, or the usual one.

    Raises:
        InputError: there is none.
    """
    from rayrec.jobs.ledger import LEDGER_VARIABLE, Ledger, ledger_path

    path = ledger_path(option)
    if not path.exists():
        raise InputError(
            f"{path}: there is no ledger; add a queue with `rayrec queue add NAME --cards N`, or name "
            f"another file with --ledger or {LEDGER_VARIABLE}"
        )
    return Ledger(path)


@command(queue_app, "add")
def add_command(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and '-'.")],
    cards: Annotated[
        float | None, typer.Option(min=0, help="Accelerators that it is guaranteed, of the cluster's kind.")
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COUNT", help="Guarantee of another resource (CPU=64); may be repeated."),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[Nx]NAME=COUNT,…[@LABEL]",
            help="Guarantee in shapes: `2xGPU=8,CPU=64@rack` is two nodes of one rack; may be repeated.",
        ),
    ] = None,
    borrow: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]COUNT", help="The most that it borrows beyond that \\[what is unused]."),
    ] = None,
    lend: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]COUNT", help="The most of it that others may borrow \\[all]."),
    ] = None,
    cohort: Annotated[
        str | None, typer.Option(help="Queues that lend each other what they do not use; '' is none.")
    ] = None,
    cohort_parent: Annotated[
        str | None, typer.Option(help="Cohort that this queue's cohort is part of.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(min=0, help="Of its fair share of what is borrowed \\[1].")
    ] = None,
    reclaim: Annotated[
        str | None,
        typer.Option(help="From whom it takes back what it lent: Any, LowerPriority or Never \\[Any]."),
    ] = None,
    ledger: LedgerOption = None,
) -> Answer:
    """Add a queue, or change what is said of one; the rest of it stays."""
    from rayrec.jobs.ledger import Ledger, ledger_path
    from rayrec.jobs.overview import check_queues
    from rayrec.jobs.queues import CohortConfig, QueueConfig, QueuesConfig

    opened = Ledger(ledger_path(ledger))  # it is made where there is none
    with opened.change():
        known = opened.queues()
        queues = {each.name: each for each in known.queues}
        is_new = name not in queues
        values: dict[str, Any] = {"name": name} if is_new else queues[name].model_dump(exclude_unset=True)
        _say_guarantee(values, opened, cards, resource, cell, borrow, lend)
        if cohort is not None:
            values["cohort"] = cohort or None
        if weight is not None:
            values["weight"] = weight
        if reclaim is not None:
            values["preemption"] = {**values.get("preemption", {}), "reclaim_within_cohort": reclaim}
        queue = queues[name] = QueueConfig.parse(values, source=f"queue {name}")
        cohorts = {each.name: each for each in known.cohorts}
        if cohort_parent is not None:
            if queue.cohort is None:
                raise InputError("--cohort-parent says what the cohort is part of; name it with --cohort")
            said = {"name": queue.cohort, "parent": cohort_parent}
            cohorts[queue.cohort] = CohortConfig.parse(said, source=f"cohort {queue.cohort}")
        config = QueuesConfig.parse(
            {
                "queues": [each.model_dump(exclude_unset=True) for each in queues.values()],
                "cohorts": [each.model_dump(exclude_unset=True) for each in cohorts.values()],
            },
            source=f"queue {name}",
        )
        check_queues(opened, config, known)
        opened.put_queue(queue)
        for each in cohorts.values():
            opened.put_cohort(each)
    quota = {each: quota.nominal for each, quota in queue.all_quotas.items()}
    print_rows(
        f"Queue {name}: {'added' if is_new else 'changed'}",
        [
            ("guaranteed", _amounts(quota)),
            ("cohort", queue.cohort or "none: it neither borrows nor lends"),
            ("borrows at most", _limits(queue, "borrowing_limit")),
            ("lends at most", _limits(queue, "lending_limit")),
            ("weight", f"{queue.weight:g}"),
            ("takes back from", queue.preemption.reclaim_within_cohort),
        ],
    )
    return {"queue": name, "quota": quota, "cohort": queue.cohort}


def _limits(queue: QueueConfig, which: str) -> str:
    given = {name: getattr(quota, which) for name, quota in queue.all_quotas.items()}
    return _amounts({name: most for name, most in given.items() if most is not None}, "what there is")


def _say_guarantee(
    values: dict[str, Any],
    ledger: Ledger,
    cards: float | None,
    resource: list[str] | None,
    cell: list[str] | None,
    borrow: list[str] | None,
    lend: list[str] | None,
) -> None:
    """Write into a queue's settings what the options say of its guarantee."""
    quotas: dict[str, dict[str, float]] = values.setdefault("quotas", {})
    if cell:
        values["cells"] = [_cell(text) for text in cell]
    guaranteed = counts_by_name("--resource", resource)
    if cards is not None:
        if (kind := _kind_of_cards(ledger)) in guaranteed:
            raise InputError(
                f"--cards {cards:g} and --resource {kind}={guaranteed[kind]:g} say the same; keep one"
            )
        guaranteed[kind] = cards
    for name, count in guaranteed.items():
        quotas.setdefault(name, {})["nominal"] = count
    for option, key, texts in (("--borrow", "borrowing_limit", borrow), ("--lend", "lending_limit", lend)):
        for text in texts or ():
            which, count = (
                named_count(option, text) if "=" in text else (_kind_of_cards(ledger), _number(option, text))
            )
            quotas.setdefault(which, {})[key] = count
    if not quotas and not values.get("cells"):
        raise InputError(f"queue {values['name']}: say what it is guaranteed: --cards, --resource or --cell")


def _kind_of_cards(ledger: Ledger) -> str:
    """The cluster's kind of accelerator, GPU where that is not known."""
    from rayrec.platform.devices import ACCELERATOR_RESOURCES

    there = {name for node in ledger.nodes() or () for name in node.total if node.total[name] > 0}
    kinds = sorted(there & ACCELERATOR_RESOURCES)
    if len(kinds) > 1:
        raise InputError(
            f"the cluster has {' and '.join(kinds)}; name one of them, as in --resource {kinds[0]}=8"
        )
    return kinds[0] if kinds else "GPU"


def _cell(text: str) -> dict[str, Any]:
    found = CELL.fullmatch(text)
    if found is None:
        raise InputError(
            f"--cell {text}: expected [Nx]NAME=COUNT,NAME=COUNT[@LABEL], as in 2xGPU=8,CPU=64@rack"
        )
    resources = dict(named_count("--cell", part) for part in found["resources"].split(","))
    return {"resources": resources, "count": int(found["count"] or 1), "within": found["within"]}


def named_count(option: str, text: str) -> tuple[str, float]:
    name, sign, count = text.partition("=")
    if not sign or not name.strip():
        raise InputError(f"{option} {text}: expected NAME=COUNT, as in GPU=8")
    return name.strip(), _number(option, count)


def counts_by_name(option: str, texts: Sequence[str] | None) -> dict[str, float]:
    """NAME=COUNT, each name once.

    Raises:
        InputError: one has another form, or a name is there twice.
    """
    counts: dict[str, float] = {}
    for text in texts or ():
        name, count = named_count(option, text)
        if name in counts:
            raise InputError(f"{option} {text}: {name} is named twice; keep one of them")
        counts[name] = count
    return counts


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"{option} {text}: expected a number, 0 or more")
    return number


def _amounts(amounts: dict[str, float], if_none: str = "nothing") -> str:
    return ", ".join(f"{count:g} {name}" for name, count in sorted(amounts.items())) or if_none


@command(queue_app, "list")
def list_command(ledger: LedgerOption = None) -> Answer:
    """List queues: what each has and uses, and who waits, for what, why, and when it would start."""
    import time

    from rayrec.jobs.overview import queue_list

    opened = open_ledger(ledger)
    listed, now = queue_list(opened), time.time()
    table = new_table("Queues", ("queue", "cohort", "used", "running", "waiting"), figures=("waiting",))
    for queue in listed:
        table.add_row(
            escape(queue["name"]),
            escape(queue["cohort"] or ""),
            escape(queue["use"]),
            escape(", ".join(queue["running"])),
            str(len(queue["waiting"])),
        )
    out.print(table)
    headings = ("job", "queue", "priority", "starts", "why it waits")
    waits = new_table("Waiting", headings, figures=("priority",))
    for queue in listed:
        for each in queue["waiting"]:
            waits.add_row(
                escape(each["id"]),
                escape(queue["name"]),
                str(each["priority"]),
                _when(each["starts_at"], now),
                escape(each["reason"]),
            )
    if waits.row_count:
        out.print(waits)
    seen = opened.seen_at()
    if seen is None or now - seen > 60.0:
        since = "has never run" if seen is None else f"was last here {_span(now - seen)} ago"
        console.print(f"the queue's process {since}; start it with `rayrec queue run`", style="yellow")
    lacking = opened.lacking()
    for each in lacking:
        console.print(f"a guarantee cannot be kept now: {each}", style="yellow", markup=False)
    return {"queues": listed, "seen_at": seen, "lacking": lacking}


def _when(at: float | None, now: float) -> str:
    return "not known" if at is None else f"in {_span(max(0.0, at - now))}"


def _span(seconds: float) -> str:
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@command(queue_app, "remove")
def remove_command(
    name: Annotated[str, typer.Argument(help="Queue without jobs.")], ledger: LedgerOption = None
) -> Answer:
    """Remove a queue that no job uses."""
    from rayrec.jobs.overview import check_queues

    opened = open_ledger(ledger)
    with opened.change():
        known = opened.queues()
        opened.remove_queue(name)
        check_queues(opened, opened.queues(), known)  # others may use what they borrow of it
    print_rows(f"Queue {name}", [("removed", "its jobs that are over stay in the ledger")])
    return {"queue": name, "removed": True}


@command(queue_app, "run")
def run_command(
    address: AddressOption = None,
    settings: Annotated[
        Path | None, typer.Option(help="YAML file with settings of the queue's process.")
    ] = None,
    moved: Annotated[
        bool, typer.Option("--moved", help="The ledger's cluster has a new head at a new address.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="The queue of another ledger does not run here any more.")
    ] = False,
    ledger: LedgerOption = None,
) -> Answer:
    """Start, shrink and stop jobs as the ledger says, until this process is ended; jobs go on without it."""
    import os

    from rayrec.jobs.kubernetes import check_alone
    from rayrec.jobs.ledger import Ledger, ledger_path
    from rayrec.jobs.loop import QueueLoop, QueueRunConfig, alone
    from rayrec.jobs.runner import RayRunner
    from rayrec.jobs.trainings import RunFolders
    from rayrec.jobs.watcher import ClusterWatcher
    from rayrec.pipelines.cluster.nodes import cluster_folder
    from rayrec.pipelines.cluster.service_limits import ServiceLimits

    config = QueueRunConfig() if settings is None else QueueRunConfig.load(settings)
    path = ledger_path(ledger)
    opened = Ledger(path)
    limits = ServiceLimits(cluster_folder())

    def scale(entry: JobEntry, num_replicas: int) -> bool:
        return limits.allow(num_replicas, f"queue {entry.job.queue} leaves it so many")

    def replica_nodes(entry: JobEntry) -> Sequence[str]:
        state = limits.state()
        return () if state is None else state.nodes

    watcher = ClusterWatcher(address or os.environ.get("RAY_ADDRESS") or None, opened.owner, take_over)
    with alone(path):
        said = f"the queue of {path} runs; what it decides is in `rayrec jobs ID`"
        console.print(said, highlight=False, markup=False)
        try:
            QueueLoop(
                opened,
                watcher.look,
                RayRunner(watcher.dashboard),
                RunFolders(config.snapshot_s),
                config,
                scale=scale,
                has_moved=moved,
                check_alone=check_alone,
                replica_nodes=replica_nodes,
            ).run()
        finally:
            watcher.close()
    return {"ledger": str(path)}
