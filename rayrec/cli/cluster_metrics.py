"""`queue metrics`: what the files of a cluster say, for Prometheus."""

from __future__ import annotations

import errno
import threading
from typing import Annotated

import typer

from rayrec.cli.app import queue_app
from rayrec.cli.nodes import FolderOption
from rayrec.cli.queues import LedgerOption
from rayrec.platform.console import Answer, command
from rayrec.platform.console import log as console
from rayrec.platform.errors import InputError, MachineError


@command(queue_app, "metrics")
def metrics_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of /metrics.")] = 9466,
    folder: FolderOption = None,
    ledger: LedgerOption = None,
) -> Answer:
    """Show queues, quarantine and health to Prometheus until interrupted; needs no Ray cluster."""
    from prometheus_client import CollectorRegistry, start_http_server

    from rayrec.jobs.cluster_metrics import ClusterMetrics
    from rayrec.jobs.ledger import ledger_path
    from rayrec.pipelines.cluster.nodes import cluster_folder

    registry = CollectorRegistry()
    registry.register(ClusterMetrics(ledger_path(ledger), cluster_folder() if folder is None else folder))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        kind = MachineError if error.errno == errno.EADDRINUSE else InputError
        raise kind(f"--host {host} --port {port}: cannot listen there ({error})") from error
    console.print(f"metrics at http://{host}:{port}/metrics (Ctrl-C ends it)")
    try:
        threading.Event().wait()
    finally:
        server.shutdown()
        thread.join()
    return {"host": host, "port": port}
