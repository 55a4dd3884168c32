import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import NUM_BUCKETS, ShardMap, bucket_of
from rayrec.platform.compiled import extend64
from rayrec.platform.compiled import mix64 as compiled_mix64
from rayrec.platform.hashing import combine64, mix64
from tests.helpers.examples import examples

INT64 = st.integers(-(2**63), 2**63 - 1)


@examples(50)
@given(INT64, INT64)
def test_compiled_hashes_equal_the_platform_ones(first, second):
    a, b = np.uint64(first % 2**64), np.uint64(second % 2**64)
    assert compiled_mix64(a) == int(mix64(a))
    assert extend64(np.uint64(extend64(np.uint64(0), a)), b) == int(combine64(a, b))


@examples(50)
@given(st.lists(INT64, max_size=40), st.sampled_from([1, 2, 3, 7, 65_536]))
def test_split_gives_every_id_to_the_shard_of_its_bucket_in_order(ids, num_shards):
    ids_M = np.array(ids, dtype=np.int64)
    shard_map = ShardMap(num_shards)
    parts = shard_map.split(ids_M)

    assert len(parts) == num_shards
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(ids)))
    buckets = (mix64(ids_M) % np.uint64(NUM_BUCKETS)).tolist()
    assert bucket_of(ids_M).tolist() == buckets
    for shard, positions in enumerate(parts):
        if not len(positions):  # of as many shards as there are buckets, nearly all
            continue
        assert positions.tolist() == sorted(positions.tolist())
        assert all(buckets[m] in shard_map.buckets(shard) for m in positions)
        assert (shard_map.shard_of(ids_M[positions]) == shard).all()


def test_shards_hold_contiguous_ranges_that_cover_every_bucket():
    shard_map = ShardMap(3)
    assert [shard_map.buckets(shard) for shard in range(3)] == [
        range(21845),
        range(21845, 43690),
        range(43690, 65536),
    ]


@pytest.mark.parametrize("num_shards", [0, 65_537])
def test_a_number_of_shards_that_cannot_be_is_refused(num_shards):
    with pytest.raises(ValueError, match=f"got {num_shards}"):
        ShardMap(num_shards)


@given(st.sets(st.integers(0, 6), min_size=1), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_a_table_on_some_shards_is_divided_among_these_alone(holders, ids):
    shard_map, ids_M = ShardMap(7).among(sorted(holders)), np.array(ids, dtype=np.int64)

    held = {shard: shard_map.buckets(shard) for shard in range(7)}

    assert {shard for shard, buckets in held.items() if buckets} == holders
    covered = sorted(bucket for buckets in held.values() for bucket in buckets)
    assert covered == list(range(NUM_BUCKETS))
    sizes = [len(held[shard]) for shard in holders]
    assert max(sizes) - min(sizes) <= 1
    for shard, at in enumerate(shard_map.split(ids_M)):
        assert all(bucket in held[shard] for bucket in bucket_of(ids_M[at]).tolist())


def test_a_table_that_one_shard_reads_is_all_there():
    shard_map = ShardMap(1)
    assert shard_map.among((3, 5)) is shard_map
    assert ShardMap(4).among(None).buckets(2) == ShardMap(4).buckets(2)


@pytest.mark.parametrize("holders", [(), (1, 1), (2, 1), (-1,), (4,)])
def test_holders_that_are_no_shards_are_refused(holders):
    with pytest.raises(ValueError, match="holders must be distinct shards from 0 to 3"):
        ShardMap(4, holders)
