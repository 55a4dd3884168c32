"""Calls of shards between processes of one machine, through shared memory.

Calls that may wait for a step have a channel on which any number can wait. Those that must stay in order
have one of their own, on which they are carried out one by one as they were sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayrec.embeddings.transport.protocol import Empty, ReplyT, ShardCall, ShardTransport
from rayrec.embeddings.transport.shared_calls import Channel, Endpoint, SharedReply


class SharedMemoryTransport(ShardTransport):
    """Reaches the shards of servers on this machine."""

    def __init__(self, endpoints: Mapping[int, Endpoint]) -> None:
        """Connect to servers whose `CallServer` answers shard calls, by shard.

        Raises:
            ServerLostError: no server answers at an address.
        """
        self._any_order = {shard: Channel(endpoint, in_order=False) for shard, endpoint in endpoints.items()}
        self._in_order = {shard: Channel(endpoint, in_order=True) for shard, endpoint in endpoints.items()}

    def call(self, shard: int, call: ShardCall[ReplyT]) -> SharedReply[ReplyT]:
        channels = self._in_order if call.in_order else self._any_order
        return channels[shard].call(call)

    def memory(self, shard: int, num_bytes: int) -> Empty:
        return self._in_order[shard].memory(num_bytes)

    def close(self) -> None:
        """Hang up; the servers free what this client had."""
        for channel in (*self._any_order.values(), *self._in_order.values()):
            channel.close()
