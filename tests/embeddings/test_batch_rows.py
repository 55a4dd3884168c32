"""Batches of a table in one process: the bits of its rows for each id, for any number of threads."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rayrec.embeddings.base.config import AdmissionConfig, DiskConfig, EvictionConfig, TableConfig
from rayrec.embeddings.base.threads import in_given_parts, in_parts
from rayrec.embeddings.table import row_operations
from rayrec.embeddings.table.batch_rows import IdGroups, batch_memory, group_ids, sum_groups
from rayrec.embeddings.table.table import EmbeddingTable, TableRows

NUM_IDS = 20_000


def batch(num_ids: int, seed: int = 3) -> np.ndarray:
    """Some ids come once, some a thousand times."""
    random = np.random.default_rng(seed)
    return (random.random(num_ids) ** 3 * num_ids).astype(np.int64) * 2**40 - 5


def gradients(num_ids: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_ids, dim), dtype=np.float32)


def summed(groups: IdGroups, grads_ND: np.ndarray) -> np.ndarray:
    """[M, D] sums, one gradient after the other."""
    sums_MD = np.zeros((len(groups.ids_M), grads_ND.shape[1]), dtype=np.float32)
    np.add.at(sums_MD, groups.inverse_N(), grads_ND)
    return sums_MD


@pytest.mark.parametrize("num_ids", [0, 1, 50, NUM_IDS])
def test_groups_say_where_each_distinct_id_is(num_ids: int):
    ids_N = batch(num_ids)
    groups = group_ids(ids_N)

    assert sorted(groups.ids_M) == sorted(set(ids_N))
    assert (groups.ids_M[groups.inverse_N()] == ids_N).all()
    assert groups.starts_M1[0] == 0
    assert groups.starts_M1[-1] == num_ids
    for m in range(len(groups.ids_M)):
        places = groups.places_N[groups.starts_M1[m] : groups.starts_M1[m + 1]]
        assert len(places)
        assert (np.diff(places) > 0).all()


@pytest.mark.parametrize("num_threads", [2, 5])
def test_groups_do_not_depend_on_the_number_of_threads(num_threads: int):
    one, several = group_ids(batch(NUM_IDS)), group_ids(batch(NUM_IDS), num_threads)

    for field in dataclasses.fields(IdGroups):
        assert (getattr(one, field.name) == getattr(several, field.name)).all()


def test_a_batch_of_one_id_is_one_group():
    groups = group_ids(np.full(NUM_IDS, -(2**63)), num_threads=2)

    assert groups.ids_M.tolist() == [-(2**63)]
    assert groups.starts_M1.tolist() == [0, NUM_IDS]
    assert (groups.places_N == np.arange(NUM_IDS)).all()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(("num_ids", "dim"), [(NUM_IDS, 40), (NUM_IDS, 8), (50, 64), (0, 4)])
def test_sums_are_those_of_a_loop_over_the_batch(num_ids: int, dim: int, num_threads: int):
    groups, grads_ND = group_ids(batch(num_ids)), gradients(num_ids, dim)
    out_MD = np.full((len(groups.ids_M), dim), np.nan, dtype=np.float32)

    sums_MD, are_finite = sum_groups(groups, grads_ND, out_MD, num_threads)

    assert sums_MD is out_MD
    assert are_finite
    assert (sums_MD == summed(groups, grads_ND)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, NUM_IDS - 1])
def test_a_sum_that_is_not_finite_is_noticed(bad: float, place: int):
    grads_ND = gradients(NUM_IDS, 20)
    grads_ND[place, 17] = bad

    assert not sum_groups(group_ids(batch(NUM_IDS)), grads_ND, num_threads=2)[1]


def test_gradients_or_outputs_of_another_shape_are_refused():
    groups = group_ids(np.array([1, 2, 1]))

    with pytest.raises(ValueError, match="for a batch of 3 ids"):
        sum_groups(groups, np.ones((2, 1), dtype=np.float32))
    with pytest.raises(ValueError, match=r"shape \(2, 1\)"):
        sum_groups(groups, np.ones((3, 1), dtype=np.float32), np.empty((3, 1), dtype=np.float32))
    with pytest.raises(ValueError, match=r"shape \(3, 4\)"):
        EmbeddingTable(TableConfig(name="item", dim=4)).lookup_batch(groups, batch_memory(2, 4))
    with pytest.raises(ValueError, match=r"'item': gradients must be float32 of shape \(3, 4\)"):
        EmbeddingTable(TableConfig(name="item", dim=4)).apply_batch(groups, batch_memory(2, 4), step=0)


def assert_equal(rows: TableRows, others: TableRows) -> None:
    for field in ("ids_M", "weights_MD", "state_MS", "steps_M", "counts_M"):
        assert getattr(rows, field).tobytes() == getattr(others, field).tobytes()


CONFIGS = {
    "float32": TableConfig(name="item", dim=64),
    "odd": TableConfig(name="item", dim=7),
    "bfloat16": TableConfig(name="item", dim=20, weight_dtype="bfloat16"),
    "admission": TableConfig(name="item", dim=16, admission=AdmissionConfig(min_sightings=2)),
    "eviction": TableConfig(name="item", dim=16, eviction=EvictionConfig(every_steps=2, max_age_steps=1)),
}


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_table_trained_by_batches_has_the_bits_of_one_trained_by_distinct_ids(name: str, num_threads: int):
    config = CONFIGS[name]
    by_batch, by_ids = EmbeddingTable(config, num_threads), EmbeddingTable(config)
    for step in range(5):
        groups = group_ids(batch(NUM_IDS, seed=step // 2), num_threads)
        grads_ND = gradients(NUM_IDS, config.dim, seed=step)
        rows_ND = by_batch.lookup_batch(groups)
        assert (rows_ND == by_ids.lookup(groups.ids_M)[groups.inverse_N()]).all()

        by_batch.apply_batch(groups, grads_ND, step)
        by_ids.apply(groups.ids_M, summed(groups, grads_ND), step)

    assert by_batch.counts == by_ids.counts
    assert_equal(by_batch.export(), by_ids.export())


def test_rows_that_lie_on_disk_are_read_and_trained_in_pieces(tmp_path: Path):
    disk = DiskConfig(folder=str(tmp_path), memory="27 MiB")
    on_disk = EmbeddingTable(TableConfig(name="item", dim=300, disk=disk))
    in_memory = EmbeddingTable(TableConfig(name="item", dim=300))
    for step in range(3):
        groups, grads_ND = group_ids(batch(NUM_IDS, seed=step)), gradients(NUM_IDS, 300, seed=step)
        assert (on_disk.lookup_batch(groups) == in_memory.lookup_batch(groups)).all()
        for table in (on_disk, in_memory):
            table.apply_batch(groups, grads_ND, step)

    assert on_disk.counts.num_from_disk > 0
    assert_equal(on_disk.export(), in_memory.export())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_streamed_rows_are_the_same_rows(num_threads: int, monkeypatch: pytest.MonkeyPatch):
    table, groups = EmbeddingTable(TableConfig(name="item", dim=32), num_threads), group_ids(batch(NUM_IDS))
    table.apply_batch(groups, gradients(NUM_IDS, 32), step=0)
    copied_ND = table.lookup_batch(groups)
    monkeypatch.setattr(row_operations, "_STREAMED_BYTES", 0)

    assert (table.lookup_batch(groups, batch_memory(NUM_IDS, 32)) == copied_ND).all()


def test_memory_that_begins_within_a_cache_line_can_be_written_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_operations, "_STREAMED_BYTES", 0)
    table, groups = EmbeddingTable(TableConfig(name="item", dim=16)), group_ids(batch(50))
    within = batch_memory(51, 16).reshape(-1)[4:804].reshape(50, 16)

    assert (table.lookup_batch(groups, within) == table.lookup_batch(groups)).all()


def test_a_refused_batch_changes_nothing_and_names_the_id():
    table, groups = EmbeddingTable(TableConfig(name="item", dim=2)), group_ids(np.array([7, 8, 7]))
    grads_ND = np.array([[3e38, 0], [1, 1], [3e38, 0]], dtype=np.float32)  # the sum of id 7 is infinite
    table.lookup_batch(groups)

    with pytest.raises(ValueError, match="gradient of id 7 is inf at element 0"):
        table.apply_batch(groups, grads_ND, step=0)

    assert table.num_rows == 0


def test_rows_found_for_a_batch_are_found_again_when_rows_came_or_went_since():
    config = TableConfig(name="item", dim=4, eviction=EvictionConfig(every_steps=1, max_age_steps=1))
    by_batch, by_ids = EmbeddingTable(config), EmbeddingTable(config)
    one, other = group_ids(np.array([1, 2, 3])), group_ids(np.array([4, 2]))
    ones = {groups: np.ones((len(groups.places_N), 4), dtype=np.float32) for groups in (one, other)}
    for step, groups in enumerate((one, other, one)):
        by_batch.lookup_batch(one)
        if step:  # rows of the batch go, and others get their numbers, before its own update
            by_batch.apply(other.ids_M, ones[other], step=9 * step)
            by_ids.apply(other.ids_M, ones[other], step=9 * step)
        by_batch.apply_batch(groups, ones[groups], step=9 * step + 4)
        by_ids.apply(groups.ids_M, ones[groups], step=9 * step + 4)

    assert_equal(by_batch.export(), by_ids.export())


def test_parts_cover_everything_once_and_errors_of_any_part_are_raised():
    assert in_parts(3, 10, lambda first, last: list(range(first, last)), least=2) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]
    assert in_parts(3, 0, lambda first, last: last) == [0]
    assert in_given_parts([2, 2, 5], lambda first, last: (first, last)) == [(2, 2), (2, 5)]

    def fail_last(first: int, last: int) -> None:
        if last == 10:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        in_parts(2, 10, fail_last, least=2)
