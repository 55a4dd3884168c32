"""Rows of files as intervals.

Every batch brings along where its rows were read, and shuffled rows are as many intervals. So they are
arrays: as objects, they took the processes that a batch goes through longer than its rows did.

Axes: K intervals, B rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self, overload

import numpy as np

from rayrec.platform.arrays import Int64Array

_NONE = np.empty(0, dtype=np.int64)


class Interval(NamedTuple):
    """Rows `start` to `stop` (exclusive) of one file, as numbered in that file."""

    file: str
    start: int
    stop: int


class Intervals(Sequence[Interval]):
    """Sorted by file and row; those that touch each other are one."""

    def __init__(
        self,
        names: Sequence[str] = (),
        file_K: Int64Array = _NONE,
        starts_K: Int64Array = _NONE,
        stops_K: Int64Array = _NONE,
    ) -> None:
        """
        Args:
            names: of files; several may be one file.
            file_K: indices in `names`.

        Raises:
            ValueError: no row is in one of the intervals.
        """
        if not len(starts_K):  # as in most batches what is unreadable: nothing to put in order
            self._files: tuple[str, ...] = ()
            self._file_K, self._starts_K, self._stops_K = _NONE, _NONE, _NONE
            return
        sorted_names = sorted(set(names))
        indices = {name: index for index, name in enumerate(sorted_names)}
        file_K = np.array([indices[name] for name in names], dtype=np.int64)[file_K]
        if not (right_K := (starts_K >= 0) & (starts_K < stops_K)).all():
            wrong = int(np.argmin(right_K))
            name = sorted_names[file_K[wrong]]
            raise ValueError(f"{name}: rows {starts_K[wrong]} to {stops_K[wrong]} are no interval")
        order_K = np.lexsort((starts_K, file_K))
        file_K, starts_K, stops_K = file_K[order_K], starts_K[order_K], stops_K[order_K]
        apart = (file_K[:-1] != file_K[1:]) | (stops_K[:-1] != starts_K[1:])
        first_K, last_K = np.append(True, apart), np.append(apart, True)
        file_K, starts_K, stops_K = file_K[first_K], starts_K[first_K], stops_K[last_K]
        used, self._file_K = np.unique(file_K, return_inverse=True)
        self._files = tuple(sorted_names[index] for index in used.tolist())
        self._starts_K, self._stops_K = starts_K, stops_K

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Self:
        """The intervals in order, those that touch joined.

        Raises:
            ValueError: no row is in one of them.
        """
        if isinstance(intervals, cls):
            return intervals
        intervals = list(intervals)
        return cls(
            [one.file for one in intervals],
            np.arange(len(intervals)),
            np.array([one.start for one in intervals], dtype=np.int64),
            np.array([one.stop for one in intervals], dtype=np.int64),
        )

    @classmethod
    def of_rows(cls, names: Sequence[str], file_B: Int64Array, row_B: Int64Array) -> Self:
        """Of distinct rows; `file_B` are indices in `names`."""
        return cls(names, file_B, row_B, row_B + 1)

    @classmethod
    def joined(cls, parts: Iterable[Intervals]) -> Self:
        """Of parts that share no row."""
        parts = list(parts)
        before = np.cumsum([0, *(len(part._files) for part in parts)]).tolist()
        return cls(
            [name for part in parts for name in part._files],
            np.concatenate([_NONE, *(part._file_K + at for part, at in zip(parts, before, strict=False))]),
            np.concatenate([_NONE, *(part._starts_K for part in parts)]),
            np.concatenate([_NONE, *(part._stops_K for part in parts)]),
        )

    @property
    def num_rows(self) -> int:
        return int((self._stops_K - self._starts_K).sum())

    def by_file(self) -> Iterator[tuple[str, Int64Array, Int64Array]]:
        """Starts and stops of each file."""
        bounds = np.searchsorted(self._file_K, np.arange(len(self._files) + 1)).tolist()
        for name, low, high in zip(self._files, bounds, bounds[1:], strict=False):
            yield name, self._starts_K[low:high], self._stops_K[low:high]

    def __len__(self) -> int:
        return len(self._starts_K)

    @overload
    def __getitem__(self, index: int) -> Interval: ...
    @overload
    def __getitem__(self, index: slice) -> list[Interval]: ...
    def __getitem__(self, index: int | slice) -> Interval | list[Interval]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        return Interval(
            self._files[self._file_K[index]], int(self._starts_K[index]), int(self._stops_K[index])
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def __repr__(self) -> str:
        return f"Intervals.of({list(self)})"
