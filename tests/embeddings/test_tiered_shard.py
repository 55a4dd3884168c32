"""Shards whose tables hold a few rows in memory, the others on disk."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import DiskConfig, EvictionConfig, IdAdmissionConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot import snapshot
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.embeddings.storage.disk import record_log, tiered_rows
from rayrec.embeddings.storage.disk.page_reads import ALIGNMENT
from rayrec.embeddings.storage.disk.record_log import RecordLog
from rayrec.embeddings.storage.disk.tiered_rows import TieredRows
from rayrec.embeddings.transport.protocol import FetchCall, LookupCall
from tests.embeddings.dictionary_runs import MODES, check_tables, runs, trained_dictionaries
from tests.embeddings.sparse_runs import AdversarialTransport, make_shards, run
from tests.helpers.examples import cases, examples

CONFIG = TableConfig(name="items", dim=3, disk=DiskConfig(memory=64 * 2**20))


@pytest.fixture(autouse=True, scope="module")
def four_rows_in_memory():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered_rows, "_MIN_ROWS", 1)
        patch.setattr(tiered_rows, "_COPY_BYTES", 100)
        patch.setattr(record_log, "_SEGMENT_BYTES", 2 * ALIGNMENT)
        patch.setattr(TieredRows, "_capacity_beside", lambda self, num_bytes: 4)
        yield


class AnnouncingTransport(AdversarialTransport):
    """Every request is announced when it is sent, so that it is read ahead while other calls come."""

    def call(self, shard, call):
        if isinstance(call, LookupCall | FetchCall):
            self._shards[shard].prefetch(call.request)
        return super().call(shard, call)


@pytest.mark.parametrize(
    "mode", cases(MODES, ("sync", "exact_prefetch", "shared-row write-back in a thread", "cache of 3"))
)
@examples(15)
@given(run_=runs(), num_shards=st.integers(1, 2), seed=st.integers(0, 10_000), ahead=st.booleans())
def test_every_mode_gives_the_rows_of_a_dictionary(mode, run_, num_shards, seed, ahead):
    expected, expected_rows = trained_dictionaries(run_)
    tables = [table.model_copy(update={"disk": CONFIG.disk}) for table in run_.tables]
    shards = make_shards(tables, num_shards, len(run_.batches_by_source))
    transport = AnnouncingTransport(shards, seed, repeated=0.3)
    found = run(MODES[mode], tables, transport, num_shards, run_.batches_by_source, ahead=ahead)
    transport.finish()

    for source, (seen, _) in enumerate(found):
        for step, rows in enumerate(seen):
            for name, expected_MD in expected_rows[source][step].items():
                assert rows[name].tobytes() == expected_MD.tobytes(), (source, step, name)
    check_tables(shards, run_, expected)


def filled(num_rows: int, config: TableConfig = CONFIG) -> EmbeddingShard:
    shard = EmbeddingShard([config], 0, 1)
    ids_M = np.arange(num_rows)
    shard.apply(UpdateTag(0, 0, 0), {"items": (ids_M, np.ones((num_rows, 3), dtype=np.float32))})
    return shard


def snapshot_of(shard: EmbeddingShard, step: int):
    shard.begin_snapshot(step)
    return shard.export_snapshot("items", step)


def test_announced_rows_are_in_memory_when_they_are_looked_up(monkeypatch):
    shard, arrived = filled(50), threading.Event()
    finish = TieredRows.finish_fetch
    monkeypatch.setattr(
        TieredRows, "finish_fetch", lambda rows, fetch: (finish(rows, fetch), arrived.set())[0]
    )
    shard.prefetch({"items": np.arange(1)})
    assert arrived.wait(20)
    read = []
    monkeypatch.setattr(RecordLog, "read", lambda log, addresses_M: read.append(addresses_M))
    shard.lookup({"items": np.arange(1)})
    assert not read


def test_updates_go_on_while_a_lookup_reads_from_disk(monkeypatch):
    shard, reading, go_on = filled(50), threading.Event(), threading.Event()
    read = tiered_rows.Fetch.read

    def slow_read(fetch):
        reading.set()
        assert go_on.wait(20)
        read(fetch)

    monkeypatch.setattr(tiered_rows.Fetch, "read", slow_read)
    replies = []
    looking_up = threading.Thread(target=lambda: replies.append(shard.lookup({"items": np.arange(1)}, 1)))
    looking_up.start()
    assert reading.wait(20)
    shard.apply(UpdateTag(0, 1, 0), {"items": (np.arange(2), np.ones((2, 3), dtype=np.float32))})
    go_on.set()
    looking_up.join(20)
    in_memory = filled(50, CONFIG.model_copy(update={"disk": None}))
    in_memory.apply(UpdateTag(0, 1, 0), {"items": (np.arange(2), np.ones((2, 3), dtype=np.float32))})
    assert np.array_equal(replies[0]["items"], in_memory.lookup({"items": np.arange(1)})["items"])


class SlowReads:
    """Reads from disk that wait until they may go on; which records they read, in order."""

    def __init__(self, monkeypatch):
        self.begun, self.go_on, self.logs = threading.Event(), threading.Event(), []
        read = tiered_rows.Fetch.read

        def slow_read(fetch):
            self.logs.append(fetch.log)
            self.begun.set()
            assert self.go_on.wait(20)
            read(fetch)

        monkeypatch.setattr(tiered_rows.Fetch, "read", slow_read)


def two_tables(second: TableConfig) -> EmbeddingShard:
    shard, ids_M = EmbeddingShard([CONFIG, second], 0, 1), np.arange(50)
    grads_MD = np.ones((50, 3), dtype=np.float32)
    shard.apply(UpdateTag(0, 0, 0), {"items": (ids_M, grads_MD), "users": (ids_M, grads_MD)})
    return shard


def test_lookups_that_need_nothing_from_disk_wait_for_no_read(monkeypatch):
    shard = two_tables(CONFIG.model_copy(update={"name": "users", "disk": None}))
    shard.lookup({"items": np.array([7])})
    reads = SlowReads(monkeypatch)
    shard.prefetch({"items": np.arange(1)})
    assert reads.begun.wait(20)
    shard.lookup({"users": np.arange(50), "items": np.array([7])})  # would wait for ever
    assert not reads.go_on.is_set()
    reads.go_on.set()


def test_a_lookup_goes_before_what_is_left_of_an_announcement(monkeypatch):
    shard = two_tables(CONFIG.model_copy(update={"name": "users"}))
    reads = SlowReads(monkeypatch)
    shard.prefetch({"items": np.arange(1), "users": np.arange(1)})
    assert reads.begun.wait(20)
    looking_up = threading.Thread(target=shard.lookup, args=({"items": np.array([1])},))
    looking_up.start()
    while not shard._disk_prefetch._turns.num_first:
        time.sleep(0.001)
    reads.go_on.set()
    looking_up.join(20)
    shard._disk_prefetch._thread.shutdown()  # waits for the prefetch
    items, users = (shard._tables[name]._rows._log for name in ("items", "users"))
    assert reads.logs == [items, items, users]


def test_announcements_beyond_a_few_that_wait_are_forgotten(monkeypatch):
    shard = filled(50)
    reads = SlowReads(monkeypatch)
    for first in range(20):
        shard.prefetch({"items": np.array([first])})
    assert reads.begun.wait(20)
    assert shard._disk_prefetch._num_waiting == 8
    reads.go_on.set()
    shard._disk_prefetch._thread.shutdown()
    assert len(reads.logs) <= 8
    assert shard._disk_prefetch._num_waiting == 0


def test_an_announcement_that_fails_is_left_to_the_lookup(monkeypatch, caplog):
    shard, failed = filled(50), threading.Event()

    def broken(*args):
        failed.set()
        raise OSError(5, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(RecordLog, "read", broken)
        shard.prefetch({"items": np.arange(10)})
        assert failed.wait(20)
        with pytest.raises(OSError, match="the disk is broken"):
            shard.lookup({"items": np.arange(10)})
    assert len(shard.lookup({"items": np.arange(50)})["items"]) == 50


@pytest.mark.slow
def test_a_larger_table_is_read_in_parts_by_any_number_of_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_ROWS_PER_PART", 50)
    monkeypatch.setattr(snapshot, "_ROWS_PER_GROUP", 100)
    config = CONFIG.model_copy(
        update={
            "admission": IdAdmissionConfig(min_sightings=2),
            "eviction": EvictionConfig(max_age_steps=1, every_steps=4),
        }
    )
    shard = EmbeddingShard([config], 0, 1)
    for step, ids_M in enumerate([np.arange(30), np.arange(30), np.arange(30, 500), np.arange(100, 520)]):
        shard.apply(UpdateTag(0, step, 0), {"items": (ids_M, np.ones((len(ids_M), 3), dtype=np.float32))})
    everything = shard.export("items")
    assert min(map(len, (everything.ids_M, everything.sighted, everything.evicted))) > 0
    files = [
        tmp_path / file.name
        for file in write_table(tmp_path, config, ShardMap(1), 0, 3, snapshot_of(shard, 3))
    ]
    found = []
    for number in range(3):
        parts = list(load_tables(files, [config], ShardMap(3), number)["items"])
        assert len(parts) > 1
        loaded = EmbeddingShard([config], 0, 1)
        loaded.restore({"items": parts})
        found.append(loaded.export("items"))
    for name in ("ids_M", "weights_MD", "state_MS", "steps_M", "counts_M"):
        assert np.array_equal(
            np.concatenate([getattr(rows, name) for rows in found]), getattr(everything, name)
        )
    assert sorted(np.concatenate([rows.sighted.ids_K for rows in found])) == everything.sighted.ids_K.tolist()
    assert sorted(np.concatenate([rows.evicted.ids_V for rows in found])) == sorted(everything.evicted.ids_V)


@pytest.mark.slow
def test_what_a_shard_with_a_disk_saves_a_shard_without_one_loads(tmp_path):
    shard = filled(500)
    saved = write_table(tmp_path, CONFIG, ShardMap(1), 0, 0, snapshot_of(shard, 0))
    in_memory = CONFIG.model_copy(update={"disk": None})
    files = [tmp_path / file.name for file in saved]
    loaded = EmbeddingShard([in_memory], 0, 1)
    loaded.restore(load_tables(files, [in_memory], ShardMap(1), 0))
    again = EmbeddingShard([CONFIG], 0, 1)
    again.restore(load_tables(files, [CONFIG], ShardMap(1), 0))
    for other in (loaded, again):
        assert np.array_equal(other.export("items").ids_M, shard.export("items").ids_M)
        assert np.array_equal(other.export("items").weights_MD, shard.export("items").weights_MD)


def test_room_on_disk_is_taken_for_rows_that_change_and_for_those_that_come_back(monkeypatch):
    shard, reserved = filled(50), []
    reserve = RecordLog.reserve
    monkeypatch.setattr(RecordLog, "reserve", lambda log, num: (reserved.append(num), reserve(log, num))[1])
    kept_K, ids_M = np.arange(7), np.arange(20, 30)
    kept = {"items": (kept_K, shard.fetch({"items": kept_K})["items"][0])}

    shard.apply(UpdateTag(0, 1, 0), {"items": (ids_M, np.ones((10, 3), dtype=np.float32))}, kept)
    shard.write_back(0, 1, kept)

    # Each of them may send a row to disk when it comes in, and go there itself.
    assert reserved == [2 * (7 + 10), 2 * 7]


def test_stats_say_what_is_on_disk():
    stats = filled(500).stats()
    assert stats.num_rows == {"items": 500}
    assert stats.disk_bytes >= 500 * CONFIG.dim * 4


def test_a_full_disk_ends_the_step_for_everybody_who_waits_and_no_row_has_changed(monkeypatch):
    shard = filled(50)
    before = shard.export("items")

    def full(log, num_records):
        raise OSError(28, "no space on disk for 4,096 more bytes of embedding rows", "/somewhere")

    monkeypatch.setattr(RecordLog, "reserve", full)
    update = {"items": (np.arange(100), np.ones((100, 3), dtype=np.float32))}
    with pytest.raises(OSError, match="no space on disk"):
        shard.apply(UpdateTag(0, 1, 0), update)
    assert np.array_equal(shard.export("items").weights_MD, before.weights_MD)
    assert shard.committed_step == 0
    with pytest.raises(OSError, match="no space on disk"):
        shard.lookup({"items": np.arange(1)}, after_step=1)
