"""The cluster as the queue sees it, through a process of its own.

A process that has joined a Ray cluster dies with its head. The queue has to outlive that, so a child joins,
and another one takes its place when the head is back.

queue ── which actors are awaited ──► child: ray.init(address), cluster_nodes()
      ◄── nodes, actors, cluster ────
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from rayrec.jobs.ledger import ClusterId
from rayrec.jobs.runner import HeadDownError
from rayrec.pipelines.cluster.placement import Node

JOIN_S, LOOK_S, PROBE_S = 60.0, 20.0, 2.0
"""Time in which a child joins, answers, and in which the head's port takes a connection."""
OWNER_KEY, NAMESPACE = b"owner", b"rayrec_queue"
"""In Ray's key-value store: whose cluster it is."""
PAUSE_S = (1.0, 30.0)
"""First and longest time between two tries to join."""


@dataclass(frozen=True)
class Awaited:
    """Whose actors are to be counted: those of a driver, and the process that started it."""

    submission: str
    ray_job: str | None


@dataclass(frozen=True)
class View:
    """The cluster at one time."""

    cluster: ClusterId
    nodes: tuple[Node, ...]
    num_actors: Mapping[str, int]
    """By submission that was asked about, its actors that are not gone."""
    dashboard: str
    """URL of the head's HTTP side."""
    owner: str = ""
    """Ledger whose queue was here first; empty where nobody has asked."""


class ClusterWatcher:
    """Looks at a cluster for as long as there is one."""

    def __init__(
        self,
        address: str | None,
        owner: str = "",
        takes_over: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            address: `host:port` of the head; None: as `ray.init` finds it.
            owner: the ledger of the queue that looks, which claims the cluster.
            takes_over: also where another one has claimed it.
        """
        self._address, self._clock = address, clock
        self._owner, self._takes_over = owner, takes_over
        self._child: tuple[BaseProcess, Connection] | None = None
        self._url: str | None = None
        self._again_at, self._pause_s = float("-inf"), PAUSE_S[0]

    def look(self, awaited: Sequence[Awaited] = ()) -> View:
        """
        Raises:
            HeadDownError: no head answers.
        """
        if self._child is None:
            self._join()
        view = self._ask(tuple(awaited), LOOK_S)
        self._url, self._pause_s = view.dashboard, PAUSE_S[0]
        return view

    def dashboard(self) -> str:
        """URL of the dashboard of the head that was there last.

        Raises:
            HeadDownError: there was none yet, and none answers.
        """
        return self._url if self._url is not None and self._child is not None else self.look().dashboard

    def close(self) -> None:
        if self._child is None:
            return
        process, pipe = self._child
        self._child = None
        pipe.close()
        process.terminate()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()

    def _join(self) -> None:
        if self._clock() < self._again_at:
            raise HeadDownError(f"no Ray head answers at {self._address or 'the address that Ray looks at'}")
        self._again_at, self._pause_s = self._clock() + self._pause_s, min(2 * self._pause_s, PAUSE_S[1])
        if self._address is not None and not _takes_connections(self._address):
            raise HeadDownError(f"no Ray head answers at {self._address}")
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, self._address, self._owner, self._takes_over), daemon=True
        )
        process.start()
        theirs.close()
        self._child = process, ours
        self._receive(JOIN_S)

    def _ask(self, awaited: tuple[Awaited, ...], timeout_s: float) -> View:
        assert self._child is not None
        try:
            self._child[1].send(awaited)
        except OSError as error:
            self.close()
            raise HeadDownError("the process that looks at the Ray cluster has ended") from error
        view = self._receive(timeout_s)
        assert isinstance(view, View)
        return view

    def _receive(self, timeout_s: float) -> View | None:
        assert self._child is not None
        pipe = self._child[1]
        try:
            answer: View | str | None = pipe.recv() if pipe.poll(timeout_s) else "it does not answer in time"
        except (EOFError, OSError):
            answer = "it was lost"
        if isinstance(answer, str):
            self.close()
            raise HeadDownError(f"the Ray cluster cannot be looked at: {answer}")
        return answer


def _takes_connections(address: str) -> bool:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return True  # `auto` or the like: Ray finds out
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except OSError:
        return False
    return True


def _serve(pipe: Connection, address: str | None, owner: str, takes_over: bool) -> None:
    """The child."""
    import logging

    import ray

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the queue says when it ends
    try:
        context = ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        url = context.dashboard_url
        if not url:
            pipe.send("its head has no dashboard, through which jobs are submitted; start it with one")
            return
        claimed = _claim(owner, takes_over) if owner else ""
        pipe.send(None)
        while True:
            pipe.send(_look(pipe.recv(), f"http://{url}", claimed))
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _claim(owner: str, takes_over: bool) -> str:
    """Claim the cluster for a ledger, for as long as its head lives.

    Returns:
        The ledger whose it is.
    """
    # As Ray Serve does it; there is no public key-value store.
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    _internal_kv_put(OWNER_KEY, owner.encode(), overwrite=takes_over, namespace=NAMESPACE)
    found: bytes = _internal_kv_get(OWNER_KEY, namespace=NAMESPACE)
    return found.decode()


def _look(awaited: tuple[Awaited, ...], url: str, owner: str) -> View:
    import ray

    from rayrec.pipelines.cluster.nodes import cluster_nodes

    node: Any = ray._private.worker.global_worker.node
    cluster = ClusterId(node.gcs_address, node.cluster_id.hex())
    return View(cluster, tuple(cluster_nodes()), _count_actors(awaited) if awaited else {}, url, owner)


def _count_actors(awaited: tuple[Awaited, ...]) -> dict[str, int]:
    """Those that have not died; of a service, what outlives its driver is its own."""
    import ray
    from ray.dashboard.modules.job.common import JOB_ACTOR_NAME_TEMPLATE

    of_job: Counter[str] = Counter()
    names: set[str] = set()
    for actor in ray._private.state.actors().values():
        if actor["State"] != "DEAD":
            names.add(actor["Name"])
            of_job[actor["JobID"]] += not actor["IsDetached"]
    return {
        each.submission: (of_job[each.ray_job] if each.ray_job else 0)
        + (JOB_ACTOR_NAME_TEMPLATE.format(job_id=each.submission) in names)
        for each in awaited
    }
