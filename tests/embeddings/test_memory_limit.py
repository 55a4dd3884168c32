"""A server keeps to its memory, or says which table does not."""

import tracemalloc

import numpy as np
import pytest

from rayrec.embeddings.config import AdmissionConfig, TableConfig
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
    config = ITEMS.model_copy(update={"admission": AdmissionConfig(min_sightings=min_sightings)})
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
