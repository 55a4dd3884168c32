"""Which ids a space has, how often each was seen, and whether two keys share one.

Axis: D distinct ids.
"""

from __future__ import annotations

import numpy as np

from rayrec.platform.arrays import Int64Array

_PENDING = 1 << 20
"""Ids that are collected before they are merged: 24 bytes each."""


class IdCollisionError(Exception):
    """Two keys of one space have the same id."""

    def __init__(self, id_: int) -> None:
        super().__init__(id_)
        self.id = id_


class IdTally:
    """Distinct ids and their counts: 24 bytes an id, twice that while they are merged."""

    def __init__(self) -> None:
        self._ids_D = np.zeros(0, dtype=np.int64)
        self._checks_D = np.zeros(0, dtype=np.int64)
        self._counts_D = np.zeros(0, dtype=np.int64)
        self._pending: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        self._num_pending = 0

    def add(self, ids_D: Int64Array, checks_D: Int64Array, counts_D: Int64Array) -> None:
        """Count ids.

        Args:
            checks_D: a second hash of the key of each id.

        Raises:
            IdCollisionError: an id has two of them. It may come with a later call.
        """
        self._pending.append((ids_D, checks_D, counts_D))
        self._num_pending += len(ids_D)
        # As many as there are already: every id is merged a logarithmic number of times.
        if self._num_pending >= max(_PENDING, len(self._ids_D)):
            self._merge()

    @property
    def ids_D(self) -> Int64Array:
        """Ascending."""
        self._merge()
        return self._ids_D

    @property
    def checks_D(self) -> Int64Array:
        """A second hash of the key of each."""
        self._merge()
        return self._checks_D

    @property
    def counts_D(self) -> Int64Array:
        """How often each was seen."""
        self._merge()
        return self._counts_D

    def _merge(self) -> None:
        if not self._pending:
            return
        parts = [(self._ids_D, self._checks_D, self._counts_D), *self._pending]
        ids, checks, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(ids, kind="stable")
        ids, checks, counts = ids[order], checks[order], counts[order]
        again = ids[1:] == ids[:-1]
        wrong = again & (checks[1:] != checks[:-1])
        if wrong.any():
            raise IdCollisionError(int(ids[1:][wrong][0]))
        firsts = np.flatnonzero(np.concatenate([[True], ~again])) if len(ids) else np.zeros(0, np.int64)
        self._ids_D, self._checks_D = ids[firsts], checks[firsts]
        self._counts_D = np.add.reduceat(counts, firsts) if len(firsts) else counts
        self._pending, self._num_pending = [], 0
