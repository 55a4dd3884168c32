"""Where a table's rows are: all of them in memory, or some of them on disk (`tiered_rows`).

Axes: M ids of one call or part, K of them that are found, W words of a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from rayrec.embeddings.base.layout import NEVER, STEP_WORD
from rayrec.embeddings.storage.index import MISSING, IdIndex
from rayrec.embeddings.storage.records import Records
from rayrec.platform.arrays import BoolArray, Int32Array, Int64Array

SCANNED_ROWS, BUCKET_PARTS = 65_536, 8
"""Rows that are looked at at once where their order does not matter; and the number of parts where they come
by whole buckets, each of which takes a pass over the index."""
_PART_ROWS = 65_536
"""Rows that are copied at once: a row group of a snapshot."""


class RowsPart(NamedTuple):
    """Some of the rows that there are."""

    ids_M: Int64Array
    records: Records
    rows_M: Int64Array
    """Of these records."""


class RowReading(Protocol):
    """Some records on their way, between `begin_reading` and `finish_reading` of a source."""

    def read(self) -> None:
        """Wait for the disk; needs no lock."""
        ...

    def close(self) -> None:
        """With the lock held; must follow."""
        ...


class Wanted(NamedTuple):
    """Which records of a snapshot are asked for."""

    ids_M: Int64Array
    """As the reading was begun with."""
    at_K: Int64Array
    """Ascending positions of those whose records are wanted."""
    after_step: int
    until_step: int

    @property
    def ids_K(self) -> Int64Array:
        return self.ids_M[self.at_K]

    def is_between(self, steps_K: Int32Array | Int64Array) -> BoolArray:
        """Whether records were changed last after the one step, and no later than in the other."""
        return (steps_K > self.after_step) & (steps_K <= self.until_step)


class ListedIds(Protocol):
    """Ids of a map, as a snapshot goes through them."""

    def __len__(self) -> int: ...

    @property
    def num_slots(self) -> int: ...

    def ids_from(self, first: int, num_slots: int, buckets: range) -> tuple[Int64Array, int]:
        """As `IdMap.ids_from`."""
        ...


class SnapshotSource(Protocol):
    """What a snapshot is made of: ids with a record of W words each, and the last step that changed it."""

    @property
    def ids(self) -> ListedIds: ...

    @property
    def num_words(self) -> int:
        """W."""
        ...

    def begin_reading(self, ids_M: Int64Array) -> RowReading | None:
        """Begin to read records from disk, of those that are there."""
        ...

    def finish_reading(self, reading: RowReading | None, wanted: Wanted) -> tuple[Int64Array, Int32Array]:
        """Those of the records wanted that there are; moves nothing.

        Returns:
            ([K] ascending positions of their ids, [K, W] records).
        """
        ...

    def steps(self, records_KW: Int32Array) -> Int32Array:
        """[K] last step that changed each record."""
        ...


class RowStorage(SnapshotSource, Protocol):
    """Rows by id. Not thread-safe.

    Row numbers are those of `records`; the numbers that `find` and `add` return hold until the next
    `find`, `reserve` or `remove`, since a row may be moved to disk then.
    """

    stay: bool
    """Whether row numbers hold until `remove`: then they need not be found again."""

    @property
    def records(self) -> Records: ...

    def __len__(self) -> int:
        """Ids that have rows."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that were in use at once, and of what finds them."""
        ...

    def bytes_after(self, num_more: int) -> int:
        """Most that `num_bytes` is, and takes on the way, when so many more ids have rows."""
        ...

    def pieces(self, num_ids: int) -> Iterator[slice]:
        """Parts of so many ids whose rows can be in memory at once; call `find` on each of them."""
        ...

    def find(self, ids_M: Int64Array) -> Int64Array:
        """[M] row of each id, -1 where it has none."""
        ...

    def add(self, ids_M: Int64Array) -> Int64Array:
        """[M] rows for distinct ids that have none; what the records hold is the caller's to write."""
        ...

    def present(self, ids_M: Int64Array) -> BoolArray:
        """[M] whether each id has a row."""
        ...

    def remove(self, ids_M: Int64Array) -> None:
        """Give up the rows of these distinct ids; those that have none are left out."""
        ...

    def has_room(self, num_new: int) -> bool:
        """Whether `reserve` would move nothing for so many new rows; then they need not be counted first."""
        ...

    def reserve(self, num_new: int, num_changed: int) -> None:
        """Make room for so many new rows among so many that are found or added.

        Raises:
            MemoryError, OSError: there is none, in memory or on disk; nothing has changed.
        """
        ...

    def look(self, ids_M: Int64Array) -> Iterator[RowsPart]:
        """Rows of those of these ids that have one, as `parts`, in no order."""
        ...

    def parts(self, ordered: bool) -> Iterator[RowsPart]:
        """All rows in parts, as large as memory allows; moves nothing.

        A part holds until the next one. Rows may be found in between, but not added or removed.

        Args:
            ordered: by virtual bucket, then by id as uint64. Otherwise every bucket is whole in a part.
        """
        ...


class MemoryRows:
    """A `RowStorage` with all rows in memory."""

    stay = True

    def __init__(self, words: int, num_threads: int = 1) -> None:
        self.records = Records(words)
        self._words = words
        self._num_threads = num_threads
        self._index = IdIndex()

    @property
    def ids(self) -> IdIndex:
        return self._index

    @property
    def num_words(self) -> int:
        return self._words

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return 4 * self._words * self._index.num_rows + self._index.num_bytes

    def bytes_after(self, num_more: int) -> int:
        rows = self._index.rows_after(num_more) - self._index.num_rows
        return self.num_bytes + 4 * self._words * rows + self._index.growth_bytes(num_more)

    def pieces(self, num_ids: int) -> Iterator[slice]:
        yield slice(0, num_ids)

    def find(self, ids_M: Int64Array) -> Int64Array:
        return self._index.find(ids_M, self._num_threads)

    def add(self, ids_M: Int64Array) -> Int64Array:
        self.records.reserve(self._index.rows_after(len(ids_M)))
        return self._index.find_or_add(ids_M)

    def add_new(self, ids_M: Int64Array) -> Int64Array:
        """[M] rows of those of these distinct ids that have none, -1 for the others.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        self.reserve(len(ids_M), 0)
        return self._index.add_new(ids_M)

    def present(self, ids_M: Int64Array) -> BoolArray:
        return self.find(ids_M) != MISSING

    def remove(self, ids_M: Int64Array) -> None:
        self._index.remove(ids_M)

    def remove_older(self, ids_K: Int64Array, last_step: int) -> tuple[Int64Array, Int64Array, Int32Array]:
        """Give up rows, among those of distinct ids, that no step after `last_step` has changed.

        Returns:
            (ids that had them, [L] ids that have rows still, [L] steps of their last change).
        """
        return self._index.remove_older(ids_K, self.records.addresses, self._words + STEP_WORD, last_step)

    def has_room(self, num_new: int) -> bool:
        # Blocks of records that no row reaches take no memory.
        return not self._index.growth_bytes(num_new)

    def reserve(self, num_new: int, num_changed: int) -> None:
        self.records.reserve(self._index.rows_after(num_new))
        self._index.reserve(num_new)

    def look(self, ids_M: Int64Array) -> Iterator[RowsPart]:
        rows_M = self.find(ids_M)
        has_row_M = rows_M != MISSING
        yield RowsPart(ids_M[has_row_M], self.records, rows_M[has_row_M])

    def parts(self, ordered: bool) -> Iterator[RowsPart]:
        if not ordered:
            # Each part takes a pass over all slots: few of them, however many rows there are.
            for ids_K, _ in self._index.by_bucket(max(SCANNED_ROWS, len(self) // BUCKET_PARTS)):
                yield self._part(ids_K)
            return
        ids_M = np.empty(0, dtype=np.int64)
        for ids_K, _ in self._index.by_bucket(_PART_ROWS):
            ids_M = np.concatenate((ids_M, ids_K))
            while len(ids_M) > _PART_ROWS:
                yield self._part(ids_M[:_PART_ROWS])
                ids_M = ids_M[_PART_ROWS:]
        yield self._part(ids_M)

    def begin_reading(self, ids_M: Int64Array) -> None:
        return None

    def finish_reading(self, reading: RowReading | None, wanted: Wanted) -> tuple[Int64Array, Int32Array]:
        rows_K = self._index.find(wanted.ids_K)
        is_found_K = rows_K != MISSING
        at_K, rows_K = wanted.at_K[is_found_K], rows_K[is_found_K]
        if wanted.after_step >= NEVER:  # otherwise it is nearly all of them
            is_between_K = wanted.is_between(self.records.read(rows_K, self._words + STEP_WORD, 1)[:, 0])
            at_K, rows_K = at_K[is_between_K], rows_K[is_between_K]
        records_KW = self.records.read(rows_K, 0, self._words)
        is_in_time_K = wanted.is_between(records_KW[:, STEP_WORD])
        if is_in_time_K.all():
            return at_K, records_KW
        return at_K[is_in_time_K], records_KW[is_in_time_K]

    def steps(self, records_KW: Int32Array) -> Int32Array:
        return records_KW[:, STEP_WORD]

    def _part(self, ids_M: Int64Array) -> RowsPart:
        return RowsPart(ids_M, self.records, self.find(ids_M))
