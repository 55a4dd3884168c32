"""All shards seen as one: split ids and gradients by shard, call every shard once, put rows together.

Axes: M distinct ids of one table, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.routing import ShardMap
from rayrec.embeddings.shard import EmbeddingShard, LookupReply, LookupRequest, SparseUpdate, UpdateTag

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

ReplyT_co = TypeVar("ReplyT_co", covariant=True)
ResultT = TypeVar("ResultT")


class Reply(Protocol[ReplyT_co]):
    """An answer that may still be on its way."""

    def result(self) -> ReplyT_co:
        """Wait for the answer; raises what the server raised."""
        ...


class ShardTransport(Protocol):
    """Reaches the shards. A call is on its way when it returns, the answer is in the reply."""

    def lookup(self, shard: int, request: LookupRequest, after_step: int | None) -> Reply[LookupReply]: ...

    def apply(self, shard: int, tag: UpdateTag, update: SparseUpdate) -> Reply[int]: ...


class LocalTransport:
    """Shards in this process, called at once: for evaluation, serving and tests."""

    def __init__(self, shards: Sequence[EmbeddingShard]) -> None:
        self._shards = shards

    def lookup(self, shard: int, request: LookupRequest, after_step: int | None) -> Reply[LookupReply]:
        return _answered(lambda: self._shards[shard].lookup(request, after_step))

    def apply(self, shard: int, tag: UpdateTag, update: SparseUpdate) -> Reply[int]:
        return _answered(lambda: self._shards[shard].apply(tag, update))


def _answered(call: Callable[[], ResultT]) -> Future[ResultT]:
    future: Future[ResultT] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


class PendingRows:
    """Rows that were requested from the shards."""

    def __init__(self, parts: list[tuple[Reply[LookupReply], dict[str, Int64Array]]]) -> None:
        self._parts = parts

    def write_to(self, rows: Mapping[str, Float32Array]) -> None:
        """Wait for every shard and write its rows to their places."""
        for reply, places in self._parts:
            for name, part_MD in reply.result().items():
                rows[name][places[name]] = part_MD


class ShardClient:
    """Reads and updates the tables wherever their shards are."""

    def __init__(self, tables: Sequence[TableConfig], shard_map: ShardMap, transport: ShardTransport) -> None:
        self._dims = {table.name: table.dim for table in tables}
        self._shard_map = shard_map
        self._transport = transport

    def read(self, ids: Mapping[str, Int64Array], after_step: int | None = None) -> dict[str, Float32Array]:
        """[M, D] rows of distinct ids by table, as they are now or once `after_step` is committed."""
        rows = self.empty_rows(ids)
        self.request(ids, {name: np.arange(len(ids_M)) for name, ids_M in ids.items()}, after_step).write_to(
            rows
        )
        return rows

    def empty_rows(self, ids: Mapping[str, Int64Array]) -> dict[str, Float32Array]:
        """Uninitialised [M, D] arrays by table, to be written to."""
        return {
            name: np.empty((len(ids_M), self._dim(name)), dtype=np.float32) for name, ids_M in ids.items()
        }

    def request(
        self, ids: Mapping[str, Int64Array], places: Mapping[str, Int64Array], after_step: int | None
    ) -> PendingRows:
        """Ask for the ids at the given places of each table's ids; a shard that holds none is not called."""
        requests: list[dict[str, Int64Array]] = [{} for _ in range(self._shard_map.num_shards)]
        places_by_shard: list[dict[str, Int64Array]] = [{} for _ in requests]
        for name, places_M in places.items():
            wanted_M = ids[name][places_M]
            for shard, at in enumerate(self._shard_map.split(wanted_M)):
                if len(at):
                    requests[shard][name] = wanted_M[at]
                    places_by_shard[shard][name] = places_M[at]
        return PendingRows(
            [
                (self._transport.lookup(shard, request, after_step), places_by_shard[shard])
                for shard, request in enumerate(requests)
                if request
            ]
        )

    def send(
        self,
        tag: UpdateTag,
        ids: Mapping[str, Int64Array],
        grads: Mapping[str, Float32Array],
    ) -> list[Reply[int]]:
        """Send one step's gradients, [M, D] by table; every shard is called, with nothing if need be.

        Raises:
            ValueError: gradients of an unknown table, or not one row of gradients per id.
        """
        updates: list[dict[str, tuple[Int64Array, Float32Array]]] = [
            {} for _ in range(self._shard_map.num_shards)
        ]
        for name, grads_MD in grads.items():
            if name not in ids:
                raise ValueError(
                    f"step {tag.step}: gradients of table {name!r}, which the batch does not read "
                    f"(it reads {', '.join(ids) or 'none'})"
                )
            expected = (len(ids[name]), self._dim(name))
            if grads_MD.shape != expected:
                raise ValueError(
                    f"step {tag.step}, table {name!r}: expected gradients of shape {expected}, "
                    f"one row per id, got {grads_MD.shape}"
                )
            for shard, at in enumerate(self._shard_map.split(ids[name])):
                if len(at):
                    updates[shard][name] = (ids[name][at], grads_MD.take(at, axis=0))
        return [self._transport.apply(shard, tag, update) for shard, update in enumerate(updates)]

    def _dim(self, table: str) -> int:
        if table not in self._dims:
            raise ValueError(f"there is no embedding table {table!r}; tables: {', '.join(self._dims)}")
        return self._dims[table]
