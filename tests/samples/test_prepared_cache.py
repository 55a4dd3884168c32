import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rayrec
from rayrec.platform.errors import InputError
from rayrec.samples.reading.prepared_cache import PreparedCache, cache_key


def batch(number=0, num_rows=1000):
    return pa.RecordBatch.from_pydict(
        {
            "x": np.arange(number, number + num_rows),
            "lists": pa.array([[n, None] if n % 3 else None for n in range(num_rows)]),
            "city": pa.array(["a", None] * (num_rows // 2)).dictionary_encode(),
        }
    )


def key(number=0):
    return cache_key("file", number)


ENTRY_BYTES = 30_000  # about what one of these takes


def entries(folder):
    return {path.stem for path in folder.glob("*.arrow")}


def test_a_batch_comes_back_as_it_was(tmp_path):
    cache = PreparedCache(tmp_path / "cache", 10**6)

    assert cache.get(key()) is None
    assert cache.put(key(), batch())
    assert cache.get(key()).equals(batch())
    assert PreparedCache(tmp_path / "cache", 10**6).get(key()).equals(batch())
    assert (cache.counts.misses, cache.counts.hits) == (1, 1)


def test_slices_are_kept_without_what_lies_around_them(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    cache.put(key(), batch().slice(10, 4))

    assert cache.get(key()).equals(batch().slice(10, 4))
    assert (tmp_path / f"{key()}.arrow").stat().st_size < 5000


def test_a_batch_without_rows_is_one_too(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    cache.put(key(), batch().slice(0, 0))

    assert cache.get(key()).equals(batch().slice(0, 0))


def test_nothing_is_copied_on_reading(tmp_path):
    cache = PreparedCache(tmp_path, 10**8)
    cache.put(key(), pa.RecordBatch.from_pydict({"x": np.arange(10**6)}))
    before = pa.total_allocated_bytes()

    found = cache.get(key())
    assert pa.total_allocated_bytes() - before < 10**5
    assert found.column("x")[-1].as_py() == 10**6 - 1


def test_a_batch_is_made_once(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    made = []

    def make():
        made.append(1)
        return batch()

    assert cache.get_or_make(key(), make).equals(cache.get_or_make(key(), make))
    assert len(made) == 1


def test_keys_tell_all_parts_apart():
    keys = [
        cache_key("a", 1),
        cache_key("a", "1"),
        cache_key("a1"),
        cache_key(["a", 1]),
        cache_key("a", 1, None),
        cache_key({"a": 1}),
    ]

    assert len(set(keys)) == len(keys)
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1})


def flip(content):
    return content[:500] + bytes([content[500] ^ 1]) + content[501:]


@pytest.mark.parametrize(
    "damage", [flip, lambda content: content[:-1], lambda content: content[:20], lambda content: b""]
)
def test_a_damaged_file_is_never_used_and_made_again(tmp_path, damage):
    cache = PreparedCache(tmp_path, 10**6)
    cache.put(key(), batch())
    path = tmp_path / f"{key()}.arrow"
    path.write_bytes(damage(path.read_bytes()))

    assert cache.get_or_make(key(), batch).equals(batch())
    assert cache.counts.damaged == 1
    assert cache.get(key()).equals(batch())
    assert cache.counts.damaged == 1


def test_the_file_of_another_key_is_not_used(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    cache.put(key(1), batch())
    os.rename(tmp_path / f"{key(1)}.arrow", tmp_path / f"{key(2)}.arrow")

    assert cache.get(key(2)) is None
    assert cache.counts.damaged == 1


def test_a_half_written_file_is_not_seen_and_goes_when_it_is_old(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    half = tmp_path / f".{key()}.1234.tmp"
    half.write_bytes(b"half")

    assert cache.get(key()) is None
    PreparedCache(tmp_path, 10**6)
    assert half.exists()  # another process may be at it
    os.utime(half, (0, 0))
    PreparedCache(tmp_path, 10**6)
    assert not half.exists()


def test_the_least_recently_used_entries_go_first(tmp_path):
    cache = PreparedCache(tmp_path, 4 * ENTRY_BYTES)
    for number in range(3):
        cache.put(key(number), batch(number))
        os.utime(tmp_path / f"{key(number)}.arrow", (number, number))
    size = (tmp_path / f"{key()}.arrow").stat().st_size
    assert 2.5 * size < 4 * ENTRY_BYTES < 8 * size
    cache.get(key(0))

    for number in range(3, 12):
        cache.put(key(number), batch(number))
        cache.get(key(0))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.arrow")) <= 4 * ENTRY_BYTES

    assert key(0) in entries(tmp_path)
    assert key(11) in entries(tmp_path)
    assert key(1) not in entries(tmp_path)
    assert cache.counts.removed == 12 - len(entries(tmp_path))


def test_a_smaller_limit_holds_from_the_start(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    for number in range(5):
        cache.put(key(number), batch(number))

    PreparedCache(tmp_path, ENTRY_BYTES // 10)
    assert not entries(tmp_path)


def test_the_ledger_knows_what_is_on_disk(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    for number in (0, 1, 0):
        cache.put(key(number), batch(number))
    (tmp_path / f"{key(1)}.arrow").write_bytes(bytes((tmp_path / f"{key(1)}.arrow").stat().st_size))
    cache.get(key(1))

    assert entries(tmp_path) == {key(0)}
    assert int((tmp_path / "ledger").read_bytes()) == (tmp_path / f"{key(0)}.arrow").stat().st_size


def test_a_batch_larger_than_the_cache_is_not_kept(tmp_path):
    cache = PreparedCache(tmp_path, 1000)

    assert cache.get_or_make(key(), batch).equals(batch())
    assert cache.counts.not_kept == 1
    assert "does not fit into 1000" in cache.last_error


@contextmanager
def largest_file(num_bytes):
    """The system refuses to write more than this, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_means_no_cache(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    with largest_file(4096):
        assert cache.get_or_make(key(), batch).equals(batch())

    assert cache.counts.not_kept == 1
    assert "File too large" in cache.last_error
    assert not entries(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))
    assert cache.put(key(), batch())


def test_an_entry_that_another_process_removes_stays_readable(tmp_path):
    cache = PreparedCache(tmp_path, 10**6)
    cache.put(key(), batch())
    found = cache.get(key())
    (tmp_path / f"{key()}.arrow").unlink()

    assert found.equals(batch())
    assert cache.get(key()) is None


def test_a_ledger_that_nobody_can_read_is_written_again(tmp_path):
    cache = PreparedCache(tmp_path, 3 * ENTRY_BYTES)
    (tmp_path / "ledger").write_bytes(b"?")

    for number in range(8):
        assert cache.put(key(number), batch(number))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.arrow")) <= 3 * ENTRY_BYTES


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(InputError, match="cannot hold the cache of prepared rows"):
        PreparedCache(tmp_path / "file" / "cache", 1000)


WORKER = """
import sys
import numpy as np
from rayrec.samples.reading.prepared_cache import PreparedCache
from tests.samples.test_prepared_cache import batch, key

cache = PreparedCache(sys.argv[1], int(sys.argv[2]))
random = np.random.default_rng(int(sys.argv[3]))
for number in random.integers(20, size=150).tolist():
    assert cache.get_or_make(key(number), lambda: batch(number)).equals(batch(number))
assert not cache.counts.damaged and not cache.counts.not_kept
"""


@pytest.mark.slow
def test_processes_share_one_bounded_cache(tmp_path):
    limit = 5 * ENTRY_BYTES
    root = Path(rayrec.__file__).parent.parent
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(limit), str(seed)], cwd=root)
        for seed in range(3)
    ]

    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))
    assert 0 < on_disk <= limit
    assert not list(tmp_path.glob(".*.tmp"))
    assert int((tmp_path / "ledger").read_bytes()) == on_disk
