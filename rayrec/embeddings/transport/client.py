"""All shards seen as one: split ids and gradients by shard, call every shard once, put rows together.

Axes: M distinct ids of one table, D numbers of a row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rayrec.embeddings.base.compiled import LANES, copy_lanes
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import DirtyRows, Part, SparseUpdate, UpdateTag, bytes_of
from rayrec.embeddings.shard.shard import EmbeddingShard, FetchReply, LookupReply, LookupRequest
from rayrec.embeddings.table.row_operations import first_not_finite
from rayrec.embeddings.transport.protocol import (
    AdmitCall,
    ApplyCall,
    ApplyHeadCall,
    EvictedCall,
    FetchCall,
    LookupCall,
    Reply,
    ReplyT,
    ShardCall,
    ShardTransport,
    WriteBackCall,
)
from rayrec.platform.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input

ResultT = TypeVar("ResultT")


class LocalTransport(ShardTransport):
    """Shards in this process, called at once: for evaluation, serving and tests."""

    is_at_once = True

    def __init__(self, shards: Sequence[EmbeddingShard]) -> None:
        self._shards = shards

    def call(self, shard: int, call: ShardCall[ReplyT]) -> Reply[ReplyT]:
        return answered(lambda: call.carry_out(self._shards[shard]))


def answered(call: Callable[[], ResultT]) -> Future[ResultT]:
    future: Future[ResultT] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


SplitIds = list[dict[str, tuple[Int64Array, Int64Array]]]
"""For each shard, by table: (ids that it holds, their positions among the ids of a batch)."""


def _ids_of(part: Mapping[str, tuple[Int64Array, Int64Array]]) -> dict[str, Int64Array]:
    return {name: ids_M for name, (ids_M, _) in part.items()}


def _positions_of(part: Mapping[str, tuple[Int64Array, Int64Array]]) -> dict[str, Int64Array]:
    return {name: positions_M for name, (_, positions_M) in part.items()}


def _gradients_of(
    part: Mapping[str, tuple[Int64Array, Int64Array]],
    grads: Mapping[str, Float32Array],
    empty: Callable[..., Float32Array] = np.empty,
) -> dict[str, tuple[Int64Array, Float32Array]]:
    """Of one shard; without the tables that have no gradients."""
    found = {}
    for name, (ids_M, positions_M) in part.items():
        if name in grads:
            part_MD = empty((len(ids_M), grads[name].shape[1]), dtype=np.float32)
            gather_rows(kernel_input(grads[name], np.float32), kernel_input(positions_M, np.int64), part_MD)
            found[name] = ids_M, part_MD
    return found


@njit(nogil=True, cache=True)
def gather_rows(rows_MD: Float32Array, positions_P: Int64Array, part_PD: Float32Array) -> None:
    """part_PD = rows_MD[positions_P]"""
    dim = part_PD.shape[1]
    whole, row_bytes = dim - dim % LANES, np.uint64(4 * dim)
    rows, part = np.uint64(rows_MD.ctypes.data), np.uint64(part_PD.ctypes.data)
    for p in range(len(positions_P)):
        source, target = rows + row_bytes * np.uint64(positions_P[p]), part + row_bytes * np.uint64(p)
        for d in range(0, whole, LANES):
            copy_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
        for d in range(whole, dim):
            part_PD[p, d] = rows_MD[positions_P[p], d]


class PendingRows:
    """Rows that were requested from the shards."""

    def __init__(self, parts: list[tuple[Reply[LookupReply], dict[str, Int64Array]]]) -> None:
        self._parts = parts

    def write_to(self, rows: Mapping[str, Float32Array]) -> None:
        """Wait for every shard and write its rows to their positions."""
        for reply, positions in self._parts:
            for name, part_MD in reply.result().items():
                scatter_rows(rows[name], positions[name], kernel_input(part_MD, np.float32))


@njit(nogil=True, cache=True)
def scatter_rows(rows_MD: Float32Array, positions_P: Int64Array, part_PD: Float32Array) -> None:
    """rows_MD[positions_P] = part_PD, which numpy takes several times as long for."""
    dim = part_PD.shape[1]
    whole, row_bytes = dim - dim % LANES, np.uint64(4 * dim)
    rows, part = np.uint64(rows_MD.ctypes.data), np.uint64(part_PD.ctypes.data)
    for p in range(len(positions_P)):
        source, target = part + row_bytes * np.uint64(p), rows + row_bytes * np.uint64(positions_P[p])
        for d in range(0, whole, LANES):
            copy_lanes(target + np.uint64(4 * d), source + np.uint64(4 * d))
        for d in range(whole, dim):
            rows_MD[positions_P[p], d] = part_PD[p, d]


@dataclass(frozen=True)
class _Later:
    """A call that is made when its answer is needed."""

    transport: ShardTransport
    shard: int
    call: ShardCall[None]

    def result(self) -> None:
        self.transport.call(self.shard, self.call).result()


class PendingRecords:
    """Whole records that were requested from the shards."""

    def __init__(self, parts: list[tuple[Reply[FetchReply], dict[str, Int64Array]]]) -> None:
        self._parts = parts

    def received(self) -> Iterator[tuple[str, Int64Array, Int32Array, BoolArray]]:
        """Wait for the shards; yields (table, [M] positions, [M, W] records, [M] whether there is a row)."""
        for reply, positions in self._parts:
            for name, (records_MW, present_M) in reply.result().items():
                yield name, positions[name], records_MW, present_M


class _OfThread(threading.local):
    """Several trainers' calls may be sent at once."""

    seconds = 0.0


class ShardClient:
    """Reads and updates the tables wherever their shards are.

    Args:
        unasked_bytes: of a part of a step that shards take without being asked for room; None: any.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        shard_map: ShardMap,
        transport: ShardTransport,
        unasked_bytes: int | None = None,
    ) -> None:
        self._dims = {table.name: table.dim for table in tables}
        self._num_shards = shard_map.num_shards
        self._shard_maps = {table.name: shard_map.among(table.servers) for table in tables}
        self._transport = transport
        self._unasked_bytes = unasked_bytes
        self._held_back = _OfThread()

    @property
    def held_back_s(self) -> float:
        """Time that parts of steps waited here for room on the shards, of the calling thread."""
        return self._held_back.seconds

    def split_ids(self, ids: Mapping[str, Int64Array], positions: Mapping[str, Int64Array]) -> SplitIds:
        """The ids at the given positions of each table's ids, by the shard that holds them."""
        split: SplitIds = [{} for _ in range(self._num_shards)]
        for name, positions_M in positions.items():
            self._dim(name)  # which refuses unknown tables
            wanted_M = ids[name][positions_M]
            for part, at in zip(split, self._shard_maps[name].split(wanted_M), strict=True):
                if len(at):
                    part[name] = wanted_M[at], positions_M[at]
        return split

    def read(self, ids: Mapping[str, Int64Array], after_step: int | None = None) -> dict[str, Float32Array]:
        """[M, D] rows of distinct ids by table, as they are now or once `after_step` is committed.

        While steps are still being applied, each row is as some step from `after_step` on left it, not all
        of them the same one. Between steps they are those of the last.
        """
        rows = self.empty_rows(ids)
        self.request(ids, {name: np.arange(len(ids_M)) for name, ids_M in ids.items()}, after_step).write_to(
            rows
        )
        return rows

    def empty_rows(self, ids: Mapping[str, Int64Array]) -> dict[str, Float32Array]:
        """Uninitialized [M, D] arrays by table, to be written to."""
        return {
            name: np.empty((len(ids_M), self._dim(name)), dtype=np.float32) for name, ids_M in ids.items()
        }

    def request(
        self,
        ids: Mapping[str, Int64Array],
        positions: Mapping[str, Int64Array],
        after_step: int | None,
        tag: UpdateTag | None = None,
    ) -> PendingRows:
        """Ask for the ids at the given positions of each table's ids.

        Shards without any are not called, unless there is a tag: then others wait for the call.
        """
        return PendingRows(
            [
                (self._transport.call(shard, LookupCall(_ids_of(part), after_step, tag)), _positions_of(part))
                for shard, part in enumerate(self.split_ids(ids, positions))
                if part or tag is not None
            ]
        )

    def request_records(
        self, ids: Mapping[str, Int64Array], positions: Mapping[str, Int64Array], after_step: int | None
    ) -> PendingRecords:
        """As `request`, for whole records."""
        return PendingRecords(
            [
                (self._transport.call(shard, FetchCall(_ids_of(part), after_step)), _positions_of(part))
                for shard, part in enumerate(self.split_ids(ids, positions))
                if part
            ]
        )

    def send(
        self,
        tag: UpdateTag,
        ids: Mapping[str, Int64Array],
        grads: Mapping[str, Float32Array],
        dirty: DirtyRows | None = None,
    ) -> list[Reply[int]]:
        """Send one step's gradients, [M, D] by table; every shard is called, with nothing if need be.

        Waits for shards that have no room for them yet.

        Args:
            dirty: records that leave a cache, by table.

        Raises:
            ValueError: gradients of an unknown table, or not one row of gradients per id.
            Exception: as `EmbeddingShard.admit`, in whose place it is.
        """
        self.check_shapes(tag.step, ids, grads)
        updates = self._split({name: (ids[name], grads_MD) for name, grads_MD in grads.items()})
        dirty_by_shard = self._split(dirty) if dirty else [None] * len(updates)
        room = self._ask_for_room(tag, [bytes_of(update) for update in updates])
        replies = []
        for shard, (update, records) in enumerate(zip(updates, dirty_by_shard, strict=True)):
            self._wait_for_room(room[shard])
            replies.append(self._transport.call(shard, ApplyCall(tag, update, records)))
        return replies

    def _ask_for_room(self, tag: UpdateTag, num_bytes: Sequence[int]) -> list[Reply[None] | None]:
        """Of all shards together, for a part of so many bytes each; None where there is no need to ask."""
        most = self._unasked_bytes
        return [
            None if most is None or size <= most else self._asked(shard, AdmitCall(tag, size))
            for shard, size in enumerate(num_bytes)
        ]

    def _asked(self, shard: int, call: AdmitCall) -> Reply[None]:
        # Called at once, a shard would wait for the head of a lower rank, whose trainer may be waiting in a
        # shard before it for the head that comes after this.
        return (
            _Later(self._transport, shard, call)
            if self._transport.is_at_once
            else self._transport.call(shard, call)
        )

    def _wait_for_room(self, asked: Reply[None] | None) -> None:
        if asked is not None:
            started = time.perf_counter()
            asked.result()
            self._held_back.seconds += time.perf_counter() - started

    def send_head(
        self,
        tag: UpdateTag,
        grads: Mapping[str, Float32Array],
        head: SplitIds,
        rest: SplitIds,
        wanted: SplitIds,
    ) -> PendingRows:
        """Send the head of one step's contribution, and ask for rows that the rest does not touch.

        Args:
            head, rest: of the batch's ids, all of them; `send_split` of the rest follows.
            wanted: of the next batch's.
        """
        tag = tag._replace(part=Part.HEAD)
        room = self._ask_for_room(tag, [self._gradient_bytes(first, grads) for first in head])
        pending = []
        for shard, (first, then, next_) in enumerate(zip(head, rest, wanted, strict=True)):
            self._wait_for_room(room[shard])
            announced = {name: ids_M for name, (ids_M, _) in then.items() if name in grads}
            call = ApplyHeadCall(tag, _gradients_of(first, grads), announced, _ids_of(next_))
            pending.append((self._transport.call(shard, call), _positions_of(next_)))
        return PendingRows(pending)

    def send_head_of(
        self, tag: UpdateTag, update: SparseUpdate, rest: LookupRequest, wanted: LookupRequest
    ) -> PendingRows:
        """`send_head` of ids that are not those of one batch."""
        rest_by_shard, wanted_by_shard = (
            self.split_ids(ids, {name: np.arange(len(ids_M)) for name, ids_M in ids.items()})
            for ids in (rest, wanted)
        )
        tag = tag._replace(part=Part.HEAD)
        heads = self._split(update)
        room = self._ask_for_room(tag, [bytes_of(head) for head in heads])
        pending = []
        for shard, (head, then, next_) in enumerate(zip(heads, rest_by_shard, wanted_by_shard, strict=True)):
            self._wait_for_room(room[shard])
            call = ApplyHeadCall(tag, head, _ids_of(then), _ids_of(next_))
            pending.append((self._transport.call(shard, call), _positions_of(next_)))
        return PendingRows(pending)

    def send_split(
        self,
        tag: UpdateTag,
        grads: Mapping[str, Float32Array],
        split: SplitIds,
        dirty: DirtyRows | None = None,
    ) -> list[Reply[int]]:
        """`send` of the gradients at some positions of the batch's ids; those elsewhere are not sent."""
        dirty_by_shard = self._split(dirty) if dirty else [None] * len(split)
        room = self._ask_for_room(tag, [self._gradient_bytes(part, grads) for part in split])
        replies = []
        for shard, (part, records) in enumerate(zip(split, dirty_by_shard, strict=True)):
            self._wait_for_room(room[shard])
            empty = self._transport.memory(shard, self._bytes_of(part, records))
            update = _gradients_of(part, grads, empty)
            replies.append(self._transport.call(shard, ApplyCall(tag, update, records)))
        return replies

    def _gradient_bytes(
        self, part: Mapping[str, tuple[Int64Array, Int64Array]], grads: Mapping[str, Float32Array]
    ) -> int:
        """Of the ids and gradients that a shard gets."""
        return sum(
            ids_M.nbytes + 4 * self._dim(name) * len(ids_M)
            for name, (ids_M, _) in part.items()
            if name in grads
        )

    def _bytes_of(self, part: Mapping[str, tuple[Int64Array, Int64Array]], dirty: DirtyRows | None) -> int:
        """Of the arrays of an `apply`, each at the beginning of a cache line."""
        arrays = [ids_M.nbytes for ids_M, _ in part.values()]
        arrays += [4 * self._dim(name) * len(ids_M) for name, (ids_M, _) in part.items()]
        arrays += [array.nbytes for pair in (dirty or {}).values() for array in pair]
        return sum(-(-num_bytes // 64) * 64 for num_bytes in arrays)

    def check_finite(
        self, step: int, ids: Mapping[str, Int64Array], grads: Mapping[str, Float32Array]
    ) -> None:
        """For what is not sent at once: servers that are told in parts must not learn half of a bad step.

        Raises:
            ValueError: a gradient is not finite; names step, table, id.
        """
        for name, grads_MD in grads.items():
            bad = first_not_finite(grads_MD)
            if bad >= 0:
                value = grads_MD[bad][~np.isfinite(grads_MD[bad])][0]
                raise ValueError(
                    f"step {step}, table {name!r}: the gradient of id {ids[name][bad]} is {value}; nothing "
                    "of the step was sent, and no row has changed"
                )

    def check_shapes(
        self, step: int, ids: Mapping[str, Int64Array], grads: Mapping[str, Float32Array]
    ) -> None:
        """Check that gradients fit the ids and tables that they are of.

        Raises:
            ValueError: gradients of an unknown table, of another type, or not one row of them per id.
        """
        for name, grads_MD in grads.items():
            if name not in ids:
                raise ValueError(
                    f"step {step}: gradients of table {name!r}, which the batch does not read "
                    f"(it reads {', '.join(ids) or 'none'})"
                )
            expected = (len(ids[name]), self._dim(name))
            if grads_MD.shape != expected:
                raise ValueError(
                    f"step {step}, table {name!r}: expected gradients of shape {expected}, "
                    f"one row per id, got {grads_MD.shape}"
                )
            if isinstance(grads_MD, np.ndarray) and grads_MD.dtype != np.float32:
                raise ValueError(
                    f"step {step}, table {name!r}: gradients must be float32, got {grads_MD.dtype}"
                )

    def write_back(self, incarnation: int, after_step: int, dirty: DirtyRows) -> list[Reply[int]]:
        """Send records that a cache has changed; shards that hold none of them are not called."""
        return [
            self._transport.call(shard, WriteBackCall(incarnation, after_step, records))
            for shard, records in enumerate(self._split(dirty))
            if records
        ]

    def evicted(self, since_step: int, after_step: int) -> dict[str, Int64Array]:
        """By table, ids whose rows commits after `since_step` gave up, once `after_step` is committed."""
        replies = [
            self._transport.call(shard, EvictedCall(since_step, after_step))
            for shard in range(self._num_shards)
        ]
        found: dict[str, list[Int64Array]] = {}
        for reply in replies:
            for name, ids_V in reply.result().items():
                found.setdefault(name, []).append(ids_V)
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _split(
        self, values: Mapping[str, tuple[Int64Array, NDArray[Any]]]
    ) -> list[dict[str, tuple[Int64Array, NDArray[Any]]]]:
        """For each shard, the (ids, values of ids) it holds, by table."""
        if self._num_shards == 1:
            # Without the copy that a selection makes: a transport that keeps arrays copies them itself.
            return [{name: pair for name, pair in values.items() if len(pair[0])}]
        parts: list[dict[str, tuple[Int64Array, NDArray[Any]]]] = [{} for _ in range(self._num_shards)]
        for name, (ids_M, values_M) in values.items():
            for shard, at in enumerate(self._shard_maps[name].split(ids_M)):
                if len(at):
                    parts[shard][name] = (ids_M[at], values_M.take(at, axis=0))
        return parts

    def _dim(self, table: str) -> int:
        if table not in self._dims:
            raise ValueError(f"there is no embedding table {table!r}; tables: {', '.join(self._dims)}")
        return self._dims[table]
