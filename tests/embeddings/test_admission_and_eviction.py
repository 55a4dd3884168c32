"""Which ids get rows and which rows go, against a dictionary that is changed one row at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.layout import NEVER
from rayrec.embeddings.base.routing import NUM_BUCKETS, bucket_of
from rayrec.embeddings.config import (
    EvictionConfig,
    IdAdmissionConfig,
    MostRows,
    SgdConfig,
    TableConfig,
)
from rayrec.embeddings.table.eviction import choose_victims
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import TableRows
from tests.embeddings.admission_runs import IDS, OPTIMIZERS
from tests.embeddings.dictionary_oracle import DictionaryTable
from tests.helpers.examples import examples

configs = st.builds(
    TableConfig,
    name=st.just("items"),
    dim=st.integers(1, 5),
    seed=st.integers(0, 5),
    init_scale=st.sampled_from([0.05, 2.0, 1e-6]),
    weight_dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    admission=st.builds(
        IdAdmissionConfig,
        min_sightings=st.integers(1, 3),
        forget_after_steps=st.none() | st.integers(1, 4),
        every_steps=st.integers(1, 3),
    ),
    eviction=st.none()
    | st.builds(
        EvictionConfig,
        max_age_steps=st.integers(1, 4),
        max_rows_per_bucket=st.none() | st.integers(1, 4),
        keep=st.sampled_from(["recent", "frequent"]),
        every_steps=st.integers(1, 3),
    )
    | st.builds(
        EvictionConfig,
        max_rows_per_bucket=st.integers(1, 4),
        keep=st.sampled_from(["recent", "frequent"]),
    ).map(lambda config: config.model_copy(update={"every_steps": 1}))
    | st.builds(
        EvictionConfig,
        ttl_hours=st.sampled_from([0.5, 1.0, 2.5]),
        max_age_steps=st.none() | st.integers(1, 4),
        max_rows_per_bucket=st.none() | st.integers(1, 4),
        every_steps=st.integers(1, 3),
    )
    | st.builds(
        EvictionConfig,
        max_rows=st.integers(65_536, 4 * 65_536),
        keep=st.just("score"),
        half_life_steps=st.integers(1, 3),
        min_score=st.none() | st.sampled_from([0.25, 0.5]),
        every_steps=st.integers(1, 3),
    )
    | st.builds(
        EvictionConfig,
        min_score=st.sampled_from([0.25, 0.5, 2.0]),
        half_life_steps=st.integers(1, 3),
        ttl_hours=st.none() | st.just(1.0),
    ).map(lambda config: config.model_copy(update={"every_steps": 2})),
)
steps_of_ids = st.lists(
    st.tuples(
        st.lists(st.sampled_from(IDS.tolist()), max_size=12),
        st.none() | st.integers(-4, 8).map(lambda halves: 1_700_000_000 + 1800 * halves),  # newest event
    ),
    max_size=10,
)


@examples(150)
@given(configs, steps_of_ids, st.integers(0, 99))
def test_a_table_is_a_dictionary_of_rows(config, steps, seed):
    table, expected = EmbeddingTable(config), DictionaryTable(config)
    random = np.random.default_rng(seed)
    for step, (named, newest_event) in enumerate(steps):
        ids_M = np.array(list(dict.fromkeys(named)), dtype=np.int64)
        grads_MD = random.standard_normal((len(ids_M), config.dim)).astype(np.float32)
        table.apply(ids_M, grads_MD, step, newest_event)
        expected.commit(step, dict(zip(ids_M.tolist(), grads_MD, strict=True)), newest_event)
        for i, weights_D in zip(IDS.tolist(), table.lookup(IDS), strict=True):
            assert weights_D.tobytes() == expected.lookup(i).tobytes()
        if step == len(steps) // 2:  # as after a restart
            loaded = EmbeddingTable(config)
            loaded.load([table.export()])
            table = loaded
        check_calendar(table)
    assert everything(table) == expected.everything()
    sighted = table.export().sighted
    found = zip(sighted.ids_K.tolist(), sighted.counts_K.tolist(), sighted.steps_K.tolist(), strict=True)
    assert {i: (count, step) for i, count, step in found} == expected.sightings
    evicted = table.evicted_since(-1)
    assert dict(zip(evicted.ids_V.tolist(), evicted.steps_V.tolist(), strict=True)) == {
        i: step for i, step in expected.evicted.items() if i not in expected.rows
    }


def check_calendar(table: EmbeddingTable) -> None:
    """Every row will be looked at, by one list."""
    if table._ages is not None:
        listed = table._ages.ids().tolist()
        assert len(listed) == len(set(listed))
        assert set(table.export().ids_M.tolist()) <= set(listed)


def everything(table: EmbeddingTable) -> dict[int, tuple]:
    rows = table.export()
    columns = zip(rows.ids_M, rows.weights_MD, rows.state_MS, rows.steps_M, rows.counts_M, strict=True)
    return {int(i): (w.tobytes(), s.tobytes(), int(step), int(count)) for i, w, s, step, count in columns}


def touch(table: EmbeddingTable, step: int, *ids: int) -> None:
    table.apply(np.array(ids, dtype=np.int64), np.ones((len(ids), table.config.dim), np.float32), step)


def test_an_id_gets_its_row_with_the_sighting_that_admits_it():
    table = EmbeddingTable(
        TableConfig(
            name="t", dim=2, optimizer=SgdConfig(lr=1.0), admission=IdAdmissionConfig(min_sightings=3)
        )
    )
    ids_M = np.array([5], dtype=np.int64)
    before_MD = table.lookup(ids_M)
    for step in range(2):
        touch(table, step, 5)
        assert (table.lookup(ids_M) == before_MD).all()
    assert (table.num_rows, table.counts.num_not_admitted, table.counts.num_waiting) == (0, 2, 1)
    touch(table, 2, 5)
    assert table.lookup(ids_M).tolist() == (before_MD - 1).tolist()
    assert (table.num_rows, table.counts.num_created, table.counts.num_waiting) == (1, 1, 0)


def test_a_full_bucket_keeps_its_best_rows_and_the_rest_start_again():
    first, second, third = (int(i) for i in IDS[bucket_of(IDS) == bucket_of(IDS[:1])][:3])

    def trained(keep: str) -> EmbeddingTable:
        eviction = EvictionConfig(max_rows_per_bucket=2, keep=keep, every_steps=4)
        table = EmbeddingTable(TableConfig(name="t", dim=2, eviction=eviction))
        touch(table, 0, first)
        touch(table, 1, first, second)
        touch(table, 2, third)
        assert table.num_rows == 3  # not due yet
        touch(table, 3)
        return table

    recent, frequent = trained("recent"), trained("frequent")
    # `first` and `second` are equally recent; two steps changed `first`.
    assert recent.evicted_since(2).ids_V.tolist() == [second]
    # `second` and `third` were changed once, `third` later.
    assert frequent.evicted_since(2).ids_V.tolist() == [second]
    assert recent.counts.num_evicted == 1
    gone = np.array([second], dtype=np.int64)
    fresh = EmbeddingTable(TableConfig(name="t", dim=2))
    assert (recent.lookup(gone) == fresh.lookup(gone)).all()


def test_rows_that_a_run_begins_with_are_not_given_up_by_a_score_that_they_cannot_have_yet():
    config = EvictionConfig(min_score=1.5, half_life_steps=4)
    ids_R, of_no_step = np.arange(3), np.full(3, NEVER, dtype=np.int32)
    counts_R = np.zeros(3, dtype=np.int32)

    gone = [choose_victims(config, None, ids_R, of_no_step, counts_R, step).tolist() for step in (0, 2, 3)]

    assert gone == [[False] * 3, [False] * 3, [True] * 3]


def test_the_rest_of_a_bound_goes_to_the_first_buckets():
    config = EvictionConfig(max_rows=NUM_BUCKETS)
    ids_R = np.arange(200_000)
    same_R = np.zeros(len(ids_R), dtype=np.int32)
    victims_R = choose_victims(config, MostRows(1, 1000), ids_R, same_R, same_R, 9)
    left_B = np.bincount(bucket_of(ids_R[~victims_R]), minlength=NUM_BUCKETS)
    had_B = np.bincount(bucket_of(ids_R), minlength=NUM_BUCKETS)
    assert left_B.tolist() == np.minimum(had_B, 1 + (np.arange(NUM_BUCKETS) < 1000)).tolist()


def test_rows_given_up_leave_their_memory_to_others():
    eviction = EvictionConfig(max_age_steps=1, every_steps=1)
    table = EmbeddingTable(TableConfig(name="t", dim=8, eviction=eviction))
    for step in range(30):
        touch(table, step, *range(1000 * step, 1000 * step + 1000))
    assert table.num_rows == 2000
    alone = EmbeddingTable(TableConfig(name="t", dim=8))
    touch(alone, 0, *range(3000))
    tombstones = 2 * 28_000 * 27
    assert table.num_bytes - tombstones <= 1.1 * alone.num_bytes


def test_tombstones_are_those_since_a_step_and_end_with_a_new_row():
    eviction = EvictionConfig(max_age_steps=1, every_steps=1, remember_steps=3)
    table = EmbeddingTable(TableConfig(name="t", dim=1, eviction=eviction))
    touch(table, 0, 1, 2)
    touch(table, 1)
    touch(table, 2)  # both are older than a step now
    assert sorted(table.evicted_since(-1).ids_V.tolist()) == [1, 2]
    assert table.evicted_since(2).ids_V.tolist() == []
    touch(table, 3, 1)
    assert table.evicted_since(-1).ids_V.tolist() == [2]
    for step in range(4, 8):
        touch(table, step)
    assert table.evicted_since(-1).ids_V.tolist() == [1]  # 2 went more than 3 steps ago


def test_a_table_that_was_loaded_remembers_what_one_that_went_on_does():
    """Also where the last ids that were given up have rows again, so that none of them was saved."""
    eviction = EvictionConfig(max_age_steps=9, every_steps=5, remember_steps=12)
    config = TableConfig(name="items", dim=2, eviction=eviction)
    table, loaded = EmbeddingTable(config), None
    for step in range(40):
        ids_M = np.array([1, *([7] if step == 0 else []), *([8] if step == 5 or step >= 20 else [])])
        for each in (table, loaded):
            if each is not None:
                each.apply(ids_M, np.ones((len(ids_M), 2), np.float32), step)
        if step == 22:
            loaded = EmbeddingTable(config)
            loaded.load([table.export()])
        remembered = table.evicted_since(-1).ids_V.tolist()
        assert loaded is None or loaded.evicted_since(-1).ids_V.tolist() == remembered
        assert 7 not in remembered or 14 <= step <= 26  # as long as it is said, to the step


def test_ids_that_come_and_go_leave_one_tombstone_each():
    eviction = EvictionConfig(max_age_steps=1, every_steps=1)
    table = EmbeddingTable(TableConfig(name="t", dim=1, eviction=eviction))
    for step in range(300):
        touch(table, step, *range(1000 * (step % 3), 1000 * (step % 3) + 1000))
    assert table.counts.num_evicted > 250_000
    evicted = table.evicted_since(-1)
    assert len(evicted) == len(set(evicted.ids_V.tolist())) == 1000
    assert table.num_bytes < 310_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_updates_survive_16_bits_on_average(dtype):
    # Rounding to the nearest would leave a weight of 1 where it is: a step of 1e-4 is less than half a ulp.
    config = TableConfig(name="t", dim=64, weight_dtype=dtype, init_scale=0, optimizer=SgdConfig(lr=1.0))
    table = EmbeddingTable(config)
    ids_M = np.arange(500, dtype=np.int64)
    table.apply(ids_M, np.full((500, 64), -1.0, np.float32), 0)
    assert (table.lookup(ids_M) == 1).all()
    for step in range(1, 11):
        table.apply(ids_M, np.full((500, 64), -1e-4, np.float32), step)
    moved_MD = table.lookup(ids_M) - 1
    assert abs(moved_MD.mean() / 1e-3 - 1) < 0.1
    assert table.num_bytes < 0.75 * 4 * 64 * 500 + 64_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_that_need_no_rounding_stay(dtype):
    values = np.array([0.0, 1.0, -1.5, 2.0**-14, -(2.0**-24) * 0, 0.125, 40960.0, -3.0], np.float32)
    config = TableConfig(name="t", dim=8, weight_dtype=dtype, init_scale=0, optimizer=SgdConfig(lr=1.0))
    table = EmbeddingTable(config)
    table.apply(np.array([1]), -values[None], 0)
    assert table.lookup(np.array([1]))[0].tolist() == values.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_32_bits_that_a_table_of_16_begins_with_are_rounded_by_chance_in_every_column(dtype):
    num_rows, dim, last_place = 4000, 8, {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    weights_MD = np.random.default_rng(0).uniform(1, 2, (num_rows, dim)).astype(np.float32)
    rows = TableRows(
        np.arange(num_rows),
        weights_MD,
        np.empty((num_rows, 0), np.float32),
        np.full(num_rows, NEVER, np.int32),
        np.zeros(num_rows, np.int32),
    )
    table = EmbeddingTable(TableConfig(name="t", dim=dim, weight_dtype=dtype, optimizer=SgdConfig()))
    table.load([rows])
    error_MD = (table.lookup(rows.ids_M) - weights_MD) / last_place
    assert abs(error_MD).max() < 1
    assert abs(error_MD.mean(axis=0)).max() < 0.04  # five deviations of chance

    again = EmbeddingTable(table.config)
    again.load([table.export()])
    assert again.lookup(rows.ids_M).tobytes() == table.lookup(rows.ids_M).tobytes()


def test_float16_keeps_to_its_largest_number():
    config = TableConfig(name="t", dim=2, weight_dtype="float16", init_scale=0, optimizer=SgdConfig(lr=1.0))
    table = EmbeddingTable(config)
    table.apply(np.array([1]), np.array([[-1e6, 1e6]], np.float32), 0)
    assert table.lookup(np.array([1]))[0].tolist() == [65504.0, -65504.0]


def test_an_eviction_without_a_reason_is_refused():
    with pytest.raises(ValueError, match="needs one of max_age_steps, ttl_hours, max_rows_per_bucket"):
        EvictionConfig()


def test_ids_that_were_evicted_are_remembered_as_long_as_somebody_may_ask_and_take_no_memory_then():
    """Of a stream of ever new ids they were kept for 100,000 steps: five times the memory of the rows."""
    eviction = EvictionConfig(max_age_steps=2, every_steps=2)
    table = EmbeddingTable(TableConfig(name="t", dim=2, eviction=eviction))
    for step in range(200):
        table.apply(np.arange(50) + 50 * step, np.ones((50, 2), np.float32), step)
        if eviction.is_due(step) and step > 4:
            assert len(table.evicted_since(step - 1)) == 100  # what a cache asks, at the step
    assert len(table.evicted_since(-1)) <= 50 * (eviction.remember_steps + 2)
    kept = table.num_bytes

    for step in range(200, 300):  # and no id comes any more
        table.apply(np.arange(0), np.ones((0, 2), np.float32), step)

    assert len(table.evicted_since(-1)) == 0
    assert table._tombstones.num_bytes == 0
    assert table.num_bytes < kept
