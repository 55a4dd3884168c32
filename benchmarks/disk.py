"""What a disk's random reads allow: 4 KiB at a time, past the page cache, at its best queue depth."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numba import njit, types

from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log
from rayrec.platform.errors import InputError

PAGE = 4096
_DEPTHS = (16, 32, 64, 128)
_CHUNK = 8 * 2**20

_pread: Any = types.ExternalFunction(
    "pread", types.int64(types.int32, types.uint64, types.uint64, types.int64)
)


class RandomReads:
    """A file of random bytes, and reads of its pages by as many threads as serve it best."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Write the file and find the best number of threads.

        Raises:
            InputError: the folder's file system knows no direct I/O.
        """
        self._num_pages = num_bytes // PAGE
        self._random = np.random.default_rng(0)
        self._descriptor = _written_file(folder, num_bytes)
        self._buffers = mmap.mmap(-1, max(_DEPTHS) * PAGE)
        self._buffer = np.uint64(np.frombuffer(self._buffers, dtype=np.uint8).ctypes.data)
        self._threads = ThreadPoolExecutor(max(_DEPTHS))
        self._measure(max(_DEPTHS), 1000)  # compiles, starts threads
        rates = {depth: self._measure(depth, 40_000) for depth in _DEPTHS}
        self.depth = max(rates, key=lambda depth: rates[depth])
        log.print(f"disk: {rates[self.depth]:,.0f} random reads/s, {self.depth} at a time", highlight=False)

    def measure(self, num_reads: int = 80_000) -> float:
        """Reads per second."""
        return self._measure(self.depth, num_reads)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)

    def _measure(self, depth: int, num_reads: int) -> float:
        places_M = self._random.integers(0, self._num_pages, num_reads) * PAGE
        started = time.perf_counter()
        failed = sum(
            self._threads.map(
                lambda i: _read(self._descriptor, places_M[i::depth], self._buffer + np.uint64(i * PAGE)),
                range(depth),
            )
        )
        assert not failed, f"{failed} reads failed"
        return num_reads / (time.perf_counter() - started)


@contextmanager
def scratch_folder(given: Path | None) -> Iterator[Path]:
    """A folder below `given`, or below the system's temporary folder, removed afterwards.

    What is measured is the disk that it is on; `RAYREC_BENCH_DATA` or `TMPDIR` chooses another.
    """
    with TemporaryDirectory(prefix="rayrec-bench-", dir=given) as folder:
        yield Path(folder)


def _written_file(folder: Path, num_bytes: int) -> int:
    """Descriptor of a new file without a name, open for direct I/O, every page of it written."""
    path = folder / "random-reads"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except (OSError, AttributeError) as error:
        raise InputError(
            f"{folder}: this file system has no direct I/O, without which memory would be measured instead "
            "of the disk; name a folder on a disk by RAYREC_BENCH_DATA"
        ) from error
    path.unlink()
    with mmap.mmap(-1, _CHUNK) as chunk:
        chunk.write(np.random.default_rng(0).bytes(_CHUNK))
        for place in range(0, num_bytes, _CHUNK):
            os.pwrite(descriptor, chunk, place)
    return descriptor


@njit(nogil=True)
def _read(descriptor: int, places_M: Int64Array, buffer: np.uint64) -> int:
    """Read the pages at these places, one after the other; how many could not be read."""
    failed = 0
    for place in places_M:
        failed += _pread(np.int32(descriptor), buffer, np.uint64(PAGE), place) != PAGE
    return failed
