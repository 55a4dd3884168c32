"""How fast 64-bit ids become row numbers: our index against torchrec's and pandas'.

Ten million ids that look random, one thread on each side. Bars, all of them ratios of ids per second:

* `index-lookup-torchrec`, `index-insert-torchrec`, `index-insert-growing-torchrec`: against
  `MCHManagedCollisionModule`, which maps ids to rows of a fixed number by a binary search over sorted ids.
  Its inserts are measured at their best: all ids in one call, into a module of the right size. Ours come
  100,000 at a time, into an index of the right size, and in the third bar into one that starts empty and
  grows as in training. (torchrec's `HashZchManagedCollisionModule` cannot insert on a CPU.)
* `index-lookup-pandas`: against `pandas.Index.get_indexer`.

Lookups come 100,000 at a time, of ids drawn uniformly among those that are there; no batch comes twice.
For comparison only, a line tells of numba's typed dictionary.

torchrec is an optional peer. It asks for the CUDA build of fbgemm-gpu, which would overwrite the CPU one:
on a machine without a GPU install it by the two commands in `INSTALL_TORCHREC`.
`RAYREC_BENCH_ROWS` makes the index smaller, for a look at the benchmark itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numba import njit, types
from numba.typed import Dict

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.embeddings.storage.index import IdIndex
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log
from rayrec.platform.hashing import mix64

IDS = 10_000_000
BATCH = 100_000
LOOKUP_TARGET, INSERT_TARGET = 2.5, 5.0
INSTALL_TORCHREC = "pip install '.[torchrec]', then pip install --no-deps torchrec==1.8.0"


def bench(options: BenchOptions) -> list[Bar]:
    with _one_thread():
        ids_R = distinct_ids(options.rows or IDS)
        index = IdIndex()
        insert(index, ids_R)
        ours = LookupWindows(index.find, ids_R, options.steps)
        bars = [*_torchrec_bars(ours, ids_R, options), _pandas_bar(ours, ids_R, options)]
        _tell_of_numba(ids_R, options)
    return bars


def distinct_ids(num_ids: int) -> Int64Array:
    """Ids that look random; not negative, since torchrec's module keeps the sign for itself."""
    ids_R = (mix64(np.arange(num_ids + num_ids // 1000 + 10)) >> np.uint64(1)).view(np.int64)
    ids_R = pd.unique(ids_R)[:num_ids]  # two of them may have differed in the bit that was dropped
    assert len(ids_R) == num_ids
    return ids_R


def insert(index: IdIndex, ids_R: Int64Array) -> None:
    for first in range(0, len(ids_R), BATCH):
        index.find_or_add(ids_R[first : first + BATCH])


class LookupWindows:
    """Timed windows of lookups of new batches."""

    def __init__(self, find: Callable[[Any], Any], ids_R: Int64Array, num_steps: int) -> None:
        self._find = find
        self._ids_R = ids_R
        self._num_steps = num_steps
        self._next = itertools.count()

    def rate(self) -> float:
        """Ids per second over the next window."""
        batches = []
        for _ in range(self._num_steps):
            random = np.random.default_rng([0, next(self._next)])
            batches.append(self._ids_R[random.integers(len(self._ids_R), size=BATCH)])
        started = time.perf_counter()
        for ids_N in batches:
            self._find(ids_N)
        return self._num_steps * BATCH / (time.perf_counter() - started)


def _torchrec_bars(ours: LookupWindows, ids_R: Int64Array, options: BenchOptions) -> list[Bar]:
    try:
        from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
        from torchrec.sparse.jagged_tensor import JaggedTensor
    except ImportError as error:
        peer = f"torchrec, which is not installed ({error}): {INSTALL_TORCHREC}"
        return [
            Bar.of("index-lookup-torchrec", [], peer, LOOKUP_TARGET),
            Bar.of("index-insert-torchrec", [], peer, INSERT_TARGET),
            Bar.of("index-insert-growing-torchrec", [], peer, INSERT_TARGET),
        ]

    def features(ids_N: Int64Array) -> dict[str, JaggedTensor]:
        return {"id": JaggedTensor(torch.from_numpy(ids_N), lengths=torch.tensor([len(ids_N)]))}

    def filled() -> MCHManagedCollisionModule:
        module = MCHManagedCollisionModule(
            zch_size=len(ids_R) + 1,  # the last row is that of ids it does not know
            device=torch.device("cpu"),
            eviction_policy=LFU_EvictionPolicy(),
            eviction_interval=1,
        )
        module.profile(features(ids_R))
        return module

    module = filled()
    remapped = module.remap(features(ids_R))["id"].values()
    assert len(torch.unique(remapped)) == len(ids_R), "the peer has not given every id a row of its own"
    theirs = LookupWindows(lambda ids_N: module.remap(features(ids_N)), ids_R, options.steps)
    peer = "torchrec MCHManagedCollisionModule"
    lookups = _ratios("index-lookup-torchrec", ours.rate, theirs.rate, options)

    bars = [Bar.of("index-lookup-torchrec", lookups, peer, LOOKUP_TARGET)]
    for name, expected_ids in (("index-insert-torchrec", len(ids_R)), ("index-insert-growing-torchrec", 0)):
        inserts = _ratios(
            name,
            partial(_insert_rate, ids_R, expected_ids),
            lambda: _rate(len(ids_R), filled),
            options,
        )
        bars.append(Bar.of(name, inserts, peer, INSERT_TARGET))
    return bars


def _insert_rate(ids_R: Int64Array, expected_ids: int) -> float:
    return _rate(len(ids_R), lambda: insert(IdIndex(expected_ids), ids_R))


def _pandas_bar(ours: LookupWindows, ids_R: Int64Array, options: BenchOptions) -> Bar:
    peer = pd.Index(ids_R)
    theirs = LookupWindows(lambda ids_N: peer.get_indexer(pd.Index(ids_N)), ids_R, options.steps)
    ratios = _ratios("index-lookup-pandas", ours.rate, theirs.rate, options)
    return Bar.of("index-lookup-pandas", ratios, "pandas Index.get_indexer", LOOKUP_TARGET)


def _tell_of_numba(ids_R: Int64Array, options: BenchOptions) -> None:
    """For comparison only: there is no bar."""
    _find_in_dictionary(_dictionary_of(ids_R[:1]), ids_R[:1])  # compiles
    started = time.perf_counter()
    dictionary = _dictionary_of(ids_R)
    inserts = len(ids_R) / (time.perf_counter() - started)
    lookups = LookupWindows(lambda ids_N: _find_in_dictionary(dictionary, ids_N), ids_R, options.steps).rate()
    log.print(
        f"index: numba's typed dictionary: {inserts / 1e6:.2f} M inserts/s, {lookups / 1e6:.2f} M lookups/s",
        highlight=False,
    )


@njit(nogil=True)
def _dictionary_of(ids_R: Int64Array) -> Any:
    rows = Dict.empty(types.int64, types.int64)
    for row in range(len(ids_R)):
        rows[ids_R[row]] = row
    return rows


@njit(nogil=True)
def _find_in_dictionary(rows: Any, ids_N: Int64Array) -> Int64Array:
    rows_N = np.empty(len(ids_N), dtype=np.int64)
    for n in range(len(ids_N)):
        rows_N[n] = rows.get(ids_N[n], -1)
    return rows_N


def _rate(num_ids: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return num_ids / (time.perf_counter() - started)


def _ratios(
    name: str, ours: Callable[[], float], peer: Callable[[], float], options: BenchOptions
) -> list[float]:
    def show(a: float, b: float) -> None:
        log.print(f"{name}: {a / 1e6:.2f} M ids/s, peer {b / 1e6:.2f}, ratio {a / b:.2f}", highlight=False)

    interleaved(ours, peer, repeats=1)  # thrown away
    return interleaved(ours, peer, options.pairs, show)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
