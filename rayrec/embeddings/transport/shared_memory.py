"""The lookup and update calls of the sparse engine, between processes of one machine, through shared memory.

Reads may wait for a step, and have a channel on which any number can wait. Writes have one of their own,
on which they are carried out in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from rayrec.embeddings.shard.contributions import KeptRecords, SparseUpdate, UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard, FetchReply, LookupReply, LookupRequest
from rayrec.embeddings.transport.shared_calls import Channel, Endpoint, Methods, SharedReply
from rayrec.platform.arrays import Int64Array


class SharedMemoryTransport:
    """A `rayrec.embeddings.transport.client.ShardTransport` to the shards of servers on this machine."""

    def __init__(self, endpoints: Mapping[int, Endpoint]) -> None:
        """Connect to servers of `shard_methods`, by shard.

        Raises:
            ServerLostError: no server answers at an address.
        """
        self._reads = {shard: Channel(endpoint, in_order=False) for shard, endpoint in endpoints.items()}
        self._writes = {shard: Channel(endpoint, in_order=True) for shard, endpoint in endpoints.items()}

    def lookup(self, shard: int, request: LookupRequest, after_step: int | None) -> SharedReply[LookupReply]:
        return self._reads[shard].call("lookup", request, after_step)

    def fetch(self, shard: int, request: LookupRequest, after_step: int | None) -> SharedReply[FetchReply]:
        return self._reads[shard].call("fetch", request, after_step)

    def evicted(
        self, shard: int, since_step: int, after_step: int | None
    ) -> SharedReply[dict[str, Int64Array]]:
        return self._reads[shard].call("evicted", since_step, after_step)

    def memory(self, shard: int, num_bytes: int) -> Callable[..., NDArray[Any]]:
        return self._writes[shard].memory(num_bytes)

    def apply(
        self, shard: int, tag: UpdateTag, update: SparseUpdate, kept: KeptRecords | None = None
    ) -> SharedReply[int]:
        return self._writes[shard].call("apply", tag, update, kept)

    def apply_head(
        self,
        shard: int,
        tag: UpdateTag,
        head: SparseUpdate,
        rest: LookupRequest,
        wanted: LookupRequest,
    ) -> SharedReply[LookupReply]:
        # It waits for other trainers' heads, and what it must not overtake is kept apart by its step.
        return self._reads[shard].call("apply_head", tag, head, rest, wanted)

    def write_back(
        self, shard: int, incarnation: int, after_step: int, kept: KeptRecords
    ) -> SharedReply[int]:
        return self._writes[shard].call("write_back", incarnation, after_step, kept)

    def close(self) -> None:
        """Hang up; the servers free what this client had."""
        for channel in (*self._reads.values(), *self._writes.values()):
            channel.close()


def shard_methods(shard: EmbeddingShard, apply: Callable[..., int] | None = None) -> Methods:
    """What a `SharedMemoryTransport` calls.

    Args:
        apply: called in place of the shard's.
    """

    def without_empty(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda empty, *arguments: method(*arguments)

    return {
        "lookup": lambda empty, request, after_step: shard.lookup(request, after_step, empty),
        "fetch": lambda empty, request, after_step: shard.fetch(request, after_step, empty),
        "evicted": without_empty(shard.evicted),
        "apply_head": lambda empty, tag, head, rest, wanted: shard.apply_head(tag, head, rest, wanted, empty),
        "apply": without_empty(apply or shard.apply),
        "write_back": without_empty(shard.write_back),
    }
