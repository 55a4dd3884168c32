"""The lookup and update stages of one of several trainers that read ahead: `exact_prefetch` without a cache.

What an only trainer can do better is in `shared_row_write_back`.

    prefetch t + 1   ids that batch t does not touch: they need step t - 1 only
    rows t           what was asked for earlier, most of it here already
    dense t          the servers work on what prefetch asked for
    update t         the overlap first: gradients of the rows that both batches touch, for which the servers
                     return those rows of t + 1; then everything else, beside dense t + 1

The bits are those of `sync`: nothing is read before the last step that changes it. Tables that may evict
any row at step t, and those with rows on disk, say what a row is only when the whole step is committed; with
one of them the update goes whole, and behind it the request for the overlap.

Axes: M distinct ids of one table, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rayrec.embeddings.lookup.lookups import (
    Lookups,
    ids_by_table,
)
from rayrec.embeddings.lookup.overlap import NO_POSITIONS, Overlap, all_but
from rayrec.embeddings.lookup.prefetching import PrefetchedBatch, PrefetchingLookups, everything, refuse_rows
from rayrec.embeddings.shard.contributions import Part
from rayrec.embeddings.transport.client import PendingRows, SplitIds
from rayrec.platform.arrays import Float32Array, Int64Array


@dataclass
class _OverlappingBatch(PrefetchedBatch):
    lookups: Lookups
    requests: list[PendingRows] = field(default_factory=list)
    overlap: dict[str, Int64Array] = field(default_factory=dict)
    """Positions, by table, of the ids that are asked for with or after the update of the step before."""
    num_requested: dict[str, int] = field(default_factory=dict)
    """Positions, by table, that `requests` will fill; none is asked for twice."""
    rows: dict[str, Float32Array] | None = None
    """What has arrived, at its position."""
    parts: _SplitUpdate | None = None
    """How its update goes to the servers, if not whole."""


@dataclass(frozen=True)
class _SplitUpdate:
    """An update whose rows the next batch reads in part, by shard."""

    head: SplitIds
    rest: SplitIds
    wanted: SplitIds
    """Of the next batch's ids, its overlap."""


class ExactPrefetch(PrefetchingLookups[_OverlappingBatch]):
    """Reads the next batch ahead, except what the batch before it may still change.

    All trainers call the methods in the same order: if t + 1 is prefetched, update(t) waits for the heads of
    all of them. Gradients that are not finite raise in the `update` that has them.
    """

    def prefetch(self, step: int, lookups: Lookups) -> None:
        batch = _OverlappingBatch(step, lookups)
        before = self._batches.get(step - 1)
        parts = None
        if before is None:
            # Updated already, or never prefetched: then any id may depend on it.
            self._request(batch, everything(ids_by_table(lookups)), after_step=step - 1)
        else:
            shared = {
                name: Overlap.between(before.lookups[name], ids)
                for name, ids in lookups.items()
                if name in before.lookups
            }
            early = {}
            for name, ids in lookups.items():
                num_ids = len(ids.ids_M)
                if self._tables[name].evicts_at(step - 1):
                    # Any row may be given up when that step commits, also one that it does not touch.
                    batch.overlap[name] = np.arange(num_ids)
                else:
                    batch.overlap[name] = shared[name].of_next if name in shared else NO_POSITIONS
                early[name] = all_but(num_ids, batch.overlap[name])
            self._request(batch, early, after_step=step - 2)
            if self._takes_heads(step - 1):
                parts = self._parts(before.lookups, shared, batch)
        self._batches[step] = batch  # last: a batch whose requests could not be sent may be prefetched again
        if before is not None:
            before.parts = parts

    def rows(self, step: int, lookups: Lookups) -> dict[str, Float32Array]:
        if step not in self._batches:
            self.prefetch(step, lookups)
        batch = self._batches[step]
        self._request_overlap(batch)
        self._receive_all(batch)
        rows, batch.rows = batch.rows, None
        batch.num_requested.clear()
        assert rows is not None
        return rows

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Float32Array]) -> None:
        # The servers keep contributions one step ahead of the slowest trainer, no more; to have sent
        # this one a step after an update that has not arrived would be two.
        self._acknowledge()
        batch, following = self._batches.get(step), self._batches.get(step + 1)
        ids = ids_by_table(lookups if batch is None else batch.lookups)
        self._client.check_shapes(step, ids, grads)
        parts = None if batch is None or following is None else batch.parts
        if parts is not None:
            self._client.check_finite(step, ids, grads)
        self._batches.pop(step, None)
        if parts is None or following is None:
            self._unacknowledged = self._client.send(self._link.tag(step), ids, grads)
            if following is not None:
                self._request_overlap(following)
            return
        replies = self._client.send_head(self._link.tag(step), grads, parts.head, parts.rest, parts.wanted)
        self._expect(following, replies, following.overlap, is_late=True)
        following.overlap = {}
        self._receive_all(following)
        assert following.rows is not None
        self.on_rows(step + 1, following.rows)
        self._unacknowledged = self._client.send_split(
            self._link.tag(step)._replace(part=Part.REST), grads, parts.rest
        )

    def _takes_heads(self, step: int) -> bool:
        return not any(table.disk is not None or table.evicts_at(step) for table in self._tables.values())

    def _parts(
        self, before: Lookups, shared: Mapping[str, Overlap], batch: _OverlappingBatch
    ) -> _SplitUpdate:
        ids = ids_by_table(before)
        head = {name: shared[name].of_this if name in shared else NO_POSITIONS for name in before}
        rest = {name: all_but(len(ids[name]), positions) for name, positions in head.items()}
        return _SplitUpdate(
            head=self._client.split_ids(ids, head),
            rest=self._client.split_ids(ids, rest),
            wanted=self._client.split_ids(ids_by_table(batch.lookups), batch.overlap),
        )

    def _receive_all(self, batch: _OverlappingBatch) -> None:
        for name, ids in batch.lookups.items():
            refuse_rows(batch.step, name, batch.num_requested.get(name, 0), len(ids.ids_M))
        self._receive(batch)

    def _receive(self, batch: _OverlappingBatch) -> None:
        if batch.rows is None:
            batch.rows = self._client.empty_rows(ids_by_table(batch.lookups))
        started = self._clock()
        for pending in batch.requests:
            pending.write_to(batch.rows)
        self.stats.rows_wait_s += self._clock() - started
        batch.requests.clear()

    def _request_overlap(self, batch: _OverlappingBatch) -> None:
        if batch.overlap:
            self._request(batch, batch.overlap, after_step=batch.step - 1)
            batch.overlap = {}

    def _request(
        self, batch: _OverlappingBatch, positions: Mapping[str, Int64Array], after_step: int
    ) -> None:
        ids, tag = ids_by_table(batch.lookups), self._link.lookup_tag(batch.step)
        replies = self._client.request(ids, positions, after_step, tag)
        self._expect(batch, replies, positions, is_late=after_step == batch.step - 1)

    def _expect(
        self,
        batch: _OverlappingBatch,
        replies: PendingRows,
        positions: Mapping[str, Int64Array],
        is_late: bool,
    ) -> None:
        """Rows of these positions are in flight."""
        batch.requests.append(replies)
        for name, positions_M in positions.items():
            batch.num_requested[name] = batch.num_requested.get(name, 0) + len(positions_M)
        self._count_requested(sum(map(len, positions.values())), is_late)
