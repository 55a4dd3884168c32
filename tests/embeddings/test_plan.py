"""The planner's formulas against the structures that they describe."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
import torch

from rayrec.embeddings.base.routing import NUM_BUCKETS, ShardMap
from rayrec.embeddings.capacity import (
    HELD_RECORDS,
    batch_bytes,
    cache_bytes,
    caller_bytes,
    count_by_shard,
    device_cache_bytes,
    plan_shards,
    plan_table,
    spread,
)
from rayrec.embeddings.config import (
    AdagradConfig,
    AdamConfig,
    DiskConfig,
    EvictionConfig,
    IdAdmissionConfig,
    PartialRowwiseAdamConfig,
    RowwiseAdagradConfig,
    SgdConfig,
    TableConfig,
)
from rayrec.embeddings.lookup.cache.device_cache import device_caches
from rayrec.embeddings.lookup.cache.row_cache import RowCache
from rayrec.embeddings.lookup.lookups import TrainerLink
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot.saved_files import SavedFile
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.embeddings.storage.index import IdIndex, index_bytes
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.transport.client import LocalTransport, answered
from rayrec.embeddings.transport.group_caller import GroupCaller
from rayrec.embeddings.transport.protocol import ApplyCall, ShardTransport
from tests.embeddings.sparse_runs import alone, make_shards

KINDS = [SgdConfig(), RowwiseAdagradConfig(), AdagradConfig(), AdamConfig(), PartialRowwiseAdamConfig()]


def filled(config: TableConfig, num_rows: int) -> EmbeddingTable:
    table = EmbeddingTable(config)
    for step, ids_M in enumerate(np.array_split(np.arange(num_rows), 7)):
        table.apply(ids_M, np.zeros((len(ids_M), config.dim), np.float32), step)
    return table


@pytest.mark.parametrize("optimizer", KINDS, ids=lambda optimizer: optimizer.kind)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [0, 1, 614, 615, 5000])
def test_a_full_table_has_the_planned_bytes(optimizer, dtype, num_rows):
    config = TableConfig(name="items", dim=5, optimizer=optimizer, weight_dtype=dtype)

    assert plan_table(config, num_rows, num_rows).num_bytes == filled(config, num_rows).num_bytes


@pytest.mark.parametrize("num_ids", [0, 1, 614, 615, 1228, 1229, 20_000])
def test_an_index_has_the_planned_bytes(num_ids):
    index = IdIndex()
    index.find_or_add(np.arange(num_ids))

    assert index.num_bytes == index_bytes(num_ids)


def test_bytes_are_those_of_a_worked_example():
    # 64 weights, 1 accumulator, 2 stamps: 268 bytes. 10,000 ids at a load of 0.6: 32,768 slots of 16.
    planned = plan_table(TableConfig(name="items", dim=64), 10_000, 10_000)

    assert planned.records_bytes == 2_680_000
    assert planned.index_bytes == 524_288
    assert planned.extra_bytes["growing"] == 262_144


def test_ids_that_wait_and_rows_that_were_given_up_stay_within_the_plan():
    config = TableConfig(
        name="items",
        dim=4,
        admission=IdAdmissionConfig(min_sightings=2),
        eviction=EvictionConfig(max_age_steps=1, every_steps=2),
    )
    table, most = EmbeddingTable(config), 0
    for step in range(12):
        ids_M = np.arange(1000 * (step // 2), 1000 * (step // 2 + 1))
        table.apply(ids_M, np.zeros((1000, 4), np.float32), step)
        most = max(most, table.num_bytes)
    assert table.counts.num_evicted > 0

    assert most <= plan_table(config, 6000, 6000).num_bytes


def peak_numpy(call) -> int:
    """Most bytes that arrays took at once, above what there was before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def own_pool() -> Iterator[pa.MemoryPool]:
    """Arrow's memory pool, for the time of a test: its highest mark is not that of another test."""
    default, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(default)


def test_doubling_the_index_takes_what_was_planned():
    num_ids = 40_000  # just above a doubling, from 65,536 slots to 131,072
    index = IdIndex(expected_ids=39_000)
    before = index.num_bytes

    peak = peak_numpy(lambda: index.reserve(num_ids))

    planned = plan_table(TableConfig(name="items", dim=1), num_ids, num_ids)
    assert index.num_bytes == planned.index_bytes
    assert before == planned.extra_bytes["growing"]
    assert peak == pytest.approx(planned.index_bytes, rel=0.01)  # beside `before`


@pytest.mark.parametrize("num_rows", [10_000, 300_000])
def test_saving_and_loading_stay_within_the_plan(tmp_path, own_pool, num_rows):
    config = TableConfig(name="items", dim=32)
    (planned,) = plan_shards([config], {"items": [num_rows]}, {"items": 0}, 1, 1)
    shard = EmbeddingShard([config], 0, 1)
    shard.apply(
        UpdateTag(0, 0, 0), {"items": (np.arange(num_rows), np.ones((num_rows, 32), dtype=np.float32))}
    )
    small = filled(config, 10)
    (tmp_path / "small").mkdir()
    write_table(tmp_path / "small", config, ShardMap(1), 0, 0, small.export_parts())  # compiles and imports
    assert own_pool.max_memory() < 0.01 * planned.extra_bytes["saving"]
    files: list[SavedFile] = []
    shard.begin_snapshot(0)

    saving = peak_numpy(
        lambda: files.extend(
            write_table(tmp_path, config, ShardMap(1), 0, 0, shard.export_snapshot("items", 0))
        )
    )
    arrow = own_pool.max_memory()
    assert 0.25 * planned.extra_bytes["saving"] < saving + arrow <= planned.extra_bytes["saving"]
    assert arrow > 0

    paths = [tmp_path / file.name for file in files]
    loading = peak_numpy(
        lambda: EmbeddingShard([config], 0, 1).restore(load_tables(paths, [config], ShardMap(1), 0))
    )
    assert loading <= planned.loading_bytes


def test_choosing_victims_stays_within_the_plan():
    config = TableConfig(
        name="items", dim=2, eviction=EvictionConfig(max_rows_per_bucket=1, every_steps=1000)
    )
    table = filled(config, 200_000)
    table.evict(999)  # compiles
    table.apply(np.arange(200_000), np.zeros((200_000, 2), np.float32), 1000)
    num_rows = table.num_rows

    peak = peak_numpy(lambda: table.evict(1999))

    assert 0.5 < peak / plan_table(config, num_rows, num_rows).extra_bytes["evicting"] <= 1


def test_known_ids_are_counted_where_they_go():
    ids_M = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=10_000)

    counts = count_by_shard(ids_M, 3)

    assert counts == [len(part) for part in ShardMap(3).split(ids_M)]
    assert max(counts) <= spread(10_000, 3)[0] < 3600


def test_a_capacity_bounds_the_rows_of_a_shard():
    eviction = EvictionConfig(max_rows_per_bucket=2, every_steps=10)
    config = TableConfig(name="items", dim=8, eviction=eviction)

    few, many = (
        plan_shards([config], {"items": [num_ids] * 2}, {"items": 100}, 2, 1)
        for num_ids in (1000, 10_000_000)
    )

    assert few[0].num_rows == 1000
    # 2 for each of half of the buckets, and what 10 steps may bring: half of 100 ids and chance.
    assert many[0].num_rows == NUM_BUCKETS + 10 * spread(100, 2)[0]


def test_a_batch_is_held_three_times():
    tables = [TableConfig(name="items", dim=16), TableConfig(name="users", dim=4)]

    assert batch_bytes(tables, {"items": 100, "users": 10}) == 3 * 4 * (16 * 100 + 4 * 10) + 16 * 110


@pytest.mark.parametrize(
    ("dim", "optimizer"), [(32, AdamConfig()), (8, RowwiseAdagradConfig())], ids=["adam", "row-wise"]
)
@pytest.mark.parametrize(
    "firsts",
    [range(0, 18_000, 3000), range(0, 12_000, 2000), [0, 0, 0, 3000, 3000, 3000]],
    ids=["nothing shared", "a third", "all, then nothing"],
)
def test_batches_whose_overlap_is_held_take_what_was_planned(firsts, dim, optimizer):
    config, num_ids, num_steps = TableConfig(name="items", dim=dim, optimizer=optimizer), 3000, 6
    shards = make_shards((config,), 2)
    mode = SharedRowWriteBack(TrainerLink((config,), ShardMap(2), LocalTransport(shards)))
    batches = [alone(*range(first, first + num_ids)) for first in firsts]

    def train(first: int, last: int) -> None:
        mode.prefetch(first, batches[first])
        for step in range(first, last):
            if step + 1 < last:
                mode.prefetch(step + 1, batches[step + 1])
            rows = mode.rows(step, batches[step])
            mode.update(step, batches[step], {"items": np.ones_like(rows["items"])})
        mode.drain()

    for step, batch in enumerate(batches):  # so that the tables do not grow any more
        mode.rows(step, batch)
        mode.update(step, batch, {"items": np.ones((num_ids, dim), np.float32)})
    batches *= 2
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    train(num_steps, 2 * num_steps)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    planned = batch_bytes([config], {"items": num_ids}, is_read_ahead=True, num_records=HELD_RECORDS)
    assert 0.3 * planned < most - before < planned


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1000, 40_000, 150_000])
def test_a_table_with_rows_on_disk_takes_what_was_planned(tmp_path, num_rows):
    config = TableConfig(name="items", dim=60, disk=DiskConfig(memory=40 * 2**20, folder=str(tmp_path)))
    planned = plan_table(config, num_rows, num_rows)

    table = filled(config, num_rows)

    assert table.num_bytes <= planned.num_bytes <= 40 * 2**20
    assert planned.num_bytes <= max(table.num_bytes + 4 * 2**20, 0.9 * 40 * 2**20)
    assert table.num_bytes >= planned.least_bytes - 4 * 2**20
    assert (planned.records_bytes < 4 * 63 * num_rows) == (num_rows == 150_000)


def test_a_table_with_rows_on_disk_needs_memory_to_find_them(tmp_path):
    config = TableConfig(name="items", dim=60, disk=DiskConfig(memory=40 * 2**20, folder=str(tmp_path)))

    planned = plan_table(config, 10_000_000, 10_000_000)

    assert planned.least_bytes > planned.memory_limit
    assert planned.records_bytes == 0


@pytest.mark.parametrize("optimizer", [RowwiseAdagradConfig(), AdamConfig()], ids=lambda o: o.kind)
def test_a_cache_has_the_planned_bytes_however_rows_come_and_go(optimizer):
    config, capacity = TableConfig(name="items", dim=6, optimizer=optimizer), 3000
    cache, most = RowCache(config, capacity), 0
    words = RowOperations(config).num_words
    for first in range(0, 10_000, 1000):
        ids_M = np.arange(first, first + 1000)
        slots_M, _ = cache.insert(ids_M, np.zeros((1000, words), np.int32))
        cache.unpin(slots_M)
        most = max(most, cache.num_bytes)

    planned = cache_bytes([config], {"items": 10_000}, capacity, 1)["items"]
    assert most <= planned <= most + 2 * 8 * capacity  # the list of free rows, and room in it
    assert cache_bytes([config], {"items": 100}, capacity, 1)["items"] < most / 2
    assert cache_bytes([config], {"items": 100}, 0, 1)["items"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_records_on_a_device_are_planned_there_and_the_rest_of_the_cache_on_the_host(dtype):
    config, capacity = TableConfig(name="items", dim=6, weight_dtype=dtype), 3000
    cache = device_caches(torch.device("cpu"))(config, capacity)
    assert cache.num_bytes < cache_bytes([config], {"items": 10_000}, capacity, 1, on_device=True)["items"]
    words = RowOperations(config).num_words

    cache.insert(np.arange(capacity), np.zeros((capacity, words), np.int32))

    on_host = cache_bytes([config], {"items": 10_000}, capacity, 1, on_device=True)["items"]
    on_device = device_cache_bytes([config], capacity)["items"]
    assert on_device == 4 * words * capacity
    assert cache.num_bytes <= on_host + on_device <= cache.num_bytes + 2 * 8 * capacity


def test_updates_that_wait_for_others_are_counted():
    config = TableConfig(name="items", dim=8)

    def step_bytes(num_trainers, max_staleness, num_ids=10_000, step_buffer=2**30, step_ids=None):
        (shard,) = plan_shards(
            [config],
            {"items": [num_ids]},
            {"items": 100},
            1,
            num_trainers,
            max_staleness,
            step_buffer,
            step_ids,
        )
        return shard.step_bytes

    assert step_bytes(1, 0) == 100 * (32 + 40)  # a reply and an update
    assert step_bytes(1, 2) == 100 * (32 + 3 * 40)
    growing = 200 * (8 + 2 * 32) + index_bytes(200)  # their sum
    assert step_bytes(2, 0) == 200 * (32 + 2 * 40) + growing  # two updates of each
    distinct = 150 * (8 + 32) + index_bytes(150)  # as many as there are
    assert step_bytes(2, 0, num_ids=150) == 200 * (32 + 2 * 40) + distinct + 150 * 32
    assert step_bytes(2, 0, step_ids={"items": 150}) == step_bytes(2, 0, num_ids=150)
    # Of two steps the sum and the update whose turn it is, one that grows, and what the buffer has room for.
    bounded = 5000 * 32 + 2 * (100 * 40 + distinct) + 150 * 32 + 1000
    assert step_bytes(50, 0, num_ids=150, step_buffer=1000) == bounded


@pytest.mark.parametrize("eviction", [None, EvictionConfig(max_age_steps=9)], ids=["", "eviction"])
def test_records_that_trainers_write_back_are_counted_until_the_step_is_committed(eviction):
    config = TableConfig(name="items", dim=8, eviction=eviction)
    record = 4 * RowOperations(config).num_words

    def more_bytes(num_trainers, held_rows, num_ids=10_000):
        without, with_records = (
            plan_shards([config], {"items": [num_ids]}, {"items": 100}, 1, num_trainers, held_rows=held)[0]
            for held in (None, held_rows)
        )
        return with_records.step_bytes - without.step_bytes

    # Whole records come in the place of rows, and as many may leave in a step; of several trainers, in two.
    assert more_bytes(1, 0) == 100 * (record - 32) + 100 * (record + 8)
    swept = 0 if eviction is None else record + 8  # all that a cache holds, when rows are given up
    assert more_bytes(2, 500) == 200 * (record - 32) + 2 * 200 * (record + 8) + 1000 * swept
    assert more_bytes(2, 500, num_ids=700) == 200 * (record - 32) + 2 * 200 * (record + 8) + 700 * swept


class Taken(ShardTransport):
    """Servers that take everything and keep nothing."""

    def call(self, shard, call):
        return answered(lambda: call.tag.step)


def test_a_caller_of_a_group_holds_no_more_than_was_planned():
    config, group_size, num_ids = TableConfig(name="items", dim=16), 4, 5000
    caller = GroupCaller(0, range(group_size), [config], ShardMap(2), Taken())

    def send(step: int, rank: int) -> None:
        ids_M = np.arange(num_ids) + rank * num_ids
        grads_MD = np.full((num_ids, 16), 0.5, np.float32)
        caller.answer(ApplyCall(UpdateTag(0, step, rank), {"items": (ids_M, grads_MD)}, {}))

    for rank in range(group_size):
        send(0, rank)  # compiles
    tracemalloc.start()
    for rank in range(group_size - 1):
        send(1, rank)
        send(2, rank)
    send(1, group_size - 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    planned = caller_bytes([config], {"items": num_ids}, group_size)
    assert 0.5 * planned < peak <= planned


def test_without_tables_there_are_no_servers():
    assert plan_shards([], {}, {}, 3, 2) == ()
