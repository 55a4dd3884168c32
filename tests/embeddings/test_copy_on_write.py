import numpy as np
import pytest

from rayrec.embeddings.base.routing import NUM_BUCKETS, bucket_of
from rayrec.embeddings.storage.copy_on_write import CopyOnWriteBuffer

BUCKET = 7


def ids_of_bucket(number: int) -> np.ndarray:
    """Ids of one bucket, negative ones among them: order is that of uint64."""
    ids = np.arange(-NUM_BUCKETS * number, NUM_BUCKETS * number, dtype=np.int64)
    return ids[bucket_of(ids) == BUCKET]


def add(buffered: CopyOnWriteBuffer, ids, value: int) -> None:
    entries_K = buffered.add(np.array(ids, dtype=np.int64))
    buffered.records.write(entries_K, 0, np.full((len(entries_K), 3), value, dtype=np.int32))


@pytest.mark.parametrize("least", [3, 60])
def test_a_bucket_is_taken_in_the_order_of_its_ids_each_as_it_first_came(least):
    ids = ids_of_bucket(least)
    assert len(ids) >= least
    assert (ids < 0).any()
    shuffled = np.random.default_rng(0).permutation(ids)
    buffered = CopyOnWriteBuffer(3)
    add(buffered, shuffled[::2], 1)
    add(buffered, shuffled, 2)
    taken, records = buffered.take(BUCKET, BUCKET + 1)
    assert taken.tolist() == sorted(ids.tolist(), key=lambda i: i % 2**64)
    first = {int(i): 1 if k % 2 == 0 else 2 for k, i in enumerate(shuffled)}
    assert records.tolist() == [[first[i]] * 3 for i in taken.tolist()]
    assert len(buffered) == 0


def test_buckets_are_taken_once_and_their_memory_is_used_again():
    ids = np.arange(5000, dtype=np.int64)
    buffered = CopyOnWriteBuffer(3)
    add(buffered, ids, 1)
    half = NUM_BUCKETS // 2
    below, _ = buffered.take(0, half)
    assert below.tolist() == sorted(
        ids[bucket_of(ids) < half], key=lambda i: (bucket_of(np.array([i]))[0], i)
    )
    assert len(buffered) == 5000 - len(below)
    assert buffered.add(below).max() < 5000, "entries that were taken"
    assert len(buffered) == 5000
    above, records = buffered.take(half, NUM_BUCKETS)
    assert set(above.tolist()) == set(ids.tolist()) - set(below.tolist())
    assert (records == 1).all()


def test_so_many_buckets_as_have_few_enough_entries():
    ids = np.arange(5000, dtype=np.int64)
    buffered = CopyOnWriteBuffer(3)
    add(buffered, ids, 1)
    counts = np.bincount(bucket_of(ids), minlength=NUM_BUCKETS)
    end = buffered.end_within(range(NUM_BUCKETS), 100)
    assert counts[:end].sum() <= 100 < counts[: end + 1].sum()
    fullest = int(counts.argmax())
    assert counts[fullest] > 1
    assert buffered.end_within(range(fullest, NUM_BUCKETS), 1) == fullest + 1, "one at least"
    assert buffered.end_within(range(10), 10**6) == 10
