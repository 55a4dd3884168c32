"""Rows on disk are read into memory before the calls that need them, and while other calls go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.platform.arrays import Int64Array

logger = logging.getLogger(__name__)


_MAX_WAITING = 8
"""Prefetches that wait; more would be of steps too far ahead for memory to keep their rows."""


class DiskPrefetch:
    """Reads rows of one shard's tables from disk; thread-safe.

    Args:
        shard: its number, for messages.
        table: gives a table by its name.
        changed: the tables' lock (a `StepLock`); held to move rows about, not while the disk is read.
    """

    def __init__(
        self,
        shard: int,
        table: Callable[[str], EmbeddingTable],
        changed: AbstractContextManager[object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._shard = shard
        self._table = table
        self._changed = changed
        self._clock = clock
        self._turns = _Turns()  # taken before `changed`
        self._thread: ThreadPoolExecutor | None = None
        self._num_waiting = 0
        self.busy_s = 0.0
        """Time spent bringing rows up."""

    def bring_up(self, request: Mapping[str, Int64Array], ahead: bool = False) -> None:
        """Move rows from disk to memory while other calls go on.

        Args:
            request: ids by table.
            ahead: nobody waits for these rows yet, so that they come behind those of lookups.
        """
        for name, ids_M in request.items():
            if self._table(name).config.disk is None:
                continue
            with self._changed:
                table = self._table(name)
                parts = table.fetchable(ids_M)
            for ids_K in parts:
                # One at a time: the disk is as fast, and copies take memory.
                with self._turns.taken(first=not ahead):
                    started = self._clock()
                    with self._changed:
                        fetch = table.begin_fetch(ids_K)  # of those that nobody has brought up meanwhile
                    try:
                        fetch.read()
                    finally:
                        with self._changed:
                            table.finish_fetch(fetch)
                    self.busy_s += self._clock() - started

    def prefetch(self, request: Mapping[str, Int64Array]) -> None:
        """Read these rows in the background; dropped if several other prefetches wait already."""
        with self._changed:
            if self._num_waiting >= _MAX_WAITING:
                return
            self._num_waiting += 1
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk-prefetch")
        # A transport may use the memory of its arrays again as soon as this call is over.
        self._thread.submit(self._run, {name: ids_M.copy() for name, ids_M in request.items()})

    def _run(self, request: Mapping[str, Int64Array]) -> None:
        try:
            self.bring_up(request, ahead=True)
        except Exception as error:
            # The lookup will bring the rows up itself, or raise.
            logger.warning("shard %d could not read rows ahead: %s", self._shard, error)
        finally:
            with self._changed:
                self._num_waiting -= 1


class _Turns:
    """One caller at a time; those that others wait for come before the rest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self.num_first = 0
        """Callers that wait to be the next."""

    @contextmanager
    def taken(self, first: bool) -> Iterator[None]:
        with self._changed:
            self.num_first += first
            try:
                self._changed.wait_for(lambda: not self._is_taken and (first or not self.num_first))
                self._is_taken = True
            finally:
                self.num_first -= first
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
