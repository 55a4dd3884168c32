"""How a trainer's calls reach the parameter servers: through shared memory on one node, else as Ray calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from rayrec.actors.in_process import InProcessActor
from rayrec.embeddings.shard.contributions import KeptRecords, SparseUpdate, UpdateTag
from rayrec.embeddings.shard.shard import FetchReply, LookupReply, LookupRequest
from rayrec.embeddings.transport.client import LocalTransport, Reply, ShardTransport
from rayrec.embeddings.transport.shared_calls import Endpoint, ServerLostError
from rayrec.embeddings.transport.shared_memory import SharedMemoryTransport
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

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


class RayReply(Generic[ResultT]):
    """A reply of `rayrec.embeddings.transport.client.ShardTransport` that is an object of Ray's."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def result(self) -> ResultT:
        import ray

        return ray.get(self._ref)


class RayTransport:
    """One parameter server actor per shard."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = servers

    def lookup(self, shard: int, request: LookupRequest, after_step: int | None) -> RayReply[LookupReply]:
        return RayReply(self._servers[shard].lookup.remote(request, after_step))

    def fetch(self, shard: int, request: LookupRequest, after_step: int | None) -> RayReply[FetchReply]:
        return RayReply(self._servers[shard].fetch.remote(request, after_step))

    def memory(self, shard: int, num_bytes: int) -> Callable[..., np.ndarray]:
        return np.empty

    def apply(
        self, shard: int, tag: UpdateTag, update: SparseUpdate, kept: KeptRecords | None = None
    ) -> RayReply[int]:
        return RayReply(self._servers[shard].apply.remote(tag, update, kept))

    def apply_head(
        self,
        shard: int,
        tag: UpdateTag,
        head: SparseUpdate,
        rest: LookupRequest,
        wanted: LookupRequest,
    ) -> RayReply[LookupReply]:
        return RayReply(self._servers[shard].apply_head.remote(tag, head, rest, wanted))

    def write_back(self, shard: int, incarnation: int, after_step: int, kept: KeptRecords) -> RayReply[int]:
        return RayReply(self._servers[shard].write_back.remote(incarnation, after_step, kept))

    def evicted(self, shard: int, since_step: int, after_step: int | None) -> RayReply[dict[str, np.ndarray]]:
        return RayReply(self._servers[shard].evicted.remote(since_step, after_step))


class MixedTransport:
    """Each shard by a transport of its own."""

    def __init__(self, by_shard: Sequence[ShardTransport]) -> None:
        self._by_shard = by_shard

    def lookup(self, shard: int, request: LookupRequest, after_step: int | None) -> Reply[LookupReply]:
        return self._by_shard[shard].lookup(shard, request, after_step)

    def fetch(self, shard: int, request: LookupRequest, after_step: int | None) -> Reply[FetchReply]:
        return self._by_shard[shard].fetch(shard, request, after_step)

    def memory(self, shard: int, num_bytes: int) -> Callable[..., np.ndarray]:
        return self._by_shard[shard].memory(shard, num_bytes)

    def apply(
        self, shard: int, tag: UpdateTag, update: SparseUpdate, kept: KeptRecords | None = None
    ) -> Reply[int]:
        return self._by_shard[shard].apply(shard, tag, update, kept)

    def apply_head(
        self,
        shard: int,
        tag: UpdateTag,
        head: SparseUpdate,
        rest: LookupRequest,
        wanted: LookupRequest,
    ) -> Reply[LookupReply]:
        return self._by_shard[shard].apply_head(shard, tag, head, rest, wanted)

    def write_back(self, shard: int, incarnation: int, after_step: int, kept: KeptRecords) -> Reply[int]:
        return self._by_shard[shard].write_back(shard, incarnation, after_step, kept)

    def evicted(self, shard: int, since_step: int, after_step: int | None) -> Reply[dict[str, np.ndarray]]:
        return self._by_shard[shard].evicted(shard, since_step, after_step)


def connect(servers: Sequence[Any], choice: TransportChoice) -> ShardTransport:
    """From the calling actor to every server; waits until they are up.

    Raises:
        InputError: shared memory was asked for and is not to be had.
    """
    if isinstance(servers[0], InProcessActor):
        return LocalTransport([server.instance for server in servers])
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
