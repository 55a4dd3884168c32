import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.embeddings.index import IdIndex
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
