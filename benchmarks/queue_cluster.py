"""A Ray cluster of several nodes on this machine, and the queue's process beside it, as users start them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rayrec.jobs.ledger import JobEntry, JobState, Ledger
from rayrec.pipelines.cluster.nodes import FOLDER_VARIABLE
from rayrec.platform.checkout import CHECKOUT

ENDS_S = 20.0


class QueueCluster:
    """Made by `queue_cluster`."""

    def __init__(self, folder: Path, nodes: Sequence[dict[str, Any]], temporary: str, settings: str) -> None:
        self.folder, self._nodes, self._temporary = folder, nodes, temporary
        self._cluster: Any = None
        self.ledger_path = folder / "jobs.db"
        self.settings = folder / "queue.yaml"
        self.settings.write_text(settings)
        self._queue: subprocess.Popen[bytes] | None = None
        self._log = open(folder / "queue.log", "ab")  # noqa: SIM115

    def start_nodes(self, port: int | None = None) -> None:
        """Start a head, which knows nothing of those before it, and the other nodes.

        Args:
            port: of the head; None: any.
        """
        from ray.cluster_utils import Cluster

        small: dict[str, Any] = {"object_store_memory": 80 * 2**20}
        ports = {"dashboard_port": None, "dashboard_agent_listen_port": 0}  # any: others run here, too
        head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": True, **ports}
        at = {} if port is None else {"gcs_server_port": port}
        with mock.patch.dict(os.environ, {"RAY_TMPDIR": self._temporary}):
            self._cluster = Cluster(initialize_head=True, head_node_args={**head, **small, **at})
            for node in self._nodes:
                self._cluster.add_node(**node, **small)

    def stop_nodes(self) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None

    def replace_head(self) -> None:
        """All nodes end, and others come with a new head at the old address."""
        port = int(self.address.rpartition(":")[2])
        self.stop_nodes()
        self.start_nodes(port)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        checkout = str(CHECKOUT)
        own = {"RAY_TMPDIR": self._temporary, FOLDER_VARIABLE: str(self.folder)}
        return kept | own | {"PYTHONPATH": checkout}

    def start_queue(self) -> None:
        command = [sys.executable, "-m", "rayrec", "queue", "run", "--address", self.address]
        command += ["--ledger", str(self.ledger_path), "--settings", str(self.settings)]
        self._queue = subprocess.Popen(command, env=self.environment, stdout=self._log, stderr=self._log)

    def kill_queue(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._queue is not None:
            self._queue.send_signal(number)
            try:
                self._queue.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                self._queue.kill()
                self._queue.wait()
            self._queue = None

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        opened = Ledger(self.ledger_path)
        try:
            yield opened
        finally:
            opened.close()

    def job(self, name: str) -> JobEntry:
        with self.ledger() as ledger:
            return ledger.job(name)

    def wait_for(self, condition: Callable[[], bool], within_s: float, every_s: float = 0.2) -> float:
        """Seconds until a condition holds."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + within_s:
                raise AssertionError(f"it does not happen within {within_s:g} s\n{self.told()}")
            time.sleep(every_s)
        return time.monotonic() - began

    def is_over(self, *names: str) -> bool:
        with self.ledger() as ledger:
            return all(ledger.job(name).state.is_over for name in names)

    def is_running(self, name: str) -> bool:
        return self.job(name).state is JobState.running

    def told(self) -> str:
        """What happened so far, for the message of a test that fails."""
        with self.ledger() as ledger:
            noted = [
                f"{each.at:.1f} {each.job_id} {each.kind}: {each.reason}"
                for entry in ledger.jobs()
                for each in ledger.noted(entry.id)
            ]
        return "\n".join([*noted, (self.folder / "queue.log").read_text()[-3000:]])

    def close(self) -> None:
        self.kill_queue(signal.SIGTERM)
        self._log.close()
        self.stop_nodes()


@contextmanager
def queue_cluster(
    folder: Path, nodes: Sequence[dict[str, Any]], settings: str = "{}"
) -> Iterator[QueueCluster]:
    """Start one, and end all of it with the block.

    Args:
        nodes: what each has, as arguments of `Cluster.add_node`, beside a head that has nothing.
        settings: of the queue's process, as YAML.
    """
    # Ray's sockets need short names, and other clusters of this machine are not to be met.
    temporary = tempfile.mkdtemp(prefix="queue-", dir="/tmp")
    made = QueueCluster(folder, nodes, temporary, settings)
    try:
        made.start_nodes()
        yield made
    finally:
        made.close()
        shutil.rmtree(temporary, ignore_errors=True)
