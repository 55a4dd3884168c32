"""How a trainer's calls reach the parameter servers: through shared memory on one node, else as Ray calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

from rayrec.actors.in_process import InProcessActor
from rayrec.embeddings.base.row_codec import Wire
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.transport.client import answered
from rayrec.embeddings.transport.narrow import over
from rayrec.embeddings.transport.protocol import Empty, Reply, ReplyT, ShardCall, ShardTransport
from rayrec.embeddings.transport.shared_blocks import why_unavailable
from rayrec.embeddings.transport.shared_calls import AnswerTo, CallServer, Endpoint, ServerLostError
from rayrec.embeddings.transport.shared_memory import SharedMemoryTransport
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

TransportChoice = Literal["auto", "ray", "shared_memory"]


@dataclass(frozen=True)
class ServerPlace:
    """Where a parameter server runs, and how the processes of its node reach it."""

    server: str
    node: str
    """Ray's id of it."""
    endpoint: Endpoint | None
    """Where it listens; None if processes cannot share memory there."""
    hindrance: str | None
    """Why they cannot."""


class Listening:
    """Lets processes of an actor's node call it through shared memory, once it was asked where it is.

    Args:
        answer: to the calls; on threads of its own.
    """

    def __init__(self, actor_name: str, answer: AnswerTo) -> None:
        self._actor_name = actor_name
        self._answer = answer
        self._call_server: CallServer | None = None
        self._starting = threading.Lock()

    def place(self) -> ServerPlace:
        import ray

        node, hindrance = ray.get_runtime_context().get_node_id(), why_unavailable()
        if hindrance is not None:
            return ServerPlace(self._actor_name, node, None, hindrance)
        with self._starting:  # every trainer asks
            if self._call_server is None:
                self._call_server = CallServer(self._actor_name, self._answer)
        return ServerPlace(self._actor_name, node, self._call_server.endpoint, None)


class RayReply(Generic[ReplyT]):
    """A `Reply` that is an object of Ray's."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def result(self) -> ReplyT:
        import ray

        return ray.get(self._ref)


class RayTransport(ShardTransport):
    """One parameter server actor per shard."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = servers

    def call(self, shard: int, call: ShardCall[ReplyT]) -> RayReply[ReplyT]:
        return RayReply(self._servers[shard].answer.remote(call))


class InProcessTransport(ShardTransport):
    """Parameter servers of this process, called at once."""

    is_at_once = True

    def __init__(self, servers: Sequence[InProcessActor]) -> None:
        self._servers = servers

    def call(self, shard: int, call: ShardCall[ReplyT]) -> Reply[ReplyT]:
        return answered(lambda: self._servers[shard].instance.answer(call))


class MixedTransport(ShardTransport):
    """Each shard by a transport of its own."""

    def __init__(self, by_shard: Sequence[ShardTransport]) -> None:
        self._by_shard = by_shard

    def call(self, shard: int, call: ShardCall[ReplyT]) -> Reply[ReplyT]:
        return self._by_shard[shard].call(shard, call)

    def memory(self, shard: int, num_bytes: int) -> Empty:
        return self._by_shard[shard].memory(shard, num_bytes)


def connect(
    servers: Sequence[Any],
    choice: TransportChoice,
    wire: Wire = "float32",
    tables: Sequence[TableConfig] = (),
) -> ShardTransport:
    """From the calling actor to every server; waits until they are up.

    Args:
        wire: format of rows and gradients on every way, so that a run's bits do not depend on where actors
            are.
        tables: of the run; for a narrow wire.

    Raises:
        InputError: shared memory was asked for and is not to be had.
    """
    return over(_connected(servers, choice), wire, tables)


def _connected(servers: Sequence[Any], choice: TransportChoice) -> ShardTransport:
    if not servers or isinstance(servers[0], InProcessActor):  # without any, nothing is called
        return InProcessTransport(servers)
    import ray

    over_ray = RayTransport(servers)
    if choice == "ray":
        return over_ray
    node = ray.get_runtime_context().get_node_id()
    places: list[ServerPlace] = ray.get([server.place.remote() for server in servers])
    endpoints = reachable(places, node, choice)
    try:
        near = SharedMemoryTransport(endpoints)
    except ServerLostError as error:
        if choice == "shared_memory":
            raise
        # One node, but not one machine to the kernel: containers of their own, for example.
        logger.warning("Ray calls to the parameter servers, since %s", error)
        return over_ray
    if len(endpoints) == len(servers):
        return near
    return MixedTransport([near if shard in endpoints else over_ray for shard in range(len(servers))])


def reachable(places: Sequence[ServerPlace], node: str, choice: TransportChoice) -> dict[int, Endpoint]:
    """By shard, where the servers listen that share memory with a node's processes.

    Raises:
        InputError: `choice` is `shared_memory`, and there is a server that does not.
    """
    endpoints = {}
    for shard, place in enumerate(places):
        if place.endpoint is not None and place.node == node:
            endpoints[shard] = place.endpoint
        elif choice == "shared_memory":
            why = place.hindrance or f"it runs on Ray node {place.node} and the trainer on {node}"
            raise InputError(
                f"sparse.transport: 'shared_memory' does not reach {place.server}: {why}; 'auto' takes Ray "
                "calls to such servers"
            )
    return endpoints
