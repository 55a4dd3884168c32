"""The map of a table on disk against a dictionary, and what it takes."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import bucket_of
from rayrec.embeddings.storage.disk import packed_map
from rayrec.embeddings.storage.disk.packed_map import PackedMap, packed_bytes, packed_slots
from rayrec.embeddings.storage.index import HASHES
from rayrec.platform.compiled import mix64, unmix64
from tests.helpers.examples import examples

INT64 = st.one_of(
    st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1])
)
NUMBERS = st.one_of(st.integers(-(2**35), -2), st.integers(0, 2**35 - 2))


def array(ids) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def ids_of_one_partition(num: int) -> np.ndarray:
    """Ids whose hashes agree in the bits that choose the partition, so that it alone grows."""
    hashes = (np.uint64(77) << np.uint64(52)) | np.random.default_rng(0).integers(0, 2**52, num, np.uint64)
    return np.array([unmix64(np.uint64(h)) for h in np.unique(hashes)], dtype=np.uint64).view(np.int64)


def all_ids(index: PackedMap) -> list[int]:
    return [int(i) for ids_K, _ in index.by_bucket(100) for i in ids_K]


@given(st.integers(0, 2**64 - 1))
def test_a_hash_gives_its_id_back(value):
    assert int(unmix64(np.uint64(mix64(np.uint64(value))))) == value


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["assign", "find", "remove"]), st.dictionaries(INT64, NUMBERS, max_size=30)
        ),
        max_size=15,
    )
)
def test_a_packed_map_behaves_like_a_dict(calls):
    index, model = PackedMap(), {}
    for call, numbers in calls:
        ids_M = array(list(numbers))
        if call == "assign":
            index.reserve(len(numbers))
            index.assign(ids_M, array(list(numbers.values())))
            model |= numbers
        elif call == "remove":
            assert index.remove(ids_M).tolist() == [model.pop(i, -1) for i in numbers]
        else:
            assert index.find(ids_M).tolist() == [model.get(i, -1) for i in numbers]
        assert len(index) == len(model)
    assert index.find(array(list(model))).tolist() == list(model.values())
    assert sorted(all_ids(index)) == sorted(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ids_M", [np.arange(40_000), ids_of_one_partition(20_000)], ids=["spread", "crowded"]
)
@pytest.mark.parametrize("step", [37, 5000])
def test_ids_stay_while_the_map_grows_in_place(ids_M, step):
    """Half of them leave again, so that partitions move while others are emptied."""
    index, there = PackedMap(), {}
    for first in range(0, len(ids_M), step):
        some_M = ids_M[first : first + step]
        index.reserve(len(some_M))
        index.assign(some_M, 3 * some_M % 2**30)
        there |= dict(zip(some_M.tolist(), (3 * some_M % 2**30).tolist(), strict=True))
        gone_M = some_M[::2]
        assert index.remove(gone_M).tolist() == [there.pop(i) for i in gone_M.tolist()]
        if first % (10 * step) == 0:
            assert index.find(array(list(there))).tolist() == list(there.values())
            assert (index.find(ids_M[first + step :]) == -1).all()
    assert index.find(array(list(there))).tolist() == list(there.values())
    assert sorted(all_ids(index)) == sorted(there)


def test_an_id_takes_half_of_what_it_takes_in_memory_at_any_size():
    index = PackedMap()
    for first in range(0, 600_000, 10_000):
        ids_M = np.arange(first, first + 10_000)
        index.reserve(len(ids_M))
        index.assign(ids_M, ids_M)
        assert index.num_bytes <= packed_bytes(len(index))
        assert index.num_slots <= packed_slots(len(index))
        if first > 200_000:
            assert index.num_bytes / len(index) < 15.5  # 27 to 54 of an `IdMap`


def test_what_growth_takes_is_said_before():
    index = PackedMap()
    index.reserve(50_000)
    index.assign(np.arange(50_000), np.arange(50_000))
    for num_more in (0, 1, 10_000, 300_000):
        before, expected = index.num_bytes, index.growth_bytes(num_more)
        index.reserve(num_more)
        assert index.num_bytes - before == expected


def test_reserved_ids_need_no_memory(monkeypatch):
    index = PackedMap()
    ids_M = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=300_000)
    index.reserve(len(ids_M))

    def refuse(memory, num_bytes):
        raise OSError("no memory")

    monkeypatch.setattr(packed_map, "_longer", refuse)
    index.assign(ids_M, np.arange(len(ids_M)))
    assert (index.find(ids_M) == np.arange(len(ids_M))).all()
    with pytest.raises(MemoryError, match=r"no memory for a map of \d+ bytes of ids"):
        index.reserve(10**7)
    assert (index.find(ids_M) == np.arange(len(ids_M))).all()


def test_a_system_that_cannot_make_memory_longer_copies_it(monkeypatch):
    class Fixed(mmap.mmap):
        def resize(self, num_bytes):
            raise SystemError("mmap: resizing not available")

    monkeypatch.setattr(packed_map.mmap, "mmap", Fixed)
    index = PackedMap()
    for first in range(0, 100_000, 10_000):
        index.reserve(10_000)
        index.assign(np.arange(first, first + 10_000), np.arange(first, first + 10_000))
    assert (index.find(np.arange(100_000)) == np.arange(100_000)).all()


@pytest.mark.slow
def test_a_scan_finds_each_id_once_while_the_map_grows():
    index, always_M = PackedMap(), np.arange(30_000)
    index.reserve(len(always_M))
    index.assign(always_M, always_M)
    seen, first, next_id = [], 0, 10**6
    while first < HASHES:
        found_K, first = index.ids_from(first, 3000, range(40_000))
        seen += found_K.tolist()
        index.reserve(3000)
        index.assign(np.arange(next_id, next_id + 3000), np.zeros(3000, np.int64))
        index.remove(np.arange(next_id, next_id + 1000))
        next_id += 3000
    assert len(set(seen)) == len(seen)
    assert set(always_M[bucket_of(always_M) < 40_000].tolist()) <= set(seen)
    assert (bucket_of(array(seen)) < 40_000).all()


def test_ids_come_by_bucket_then_as_uint64():
    ids_M = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=5000)
    index = PackedMap()
    index.reserve(len(ids_M))
    index.assign(ids_M, np.arange(len(ids_M)))
    expected = sorted(ids_M.tolist(), key=lambda i: (int(bucket_of(array([i]))[0]), i % 2**64))
    assert all_ids(index) == expected
