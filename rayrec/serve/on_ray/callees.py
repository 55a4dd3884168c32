"""How a deployment calls another one: by Ray Serve's handle, or by sockets where replicas are on one node.

    HandleCallee   handle ─► Serve's router ─► gRPC ─► replica
    LocalCallee    Peers ─┬─► socket ─► replica of this node
                          └─► handle: of other nodes, full, leaving, gone

A handle takes about 3 ms of a processor for each call, a socket a quarter of a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from rayrec.serve.local_calls.peers import LEARN_S, Address, Peers
from rayrec.serve.on_ray.ray_ingress import by_message, of_session

logger = logging.getLogger(__name__)


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
        self._num_silent = 0
        """Replicas that did not say where they are, the last time."""
        self.peers = Peers(
            ray.get_runtime_context().get_node_id(), self._learn, self._by_handle, self._request
        )

    async def call(self, method: str, *arguments: Any, repeatable: bool) -> Any:
        """As `Callee.call`."""
        return await self.peers.call(method, *arguments, repeatable=repeatable)

    async def _learn(self) -> Sequence[Address]:
        self._count()
        # Serve's own `results_async` has one timeout of all replicas: one that hangs would hide the others.
        results = await self._handle.broadcast("local_address")._fetch_replica_results_async()
        found = await addresses_of([each.get_async() for each in results], LEARN_S)
        num_silent = sum(not each.replica for each in found)
        if num_silent > self._num_silent:
            logger.warning(
                "%d of %d replicas do not say where they are; they are called by Ray Serve's handle",
                num_silent,
                len(found),
            )
        self._num_silent = num_silent
        return found

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


async def addresses_of(answers: Sequence[Coroutine[Any, Any, Any]], timeout_s: float) -> list[Address]:
    """What replicas answered in time; of others, an `Address` without a name."""

    async def one(answer: Coroutine[Any, Any, Any]) -> Address:
        try:
            async with asyncio.timeout(timeout_s):
                found = await answer
        except Exception as error:  # also of one that starts, ends or is full
            logger.debug("a replica does not say where it is: %r", error)
            return Address("", "", None)
        return found if isinstance(found, Address) else Address("", "", None)

    return list(await asyncio.gather(*map(one, answers)))


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
