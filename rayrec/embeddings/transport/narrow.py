"""Calls whose rows and gradients are in a narrow format, and the transport that makes them of others.

    client ─ LookupCall, ApplyCall ─► NarrowTransport ─ narrow call ─► any transport ─► the shard
                                      rounds gradients                                  widens them, works in
           ◄── rows in float32 ────── widens rows     ◄─────────────────────────────── float32, rounds rows

What is rounded, and how, is a matter of the calls alone. So a run has the same bits wherever its actors are,
also where a transport has no use for fewer bytes. Ids that have 32 bits travel as 32 bits.

Whole records have no narrow form: what is held by a trainer could not be what others are sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from rayrec.embeddings.base.row_codec import (
    NarrowRows,
    NarrowWire,
    RoundingKey,
    Wire,
    decode,
    encode_gradients,
    encode_rows,
    narrow_bytes,
)
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import SparseUpdate, UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard, LookupReply, LookupRequest
from rayrec.embeddings.transport.protocol import (
    AdmitCall,
    ApplyCall,
    ApplyHeadCall,
    Empty,
    EvictedCall,
    LookupCall,
    Reply,
    ReplyT,
    ShardCall,
    ShardTransport,
)
from rayrec.platform.arrays import Int64Array

NarrowIds = Mapping[str, NDArray[Any]]
"""Ids by table: uint32 where all of them fit, else int64."""
NarrowReply = dict[str, NarrowRows]
NarrowUpdate = Mapping[str, tuple[NDArray[Any], NarrowRows]]


class NarrowCall(ShardCall[ReplyT]):
    """A call that stands for another one."""

    @abstractmethod
    def widened(self) -> ShardCall[Any]:
        """The other one, with what was rounded."""

    @abstractmethod
    def narrowed(self, reply: Any, empty: Empty = np.empty) -> ReplyT:
        """What to answer in place of the other one's reply."""

    def carry_out(self, shard: EmbeddingShard, empty: Empty = np.empty) -> ReplyT:
        return self.narrowed(self.widened().carry_out(shard), empty)


class _AnsweredByRows(NarrowCall[NarrowReply]):
    wire: NarrowWire

    def narrowed(self, reply: LookupReply, empty: Empty = np.empty) -> NarrowReply:
        return {name: encode_rows(self.wire, rows_MD, empty) for name, rows_MD in reply.items()}


@dataclass(frozen=True)
class NarrowLookupCall(_AnsweredByRows):
    wire: NarrowWire
    request: NarrowIds
    after_step: int | None = None
    tag: UpdateTag | None = None

    def widened(self) -> LookupCall:
        return LookupCall(_wide_ids(self.request), self.after_step, self.tag)


@dataclass(frozen=True)
class NarrowApplyCall(NarrowCall[int]):
    tag: UpdateTag
    update: NarrowUpdate

    in_order: ClassVar[bool] = True

    def widened(self) -> ApplyCall:
        return ApplyCall(self.tag, _wide_update(self.update))

    def narrowed(self, reply: int, empty: Empty = np.empty) -> int:
        return reply

    def commits(self, reply: int) -> bool:
        return reply == self.tag.step


@dataclass(frozen=True)
class NarrowApplyHeadCall(_AnsweredByRows):
    wire: NarrowWire
    tag: UpdateTag
    head: NarrowUpdate
    rest: NarrowIds
    wanted: NarrowIds

    def widened(self) -> ApplyHeadCall:
        head, rest, wanted = _wide_update(self.head), _wide_ids(self.rest), _wide_ids(self.wanted)
        return ApplyHeadCall(self.tag, head, rest, wanted)


class WideRows(Reply[LookupReply]):
    """A reply with rows, widened when they have come."""

    def __init__(self, narrow: Reply[NarrowReply]) -> None:
        self._narrow = narrow

    def result(self) -> LookupReply:
        return {name: decode(rows) for name, rows in self._narrow.result().items()}


class NarrowTransport(ShardTransport):
    """Sends narrow calls by another transport."""

    def __init__(self, transport: ShardTransport, wire: NarrowWire, tables: Sequence[TableConfig]) -> None:
        self.is_at_once = transport.is_at_once
        self._transport = transport
        self._wire = wire
        self._seeds = {table.name: table.seed for table in tables}

    def call(self, shard: int, call: ShardCall[ReplyT]) -> Reply[ReplyT]:
        """As `ShardTransport.call`.

        Raises:
            TypeError: a call with whole records.
        """
        match call:
            case LookupCall():
                request = _narrow_ids(call.request)
                narrow = NarrowLookupCall(self._wire, request, call.after_step, call.tag)
                reply: Reply[Any] = WideRows(self._transport.call(shard, narrow))
            case ApplyHeadCall():
                head = self._narrow_update(call.tag, call.head)
                rest, wanted = _narrow_ids(call.rest), _narrow_ids(call.wanted)
                narrow_head = NarrowApplyHeadCall(self._wire, call.tag, head, rest, wanted)
                reply = WideRows(self._transport.call(shard, narrow_head))
            case ApplyCall() if not call.dirty:
                empty = self._transport.memory(shard, self._bytes_of(call.update))
                update = self._narrow_update(call.tag, call.update, empty)
                reply = self._transport.call(shard, NarrowApplyCall(call.tag, update))
            case EvictedCall() | AdmitCall():  # room is for what a shard keeps, which is float32
                reply = self._transport.call(shard, cast(ShardCall[Any], call))
            case _:
                raise TypeError(
                    f"{type(call).__name__} brings whole records, which have no {self._wire} form"
                )
        return cast(Reply[ReplyT], reply)

    def _narrow_update(self, tag: UpdateTag, update: SparseUpdate, empty: Empty = np.empty) -> NarrowUpdate:
        narrow = {}
        for name, (ids_M, grads_MD) in update.items():
            key = RoundingKey(self._seeds[name], tag.rank, tag.step)
            narrow[name] = _narrow(ids_M), encode_gradients(self._wire, ids_M, grads_MD, key, empty)
        return narrow

    def _bytes_of(self, update: SparseUpdate) -> int:
        """Of the arrays of a narrow `apply`, each at the beginning of a cache line."""
        return sum(
            ids_M.nbytes + narrow_bytes(self._wire, *grads_MD.shape) + 3 * 64
            for ids_M, grads_MD in update.values()
        )


def over(transport: ShardTransport, wire: Wire, tables: Sequence[TableConfig]) -> ShardTransport:
    """The transport, with rows and gradients in this format."""
    return transport if wire == "float32" else NarrowTransport(transport, wire, tables)


def _narrow(ids_M: Int64Array) -> NDArray[Any]:
    if ids_M.dtype == np.int64 and len(ids_M) and ids_M.min() >= 0 and ids_M.max() < 2**32:
        return ids_M.astype(np.uint32)
    return ids_M


def _narrow_ids(request: LookupRequest) -> NarrowIds:
    return {name: _narrow(ids_M) for name, ids_M in request.items()}


def _wide_ids(request: NarrowIds) -> dict[str, Int64Array]:
    return {name: _wide(ids_M) for name, ids_M in request.items()}


def _wide(ids_M: NDArray[Any]) -> Int64Array:
    # Others stay as they are: the shard refuses what is wrong with them.
    return ids_M.astype(np.int64) if ids_M.dtype == np.uint32 else ids_M


def _wide_update(update: NarrowUpdate) -> dict[str, tuple[Int64Array, Any]]:
    return {name: (_wide(ids_M), decode(grads)) for name, (ids_M, grads) in update.items()}
