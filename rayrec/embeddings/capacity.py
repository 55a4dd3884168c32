"""How many bytes the tables of a run take, before anything starts.

    server     records, rounded up to huge pages │ index of ids │ what waits for admission, what was evicted
               (of a table with rows on disk: as many rows as its own limit leaves room for)
               one step's rows and gradients
               and for a while (`Phase`), whichever of the first two is most, and the last one beside it:
                 growing    the index's old slots beside the new ones, for the table that doubles
                 evicting   ids and stamps of a table while victims are chosen
                 saving     what steps have changed of the tables since a snapshot began; and of one of
                            them its ids, and a part of its rows with what is made of it
               before a run is resumed: a part of the rows of a snapshot, beside the tables that they fill
    trainer    one batch's rows, their copy on the device, their gradients
               its cache: records, index, what is known of every slot
    device     where a trainer has an accelerator, its cache's records, all of its capacity at once, and what
               a step takes to work with them

The formulas are those of `layout`, `index`, `table`, `snapshot` and `row_cache`; tests fill the real ones
and compare.

Axes: M ids of one call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from rayrec.embeddings.base.layout import record_words
from rayrec.embeddings.base.routing import NUM_BUCKETS, ShardMap
from rayrec.embeddings.config import DiskConfig, TableConfig
from rayrec.embeddings.shard.step_buffer import DEFAULT_STEP_BUFFER
from rayrec.embeddings.snapshot.snapshot import PARTS_WAITING
from rayrec.embeddings.storage.consistent_snapshot import max_buffer_bytes, most_listed
from rayrec.embeddings.storage.copy_on_write import ENTRY_BYTES
from rayrec.embeddings.storage.disk.packed_map import packed_bytes, packed_slots
from rayrec.embeddings.storage.index import grouping_bytes, index_bytes, index_slots
from rayrec.embeddings.storage.row_storage import BUCKET_PARTS, SCANNED_ROWS
from rayrec.embeddings.table.age_calendar import LISTED_BYTES, calendar_of
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.embeddings.table.table import CHANGED_SHARE, GIVEN_UP_SHARE
from rayrec.platform.arrays import Int64Array

Phase = Literal["growing", "evicting", "saving"]

_HUGE_PAGE = 2 * 2**20
_EXPORTED_STAMPS = 16
"""Bytes of a row's id, last step and count in a copy of rows."""
_LISTED_IDS = 3
"""Copies of a list of ids while it is put in order."""
_CHOOSING = 120
"""Most bytes per row of a part that choosing victims takes (113 measured, every bucket too full)."""
_VICTIM = 24
"""Bytes per row, if all of them are given up: its id, and the id and row of the search for it."""
_ROWS_PER_GROUP = 65_536
"""Rows that the writer of snapshots encodes and compresses at once."""
_WRITER_COPIES = 2
"""Most copies of such a group that are there at once."""
_FILE_BLOCK = 2**20
"""Written at once."""
_READER_COPIES = 3
"""Copies of such a group that reading a snapshot makes."""
_ID = 8
_SIGHTING_RECORD, _TOMBSTONE_RECORD = 8, 4
"""Of a copy of an id that waits for admission, and of an evicted one."""
_SIGHTING = 6
_FREE_ROW = 8
_FREE_LIST_ROOM = 2
"""Most that the list of an index's free rows is larger than what is in it."""
_ROW_IN_USE = 9
"""Bytes per row in memory, where others are on disk: its id, and when it was used."""
_MOVING_BYTES = 20 * 2**20
"""Buffers of such a table."""
_PART_BYTES = 2**20
"""Rows of such a table that are copied at once, or one virtual bucket."""
_CACHE_SLOT = 15
"""Bytes per row of a cache's capacity, in use or not: its id, pins and marks."""
_DEVICE_ROWS = 3
"""Copies of a batch's weights on a device: rows, their gradients, and the rows of the batch that follows."""
_DEVICE_RECORDS = 2
"""Copies of its records there: those that come in, and those that an optimizer changes."""
_DEVICE_WORKING = {"float32": 7, "bfloat16": 11, "float16": 11}
"""Most float32 numbers per weight that optimizers take on the way (6.4 measured, for FTRL; 10.4 where hashes
round the weights)."""


@dataclass(frozen=True)
class TablePlan:
    """One table's part of one shard, in bytes."""

    table: str
    num_rows: int
    weights_bytes: int
    state_bytes: int
    """Of the optimizer."""
    stamps_bytes: int
    """Last step and count of every row."""
    index_bytes: int
    waiting_bytes: int
    """Counters of ids that wait for admission, memory of evicted ones, and when to look at rows:
    at most one of each per id."""
    loading_bytes: int
    """What is read of a snapshot at once."""
    buffer_bytes: int
    """Most that is kept of rows, and of ids that wait, which steps change while a snapshot is written."""
    extra_bytes: dict[Phase, int]
    """Taken for a while, beside the above."""
    disk_bytes: int = 0
    """Most that its file takes, for a table with rows on disk; the above are those in memory then."""
    memory_limit: int | None = None
    """Of such a table: `disk.memory`."""
    least_bytes: int = 0
    """What such a table cannot do without: what finds rows, and moves them between disk and memory."""

    @property
    def records_bytes(self) -> int:
        return self.weights_bytes + self.state_bytes + self.stamps_bytes

    @property
    def num_bytes(self) -> int:
        """What `EmbeddingTable.num_bytes` says at most when every expected row is there."""
        return self.records_bytes + self.index_bytes + self.waiting_bytes

    @property
    def resident_bytes(self) -> int:
        """The same with what is not in use of the last huge page."""
        return self.num_bytes + -self.records_bytes % _HUGE_PAGE


@dataclass(frozen=True)
class ShardPlan:
    """What one parameter server will hold, in bytes."""

    shard: int
    tables: tuple[TablePlan, ...]
    step_bytes: int
    """Rows that are read and gradients that wait for a step to be whole."""

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for table in self.tables)

    @property
    def num_bytes(self) -> int:
        """What `ShardStats.num_bytes` says at most when every expected row is there."""
        return sum(table.num_bytes for table in self.tables)

    @property
    def resident_bytes(self) -> int:
        return sum(table.resident_bytes for table in self.tables)

    @property
    def extra_bytes(self) -> dict[Phase, int]:
        """Taken for a while beside the tables; they do it one after the other."""
        extra = {
            phase: max((table.extra_bytes[phase] for table in self.tables), default=0)
            for phase in get_args(Phase)
        }
        # One snapshot is of all tables at once.
        extra["saving"] += sum(table.buffer_bytes for table in self.tables)
        return extra

    @property
    def shared_bytes(self) -> int:
        """What of `peak_bytes` more servers would share: not a step's rows, nor a part of a snapshot."""
        return (
            self.peak_bytes - self.step_bytes - max((t.extra_bytes["saving"] for t in self.tables), default=0)
        )

    @property
    def peak_phase(self) -> Phase:
        """What is being done when the run needs most."""
        extra = self.extra_bytes
        return max(extra, key=extra.__getitem__)

    @property
    def steady_bytes(self) -> int:
        """What is there all the time, and while a step is applied."""
        return self.resident_bytes + self.step_bytes

    @property
    def peak_bytes(self) -> int:
        """Most that the run needs at any time, also to begin from a snapshot, Python and libraries aside."""
        extra = self.extra_bytes
        return self.steady_bytes + extra["saving"] + max(extra["growing"], extra["evicting"])

    @property
    def loading_bytes(self) -> int:
        """Most that is needed to fill the tables from a snapshot."""
        reading = max((table.loading_bytes for table in self.tables), default=0)
        return self.resident_bytes + reading + self.extra_bytes["growing"]


def plan_table(config: TableConfig, num_ids: int, num_rows: int) -> TablePlan:
    """One table on one shard.

    Args:
        num_ids: ids that may ask for a row.
        num_rows: rows that are there at once; fewer, where some are given up.
    """
    if config.disk is not None:
        return _plan_tiered_table(config, num_ids, num_rows, config.disk)
    layout = RowOperations(config).layout
    stamp_words = record_words(layout) - layout.weight_words - layout.state_size
    exported = _EXPORTED_STAMPS + 4 * (layout.dim + layout.state_size)
    index = index_bytes(num_rows)
    part_rows = min(num_rows, _ROWS_PER_GROUP)
    records, waiting = 4 * record_words(layout) * num_rows, _waiting_bytes(config, num_ids, num_rows)
    return TablePlan(
        table=config.name,
        num_rows=num_rows,
        weights_bytes=4 * layout.weight_words * num_rows,
        state_bytes=4 * layout.state_size * num_rows,
        stamps_bytes=4 * stamp_words * num_rows,
        index_bytes=index,
        waiting_bytes=waiting,
        loading_bytes=_READER_COPIES * part_rows * exported,
        buffer_bytes=_buffer_bytes(config, num_ids, num_rows, records + index, waiting),
        extra_bytes={
            "growing": index // 2 if index > index_bytes(0) else 0,
            "evicting": 0 if config.eviction is None else _evicting_bytes(num_rows),
            "saving": _writing_bytes(num_rows, index_slots(num_rows), exported)
            + _known_bytes(config, num_rows),
        },
    )


def _plan_tiered_table(config: TableConfig, num_ids: int, num_rows: int, disk: DiskConfig) -> TablePlan:
    """A table that keeps below its own limit, by the rules of `tiered_rows`."""
    in_memory = plan_table(config.model_copy(update={"disk": None}), num_ids, num_rows)
    limit = int(disk.memory)
    words = RowOperations(config).num_words
    # What is known of rows in memory has positions for as many as an empty table could hold there.
    at_first = _MOVING_BYTES + packed_bytes(0) + grouping_bytes(packed_slots(0))
    most_rows = max(0, limit - at_first) // (4 * words + _ROW_IN_USE + _FREE_ROW)
    index = packed_bytes(num_rows) + grouping_bytes(packed_slots(num_rows))
    finding = index + num_rows // 4 + _MOVING_BYTES + _ROW_IN_USE * most_rows
    beside = finding + in_memory.waiting_bytes
    room = max(0, limit - beside) // (4 * words + _FREE_ROW)
    share = min(1.0, room / num_rows) if num_rows else 0.0
    buffered = _buffer_bytes(config, num_ids, num_rows, limit, in_memory.waiting_bytes)
    held = replace(
        in_memory,
        weights_bytes=int(share * in_memory.weights_bytes),
        state_bytes=int(share * in_memory.state_bytes),
        stamps_bytes=int(share * in_memory.stamps_bytes),
        index_bytes=finding + _FREE_ROW * int(share * num_rows),
    )
    unused = limit - held.num_bytes if share < 1 else 0
    return replace(
        held,
        # Once it has rows on disk, it takes all that it may.
        index_bytes=held.index_bytes + max(0, unused),
        extra_bytes={
            # The index grows in place, and rows in memory make room for what an eviction takes.
            "growing": 0,
            "evicting": 0,
            "saving": in_memory.extra_bytes["saving"],
        },
        buffer_bytes=buffered,
        disk_bytes=2 * 4 * (words + 2) * num_rows,
        memory_limit=limit,
        least_bytes=beside + 64 * (4 * words + _FREE_ROW),
    )


def _evicting_bytes(num_rows: int) -> int:
    """While victims are chosen, part by part, and the ids of all of them are put together."""
    part = min(num_rows, max(SCANNED_ROWS, num_rows // BUCKET_PARTS))
    return _CHOOSING * part + _VICTIM * num_rows


def _writing_bytes(num_rows: int, num_slots: int, row_bytes: int) -> int:
    """While a table's rows are written: a list of ids, parts, and a group of rows on its way to the file."""
    listed = min(num_rows, most_listed(num_slots))
    group = min(num_rows, _ROWS_PER_GROUP)
    part = max(min(num_rows * row_bytes, _PART_BYTES), -(-num_rows // NUM_BUCKETS) * row_bytes)
    parts = 3 * part + min(num_rows * row_bytes, PARTS_WAITING * part)
    buckets = 4 * _ID * NUM_BUCKETS
    return _LISTED_IDS * _ID * listed + buckets + parts + _FILE_BLOCK + _WRITER_COPIES * group * row_bytes


def _known_bytes(config: TableConfig, num_rows: int) -> int:
    """Ids that have changed or were given up since the last snapshot."""
    given_up = 0 if config.eviction is None else num_rows // GIVEN_UP_SHARE
    return _ID * (num_rows // CHANGED_SHARE + given_up)


def _buffer_bytes(config: TableConfig, num_ids: int, num_rows: int, held: int, waiting: int) -> int:
    """Of something that takes so much memory, and of the ids that wait beside it."""
    found = _buffered(num_rows, 4 * RowOperations(config).num_words, held)
    if config.admission.min_sightings > 1:
        found += _buffered(num_ids, _SIGHTING_RECORD, waiting)
    if config.eviction is not None:
        found += _buffered(num_ids, _TOMBSTONE_RECORD, waiting)
    return found


def _buffered(num_records: int, record_bytes: int, held: int) -> int:
    # What finds entries doubles when it grows.
    num_buffered = min(num_records, max_buffer_bytes(held) // (record_bytes + ENTRY_BYTES))
    return num_buffered * (record_bytes + 2 * ENTRY_BYTES)


def plan_shards(
    tables: Sequence[TableConfig],
    ids_by_shard: Mapping[str, Sequence[int]],
    batch_ids: Mapping[str, int],
    num_shards: int,
    num_trainers: int,
    max_staleness: int = 0,
    step_buffer: int = DEFAULT_STEP_BUFFER,
    step_ids: Mapping[str, int] | None = None,
    held_rows: int | None = None,
) -> tuple[ShardPlan, ...]:
    """Every parameter server of a run.

    Args:
        ids_by_shard: ids of each table that may ask for rows, one number per shard; see `count_by_shard`
            where they are known and `spread` where only their number is.
        batch_ids: most distinct ids of each table in one trainer's share of a batch.
        max_staleness: steps that trainers may be ahead; their updates wait here.
        step_buffer: bytes that a server may keep of updates that wait for those of lower ranks.
        step_ids: distinct ids of each table in the batch of all trainers, where that is known; None: as many
            as all of them could read.
        held_rows: rows of each table that a trainer may hold beyond a batch, where trainers change whole
            records and write them back; None: they do not.
    """
    if not tables:
        return ()  # no server is started
    shard_maps = {config.name: ShardMap(num_shards).among(config.servers) for config in tables}
    read_ids = {
        config.name: num_trainers * max(spread(batch_ids[config.name], num_shards, config.servers))
        for config in tables
    }
    shards = []
    for shard in range(num_shards):
        planned, steps = [], []
        for config in tables:
            num_buckets = len(shard_maps[config.name].buckets(shard))
            if not num_buckets:
                continue
            new_ids = read_ids[config.name]
            num_ids = ids_by_shard[config.name][shard]
            most_rows = _most_rows(config, num_buckets, new_ids)
            planned.append(plan_table(config, num_ids, min(num_ids, most_rows)))
            of_step = (
                new_ids
                if step_ids is None
                else max(spread(step_ids[config.name], num_shards, config.servers))
            )
            step = _StepPlan.of(config, new_ids, min(num_ids, of_step))
            if held_rows is not None:
                swept = num_trainers * max(spread(held_rows, num_shards, config.servers))
                step = step.with_records(config, new_ids, min(num_ids, swept) if config.eviction else 0)
            steps.append(step)
        step_bytes = _step_bytes(steps, num_trainers, max_staleness, step_buffer)
        shards.append(ShardPlan(shard, tuple(planned), step_bytes))
    return tuple(shards)


class _StepPlan(NamedTuple):
    """Bytes of one table in a step of all trainers, on one server."""

    rows: int
    """That are read."""
    updates: int
    """Gradients and ids, as they come."""
    total: int
    """Their sum."""
    growing: int
    """Beside it, while it grows."""
    records: int = 0
    """That trainers have changed and write back, which are kept until the step is committed."""
    swept: int = 0
    """The same, of all that they hold, before rows are given up."""

    @classmethod
    def of(cls, config: TableConfig, num_ids: int, num_distinct: int) -> _StepPlan:
        """Args:
        num_ids: of all trainers' batches, each counted by itself.
        num_distinct: ids that there are.
        """
        row, num_distinct = 4 * config.dim, min(num_ids, num_distinct)
        total = num_distinct * (_ID + row) + index_bytes(num_distinct)
        return cls(num_ids * row, num_ids * (row + _ID), total, num_distinct * row)

    def with_records(self, config: TableConfig, num_ids: int, num_swept: int) -> _StepPlan:
        """The same where whole records travel, at most one that leaves a trainer for each that it reads."""
        record = 4 * RowOperations(config).num_words
        return self._replace(
            rows=num_ids * record, records=num_ids * (record + _ID), swept=num_swept * (record + _ID)
        )


def _step_bytes(tables: Sequence[_StepPlan], num_trainers: int, max_staleness: int, step_buffer: int) -> int:
    """What a server holds in the steps of all trainers."""
    if not tables:
        return 0
    rows, updates, total, growing, records, swept = (sum(parts) for parts in zip(*tables, strict=True))
    if num_trainers == 1:
        return rows + (1 + max_staleness) * (updates + records) + swept  # applied as they came
    # Of several trainers one may be a step ahead. A part is given back once it is in the sum, where the
    # parts of all lower ranks have to be first: if the first rank is the last to come, all others wait,
    num_steps = 2 + max_staleness
    without_bound = num_steps * updates + total + growing
    # as far as the buffer has room for them; beside it there are sums, and the parts whose turn it is.
    bounded = step_buffer + num_steps * (updates // num_trainers + total) + growing
    return rows + min(without_bound, bounded) + num_steps * records + swept


def caller_bytes(
    tables: Sequence[TableConfig], batch_ids: Mapping[str, int], group_size: int, max_staleness: int = 0
) -> int:
    """Most that the caller of a group of trainers holds, Python and libraries aside.

    Its trainers' gradients of a step, until all are there, and of the next one; their sum, and the parts of
    it that go to each server; rows that came, and the copy for each trainer; ids, and where each trainer's
    are.

    Args:
        batch_ids: most distinct ids of each table in one trainer's share of a batch.
    """
    found = 0
    for config in tables:
        row, num_ids = 4 * config.dim, group_size * batch_ids[config.name]
        waiting = (2 + max_staleness) * (row + _ID)
        found += num_ids * (waiting + 2 * row + 2 * row + 3 * _ID)
    return found


CACHE_RECORDS = 2
"""Whole records of a batch beside a cache: those that come and those that leave."""
HELD_RECORDS = 5
"""And where the overlap of batches is held: those of two batches, of what they share, and of what leaves,
which is split by shard."""
_PLACES = 64
"""Bytes per id that says where its record is, and of masks and positions."""


def batch_bytes(
    tables: Sequence[TableConfig],
    batch_ids: Mapping[str, int],
    is_read_ahead: bool = False,
    num_records: int = 0,
) -> int:
    """Most that one batch's rows take in a trainer.

    They are there three times: first as rows, tensors and gradients; then as rows, gradients and the
    parts of these that go to each shard.

    Args:
        is_read_ahead: the rows of the next batch are there, too.
        num_records: how often whole records of a batch are there besides.
    """
    num_rows = 4 if is_read_ahead else 3
    positions = _PLACES if num_records else 2 * _ID
    return sum(
        (num_rows * 4 * config.dim + positions + num_records * 4 * RowOperations(config).num_words)
        * batch_ids[config.name]
        for config in tables
    )


def cache_bytes(
    tables: Sequence[TableConfig],
    num_ids: Mapping[str, int],
    cache_rows: int,
    num_trainers: int,
    on_device: bool = False,
) -> dict[str, int]:
    """By table, most host memory that one trainer's cache takes; every id belongs to one trainer's cache.

    Args:
        num_ids: ids of each table that may have rows.
        cache_rows: rows of each table that a trainer may hold; 0 is no cache.
        on_device: its records are not on the host; see `device_cache_bytes`.
    """
    if not cache_rows:
        return {config.name: 0 for config in tables}
    planned = {}
    for config in tables:
        num_rows = min(cache_rows, spread(num_ids[config.name], num_trainers)[0])
        records = 0 if on_device else 4 * RowOperations(config).num_words * num_rows
        planned[config.name] = (
            records
            + index_bytes(num_rows)
            + _FREE_LIST_ROOM * _FREE_ROW * num_rows
            + _CACHE_SLOT * cache_rows
        )
    return planned


def device_cache_bytes(tables: Sequence[TableConfig], cache_rows: int) -> dict[str, int]:
    """By table, what the records of a cache take on a trainer's device, however many are in use."""
    return {config.name: 4 * RowOperations(config).num_words * cache_rows for config in tables}


def device_batch_bytes(
    tables: Sequence[TableConfig], batch_ids: Mapping[str, int], cache_rows: int = 0
) -> int:
    """Most that one batch's rows take on a trainer's device; with a cache, also while its records change."""
    in_use, working = 0, 0
    for config in tables:
        num_ids = batch_ids[config.name]
        in_use += _DEVICE_ROWS * 4 * config.dim * num_ids
        if cache_rows:
            in_use += _DEVICE_RECORDS * 4 * RowOperations(config).num_words * num_ids
            # One table's after the other's.
            working = max(working, _DEVICE_WORKING[config.weight_dtype] * 4 * config.dim * num_ids)
    return in_use + working


def count_by_shard(ids_M: Int64Array, num_shards: int, holders: Sequence[int] | None = None) -> list[int]:
    """How many of these distinct ids each shard holds.

    Args:
        holders: shards that hold the table; None: all.
    """
    shard_map = ShardMap(num_shards).among(holders)
    return np.bincount(shard_map.shard_of(ids_M), minlength=num_shards).tolist()


def spread(num_ids: int, num_shards: int, holders: Sequence[int] | None = None) -> list[int]:
    """Ids of each shard where only their number is known: an even share and four deviations of chance."""
    held = range(num_shards) if holders is None or num_shards == 1 else holders
    mean = num_ids / len(held)
    most = math.ceil(mean + 4 * math.sqrt(mean))
    return [min(num_ids, most) if shard in held else 0 for shard in range(num_shards)]


def _most_rows(config: TableConfig, num_buckets: int, new_rows_per_step: int) -> int:
    """Most rows that eviction leaves, and those that come until it happens again."""
    if config.eviction is None or config.most_rows is None:
        return sys.maxsize
    kept = (config.most_rows.rows + (config.most_rows.num_larger > 0)) * num_buckets
    return kept + config.eviction.every_steps * new_rows_per_step


def _waiting_bytes(config: TableConfig, num_ids: int, num_rows: int) -> int:
    num_waiting = num_ids if config.admission.min_sightings > 1 else 0
    positions = 1 << (num_waiting - 1).bit_length() if num_waiting else 0
    num_evicted = 0 if config.eviction is None else num_ids
    # Indexes keep the rows of ids that left them, to give them out again.
    num_free = num_waiting + (0 if config.eviction is None else num_rows)
    counters = index_bytes(num_waiting) + _SIGHTING * positions
    tombstones = index_bytes(num_evicted) + _ID * num_evicted if num_evicted else 0
    ages = 0 if calendar_of(config.eviction) is None else LISTED_BYTES * num_rows
    return counters + tombstones + ages + _FREE_LIST_ROOM * _FREE_ROW * num_free
