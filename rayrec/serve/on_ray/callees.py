"""How a deployment calls another one: by Ray Serve's handle, or by sockets where replicas are on one node.

    HandleCallee   handle ─► Serve's router ─► gRPC ─► replica
    LocalCallee    Peers ─┬─► socket ─► replica of this node
                          └─► handle: of other nodes, full, leaving, gone

A handle takes about 3 ms of a processor for each call, a socket a quarter of a millisecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from rayrec.serve.local_calls.peers import LEARN_S, Address, Peers
from rayrec.serve.on_ray.ray_ingress import by_message, of_session


class Callee(Protocol):
    """A deployment, on the event loop where it is first called."""

    async def call(self, method: str, *arguments: Any, repeatable: bool) -> Any:
        """What a replica returns.

        Args:
            repeatable: whether another one may compute it where the first was gone before its answer.

        Raises:
            Exception: what it raises, or that no replica is there.
        """


class HandleCallee:
    """Every call goes by the handle, which repeats none."""

    def __init__(self, handle: DeploymentHandle, session: str | None = None) -> None:
        """
        Args:
            handle: that nobody has used so far.
            session: whose calls come to the same replica; see `sticky_routing`.
        """
        self._handle = by_message(handle)
        if session is not None:
            self._handle = of_session(self._handle, session)

    async def call(self, method: str, *arguments: Any, repeatable: bool) -> Any:
        """As `Callee.call`."""
        return await getattr(self._handle, method).remote(*arguments)


class LocalCallee:
    """Replicas of this node are called by their sockets."""

    def __init__(self, handle: DeploymentHandle) -> None:
        """
        Args:
            handle: of a deployment of `LocalReplica`, that nobody has used so far.
        """
        self._handle = by_message(handle)
        self._new: Counter[str] = Counter()
        """Calls by sockets that Serve has not counted, by route."""
        self.peers = Peers(
            ray.get_runtime_context().get_node_id(), self._learn, self._by_handle, self._request
        )

    async def call(self, method: str, *arguments: Any, repeatable: bool) -> Any:
        """As `Callee.call`."""
        return await self.peers.call(method, *arguments, repeatable=repeatable)

    async def _learn(self) -> Sequence[Address]:
        self._count()
        asked = self._handle.broadcast("local_address")
        found = await asked.results_async(timeout_s=LEARN_S, return_exceptions=True)
        # Who does not answer is not asked by a socket either.
        return [each if isinstance(each, Address) else Address("", "", None) for each in found]

    def _count(self) -> None:
        """Add to Serve's count of a handle's calls, seldom: each time takes as long as a tenth of a call."""
        for route, num_calls in self._new.items():
            self._handle.request_counter.inc(num_calls, tags={"route": route})
        self._new.clear()

    def _request(self) -> tuple[str, str]:
        """Id and route of the request that is answered here, if any."""
        context = serve.context._get_serve_request_context()
        self._new[context.route] += 1
        return context.request_id, context.route

    async def _by_handle(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return await getattr(self._handle, method).remote(*arguments)


def callee_of(handle: DeploymentHandle, local_calls: bool, session: str | None = None) -> Callee:
    """
    Args:
        local_calls: whether sockets are used. Where a session chooses the replica they are not: only the
            handle knows those of all nodes, of which one keeps what it has read.
    """
    return LocalCallee(handle) if local_calls and session is None else HandleCallee(handle, session)


def metrics_of(callees: Iterable[Callee]) -> dict[str, float]:
    """What a meter watches: the sums of those that use sockets."""
    found: Counter[str] = Counter()
    for callee in callees:
        if isinstance(callee, LocalCallee):
            found.update(callee.peers.metrics())
    return dict(found)
