"""Lookups that do not wait for the last updates: the mode that gives up exactness for speed.

    prefetch t + 1   a permit is taken, and every row is asked for, as it is by then
    update t         sent; its acknowledgement gives the permit of t back

There are k + 1 permits, so the rows of a step may lack the updates of at most the k steps before it.
Source: stale synchronous parallel, Ho et al., NIPS 2013; here the bound is per batch and counts steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from rayrec.embeddings.lookup.lookups import (
    Lookups,
    LookupStats,
    OnRows,
    TrainerLink,
    ids_by_table,
    ignore_rows,
)
from rayrec.embeddings.transport.client import PendingRows
from rayrec.embeddings.transport.protocol import Reply
from rayrec.platform.arrays import Float32Array, Int64Array


class BoundedStale:
    """Called as prefetch(t + 1), rows(t), update(t); without the prefetch rows are asked for in their turn.

    With `max_staleness` 0, a prefetch whose permit is still in use is put off to its `rows`, which makes
    it the mode `sync`.
    """

    def __init__(self, link: TrainerLink, *, max_staleness: int) -> None:
        self.stats = LookupStats()
        self.on_rows: OnRows = ignore_rows
        self._link = link
        self._client = link.client()
        self._clock = link.clock
        self._max_staleness = max_staleness
        self._put_off: deque[tuple[int, Lookups]] = deque()
        """Announced batches that found no permit."""
        self._asked: dict[int, tuple[dict[str, Int64Array], PendingRows]] = {}
        self._taken: dict[int, dict[str, Float32Array]] = {}
        """Rows that were received and that nobody has asked for yet."""
        self._unacknowledged: deque[list[Reply[int]]] = deque()
        self._num_in_training = 0
        """Batches whose rows were asked for and whose update is not sent."""

    def prefetch(self, step: int, lookups: Lookups) -> None:
        # A batch never overtakes another one, or the other would find its permit taken.
        self._put_off.append((step, lookups))
        while self._put_off and self._num_in_training <= self._max_staleness:
            self._ask(*self._put_off.popleft())

    def receive(self, step: int) -> None:
        if step in self._asked:  # otherwise it found no permit
            self._take_rows(step)

    def rows(self, step: int, lookups: Lookups) -> dict[str, Float32Array]:
        if step not in self._asked and step not in self._taken and not self._put_off:
            self._put_off.append((step, lookups))
        while step not in self._asked and step not in self._taken:
            self._ask(*self._put_off.popleft())
        if step not in self._taken:
            self._take_rows(step)
        return self._taken.pop(step)

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Float32Array]) -> None:
        self._unacknowledged.append(self._client.send(self._link.tag(step), ids_by_table(lookups), grads))
        self._num_in_training -= 1

    def drain(self) -> None:
        self._wait_until_at_most(0)

    def _ask(self, step: int, lookups: Lookups) -> None:
        # A permit: this batch, those in training and the updates on their way are k + 1 at most.
        self._wait_until_at_most(self._max_staleness - self._num_in_training)
        staleness = self._num_in_training + len(self._unacknowledged)
        ids = ids_by_table(lookups)
        everything = {name: np.arange(len(ids_M)) for name, ids_M in ids.items()}
        # What is acknowledged here is committed only when the other trainers have sent theirs.
        after_step = step - 1 - self._max_staleness
        tag = self._link.lookup_tag(step)
        self._asked[step] = ids, self._client.request(ids, everything, after_step, tag)
        self._num_in_training += 1
        self.stats.max_staleness = max(self.stats.max_staleness, staleness)
        num_ids = sum(map(len, ids.values()))
        if staleness:
            self.stats.num_early += num_ids
        else:
            self.stats.num_late += num_ids

    def _take_rows(self, step: int) -> None:
        ids, pending = self._asked.pop(step)
        rows = self._client.empty_rows(ids)
        started = self._clock()
        pending.write_to(rows)
        self.stats.rows_wait_s += self._clock() - started
        self._taken[step] = rows
        self.on_rows(step, rows)

    def _wait_until_at_most(self, num_updates: int) -> None:
        started = self._clock()
        while len(self._unacknowledged) > num_updates:
            for reply in self._unacknowledged.popleft():
                reply.result()
        self.stats.update_wait_s += self._clock() - started
