"""Lookups on a thread of their own, beside dense compute.

Whatever a mode does, it does here in the same order, one call after the other; so the bits are the same.
The trainer's thread hands calls over and waits for rows only:

    trainer's thread   rows t │ dense t ........................ │ update t │ rows t + 1 │ dense t + 1
    this thread        rows t │ prefetch t + 1   receive t + 1   │ apply, rows t + 1 ─► ┘  send ...

Python's lock is no hindrance: kernels, copies and waiting for servers are done without it. The thread has a
lower priority than the trainer's: its work has the time that dense compute takes, which should not have to
share a core with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from rayrec.embeddings.base.threads import give_way
from rayrec.embeddings.lookup.cache.cached_records import Rows
from rayrec.embeddings.lookup.lookups import LookupMode, Lookups, LookupStats, OnRows, ignore_rows

RowsByTable = dict[str, Rows]


class ThreadedLookups:
    """A lookup mode, run in the background. An error of any call is raised by the calls that follow it."""

    def __init__(self, mode: LookupMode, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mode = mode
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "lookups", initializer=give_way)
        self._rows: dict[int, Future[RowsByTable]] = {}
        """Of steps whose rows have not been taken."""
        self._put_off: list[tuple[int, Lookups]] = []
        """Announced batches that the mode has not been told of."""
        self._error: BaseException | None = None
        self._rows_wait_s = self._update_wait_s = 0.0
        self.on_rows: OnRows = ignore_rows
        mode.on_rows = self._deliver

    @property
    def stats(self) -> LookupStats:
        """What the trainer's thread waited for, not the time that passed beside its work."""
        return replace(self._mode.stats, rows_wait_s=self._rows_wait_s, update_wait_s=self._update_wait_s)

    def prefetch(self, step: int, lookups: Lookups) -> None:
        self._rows[step] = Future()  # before the thread hears of the step: it looks here for whom to tell
        if step - 1 in self._rows:
            # Behind the rows of that batch, which dense compute is waiting for, or will be.
            self._put_off.append((step, lookups))
        else:
            # Not received: it may take the update of a batch before that nobody has announced.
            self._submit(partial(self._mode.prefetch, step, lookups))

    def receive(self, step: int) -> None:
        """Nothing: that is done already, beside other work."""

    def rows(self, step: int, lookups: Lookups) -> RowsByTable:
        rows = self._rows.setdefault(step, Future())

        def ask() -> None:
            found = self._mode.rows(step, lookups)
            if not rows.done():
                rows.set_result(found)

        self._submit(ask)
        self._prefetch_put_off()
        started = self._clock()
        try:
            found = rows.result()  # also if nothing is read: no step overtakes another
            return {name: found[name] for name in lookups}
        finally:
            self._rows_wait_s += self._clock() - started
            del self._rows[step]

    def update(self, step: int, lookups: Lookups, grads: Mapping[str, Rows]) -> None:
        self._raise_error()
        self._submit(lambda: self._mode.update(step, lookups, grads))

    def drain(self) -> None:
        started = self._clock()
        self._submit(self._mode.drain).result()
        self._update_wait_s += self._clock() - started
        self._raise_error()

    def close(self) -> None:
        """End the thread, once the calls so far are done."""
        self._thread.shutdown()

    def _prefetch_put_off(self) -> None:
        announced, self._put_off = self._put_off, []
        for step, lookups in announced:
            self._submit(partial(self._mode.prefetch, step, lookups))
            self._submit(partial(self._mode.receive, step))

    def _deliver(self, step: int, rows: RowsByTable) -> None:
        self._rows[step].set_result(rows)

    def _submit(self, call: Callable[[], None]) -> Future[None]:
        return self._thread.submit(self._guarded, call)

    def _guarded(self, call: Callable[[], None]) -> None:
        """After an error nothing more is done: a later call would go on from half of an earlier one."""
        if self._error is None:
            try:
                call()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            for rows in list(self._rows.values()):
                if not rows.done():
                    rows.set_exception(self._error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
