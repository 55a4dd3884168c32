"""`health`: whether a cluster's nodes can be trusted with work; `health replay`: whether a run's bits can."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayrec.cli.app import app
from rayrec.cli.nodes import AddressOption, FolderOption
from rayrec.cli.run_options import refuse_without_effect
from rayrec.platform.console import Answer, command, out
from rayrec.platform.console import log as console
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.pipelines.health.node_health import NodeHealth

logger = logging.getLogger(__name__)
health_app = typer.Typer(invoke_without_command=True)


def _health(
    context: typer.Context,
    address: AddressOption = None,
    folder: FolderOption = None,
    here: Annotated[
        bool, typer.Option("--here", help="Look at this machine alone, without a Ray cluster.")
    ] = False,
    burn_in: Annotated[
        bool,
        typer.Option("--burn-in", help="Also measure nodes and cards that nobody uses now."),
    ] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also let all pairs of nodes add numbers together.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, and isolate nodes that are not well.")
    ] = False,
    every_s: Annotated[float, typer.Option(min=1, help="Seconds between two looks, with --watch.")] = 60.0,
    looks: Annotated[int | None, typer.Option(min=1, help="End --watch after so many \\[never].")] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="With --watch, quarantine what is not well.")
    ] = True,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="With --watch, compute the newest steps of a run again, in the background."
        ),
    ] = None,
) -> Answer:
    """Say what is wrong with the nodes of a Ray cluster; unknown is never ok."""
    if (name := context.invoked_subcommand) is not None:
        # Those that every command has, too: --json here is not that of what follows.
        refuse_without_effect(context, context.params, f"has no effect before {name}, which has its own")
        return {}
    if here and (watch or pairs or address is not None):
        raise InputError("--here looks at this machine alone, once; leave out --watch, --pairs and --address")
    if replay is not None and not watch:
        raise InputError("--replay works in the background of --watch; for once, rayrec health replay RUN")
    if not watch:
        refuse_without_effect(context, {"every_s", "looks", "isolate"}, "is about --watch")
    if here:
        refuse_without_effect(context, {"folder"}, "is of a cluster, and --here sees one machine")
        health: list[NodeHealth] = _look_here(burn_in)
        _print(health)
        return _answer(health)

    from rayrec.pipelines.cluster.nodes import cluster_folder
    from rayrec.platform.cluster import ClusterConfig, ray_cluster

    where = cluster_folder() if folder is None else folder
    joined = ClusterConfig(address=address or os.environ.get("RAY_ADDRESS") or "auto")
    with ray_cluster(joined, 0):
        from ray.exceptions import RayError

        from rayrec.pipelines.cluster.nodes import cluster_nodes
        from rayrec.pipelines.cluster.quarantine import Quarantine
        from rayrec.pipelines.health.node_health import write_health
        from rayrec.pipelines.health.replay import BackgroundReplay
        from rayrec.pipelines.health.sweep import Sweep
        from rayrec.pipelines.health.watching import Step, Watch, tell
        from rayrec.platform.metrics import RayMetrics

        store, sweep = Quarantine(where), Sweep()
        watching = Watch(store) if watch and isolate else None
        background = None if replay is None else BackgroundReplay(replay, address)
        metrics, number, num_failed = RayMetrics({}), 0, 0
        health = []
        while True:
            number += 1
            try:
                health = sweep.look(cluster_nodes(store), burn_in, pairs)
                write_health(where, health, time.time())
                if not watch:
                    break
                tell(health, Step() if watching is None else watching.take(health))
            except (InputError, OSError, RayError) as error:
                # A watch outlives a head that is busy, and a damaged file that somebody mends.
                if not watch:
                    raise
                num_failed += 1
                logger.warning("look %d failed, as %d have so far: %s", number, num_failed, error)
            metrics.publish({"health_looks_failed_total": num_failed})
            if background is not None and (found := background.look()) is not None:
                console.print(escape(f"replay: {found.finding()}"), highlight=False)
            if number == looks:
                break
            time.sleep(every_s)
    if not watch:
        _print(health)
    return _answer(health)


# A group that is a command as well: what is registered with the inner application is not used.
_command = command(typer.Typer(), "health")(_health)
health_app.callback(invoke_without_command=True)(_command)
app.add_typer(health_app, name="health")


@command(health_app, "replay")
def replay_command(
    run: Annotated[Path, typer.Argument(help="Folder that `rayrec train` wrote.")],
    step: Annotated[
        int, typer.Option(min=1, help="Of the snapshot to compare with: the 400 of step-000000400.")
    ],
    address: AddressOption = None,
    node: Annotated[
        list[str] | None, typer.Option(help="Id of a node to compute on; may be repeated \\[any].")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Compute in this process, without Ray.")
    ] = False,
) -> Answer:
    """Compute the steps before a snapshot again, and compare every bit (silent data corruption)."""
    from rayrec.pipelines.health.replay import replay
    from rayrec.pipelines.training.placements import in_process as here
    from rayrec.pipelines.training.placements import on_ray

    if in_process and (node or address is not None):
        raise InputError("--in-process computes here; leave out --node and --address")
    report = replay(run, step, here if in_process else on_ray, address, tuple(node or ()))
    steps = f"steps {report.from_step + 1:,} to {report.step:,}"
    title = escape(f"{run}: {steps}, again")
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.add_row("verdict", report.verdict)
    table.add_row("compared", f"{report.num_compared} tensors and tables")
    table.add_row("computed on", escape(", ".join(dict.fromkeys(report.nodes))))
    for difference in report.differences:
        table.add_row("differs", escape(str(difference)))
    if report.note:
        table.add_row("note", escape(report.note))
    out.print(table)
    return report.to_dict()


def _look_here(with_burn_in: bool) -> list[NodeHealth]:
    """This machine alone."""
    import socket
    import tempfile

    from rayrec.pipelines.cluster.placement import Node
    from rayrec.pipelines.health.node_health import NodeHealth
    from rayrec.platform.health.counters import read_counters
    from rayrec.platform.health.verdict import judge

    name = socket.gethostname()
    findings = judge(read_counters())
    if with_burn_in:
        from rayrec.platform.health.burn_in import burn_in, compare_burn_ins

        measured = burn_in(HOST.kind, tempfile.gettempdir())
        findings += compare_burn_ins({f"the CPUs of {name}": measured})[f"the CPUs of {name}"]
    return [NodeHealth(Node(name, name, {}, {}, {}, name), tuple(findings))]


def _answer(health: Sequence[NodeHealth]) -> Answer:
    from rayrec.platform.health.findings import worst

    verdict = worst(finding for each in health for finding in each.findings)
    return {"verdict": verdict, "nodes": [each.to_dict() for each in health]}


def _print(health: Sequence[NodeHealth]) -> None:
    table = Table("node", "verdict", "action", "findings", title="Health", title_justify="left")
    for each in health:
        found = "\n".join(map(str, each.wrong)) or f"{len(each.findings)} checks"
        table.add_row(*map(escape, (each.node.name, each.verdict, each.action, found)))
    out.print(table)
