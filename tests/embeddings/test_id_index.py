import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.embeddings.index import IdIndex, grouping_bytes
from rayrec.embeddings.routing import bucket_of

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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=50, deadline=None)
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
