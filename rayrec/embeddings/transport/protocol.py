"""The calls of trainers to shards, each defined once, and what a transport has to do with them.

A call is a value that pickles and can be carried out on a shard. `ShardTransport` makes it and a transport
brings it there: in this process (`client.LocalTransport`), through shared memory (`shared_memory`), or as a
method of a Ray actor (`rayrec.actors.transport`). A new call is a class here and a method of
`ShardTransport`; no transport and no server has to know of it.

Axes: M distinct ids of one table, D numbers of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayrec.embeddings.shard.contributions import DirtyRows, SparseUpdate, UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard, FetchReply, LookupReply, LookupRequest
from rayrec.platform.arrays import Int64Array

ReplyT = TypeVar("ReplyT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)

Empty = Callable[..., NDArray[Any]]
"""Called as `np.empty`: makes arrays where a transport wants them."""


class Reply(Protocol[ReplyT_co]):
    """An answer that may still be in flight."""

    def result(self) -> ReplyT_co:
        """Wait for the answer; raises what the server raised."""
        ...


class ShardCall(ABC, Generic[ReplyT]):
    """One call of one shard; `EmbeddingShard` documents its arguments, reply and errors."""

    in_order: ClassVar[bool] = False
    """Whether calls of this kind are carried out in the order in which a trainer sent them. The others may
    wait for a step, and must not hold each other up."""

    @abstractmethod
    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> ReplyT:
        """Call the shard; `empty` makes the large arrays of the reply."""


@dataclass(frozen=True)
class LookupCall(ShardCall[LookupReply]):
    request: LookupRequest
    after_step: int | None = None

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> LookupReply:
        return shard.lookup(self.request, self.after_step, empty)


@dataclass(frozen=True)
class FetchCall(ShardCall[FetchReply]):
    request: LookupRequest
    after_step: int | None = None

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> FetchReply:
        return shard.fetch(self.request, self.after_step, empty)


@dataclass(frozen=True)
class ApplyCall(ShardCall[int]):
    tag: UpdateTag
    update: SparseUpdate
    dirty: DirtyRows | None = None

    in_order: ClassVar[bool] = True

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> int:
        return shard.apply(self.tag, self.update, self.dirty)


@dataclass(frozen=True)
class ApplyHeadCall(ShardCall[LookupReply]):
    tag: UpdateTag
    head: SparseUpdate
    rest: LookupRequest
    wanted: LookupRequest

    # Not in order: it waits for other trainers' heads. What it must not overtake is told apart by its step.

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> LookupReply:
        return shard.apply_head(self.tag, self.head, self.rest, self.wanted, empty)


@dataclass(frozen=True)
class WriteBackCall(ShardCall[int]):
    incarnation: int
    after_step: int
    dirty: DirtyRows

    in_order: ClassVar[bool] = True

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> int:
        return shard.write_back(self.incarnation, self.after_step, self.dirty)


@dataclass(frozen=True)
class EvictedCall(ShardCall[dict[str, Int64Array]]):
    since_step: int
    after_step: int | None = None

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> dict[str, Int64Array]:
        return shard.evicted(self.since_step, self.after_step)


class ShardTransport(ABC):
    """Reaches the shards. A call is in flight when a method returns; the answer is in the reply."""

    @abstractmethod
    def call(self, shard: int, call: ShardCall[ReplyT]) -> Reply[ReplyT]:
        """Send one call to a shard."""

    def memory(self, shard: int, num_bytes: int) -> Empty:
        """As `np.empty`: where the arrays of this thread's next `apply` of the shard are best made.

        They belong to that call and must not be used after it.
        """
        return np.empty

    def lookup(self, shard: int, request: LookupRequest, after_step: int | None) -> Reply[LookupReply]:
        return self.call(shard, LookupCall(request, after_step))

    def fetch(self, shard: int, request: LookupRequest, after_step: int | None) -> Reply[FetchReply]:
        return self.call(shard, FetchCall(request, after_step))

    def apply(
        self, shard: int, tag: UpdateTag, update: SparseUpdate, dirty: DirtyRows | None = None
    ) -> Reply[int]:
        return self.call(shard, ApplyCall(tag, update, dirty))

    def apply_head(
        self, shard: int, tag: UpdateTag, head: SparseUpdate, rest: LookupRequest, wanted: LookupRequest
    ) -> Reply[LookupReply]:
        return self.call(shard, ApplyHeadCall(tag, head, rest, wanted))

    def write_back(self, shard: int, incarnation: int, after_step: int, dirty: DirtyRows) -> Reply[int]:
        return self.call(shard, WriteBackCall(incarnation, after_step, dirty))

    def evicted(self, shard: int, since_step: int, after_step: int | None) -> Reply[dict[str, Int64Array]]:
        return self.call(shard, EvictedCall(since_step, after_step))
