"""The calls of trainers to shards, each defined once, and what a transport has to do with them.

A call is a value that pickles and can be carried out on a shard. A transport brings it there: in this process
(`client.LocalTransport`), through shared memory (`shared_memory`), or as a method of a Ray actor
(`rayrec.actors.transport`). A new call is a class here; no transport and no server has to know of it.

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

    def commits(self, reply: ReplyT) -> bool:
        """Whether, of several trainers' calls, it was this one that completed its step."""
        return False


@dataclass(frozen=True)
class LookupCall(ShardCall[LookupReply]):
    request: LookupRequest
    after_step: int | None = None
    tag: UpdateTag | None = None
    """With whose batch it is, where trainers call in groups: each trainer asks for every step then."""

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> LookupReply:
        return shard.lookup(self.request, self.after_step, empty)


@dataclass(frozen=True)
class FetchCall(ShardCall[FetchReply]):
    request: LookupRequest
    after_step: int | None = None

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> FetchReply:
        return shard.fetch(self.request, self.after_step, empty)


@dataclass(frozen=True)
class AdmitCall(ShardCall[None]):
    """Asks for room for a part of a step that is about to be sent."""

    tag: UpdateTag
    num_bytes: int

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> None:
        shard.admit(self.tag, self.num_bytes)


@dataclass(frozen=True)
class ApplyCall(ShardCall[int]):
    tag: UpdateTag
    update: SparseUpdate
    dirty: DirtyRows | None = None

    in_order: ClassVar[bool] = True

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> int:
        return shard.apply(self.tag, self.update, self.dirty)

    def commits(self, reply: int) -> bool:
        return reply == self.tag.step


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
    """Reaches the shards."""

    is_at_once: bool = False
    """Whether calls are carried out before `call` returns: one that waits holds up all that follow."""

    @abstractmethod
    def call(self, shard: int, call: ShardCall[ReplyT]) -> Reply[ReplyT]:
        """Send a call to a shard. It is in flight when this returns; the answer is in the reply."""

    def memory(self, shard: int, num_bytes: int) -> Empty:
        """As `np.empty`: where the arrays of this thread's next `ApplyCall` to the shard are best
        made.

        They belong to that call and must not be used after it.
        """
        return np.empty
