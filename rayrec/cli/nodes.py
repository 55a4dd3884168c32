"""`nodes`: what the nodes of a cluster have, hold and may be used for; quarantine by hand; the page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from rayrec.cli.app import app
from rayrec.cli.queues import AddressOption, LedgerOption
from rayrec.cli.run_options import refuse_without_effect
from rayrec.platform.console import Answer, command, out
from rayrec.platform.console import log as console
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.jobs.view import ClusterView
    from rayrec.pipelines.cluster.placement import Node

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder", help="What is known of the cluster besides Ray \\[RAYREC_CLUSTER_FOLDER or ~/.rayrec]."
    ),
]


@command(app, "nodes")
def nodes_command(
    context: typer.Context,
    address: AddressOption = None,
    folder: FolderOption = None,
    ledger: LedgerOption = None,
    quarantine: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Let new actors not go to this node: the start of its id."),
    ] = None,
    leave: Annotated[
        bool, typer.Option("--leave", help="With --quarantine, let trainings leave it at a snapshot, too.")
    ] = False,
    reason: Annotated[str, typer.Option(help="Why, with --quarantine or --lift.")] = "by an operator",
    lift: Annotated[str | None, typer.Option(metavar="SESSION|NODE", help="End a quarantine.")] = None,
    page: Annotated[bool, typer.Option("--page", help="Serve a page that shows all of it.")] = False,
    host: Annotated[str, typer.Option(help="Where the page is served.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where the page is served.")] = 8266,
) -> Answer:
    """Show the nodes of a Ray cluster: what they have, who holds it, and which are left out and why."""
    import os

    if quarantine is None:
        refuse_without_effect(context, {"leave"}, "says how a node is isolated by --quarantine")
        if lift is None:
            refuse_without_effect(context, {"reason"}, "says why there is a --quarantine or --lift")
    if not page:
        refuse_without_effect(context, {"host", "port"}, "says where --page is served")
    from rayrec.pipelines.cluster.nodes import cluster_folder
    from rayrec.pipelines.cluster.quarantine import Quarantine
    from rayrec.platform.cluster import ClusterConfig, ray_cluster

    where = cluster_folder() if folder is None else folder
    store = Quarantine(where)
    if lift is not None:
        session = store.lift(lift, reason)
        said = f"new actors may go to {session.node_name} again, unless another session holds it"
        console.print(said, markup=False)
    joined = ClusterConfig(address=address or os.environ.get("RAY_ADDRESS") or "auto")
    with ray_cluster(joined, 0):
        from rayrec.pipelines.cluster.nodes import cluster_nodes

        if quarantine is not None:
            nodes = cluster_nodes(store)
            verdict: Literal["suspect", "bad"] = "bad" if leave else "suspect"
            store.add(_node_named(quarantine, nodes), reason, verdict, nodes, by="operator")
        if page:
            _serve_page(where, ledger, host, port)
        view = _view(where, ledger)
    _print(view)
    return view.to_json()


def _node_named(name: str, nodes: list[Node]) -> Node:
    found = [node for node in nodes if name and node.id.startswith(name)]
    if len(found) != 1:
        there = ", ".join(node.name for node in nodes)
        raise InputError(
            f"--quarantine: {'no node' if not found else 'more than one node'} of the cluster has an id that "
            f"begins with {name!r}; there are {there}"
        )
    return found[0]


def _view(folder: Path, ledger: Path | None) -> ClusterView:
    from rayrec.jobs.view import cluster_view
    from rayrec.pipelines.cluster.nodes import cluster_nodes, holders
    from rayrec.pipelines.cluster.quarantine import Quarantine
    from rayrec.pipelines.health.node_health import read_health

    store = Quarantine(folder)
    return cluster_view(cluster_nodes(store), holders(), store, read_health(folder), _queues(ledger))


def _queues(option: Path | None) -> list[dict[str, Any]]:
    """Queues of the ledger, if there is one."""
    from rayrec.jobs.ledger import Ledger, ledger_path
    from rayrec.jobs.overview import queue_list

    path = ledger_path(option)
    if not path.exists():
        return []
    ledger = Ledger(path)
    try:
        return queue_list(ledger)
    finally:
        ledger.close()


def _serve_page(folder: Path, ledger: Path | None, host: str, port: int) -> None:
    import uvicorn

    from rayrec.jobs.cluster_page import build_page

    names = ["127.0.0.1", "localhost", host] if host in ("127.0.0.1", "localhost", "::1") else ["*"]
    console.print(f"the cluster's page: http://{host}:{port}/ (Ctrl-C ends it)")
    uvicorn.run(build_page(lambda: _view(folder, ledger), names), host=host, port=port, log_level="warning")


def _print(view: ClusterView) -> None:
    table = Table("node", "condition", "health", "held", "where", "held by", title_justify="left")
    table.title = "Nodes"
    for node in view.nodes:
        amounts = "\n".join(f"{held:g} of {total:g} {name}" for name, (held, total) in node.resources.items())
        where = ", ".join(f"{name}={value}" for name, value in node.topology.items())
        by = ", ".join(f"{name} ({count})" for name, count in node.holders.items())
        condition = node.condition + "".join(f"\n{session}" for session in node.sessions)
        health = "\n".join([node.health or "not checked", *node.findings])
        table.add_row(*map(escape, (node.name, condition, health, amounts, where, by)))
    out.print(table)
    for alarm in view.alarms:
        when = time.strftime("%F %T", time.localtime(alarm.at))
        console.print(
            escape(f"{when}: {alarm.node_name} was not isolated, since the breaker holds: {alarm.reason}")
        )
