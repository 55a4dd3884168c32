import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import NUM_BUCKETS, bucket_of
from rayrec.embeddings.storage.index import HASHES, IdIndex, IdMap, grouping_bytes, ordered_by_bucket
from rayrec.embeddings.storage.row_storage import MemoryRows
from tests.helpers.examples import examples

INT64 = st.one_of(
    st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1])
)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


class Model:
    """A dict that numbers its keys, and gives the numbers of removed ones out again, last freed first."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.free: list[int] = []

    def add(self, i: int) -> int:
        if i not in self.rows:
            self.rows[i] = self.free.pop() if self.free else len(self.rows)
        return self.rows[i]

    def remove(self, i: int) -> int:
        row = self.rows.pop(i, -1)
        if row >= 0:
            self.free.append(row)
        return row


@examples(100)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "find", "remove"]), st.lists(INT64, max_size=30)), max_size=15)
)
def test_index_behaves_like_a_dict_that_numbers_its_keys(calls):
    index, model = IdIndex(), Model()
    for call, ids in calls:
        if call == "add":
            assert index.find_or_add(array(ids)).tolist() == [model.add(i) for i in ids]
        elif call == "remove":
            distinct = list(dict.fromkeys(ids))
            assert index.remove(array(distinct)).tolist() == [model.remove(i) for i in distinct]
        else:
            assert index.find(array(ids)).tolist() == [model.rows.get(i, -1) for i in ids]
        assert len(index) == len(model.rows)
        assert index.num_rows == len(model.rows) + len(model.free)
    ids, rows = index.items()
    assert dict(zip(ids.tolist(), rows.tolist(), strict=True)) == model.rows


def test_removing_from_a_crowded_index_loses_no_other_id():
    # At the highest load, runs of collisions are long and wrap around the end of the slots.
    index = IdIndex()
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=int(0.6 * 2**17))
    rows = index.find_or_add(ids)
    assert 16 * len(index) / index.num_bytes > 0.59
    gone = ids[::3]
    assert (index.remove(gone) == rows[::3]).all()
    assert (index.find(gone) == -1).all()
    kept = np.ones(len(ids), dtype=bool)
    kept[::3] = False
    assert (index.find(ids[kept]) == rows[kept]).all()


def test_index_grows_past_any_size_and_keeps_every_row():
    index = IdIndex()
    ids = np.random.default_rng(0).permutation(np.arange(-50_000, 50_000, dtype=np.int64))
    bytes_before = index.num_bytes
    for part in np.split(ids, 10):
        index.find_or_add(part)
    assert index.find(ids).tolist() == list(range(100_000))
    assert index.num_bytes > bytes_before
    assert 16 * len(index) / index.num_bytes <= 0.6


def test_ids_of_one_shard_do_not_crowd_the_index():
    # One shard's ids agree in the low bits of their hash. If those chose the slot, nearly every id would
    # collide and this would take minutes.
    ids = np.arange(3_000_000, dtype=np.int64)
    one_shard = ids[bucket_of(ids) < 1024]
    assert len(one_shard) > 40_000
    index = IdIndex()
    assert index.find_or_add(one_shard).tolist() == list(range(len(one_shard)))


def test_a_read_only_array_is_accepted():
    ids = array([5, 6])
    ids.flags.writeable = False
    assert IdIndex().find_or_add(ids).tolist() == [0, 1]


@examples(50)
@given(num_ids=st.integers(0, 3000), least=st.integers(1, 400), seed=st.integers(0, 1000))
def test_groups_hold_every_id_once_in_the_order_of_buckets_and_ids(num_ids, least, seed):
    ids_M = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, size=num_ids)
    index = IdIndex()
    index.find_or_add(ids_M)
    groups = list(index.by_bucket(least))
    for ids_K, ends_B in groups:
        sizes_B = np.diff(ends_B, prepend=0)
        assert len(ids_K) == ends_B[-1] > 0
        assert np.unique(bucket_of(ids_K), return_counts=True)[1].tolist() == sizes_B[sizes_B > 0].tolist()
        assert len(ids_K) <= max(least, index.num_bytes // 16 // 64)
    together = np.concatenate([np.empty(0, dtype=np.int64), *(ids_K for ids_K, _ in groups)])
    assert together.tolist() == ids_M[np.lexsort((ids_M.view(np.uint64), bucket_of(ids_M)))].tolist()


def test_the_number_of_groups_does_not_grow_with_the_ids():
    for num_ids in (10_000, 300_000):
        index = IdIndex()
        index.find_or_add(np.arange(num_ids))
        groups = list(index.by_bucket(1))
        assert len(groups) <= 40
        assert max(ids_K.nbytes + ends_B.nbytes for ids_K, ends_B in groups) <= grouping_bytes(
            index.num_bytes
        )


@examples(60)
@given(
    num_slots=st.sampled_from([1, 7, 300, 5000]),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 900)), max_size=6),
    seed=st.integers(0, 100),
)
def test_ids_that_stay_are_found_once_however_others_come_and_go(num_slots, changes, seed):
    """Also while the map grows, and removals shift ids to other slots."""
    random = np.random.default_rng(seed)
    index, next_id = IdIndex(), 600
    index.find_or_add(np.arange(next_id))
    always, seen, first, calls = set(range(next_id)), [], 0, 0
    while first < HASHES:
        found_K, first = index.ids_from(first, num_slots, range(NUM_BUCKETS))
        seen += found_K.tolist()
        calls += 1
        if changes:
            num_gone, num_new = changes.pop()
            gone = random.choice(sorted(always), size=min(num_gone, len(always)), replace=False)
            index.remove(gone)
            always -= set(gone.tolist())
            index.find_or_add(np.arange(next_id, next_id + num_new))
            next_id += num_new
    assert len(set(seen)) == len(seen)
    assert always <= set(seen)
    assert calls == 1 or num_slots < 5000


def test_ids_of_some_buckets_are_found_there():
    index, ids_M = IdIndex(), np.arange(5000)
    index.find_or_add(ids_M)
    found_K, first = index.ids_from(0, 10**6, range(100, 30_000))
    buckets_M = bucket_of(ids_M)
    assert first == HASHES
    assert sorted(found_K) == ids_M[(buckets_M >= 100) & (buckets_M < 30_000)].tolist()


def test_ids_are_ordered_by_bucket_then_as_uint64_and_once():
    ids_K = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=3000)
    ordered_K, ends_B = ordered_by_bucket(np.concatenate((ids_K, ids_K[:700])))
    expected = sorted(ids_K.tolist(), key=lambda i: (int(bucket_of(np.array([i]))[0]), i % 2**64))
    assert ordered_K.tolist() == expected
    assert ends_B.tolist() == np.cumsum(np.bincount(bucket_of(ids_K), minlength=NUM_BUCKETS)).tolist()


def test_only_ids_that_are_new_are_given_rows():
    index = IdIndex()
    index.find_or_add(np.array([5, 6]))
    index.reserve(3)
    assert index.add_new(np.array([6, 7, 5, 8])).tolist() == [-1, 2, -1, 3]
    assert index.find(np.array([5, 6, 7, 8])).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("num_ids", [0, 5, 700, 3000])
def test_rows_that_are_too_old_are_found_and_removed_in_one_pass_as_in_several(num_ids):
    random = np.random.default_rng(num_ids)
    ids_R = random.choice(2**62, 2000, replace=False)
    rows, expected = MemoryRows(3), IdIndex()
    rows.reserve(len(ids_R), 0)
    steps_R = random.integers(-1, 9, len(ids_R)).astype(np.int32)
    records_RW = np.column_stack((steps_R, steps_R, np.ones_like(steps_R)))
    rows.records.write(rows.add(ids_R), 0, records_RW)
    expected.find_or_add(ids_R)
    step_by_id = dict(zip(ids_R.tolist(), steps_R.tolist(), strict=True))
    # Some have no row, and others stay whatever their step is.
    looked_K = random.choice(np.concatenate((ids_R, -ids_R - 1)), num_ids, replace=False)

    gone, left_L, steps_L = rows.remove_older(looked_K, 4)

    assert gone.tolist() == [i for i in looked_K.tolist() if step_by_id.get(i, 9) <= 4]
    assert dict(zip(left_L.tolist(), steps_L.tolist(), strict=True)) == {
        i: step_by_id[i] for i in looked_K.tolist() if step_by_id.get(i, -1) > 4
    }
    expected.remove(gone)
    again = np.concatenate((ids_R, looked_K))
    assert rows.find(again).tolist() == expected.find(again).tolist()
    assert rows.add(gone).tolist() == expected.find_or_add(gone).tolist(), "the free rows are the same"


def test_ids_with_another_number_are_not_removed():
    index = IdMap()
    index.assign(np.arange(6), np.array([0, 7, 7, 0, 7, 3]))
    index.remove_those(np.array([0, 1, 2, 5, 9]), 7)
    assert dict(zip(*(each.tolist() for each in index.items()), strict=True)) == {0: 0, 3: 0, 4: 7, 5: 3}
    assert len(index) == 4
