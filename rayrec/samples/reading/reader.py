"""The training read: the rows of a part of a window, as a plan asks for them.

    ReadPart ─► window: row groups decoded in threads ─► rows to their shuffled positions ─► RowBatch

A reader knows where a data set is and what is wanted of its rows, and nothing of plans. It holds the window
that it reads from and the next one, which is decoded meanwhile; never more, however slow its consumer is.

Axes: G rows of a row group, R rows of a window, B rows of a batch, 1 an extra element.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import Label
from rayrec.samples.base.batches import RowBatch, SampleBatch
from rayrec.samples.base.intervals import Intervals
from rayrec.samples.base.jagged import take_rows
from rayrec.samples.base.keys import row_keys
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import EVALUATION_FILES, Split
from rayrec.samples.reading.blocks import Blocks
from rayrec.samples.reading.decoding import CorruptGroupError, DecodedGroup, GroupDecoder, ReadSpec, RowGroup
from rayrec.samples.reading.preparation import PreparedGroups
from rayrec.samples.reading.read_plan import BatchPlan, ReadPart, Window, corrupt_group
from rayrec.samples.reading.scatter import keys_in_order, positions_of, reordered

DECODE_THREADS = 2


class ShuffledWindow:
    """The rows of a window in the order in which they are read; unreadable ones are not among them."""

    def __init__(
        self,
        schema: pa.Schema,
        window: Window,
        decoded: list[DecodedGroup],
        unreadable: list[tuple[RowGroup, Int64Array]],
        blocks: Blocks,
    ) -> None:
        """
        Args:
            decoded: its row groups, in file order.
            unreadable: those that cannot be decoded, and the rows of the file that they were to give.
            blocks: lend the memory of its columns.
        """
        self._decoded = decoded
        self._unreadable = unreadable
        self._order_R = window.order()
        """Of all planned rows."""
        self._readable_before_R1: Int64Array | None = None
        read_R = self._order_R
        if unreadable:
            lost = {group for group, _ in unreadable}
            is_read_R = np.concatenate(
                [np.full(group.num_rows, group not in lost) for group in window.groups]
            )
            number_R = np.cumsum(is_read_R, dtype=np.int32) - 1  # of readable rows, in file order
            chosen_R = is_read_R[self._order_R]
            read_R = number_R[self._order_R[chosen_R]]
            self._readable_before_R1 = np.concatenate([[0], np.cumsum(chosen_R)])
        self._window = window
        self._read_R = read_R
        """Of the rows that are there, in reading order: their number in file order."""
        self.num_rows = len(read_R)
        position_R = positions_of(read_R)
        bounds = np.cumsum([len(group.row_G) for group in decoded])[:-1]
        positions = np.split(position_R, bounds) if decoded else []
        self._keys_R = keys_in_order(
            [group.group.file for group in decoded], [group.row_G for group in decoded], positions
        )
        columns = [
            reordered([group.columns[number] for group in decoded], field.type, positions, blocks)
            if decoded
            else pa.array([], field.type)
            for number, field in enumerate(schema)
        ]
        self._rows = pa.RecordBatch.from_arrays(columns, schema=schema)
        for group in decoded:
            group.columns.clear()  # their rows are in the window's columns now

    def slice(self, start: int, stop: int) -> RowBatch:
        """Planned rows `start` to `stop` in reading order; buffers are those of the window, no cursor."""
        low, high = self._readable(start, stop)
        return RowBatch(self._keys_R[low:high], self._rows.slice(low, high - low))

    def part(self, start: int, stop: int) -> RowBatch:
        """The same with buffers of its own and all that is to be known of the rows."""
        low, high = self._readable(start, stop)
        rows = self._rows.slice(low, high - low)
        # Arrow's message format holds the rows of a slice only.
        compact = pa.ipc.read_record_batch(rows.serialize(), rows.schema)
        return RowBatch(
            self._keys_R[low:high].copy(), compact, self._read_intervals(low, high), self._lost(start, stop)
        )

    def _readable(self, start: int, stop: int) -> tuple[int, int]:
        before_R1 = self._readable_before_R1
        return (start, stop) if before_R1 is None else (int(before_R1[start]), int(before_R1[stop]))

    def _read_intervals(self, low: int, high: int) -> Intervals:
        names, group_R, row_R = self._in_file_order
        chosen_B = np.sort(self._read_R[low:high])
        return Intervals.of_rows(names, group_R[chosen_B], row_R[chosen_B])

    def _lost(self, start: int, stop: int) -> Intervals:
        if not self._unreadable:
            return Intervals()
        rows = dict(self._unreadable)
        planned_B = np.sort(self._order_R[start:stop])
        first = 0
        found: list[Intervals] = []
        for group in self._window.groups:
            if group in rows:
                mine = planned_B[(planned_B >= first) & (planned_B < first + group.num_rows)] - first
                found.append(Intervals.of_rows((group.name,), np.zeros_like(mine), rows[group][mine]))
            first += group.num_rows
        return Intervals.joined(found)

    @cached_property
    def _in_file_order(self) -> tuple[tuple[str, ...], Int64Array, Int64Array]:
        groups = self._decoded
        names = tuple(group.group.name for group in groups)
        group_R = np.repeat(np.arange(len(groups)), [len(group.row_G) for group in groups])
        return names, group_R, np.concatenate([group.row_G for group in groups])


class WindowDecoder:
    """Window -> ShuffledWindow, in threads."""

    def __init__(self, spec: ReadSpec, windows_at_once: int = 1, threads_per_window: int = 1) -> None:
        """
        Args:
            threads_per_window: with one, a window stays with its thread, and so in that core's cache; with
                more, a single window is there sooner.
        """
        self._spec = spec
        self._blocks = Blocks()
        self._decoder = GroupDecoder(spec)
        self._schema, self._decode_group = spec.schema, self._decoder.decode
        if spec.preparation is not None:
            self._schema = spec.preparation.program.schema
            self._decode_group = PreparedGroups(spec, self._decoder, spec.preparation).decode
        self._shuffling = ThreadPoolExecutor(windows_at_once, "shuffle")
        self._decoding = ThreadPoolExecutor(threads_per_window, "decode") if threads_per_window > 1 else None

    def submit(self, window: Window) -> Future[ShuffledWindow]:
        """
        The result raises:
            InputError: a file is missing or has changed, or a row group cannot be decoded.
        """
        return self._shuffling.submit(self._shuffled, window)

    def close(self) -> None:
        """Begin no further window; the threads end with what they are at."""
        self._shuffling.shutdown(wait=False, cancel_futures=True)
        if self._decoding is not None:
            self._decoding.shutdown(wait=False, cancel_futures=True)

    def _shuffled(self, window: Window) -> ShuffledWindow:
        self._decoder.check_unchanged(window.groups)
        decoded, unreadable = [], []
        for found in (self._decoding.map if self._decoding else map)(self._decode, window.groups):
            if isinstance(found, DecodedGroup):
                decoded.append(found)
            else:
                unreadable.append(found)
        return ShuffledWindow(self._schema, window, decoded, unreadable, self._blocks)

    def _decode(self, group: RowGroup) -> DecodedGroup | tuple[RowGroup, Int64Array]:
        try:
            return self._decode_group(group)
        except CorruptGroupError as error:
            if self._spec.on_corrupt == "stop":
                raise corrupt_group(self._spec, group, error) from error
            return group, self._planned_rows(group)

    def _planned_rows(self, group: RowGroup) -> Int64Array:
        """Of a group that cannot be decoded: which rows of the file it was to give."""
        if not self._spec.filters:
            return np.arange(group.first_row, group.first_row + group.num_rows)
        try:
            rows, _ = self._decoder.matching_rows(group)
        except CorruptGroupError as error:
            # They could be read when the run was planned: not the file that it was.
            raise corrupt_group(self._spec, group, error) from error
        return rows


class SampleReader:
    """ReadPart -> RowBatch; neighboring parts share a decoded window. To be closed: it has threads."""

    def __init__(self, spec: ReadSpec, threads: int = DECODE_THREADS, cached_windows: int = 2) -> None:
        """
        Args:
            threads: that decode row groups.
            cached_windows: held at once, at least 2: the one that is read and the next one.
        """
        self._windows = WindowDecoder(spec, threads_per_window=threads)
        self._cached_windows = cached_windows
        self._held: OrderedDict[tuple[int, int], Future[ShuffledWindow]] = OrderedDict()

    def read(self, part: ReadPart, ahead: Window | None = None) -> RowBatch:
        """Read the rows of a part.

        Args:
            ahead: the window that will be read from next; it is decoded from now on.

        Raises:
            InputError: a file is missing or has changed, or a row group cannot be decoded and is not to
                be skipped.
        """
        window = self._begin(part.window)
        if ahead is not None:
            self._begin(ahead)
            self._held.move_to_end(_key(part.window))
        try:
            shuffled = window.result()
        except BaseException:
            # Not kept: what is wrong may be put right.
            self._held.pop(_key(part.window), None)
            raise
        return shuffled.part(part.start, part.stop)

    def read_batch(self, batch: BatchPlan) -> RowBatch:
        """All rows of a step."""
        return RowBatch.concatenate([self.read(part) for part in batch.parts])

    def close(self) -> None:
        """Read nothing any more, and let go of the windows; the threads end with what they are at."""
        self._windows.close()
        self._held.clear()

    def __enter__(self) -> SampleReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, window: Window) -> Future[ShuffledWindow]:
        key = _key(window)
        if key not in self._held:
            # Evict first: the bound holds while the new window is decoded, too.
            while len(self._held) >= self._cached_windows:
                self._held.popitem(last=False)[1].cancel()
            self._held[key] = self._windows.submit(window)
        self._held.move_to_end(key)
        return self._held[key]


def _key(window: Window) -> tuple[int, int]:
    return window.epoch, window.number


def evaluation_batches(
    dataset: Dataset,
    split: Split,
    batch_size: int,
    max_rows: int | None = None,
    with_times: bool = False,
    labels: Sequence[Label] = (),
) -> Iterator[SampleBatch]:
    """The first `max_rows` rows of an evaluation split, in file order, with `targets_B`; None is all.

    The last batch may be short.

    Args:
        with_times: of the events of the histories; `Dataset.check_times` says whether there are any.
        labels: of these events; `Dataset.check_label` says whether there are any.
    """
    # A file number of its own: keys differ from those of the training rows and of the other split.
    file_number = len(dataset.train_files) + list(EVALUATION_FILES).index(split)
    # Users of some batches are read at once, and no more than are asked for.
    part_rows = batch_size * max(_ROWS_AT_ONCE // batch_size, 1)
    step = first = 0
    for rows in dataset.evaluation_parts(split, part_rows, with_times, labels, max_rows):
        for start in range(0, len(rows), batch_size):
            rows_B = np.arange(start, min(start + batch_size, len(rows)))
            item_ids_N, offsets_B1 = take_rows(rows.history_ids_N, rows.offsets_B1, rows_B)
            yield SampleBatch(
                step=step,
                row_keys_B=row_keys(np.full(len(rows_B), file_number), first + rows_B),
                user_ids_B=rows.user_ids_B[rows_B],
                item_ids_N=item_ids_N,
                offsets_B1=offsets_B1,
                targets_B=rows.targets_B[rows_B],
                times_N=None if rows.times_N is None else take_rows(rows.times_N, rows.offsets_B1, rows_B)[0],
                labels={
                    label: take_rows(codes_N, rows.offsets_B1, rows_B)[0]
                    for label, codes_N in rows.labels.items()
                },
            )
            step += 1
        first += len(rows)


_ROWS_AT_ONCE = 16_384
"""Users that are evaluated whose histories are read at once."""
