"""What a join of histories from an event store costs, and what it saves.

A log of 30,000 users with 200 events each on average (log-normal lengths, at most 20,000): 6 million events
with item, time and behavior, all of it in the page cache. A batch is 512 samples, users by Zipf's law
(exponent 1.1), each at the time of one of its events; it is answered with the newest 200 events before that.
A rate is events delivered per second, one thread. Bars:

* `stores-of-gather`: `histories_before` on LMDB against what nothing that copies could beat: the same events
  taken by numpy gathers from sorted arrays in memory, with the indices known beforehand.
* `stores-service`: LMDB against Redis on this machine, which is what a service costs.
* `stores-samples`: bytes of samples that carry their histories (zstd, in order of time, as a service logs
  them), against bytes of those that carry keys.
* `stores-samples-and-store`: the same, with the store counted too.

The last two on 400 of the users, or on the log (Parquet, events by row) that RAYREC_BENCH_DATA names.
RAYREC_BENCH_ROWS is the number of users. Without a Redis server its bar is not measured.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log
from rayrec.samples.base.jagged import concatenated_ranges, list_rows, offsets_from_lengths
from rayrec.samples.stores import EventBatch, StoreManifest, open_store
from rayrec.samples.stores.build import StoreBuildConfig, build_store
from rayrec.samples.stores.key_samples import write_key_samples
from rayrec.samples.stores.lookup import histories_before
from rayrec.samples.stores.store import KeyValueEvents

NUM_USERS, MEAN_LENGTH, LONGEST, NUM_ITEMS = 30_000, 200, 20_000, 50_000
BATCH, LAST, EXPONENT = 512, 200, 1.1
BATCHES = 20
"""Of one measurement."""
USERS_OF_SAMPLES = 400
COLUMNS = ("items", "behaviors")

MANIFEST = StoreManifest(name="bench", columns={"behaviors": "int8"}, time_unit="s")

_USERS_AT_ONCE = 2000


def bench(options: BenchOptions) -> list[Bar]:
    events = Log.sampled(options.rows or NUM_USERS)
    with TemporaryDirectory(prefix="rayrec-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        ours = stack.enter_context(_loaded("LMDB", open_store(folder / "lmdb", create=MANIFEST), events))
        log.print(f"LMDB: {_bytes_on_disk(folder / 'lmdb') / events.num_events:.1f} bytes per event on disk")
        limit = Gather(events)
        bars = [_bar("of-gather", "a numpy gather, indices known", ours, limit, options.pairs, 0.1)]
        bars.append(_service(folder, events, ours, options.pairs))
        ours.store.close()
        bars += _samples(folder, options, events)
    return bars


@dataclass(frozen=True)
class Log:
    """Events by user and time. Axes: U users, N events."""

    offsets_U1: Int64Array
    times_N: Int64Array
    items_N: Int64Array
    behaviors_N: np.ndarray

    @classmethod
    def sampled(cls, num_users: int) -> Log:
        random = np.random.default_rng(0)
        lengths_U = random.lognormal(np.log(MEAN_LENGTH) - 0.5, 1.0, num_users)
        lengths_U = np.clip(lengths_U.astype(np.int64), 2, LONGEST)
        offsets_U1 = offsets_from_lengths(lengths_U)
        num_events = int(offsets_U1[-1])
        users_N = np.repeat(np.arange(num_users), lengths_U)
        times_N = 1_600_000_000 + random.integers(0, 3 * 365 * 86_400, num_events)
        times_N = times_N[np.lexsort((times_N, users_N))]
        items_N = (NUM_ITEMS * random.random(num_events) ** 3).astype(np.int64)  # few are popular
        return cls(offsets_U1, times_N, items_N, random.integers(0, 3, num_events).astype(np.int8))

    @property
    def num_users(self) -> int:
        return len(self.offsets_U1) - 1

    @property
    def num_events(self) -> int:
        return len(self.times_N)

    def batches(self) -> Iterator[EventBatch]:
        for first in range(0, self.num_users, _USERS_AT_ONCE):
            stop = min(first + _USERS_AT_ONCE, self.num_users)
            rows = slice(self.offsets_U1[first], self.offsets_U1[stop])
            users_E = np.repeat(np.arange(first, stop), np.diff(self.offsets_U1[first : stop + 1]))
            yield EventBatch(
                users_E, self.times_N[rows], self.items_N[rows], {"behaviors": self.behaviors_N[rows]}
            )


class Samples:
    """Users and times of batches that were not asked for before."""

    def __init__(self, events: Log) -> None:
        self._events = events
        self._random = np.random.default_rng(1)
        weights_U = np.arange(1, events.num_users + 1) ** -EXPONENT
        self._cumulative_U = np.cumsum(weights_U) / weights_U.sum()
        self._user_of_rank_U = self._random.permutation(events.num_users)

    def sample(self) -> tuple[Int64Array, Int64Array]:
        ranks_B = np.searchsorted(self._cumulative_U, self._random.random(BATCH))
        users_B = self._user_of_rank_U[np.minimum(ranks_B, self._events.num_users - 1)]
        starts_B, stops_B = self._events.offsets_U1[users_B], self._events.offsets_U1[users_B + 1]
        return users_B, self._events.times_N[self._random.integers(starts_B, stops_B)]


class Gather:
    """The limit: events in memory, sorted; where a sample's are is found before the clock runs."""

    def __init__(self, events: Log) -> None:
        self._events = events
        self._samples = Samples(events)

    def rate(self) -> float:
        events = self._events
        ranges = [self._ranges(*self._samples.sample()) for _ in range(BATCHES)]
        delivered = 0
        started = time.perf_counter()
        for starts_B, lengths_B in ranges:
            indices_N = concatenated_ranges(starts_B, lengths_B)
            times_N, items_N = events.times_N[indices_N], events.items_N[indices_N]
            behaviors_N = events.behaviors_N[indices_N]
            assert len(times_N) == len(items_N) == len(behaviors_N)
            delivered += len(times_N)
        return delivered / (time.perf_counter() - started)

    def _ranges(self, users_B: Int64Array, times_B: Int64Array) -> tuple[Int64Array, Int64Array]:
        starts_B = self._events.offsets_U1[users_B].copy()
        stops_B = starts_B.copy()
        for b, user in enumerate(users_B):
            times_N = self._events.times_N[starts_B[b] : self._events.offsets_U1[user + 1]]
            stops_B[b] += np.searchsorted(times_N, times_B[b])
        starts_B = np.maximum(starts_B, stops_B - LAST)
        return starts_B, stops_B - starts_B


class Measured:
    """A loaded store, and the rate of joins from it."""

    def __init__(self, store: KeyValueEvents, events: Log) -> None:
        self.store = store
        self._samples = Samples(events)
        self.rate()  # thrown away: compiles, fills caches

    def rate(self) -> float:
        asked = [self._samples.sample() for _ in range(BATCHES)]
        delivered = 0
        started = time.perf_counter()
        for users_B, times_B in asked:
            delivered += len(histories_before(self.store, users_B, times_B, LAST, COLUMNS).times_N)
        return delivered / (time.perf_counter() - started)


@contextmanager
def _loaded(name: str, store: KeyValueEvents, events: Log) -> Iterator[Measured]:
    started = time.perf_counter()
    for batch in events.batches():
        store.append(batch)
    rate = events.num_events / (time.perf_counter() - started)
    log.print(f"{name}: {events.num_events:,} events, {rate:,.0f} appended per second", highlight=False)
    try:
        yield Measured(store, events)
    finally:
        store.close()


def _service(folder: Path, events: Log, ours: Measured, pairs: int) -> Bar:
    if shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None:
        log.print("stores-service: not measured, redis-server or its client is missing (make redis)")
        return Bar.of("stores-service", [], "Redis on this machine", 1.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        store = open_store(f"redis://127.0.0.1:{port}/0", create=MANIFEST)  # waits until it listens
        with _loaded("Redis", store, events) as service:
            import redis

            used = redis.Redis(port=port).info("memory")["used_memory_dataset"]
            log.print(f"Redis: {used / events.num_events:.1f} bytes per event in memory", highlight=False)
            return _bar("service", "Redis on this machine", ours, service, pairs, 1.0)
    finally:
        server.kill()
        server.wait()


def _bar(name: str, peer: str, ours: Measured, theirs: Measured | Gather, pairs: int, target: float) -> Bar:
    def show(a: float, b: float) -> None:
        log.print(f"LMDB {a:,.0f} events/s, {peer} {b:,.0f}, ratio {a / b:.3f}", highlight=False)

    return Bar.of(f"stores-{name}", interleaved(ours.rate, theirs.rate, pairs, show), peer, target)


def _samples(folder: Path, options: BenchOptions, events: Log) -> list[Bar]:
    """Sizes, which are the same every time: as many ratios as a bar needs."""
    source = options.data
    if source is None:
        source = folder / "log.parquet"
        few = slice(0, int(events.offsets_U1[min(USERS_OF_SAMPLES, events.num_users)]))
        users_N = np.repeat(np.arange(events.num_users), np.diff(events.offsets_U1))
        pq.write_table(
            pa.table(
                {"user_id": users_N[few], "item_id": events.items_N[few], "timestamp": events.times_N[few]}
            ),
            source,
        )
    build_store(source, str(folder / "built"), StoreBuildConfig(name="log"))
    store = open_store(folder / "built")
    keys = write_key_samples(store, folder / "keys")
    carried = _write_carried(store, folder / "keys", folder / "carried.parquet")
    store.close()
    stored = _bytes_on_disk(folder / "built")
    log.print(
        f"{keys.samples:,} samples of {keys.events:,} events, {keys.users:,} users: {carried:,} bytes with "
        f"histories of at most {LAST}, {keys.bytes:,} with keys, {stored:,} in the store",
        highlight=False,
    )
    times = [1] * options.pairs
    return [
        Bar.of("stores-samples", [carried / keys.bytes for _ in times], "samples with keys", 5.0),
        Bar.of(
            "stores-samples-and-store", [carried / (keys.bytes + stored) for _ in times], "and the store", 1.0
        ),
    ]


def _write_carried(store: KeyValueEvents, keys: Path, path: Path) -> int:
    """The same samples with their histories inside, in order of time; returns the bytes."""
    rows = pq.read_table(keys).sort_by("timestamp")
    writer: pq.ParquetWriter | None = None
    for batch in rows.to_batches(max_chunksize=16_384):
        users_B, times_B = batch["user_id"].to_numpy(), batch["timestamp"].cast(pa.int64()).to_numpy()
        histories = histories_before(store, users_B, times_B, LAST, ("items",))
        starts_B, lengths_B = histories.offsets_K1[:-1], np.diff(histories.offsets_K1)
        table = pa.table(
            {
                "user_id": batch["user_id"],
                "item_id": batch["item_id"],
                "timestamp": batch["timestamp"],
                "item_ids": list_rows(pa.array(histories.columns["items"]), starts_B, lengths_B),
                "item_times": list_rows(pa.array(histories.times_N), starts_B, lengths_B),
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None, "a store without samples is refused before"
    writer.close()
    return path.stat().st_size


def _bytes_on_disk(folder: Path) -> int:
    """As allocated: a mapped file may have holes."""
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())
