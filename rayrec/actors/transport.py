"""The lookup and update calls of the sparse engine, carried by Ray actor calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle

from rayrec.embeddings.shard import (
    FetchReply,
    KeptRecords,
    LookupReply,
    LookupRequest,
    SparseUpdate,
    UpdateTag,
)

ResultT = TypeVar("ResultT")


class RayReply(Generic[ResultT]):
    """A reply of `rayrec.embeddings.client.ShardTransport` that is an object of Ray's."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def result(self) -> ResultT:
        return ray.get(self._ref)


class RayTransport:
    """One parameter server actor per shard."""

    def __init__(self, servers: Sequence[ActorHandle]) -> None:
        self._servers = servers

    def lookup(self, shard: int, request: LookupRequest, after_step: int | None) -> RayReply[LookupReply]:
        return RayReply(self._servers[shard].lookup.remote(request, after_step))

    def fetch(self, shard: int, request: LookupRequest, after_step: int | None) -> RayReply[FetchReply]:
        return RayReply(self._servers[shard].fetch.remote(request, after_step))

    def apply(
        self, shard: int, tag: UpdateTag, update: SparseUpdate, kept: KeptRecords | None = None
    ) -> RayReply[int]:
        return RayReply(self._servers[shard].apply.remote(tag, update, kept))

    def write_back(self, shard: int, incarnation: int, after_step: int, kept: KeptRecords) -> RayReply[int]:
        return RayReply(self._servers[shard].write_back.remote(incarnation, after_step, kept))

    def evicted(self, shard: int, since_step: int, after_step: int | None) -> RayReply[dict[str, np.ndarray]]:
        return RayReply(self._servers[shard].evicted.remote(since_step, after_step))
