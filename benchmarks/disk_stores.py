"""Which store should hold the rows that memory has no room for?

2 million records of 272 bytes (64 numbers, an accumulator, two stamps, an id), 544 MB, in stores that may
keep a quarter of that in memory. A batch reads 8,192 records drawn uniformly, changes them and writes all
of them back, as training does; a rate is records per second of that. Every store reads on as many threads
or with as many requests in flight as serve it best. Bars:

* `disk-stores-of-disk`: `RecordLog`, our log of records, against the disk's own random reads of 4 KiB
  with direct I/O (which write nothing).
* `disk-stores-rocksdb`, `-lmdb`, `-mmap`, `-in-place`: the log against RocksDB (`rocksdict`), LMDB,
  memory-mapped blocks of records, and a file of records read and written in place with direct I/O.

The log is measured in its steady state, with half of its file garbage, so that it compacts all the time.

The page cache is memory too. RocksDB has direct I/O and a block cache of the size allowed, its log is off.
LMDB and the mapped blocks live in the page cache: when they have more of it than allowed, they have to
write what they changed and drop it, within the time that is measured. The log needs 2 MB, and 8 bytes per
record for its address.

Optional peer: `pip install rocksdict`, or the extra `bench` of this package.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numba import njit, types

from benchmarks.disk import PAGE, RandomReads, scratch_folder
from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.embeddings.storage.disk.page_reads import Pages
from rayrec.embeddings.storage.disk.record_log import RecordLog
from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.console import log

NUM_RECORDS, WORDS = 2_000_000, 68
BATCH = 8192
MEMORY_BYTES = NUM_RECORDS * WORDS * 4 // 4
BATCHES = 10
"""Of one measurement."""
TARGET = 0.6

Keys = Int64Array
Words = Int32Array

_LOAD = 16_384
_PAGES = Pages.of(WORDS)


class Store(Protocol):
    """Records of WORDS words by key, 0 to NUM_RECORDS - 1; word 0 of a record is its key."""

    def put(self, keys_M: Keys, words_MW: Words) -> None: ...

    def get(self, keys_M: Keys) -> Words: ...

    def settle(self) -> None:
        """Keep within memory; called after every batch."""
        ...

    def close(self) -> None: ...


def bench(options: BenchOptions) -> list[Bar]:
    with scratch_folder(options.data) as folder:
        disk = RandomReads(folder, NUM_RECORDS * WORDS * 4)
        ours = Measured(LogStore(folder))
        try:
            ours.rate(
                NUM_RECORDS // BATCH
            )  # from here on it has as much garbage as it ever will: it compacts
            show = _show("record log", "disk", disk)
            ratios = interleaved(ours.rate, disk.measure, options.pairs, show)
            bars = [Bar.of("disk-stores-of-disk", ratios, f"direct reads, {disk.depth} at a time", TARGET)]
            for name, (module, make) in PEERS.items():
                bars.append(_bar(name, module, make, ours, disk, folder, options.pairs))
        finally:
            ours.close()
            disk.close()
    return bars


def _bar(
    name: str,
    module: str | None,
    make: Callable[[Path], Store],
    ours: Measured,
    disk: RandomReads,
    folder: Path,
    pairs: int,
) -> Bar:
    if module is not None and importlib.util.find_spec(module) is None:
        log.print(f"{name}: not measured, {module} is not installed; it is in the extra 'bench'")
        return Bar.of(f"disk-stores-{name}", [], name, 1.0)
    peer = Measured(make(folder))
    try:
        ratios = interleaved(ours.rate, peer.rate, pairs, _show("record log", name, disk))
    finally:
        peer.close()
    return Bar.of(f"disk-stores-{name}", ratios, name, 1.0)


def _show(ours: str, theirs: str, disk: RandomReads) -> Callable[[float, float], None]:
    def show(a: float, b: float) -> None:
        rate = disk.measure(40_000)
        log.print(
            f"{ours} {a:,.0f}/s ({a / rate:.2f} of the disk), {theirs} {b:,.0f}/s ({b / rate:.2f})",
            highlight=False,
        )

    return show


class Measured:
    """A loaded store, and its rate over the next batches."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._random = np.random.default_rng(0)
        started = time.perf_counter()
        for first in range(0, NUM_RECORDS, _LOAD):
            keys_M = np.arange(first, min(first + _LOAD, NUM_RECORDS))
            store.put(keys_M, np.repeat(keys_M[:, None], WORDS, axis=1).astype(np.int32))
        store.settle()
        seconds = time.perf_counter() - started
        log.print(f"{type(store).__name__}: loaded {NUM_RECORDS / seconds:,.0f} records/s", highlight=False)
        self.rate(2)  # thrown away: compiles, fills caches

    def rate(self, batches: int = BATCHES) -> float:
        """Records read, changed and written back per second."""
        drawn = [self._random.choice(NUM_RECORDS, BATCH, replace=False) for _ in range(batches)]
        started = time.perf_counter()
        for keys_M in drawn:
            words_MW = self._store.get(keys_M)
            assert (words_MW[:, 0] == keys_M).all()
            words_MW[:, 1] += 1
            self._store.put(keys_M, words_MW)
            self._store.settle()
        return batches * BATCH / (time.perf_counter() - started)

    def close(self) -> None:
        self._store.close()


class LogStore:
    """Ours; the addresses are kept here, as a table's index keeps them."""

    def __init__(self, folder: Path) -> None:
        self._log = RecordLog(folder, WORDS)
        self._addresses_N = np.full(NUM_RECORDS, -1, dtype=np.int64)

    def put(self, keys_M: Keys, words_MW: Words) -> None:
        before_M = self._addresses_N[keys_M]
        self._addresses_N[keys_M] = self._log.write(words_MW)
        self._log.free(before_M[before_M >= 0])

    def get(self, keys_M: Keys) -> Words:
        return self._log.read(self._addresses_N[keys_M])

    def settle(self) -> None:
        while (moved := self._log.compact()) is not None:
            self._addresses_N[moved.words_KW[:, 0]] = moved.addresses_K

    def close(self) -> None:
        self._log.close()


class RocksStore:
    """RocksDB: ten bits of Bloom filter per key, blocks of a page, no compression (floats do not)."""

    NUM_THREADS = 32

    def __init__(self, folder: Path) -> None:
        import rocksdict

        self._rocksdict: Any = rocksdict
        self._path = folder / "rocksdb"
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        buffers, buffer_bytes = 2, 16 * 2**20
        options.set_write_buffer_size(buffer_bytes)
        options.set_max_write_buffer_number(buffers)
        options.increase_parallelism(os.cpu_count() or 1)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(MEMORY_BYTES - buffers * buffer_bytes))
        blocks.set_block_size(PAGE)
        blocks.set_bloom_filter(10, False)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        options.set_block_based_table_factory(blocks)
        self._db = rocksdict.Rdict(str(self._path), options)
        without_log: Any = rocksdict.WriteOptions()
        without_log.disable_wal = True
        self._db.set_write_options(without_log)
        self._threads = ThreadPoolExecutor(self.NUM_THREADS)

    def put(self, keys_M: Keys, words_MW: Words) -> None:
        batch = self._rocksdict.WriteBatch(raw_mode=True)
        for key, value in zip(_key_bytes(keys_M), _record_bytes(words_MW), strict=True):
            batch.put(key, value)
        self._db.write(batch)

    def get(self, keys_M: Keys) -> Words:
        keys = _key_bytes(keys_M)
        get: Any = self._db.get
        parts = self._threads.map(get, _parts(keys, self.NUM_THREADS))
        return _words(value for part in parts for value in part)

    def settle(self) -> None:
        """Nothing: its memory is bounded by its options."""

    def close(self) -> None:
        self._threads.shutdown()
        self._db.close()
        shutil.rmtree(self._path)


class LmdbStore:
    """LMDB without read-ahead; a commit does not wait for the disk, only what is dropped is written."""

    NUM_THREADS = 32

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lmdb"
        self._threads = ThreadPoolExecutor(self.NUM_THREADS)
        self._open()
        self._cached = CachedFile(self._path / "data.mdb")

    def put(self, keys_M: Keys, words_MW: Words) -> None:
        order_M = np.argsort(keys_M)  # neighbors lie on one page of the tree
        pairs = zip(_key_bytes(keys_M[order_M]), _record_bytes(words_MW[order_M]), strict=True)
        with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(list(pairs))

    def get(self, keys_M: Keys) -> Words:
        parts = self._threads.map(self._get_part, _parts(_key_bytes(keys_M), self.NUM_THREADS))
        return _words(value for part in parts for value in part)

    def settle(self) -> None:
        if self._cached.num_bytes() > MEMORY_BYTES:
            self._env.sync(True)
            self._env.close()  # pages that are mapped cannot be dropped
            self._cached.drop()
            self._open()

    def close(self) -> None:
        self._threads.shutdown()
        self._env.close()
        self._cached.close()
        shutil.rmtree(self._path)

    def _open(self) -> None:
        import lmdb

        map_size = 8 * NUM_RECORDS * WORDS * 4
        self._env = lmdb.open(
            str(self._path), map_size=map_size, readahead=False, sync=False, max_readers=2 * self.NUM_THREADS
        )

    def _get_part(self, keys: list[bytes]) -> list[bytes | None]:
        with self._env.begin() as transaction:
            return [transaction.get(key) for key in keys]


class MappedStore:
    """Records in a mapped file, 15 to a page, gathered and scattered by compiled loops on threads."""

    NUM_THREADS = 64  # as many page faults at once

    def __init__(self, folder: Path) -> None:
        self._path = folder / "mapped"
        self._num_bytes = -(-NUM_RECORDS // _PAGES.records) * _PAGES.num_bytes
        with open(self._path, "wb") as file:
            file.truncate(self._num_bytes)
        self._threads = ThreadPoolExecutor(self.NUM_THREADS)
        self._descriptor = os.open(self._path, os.O_RDWR)
        self._mapped = mmap.mmap(self._descriptor, self._num_bytes)
        self._mapped.madvise(mmap.MADV_RANDOM)
        self._pages_PB = np.frombuffer(self._mapped, dtype=np.int32).reshape(-1, _PAGES.num_bytes // 4)
        self._cached = CachedFile(self._path)

    def put(self, keys_M: Keys, words_MW: Words) -> None:
        self._on_threads(_scatter, keys_M, words_MW)

    def get(self, keys_M: Keys) -> Words:
        words_MW = np.empty((len(keys_M), WORDS), dtype=np.int32)
        self._on_threads(_gather, keys_M, words_MW)
        return words_MW

    def settle(self) -> None:
        if self._cached.num_bytes() > MEMORY_BYTES:
            os.fsync(self._descriptor)
            self._mapped.madvise(mmap.MADV_DONTNEED)
            self._cached.drop()

    def close(self) -> None:
        self._threads.shutdown()
        self._cached.close()
        os.close(self._descriptor)
        self._path.unlink()

    def _on_threads(self, kernel: Callable[..., None], keys_M: Keys, words_MW: Words) -> None:
        order_M = np.argsort(keys_M)
        parts = np.array_split(order_M, self.NUM_THREADS)
        list(self._threads.map(lambda part: kernel(self._pages_PB, keys_M, part, words_MW), parts))


class InPlaceStore:
    """Records in a file, 15 to a page, every page read and written in its place with direct I/O."""

    NUM_THREADS = 64

    def __init__(self, folder: Path) -> None:
        self._path = folder / "in-place"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        self._num_pages = -(-NUM_RECORDS // _PAGES.records)
        with mmap.mmap(-1, _PAGES.num_bytes * 256) as empty:
            for first in range(0, self._num_pages, 256):
                os.pwrite(self._descriptor, empty, first * _PAGES.num_bytes)
        self._buffers = mmap.mmap(-1, BATCH * 2 * _PAGES.num_bytes)  # what is read stays until it is written
        self._pages_PB = np.frombuffer(self._buffers, dtype=np.int32).reshape(-1, _PAGES.num_bytes // 4)
        self._threads = ThreadPoolExecutor(self.NUM_THREADS)
        self._held_P = np.empty(0, dtype=np.int64)

    def put(self, keys_M: Keys, words_MW: Words) -> None:
        self._hold(keys_M)
        # A record's place among the pages that are held, as if they were the file.
        held_M = np.searchsorted(self._held_P, keys_M // _PAGES.records)
        places_M = held_M * _PAGES.records + keys_M % _PAGES.records
        _scatter(self._pages_PB, places_M, np.arange(len(keys_M)), words_MW)
        self._on_threads(_write_pages)

    def get(self, keys_M: Keys) -> Words:
        self._hold(keys_M)
        held_M = np.searchsorted(self._held_P, keys_M // _PAGES.records)
        words_MW = np.empty((len(keys_M), WORDS), dtype=np.int32)
        places_M = held_M * _PAGES.records + keys_M % _PAGES.records
        _gather(self._pages_PB, places_M, np.arange(len(keys_M)), words_MW)
        return words_MW

    def settle(self) -> None:
        self._held_P = np.empty(0, dtype=np.int64)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)
        self._path.unlink()

    def _hold(self, keys_M: Keys) -> None:
        pages_P = np.unique(keys_M // _PAGES.records)
        if not np.array_equal(pages_P, self._held_P):
            self._held_P = pages_P
            self._on_threads(_read_pages)

    def _on_threads(self, kernel: Callable[..., int]) -> None:
        buffer = np.uint64(self._pages_PB.ctypes.data)
        parts = np.array_split(np.arange(len(self._held_P)), self.NUM_THREADS)
        held_P = self._held_P
        failed = sum(self._threads.map(lambda part: kernel(self._descriptor, held_P, part, buffer), parts))
        assert not failed, f"{failed} pages failed"


PEERS: dict[str, tuple[str | None, Callable[[Path], Store]]] = {
    "rocksdb": ("rocksdict", RocksStore),
    "lmdb": (None, LmdbStore),
    "mmap": (None, MappedStore),
    "in-place": (None, InPlaceStore),
}
"""Module that it needs, and the store."""


class CachedFile:
    """How much of a file is in the page cache."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR)
        self._mincore = ctypes.CDLL(None, use_errno=True).mincore

    def num_bytes(self) -> int:
        size = os.fstat(self._descriptor).st_size
        with mmap.mmap(self._descriptor, size) as mapped:  # maps the file without touching a page of it
            view = np.frombuffer(mapped, dtype=np.uint8)
            resident = np.zeros(-(-size // PAGE), dtype=np.uint8)
            failed = self._mincore(
                ctypes.c_void_p(view.ctypes.data),
                ctypes.c_size_t(size),
                ctypes.c_void_p(resident.ctypes.data),
            )
            del view
        assert not failed, os.strerror(ctypes.get_errno())
        return int(np.count_nonzero(resident & 1)) * PAGE

    def drop(self) -> None:
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)


def _key_bytes(keys_M: Keys) -> list[bytes]:
    """Big-endian, so that the order of bytes is that of numbers."""
    joined = keys_M.astype(">i8").tobytes()
    return [joined[i : i + 8] for i in range(0, len(joined), 8)]


def _record_bytes(words_MW: Words) -> list[bytes]:
    joined, size = words_MW.tobytes(), WORDS * 4
    return [joined[i : i + size] for i in range(0, len(joined), size)]


def _words(values: Any) -> Words:
    return np.frombuffer(bytearray(b"".join(values)), dtype=np.int32).reshape(-1, WORDS)


def _parts(keys: list[bytes], num: int) -> list[list[bytes]]:
    size = -(-len(keys) // num)
    return [keys[i : i + size] for i in range(0, len(keys), size)]


@njit(nogil=True)
def _gather(pages_PB: Words, keys_M: Keys, order: Keys, words_MW: Words) -> None:
    for m in order:
        page, first = keys_M[m] // _PAGES.records, keys_M[m] % _PAGES.records * WORDS
        for w in range(WORDS):
            words_MW[m, w] = pages_PB[page, first + w]


@njit(nogil=True)
def _scatter(pages_PB: Words, keys_M: Keys, order: Keys, words_MW: Words) -> None:
    for m in order:
        page, first = keys_M[m] // _PAGES.records, keys_M[m] % _PAGES.records * WORDS
        for w in range(WORDS):
            pages_PB[page, first + w] = words_MW[m, w]


_signature: Any = types.int64(types.int32, types.uint64, types.uint64, types.int64)
_pread: Any = types.ExternalFunction("pread", _signature)
_pwrite: Any = types.ExternalFunction("pwrite", _signature)


@njit(nogil=True)
def _read_pages(descriptor: int, pages_P: Keys, part: Keys, buffer: np.uint64) -> int:
    failed = 0
    for p in part:
        at = buffer + np.uint64(p * PAGE)
        failed += _pread(np.int32(descriptor), at, np.uint64(PAGE), pages_P[p] * PAGE) != PAGE
    return failed


@njit(nogil=True)
def _write_pages(descriptor: int, pages_P: Keys, part: Keys, buffer: np.uint64) -> int:
    failed = 0
    for p in part:
        at = buffer + np.uint64(p * PAGE)
        failed += _pwrite(np.int32(descriptor), at, np.uint64(PAGE), pages_P[p] * PAGE) != PAGE
    return failed
