"""A server keeps to its memory, or says which table does not."""

import tracemalloc

import numpy as np
import pytest

from rayrec.embeddings.config import EvictionConfig, IdAdmissionConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.table.table import EmbeddingTable

ITEMS = TableConfig(name="items", dim=4)
USERS = TableConfig(name="users", dim=16, seed=1)


def update(**ids):
    dims = {"items": 4, "users": 16}
    return {
        name: (np.array(of, dtype=np.int64), np.ones((len(of), dims[name]), np.float32))
        for name, of in ids.items()
    }


def test_a_step_past_the_limit_is_refused_and_no_row_has_changed():
    shard = EmbeddingShard([ITEMS, USERS], shard=3, num_trainers=1, memory_limit=140_000)
    shard.apply(UpdateTag(0, 0, 0), update(items=range(100), users=range(100)))
    before = {name: shard.export(name) for name in ("items", "users")}

    with pytest.raises(MemoryError, match=r"shard 3 refuses step 1.*table 'users' has 100 rows.*2,000 more"):
        shard.apply(UpdateTag(0, 1, 0), update(items=range(50, 150), users=range(50, 2100)))

    assert shard.committed_step == 0
    for name, rows in before.items():
        np.testing.assert_array_equal(shard.export(name).ids_M, rows.ids_M)
        np.testing.assert_array_equal(shard.export(name).weights_MD, rows.weights_MD)


def test_steps_without_new_rows_go_on_at_the_limit():
    ids = range(500)
    free = EmbeddingShard([ITEMS], shard=0, num_trainers=1)
    free.apply(UpdateTag(0, 0, 0), update(items=ids))
    shard = EmbeddingShard([ITEMS], shard=0, num_trainers=1, memory_limit=free.stats().num_bytes)

    for step in range(3):
        shard.apply(UpdateTag(0, step, 0), update(items=ids))
    with pytest.raises(MemoryError, match="table 'items' has 500 rows"):
        shard.apply(UpdateTag(0, 3, 0), update(items=range(499, 501)))


@pytest.mark.parametrize("min_sightings", [1, 2])
def test_what_more_ids_will_take_is_foretold(min_sightings):
    config = ITEMS.model_copy(update={"admission": IdAdmissionConfig(min_sightings=min_sightings)})
    EmbeddingTable(config).reserve(np.arange(2000))  # compiles
    table, first = EmbeddingTable(config), 0
    for num_more in (1, 600, 14, 1, 5000, 1, 40_000):
        ids_M = np.arange(first, first + num_more)
        assert table.num_missing(ids_M) == num_more
        foretold, before = table.bytes_after(num_more), table.num_bytes
        tracemalloc.start()
        table.reserve(ids_M)
        grown_on_the_way = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert before + grown_on_the_way <= foretold + 50_000 + 16 * num_more  # and what `find` returns
        for step in range(min_sightings):
            foretold = table.bytes_after(table.num_missing(ids_M))
            table.apply(ids_M, np.zeros((num_more, 4), np.float32), step)
            assert table.num_bytes <= foretold
        first += num_more


@pytest.mark.parametrize("eviction", [{"max_rows_per_bucket": 1}, {"max_age_steps": 1}])
def test_an_eviction_takes_no_more_than_was_foretold(eviction):
    config = ITEMS.model_copy(update={"eviction": EvictionConfig(every_steps=4, **eviction)})

    def filled() -> EmbeddingTable:
        table = EmbeddingTable(config)
        ids_M = np.arange(300_000)
        table.apply(ids_M, np.ones((len(ids_M), 4), np.float32), 0)
        return table

    filled().evict(3)  # compiles
    table = filled()
    before, foretold = table.num_bytes, table.evicting_bytes(0)

    tracemalloc.start()
    table.evict(3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert table.num_rows < 100_000
    assert peak <= foretold
    assert table.num_bytes <= before + foretold


def test_rows_leave_room_for_their_eviction():
    evicted = ITEMS.model_copy(update={"eviction": EvictionConfig(max_age_steps=1000)})

    def most_rows(config: TableConfig) -> int:
        shard = EmbeddingShard([config], shard=0, num_trainers=1, memory_limit=2**20)
        for step in range(1000):
            try:
                shard.apply(UpdateTag(0, step, 0), update(items=range(100 * step, 100 * step + 100)))
            except MemoryError:
                break
        stats = shard.stats()
        reserve = 0 if config.eviction is None else 96 * stats.num_rows["items"]
        assert stats.num_bytes + reserve <= 2**20
        return stats.num_rows["items"]

    assert 1000 < most_rows(evicted) < most_rows(ITEMS)


def test_what_is_kept_for_a_snapshot_counts_and_new_rows_wait_until_it_is_written():
    ids = range(2000)
    free = EmbeddingShard([ITEMS], shard=0, num_trainers=1)
    free.apply(UpdateTag(0, 0, 0), update(items=ids))
    limit = free.stats().num_bytes + 40_000
    shard = EmbeddingShard([ITEMS], shard=0, num_trainers=1, memory_limit=limit)
    shard.apply(UpdateTag(0, 0, 0), update(items=ids))
    shard.begin_snapshot(0)
    parts = shard.export_snapshot("items", 0)
    next(parts)
    shard.apply(UpdateTag(0, 1, 0), update(items=ids))  # all of them are kept
    assert shard._snapshot_bytes > 0
    waited = []

    def write(is_room, timeout_s):
        waited.append(is_room())
        rows = sum(len(part.ids_M) for part in parts)
        waited.append((rows, is_room()))
        return True

    shard._lock.hold_up = write
    shard.apply(UpdateTag(0, 2, 0), update(items=range(2000, 2300)))

    assert waited == [False, (2000, True)]
    assert shard.stats().num_bytes <= limit
