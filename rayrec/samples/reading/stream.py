"""Batches for a script of one process: read, shuffled, prepared by a row program, as arrays.

    windows, decoded ahead ─► slices ─► row program, in threads ─► arrays, in the order of steps

Work is begun when a batch is taken: at most `queue_depth` batches and `windows_ahead` windows are on their
way, however long the consumer keeps the last one. For actors there are `SampleReader` and feature workers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.platform.errors import InputError
from rayrec.platform.processors import num_processors
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.reading.read_plan import BatchPlan, RowPlan, Window
from rayrec.samples.reading.reader import ShuffledWindow, WindowDecoder

RowProgram = Callable[[int, RowBatch], RowBatch]
"""(step, rows as they were read) -> rows with the columns that are wanted; called in several threads."""


class Jagged(NamedTuple):
    """Lists of different lengths: row b is values_N[offsets_B1[b]:offsets_B1[b + 1]]."""

    values_N: NDArray[Any]
    offsets_B1: NDArray[Any]


Arrays = dict[str, NDArray[Any] | Jagged]


@dataclass(frozen=True)
class StreamBatch:
    """One step's rows."""

    step: int
    epoch: int
    columns: Arrays
    """By name; `torch.from_numpy` takes them without a copy."""
    num_rows: int


class SampleStream:
    """Steps of a plan, in order. Resumed by giving the first step that is still to come."""

    def __init__(
        self,
        plan: RowPlan,
        first_step: int = 0,
        stop_step: int | None = None,
        program: RowProgram | None = None,
        threads: int | None = None,
        prepare_threads: int = 1,
        queue_depth: int = 4,
        windows_ahead: int = 2,
    ) -> None:
        """
        Args:
            stop_step: exclusive; None goes on as long as the plan has steps.
            program: what is done with the rows of a step; None leaves them as they are.
            threads: that decode, each a window of its own; None: one per core, but no more than windows
                ahead.
            prepare_threads: that run the program.
            queue_depth: batches that are prepared before they are asked for.
            windows_ahead: windows that are decoded before they are needed.
        """
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, got {queue_depth}: no batch would be begun")
        threads = threads or max(min(num_processors(), windows_ahead), 1)
        self._plan = plan
        self._stop_step = stop_step
        self._program = program
        self._queue_depth = queue_depth
        self._windows_ahead = windows_ahead
        self._decoder = WindowDecoder(plan.spec, windows_at_once=threads)
        self._preparing = ThreadPoolExecutor(prepare_threads, "prepare")
        self._held: OrderedDict[tuple[int, int], Future[ShuffledWindow]] = OrderedDict()
        self._begun: deque[Future[StreamBatch]] = deque()
        self._next_step = first_step

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield the batches, one per step.

        Raises:
            InputError: a file is missing, has changed or cannot be decoded; a column cannot be an array.
        """
        while True:
            self._fill()
            if not self._begun:
                return
            yield self._begun.popleft().result()

    def close(self) -> None:
        """Begin nothing any more; what is under way ends by itself."""
        self._decoder.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> SampleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        while len(self._begun) < self._queue_depth:
            if self._stop_step is not None and self._next_step >= self._stop_step:
                return
            batch = self._plan.batch(self._next_step)
            if batch is None:
                return
            windows = [self._window(part.window) for part in batch.parts]
            self._decode_ahead(batch.parts[-1].window)
            self._begun.append(self._preparing.submit(self._prepare, batch, windows))
            self._next_step += 1

    def _decode_ahead(self, window: Window) -> None:
        for _ in range(self._windows_ahead):
            following = self._plan.window_after(window, 1)
            if following is None:
                return
            self._window(following)
            window = following

    def _window(self, window: Window) -> Future[ShuffledWindow]:
        key = (window.epoch, window.number)
        if key not in self._held:
            # The oldest is not needed any more: steps go on, and those begun hold their own windows.
            while len(self._held) > self._windows_ahead:
                self._held.popitem(last=False)
            self._held[key] = self._decoder.submit(window)
        return self._held[key]

    def _prepare(self, batch: BatchPlan, windows: list[Future[ShuffledWindow]]) -> StreamBatch:
        rows = RowBatch.concatenate(
            [
                window.result().slice(part.start, part.stop)
                for part, window in zip(batch.parts, windows, strict=True)
            ]
        )
        if self._program is not None:
            rows = self._program(batch.step, rows)
        return StreamBatch(batch.step, batch.epoch, arrays(rows.rows), rows.num_rows)


def arrays(rows: pa.RecordBatch) -> Arrays:
    """Columns of numbers and of lists of numbers as arrays, without a copy of what they hold.

    Raises:
        InputError: a column is of another type, or has nulls where its type knows none.
    """
    return {name: _array(name, column) for name, column in zip(rows.schema.names, rows.columns, strict=True)}


class _Layout(NamedTuple):
    """How the values of a type lie in memory."""

    is_list: bool
    """Then `dtype` is that of the offsets."""
    dtype: np.dtype[Any] | None
    """None if there are no arrays of this type as it is."""
    nulls: Literal["copied", "refused"]


@lru_cache(maxsize=256)
def _layout(kind: pa.DataType) -> _Layout:
    # Asked of every column of every batch, and each of these questions takes a microsecond.
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _Layout(True, np.dtype(np.int32 if pa.types.is_list(kind) else np.int64), "refused")
    if pa.types.is_temporal(kind):
        return _Layout(False, np.dtype(np.int64 if kind.bit_width == 64 else np.int32), "refused")
    if pa.types.is_integer(kind):
        return _Layout(False, np.dtype(kind.to_pandas_dtype()), "refused")
    if pa.types.is_floating(kind):
        return _Layout(False, np.dtype(kind.to_pandas_dtype()), "copied")
    return _Layout(False, None, "copied" if pa.types.is_boolean(kind) else "refused")


def _array(name: str, column: pa.Array) -> NDArray[Any] | Jagged:
    layout = _layout(column.type)
    if not layout.is_list:
        return _numbers(name, column, layout)
    if column.null_count:
        raise InputError(f"column {name!r}: lists of a batch are null; fill them, or filter such rows out")
    offsets_B1 = _view(column.buffers()[1], layout.dtype, column.offset, len(column) + 1)
    first, last = int(offsets_B1[0]), int(offsets_B1[-1])
    values = column.values.slice(first, last - first)
    return Jagged(_numbers(name, values, _layout(values.type)), offsets_B1 - first)


def _numbers(name: str, column: pa.Array, layout: _Layout) -> NDArray[Any]:
    num_nulls = column.null_count
    if layout.nulls == "copied" and (num_nulls or layout.dtype is None):
        return np.array(column.to_numpy(zero_copy_only=False))
    if layout.dtype is None or layout.is_list:
        raise InputError(
            f"column {name!r} is {column.type}, of which there are no arrays; hash it, or leave it out of "
            "columns"
        )
    if num_nulls:
        raise InputError(f"column {name!r}: {num_nulls} of a batch are null; fill or filter them out")
    return _view(column.buffers()[1], layout.dtype, column.offset, len(column))


def _view(buffer: pa.Buffer | None, dtype: np.dtype[Any] | None, offset: int, count: int) -> NDArray[Any]:
    assert dtype is not None, "types without one are refused"
    if buffer is None or not count:
        return np.empty(0, dtype)
    # Unlike `to_numpy`, writable where the memory is: torch warns of what is not.
    return np.frombuffer(buffer, dtype, count, offset * dtype.itemsize)
