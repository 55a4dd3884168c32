import gc
import os
import re
import resource

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayrec.embeddings.config import (
    AdamConfig,
    DiskConfig,
    EvictionConfig,
    IdAdmissionConfig,
    RowwiseAdagradConfig,
    TableConfig,
)
from rayrec.embeddings.storage.disk import record_log, tiered_rows
from rayrec.embeddings.storage.disk.page_reads import ALIGNMENT
from rayrec.embeddings.storage.disk.tiered_rows import TieredRows
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import TableRows
from tests.helpers.examples import examples

CONFIG = TableConfig(name="items", dim=3, seed=7)
MEMORY = 64 * 2**20


def with_disk(config: TableConfig, memory: int = MEMORY) -> TableConfig:
    return config.model_copy(update={"disk": DiskConfig(memory=memory)})


@pytest.fixture
def few_rows(monkeypatch):
    """Sets how many rows memory holds."""

    def hold(num_rows: int) -> None:
        monkeypatch.setattr(tiered_rows, "_MIN_ROWS", 1)
        monkeypatch.setattr(TieredRows, "_capacity_beside", lambda self, num_bytes: num_rows)

    return hold


def gradients(seed: int, num: int, dim: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, dim)).astype(np.float32)


def assert_same(a: TableRows, b: TableRows) -> None:
    for name in ("ids_M", "weights_MD", "state_MS", "steps_M", "counts_M"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        assert np.array_equal(x.view(np.int32), y.view(np.int32)), name  # bits: -0.0 is not 0.0
    assert np.array_equal(a.sighted.ids_K, b.sighted.ids_K)
    assert np.array_equal(a.sighted.counts_K, b.sighted.counts_K)
    assert np.array_equal(np.sort(a.evicted.ids_V), np.sort(b.evicted.ids_V))


class TieredMachine(RuleBasedStateMachine):
    """A table with five rows in memory against one with all of them there, bit by bit."""

    IDS = st.lists(st.integers(-20, 20), max_size=12, unique=True)

    @initialize(
        dtype=st.sampled_from(["float32", "bfloat16"]),
        optimizer=st.sampled_from([RowwiseAdagradConfig(), AdamConfig()]),
        admission=st.sampled_from([IdAdmissionConfig(), IdAdmissionConfig(min_sightings=2)]),
        eviction=st.sampled_from(
            [
                None,
                EvictionConfig(max_age_steps=3, every_steps=2),
                EvictionConfig(ttl_hours=1, every_steps=2),
                EvictionConfig(
                    min_score=0.5, half_life_steps=2, max_rows=65_536, keep="score", every_steps=2
                ),
            ]
        ),
    )
    def start(self, dtype, optimizer, admission, eviction):
        config = CONFIG.model_copy(
            update={
                "weight_dtype": dtype,
                "optimizer": optimizer,
                "admission": admission,
                "eviction": eviction,
            }
        )
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tiered_rows, "_MIN_ROWS", 1)
        self.patch.setattr(tiered_rows, "_COPY_BYTES", 200)  # parts of a few rows
        self.patch.setattr(TieredRows, "_capacity_beside", lambda rows, num_bytes: self.capacity)
        self.patch.setattr(record_log, "_SEGMENT_BYTES", 2 * ALIGNMENT)
        self.capacity = 5
        self.whole, self.tiered = EmbeddingTable(config), EmbeddingTable(with_disk(config))
        self.step = 0
        self.fetches = []

    def teardown(self):
        self.patch.undo()

    @rule(ids=IDS)
    def apply(self, ids):
        ids_M, grads_MD = np.array(ids, dtype=np.int64), gradients(self.step, len(ids))
        for table in (self.whole, self.tiered):
            table.apply(ids_M, grads_MD, self.step, newest_event=1000 * self.step)
        self.step += 1

    @rule(ids=st.lists(st.integers(-20, 20), max_size=12))
    def lookup(self, ids):
        ids_M = np.array(ids, dtype=np.int64)
        assert np.array_equal(self.whole.lookup(ids_M), self.tiered.lookup(ids_M))

    @rule(ids=IDS)
    def keep_in_a_cache(self, ids):
        ids_M = np.array(ids, dtype=np.int64)
        records_MW, present_M = self.whole.read_records(ids_M)
        theirs_MW, theirs_M = self.tiered.read_records(ids_M)
        assert np.array_equal(records_MW, theirs_MW)
        assert np.array_equal(present_M, theirs_M)
        for table in (self.whole, self.tiered):
            table.reserve(ids_M[:0], np.count_nonzero(present_M))
            table.write_records(ids_M[present_M], records_MW[present_M][::-1])

    @rule(ids=IDS)
    def begin_fetch(self, ids):
        for part in self.tiered.fetchable(np.array(ids, dtype=np.int64)):
            self.fetches.append(self.tiered.begin_fetch(part))

    @precondition(lambda self: self.fetches)
    @rule()
    def finish_fetch(self):
        fetch = self.fetches.pop(0)
        fetch.read()
        self.tiered.finish_fetch(fetch)

    @rule(capacity=st.integers(3, 8))
    def memory_changes(self, capacity):
        self.capacity = min(capacity, 5)

    @rule()
    def save_and_load(self):
        rows = self.tiered.export()
        self.tiered, self.fetches = EmbeddingTable(self.tiered.config), []
        self.tiered.load([rows])

    @invariant()
    def same(self):
        if hasattr(self, "whole"):
            assert_same(self.whole.export(), self.tiered.export())


TieredMachine.TestCase.settings = examples(30, stateful_step_count=20)
TestTieredTableIsATable = TieredMachine.TestCase


def test_rows_beyond_memory_lie_on_disk_and_come_back(few_rows):
    few_rows(100)
    table, ids_M = EmbeddingTable(with_disk(CONFIG)), np.arange(1000)
    table.apply(ids_M, gradients(0, 1000), 0)
    assert table.num_rows == 1000
    assert table._rows.num_on_disk >= 900
    whole = EmbeddingTable(CONFIG)
    whole.apply(ids_M, gradients(0, 1000), 0)
    assert np.array_equal(table.lookup(ids_M[::-1]), whole.lookup(ids_M[::-1]))


def test_looking_up_creates_nothing(few_rows):
    few_rows(100)
    table = EmbeddingTable(with_disk(CONFIG))
    assert np.array_equal(table.lookup(np.arange(500)), EmbeddingTable(CONFIG).lookup(np.arange(500)))
    assert (table.num_rows, table.fetchable(np.arange(500))) == (0, [])


def test_rows_that_are_used_often_stay_in_memory(few_rows):
    few_rows(100)
    table, often_M = EmbeddingTable(with_disk(CONFIG)), np.arange(20)
    for step in range(50):
        ids_M = np.concatenate((often_M, 1000 + 30 * step + np.arange(30)))
        table.apply(ids_M, gradients(step, 50), step)
    assert table.fetchable(often_M) == []


def test_what_was_fetched_is_found_in_memory_unless_it_changed_meanwhile(few_rows):
    few_rows(40)
    table, ids_M = EmbeddingTable(with_disk(CONFIG)), np.arange(200)
    for step in range(5):
        table.apply(ids_M[step * 40 : step * 40 + 40], gradients(step, 40), step)
    (wanted_K,) = table.fetchable(ids_M[:5])
    fetch = table.begin_fetch(wanted_K)
    fetch.read()
    table.apply(ids_M[:2], gradients(9, 2), 9)  # these two are in memory now, and newer
    expected = table.export()
    table.finish_fetch(fetch)
    assert table.fetchable(ids_M[:5]) == []
    assert_same(table.export(), expected)


def test_the_limit_holds_while_rows_and_the_map_of_ids_grow():
    memory = 40 * 2**20
    config = with_disk(CONFIG.model_copy(update={"dim": 30}), memory)
    table = EmbeddingTable(config)
    on_disk = []
    for step in range(15):
        ids_M = np.arange(step * 20_000, (step + 1) * 20_000)
        table.apply(ids_M, gradients(step, 20_000, 30), step)
        assert table.num_bytes <= memory
        on_disk.append(table._rows.num_on_disk)
    assert table.num_rows == 300_000
    assert on_disk[-1] > 190_000
    some_M = np.arange(0, 300_000, 1000)
    whole = EmbeddingTable(config.model_copy(update={"disk": None}))
    for step in range(15):
        whole.apply(np.arange(step * 20_000, (step + 1) * 20_000), gradients(step, 20_000, 30), step)
    assert np.array_equal(table.lookup(some_M), whole.lookup(some_M))


def test_too_little_memory_for_the_map_of_ids_is_an_error_that_changes_nothing():
    config = with_disk(CONFIG, 26 * 2**20)
    table = EmbeddingTable(config)

    def grow(step: int) -> None:
        table.apply(np.arange(step * 20_000, (step + 1) * 20_000), np.zeros((20_000, 3), np.float32), step)

    fitting = 0  # steps; the map of their ids takes what memory there is
    error: MemoryError | None = None
    while error is None:
        try:
            grow(fitting)
            fitting += 1
        except MemoryError as lacking:
            error = lacking
    assert re.search(r"'items'.*disk\.memory allows 26\.0 MiB", str(error))
    assert fitting > 3
    assert table.num_rows == fitting * 20_000
    assert np.array_equal(table.lookup(np.arange(10)), EmbeddingTable(CONFIG).lookup(np.arange(10)))


def test_no_memory_at_all_is_refused_at_once():
    with pytest.raises(MemoryError, match=r"disk\.memory allows 1\.0 MiB"):
        EmbeddingTable(with_disk(CONFIG, 2**20))


@pytest.fixture
def file_limit():
    """Sets the largest file that this process may write: a full disk, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_refuses_the_step_and_loses_no_row(few_rows, file_limit, monkeypatch):
    few_rows(100)
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", 2 * ALIGNMENT)
    table, whole = EmbeddingTable(with_disk(CONFIG)), EmbeddingTable(CONFIG)
    for t in (table, whole):
        t.apply(np.arange(150), gradients(0, 150), 0)
    file_limit(table._rows.disk_bytes)
    with pytest.raises(OSError, match=r"no space on disk for .* more bytes of embedding rows") as caught:
        table.apply(np.arange(100, 5000), gradients(1, 4900), 1)
    assert caught.value.filename == str(table.config.disk.folder_path)
    assert_same(table.export(), whole.export())
    file_limit(2**30)
    for t in (table, whole):
        t.apply(np.arange(100, 5000), gradients(1, 4900), 1)
    assert_same(table.export(), whole.export())


def test_parts_of_an_export_follow_each_other_and_are_the_export(few_rows, monkeypatch):
    few_rows(100)
    monkeypatch.setattr(tiered_rows, "_COPY_BYTES", 4 * 8 * 50)
    config = CONFIG.model_copy(update={"admission": IdAdmissionConfig(min_sightings=2)})
    table, ids_M = EmbeddingTable(with_disk(config)), np.arange(1000)
    table.apply(ids_M, gradients(0, 1000), 0)
    table.apply(ids_M[:900], gradients(1, 900), 1)
    parts = list(table.export_parts())
    assert len(parts) > 10
    assert [len(part.sighted) for part in parts[:2]] == [100, 0]
    whole = EmbeddingTable(config)
    whole.apply(ids_M, gradients(0, 1000), 0)
    whole.apply(ids_M[:900], gradients(1, 900), 1)
    assert_same(table.export(), whole.export())


def test_the_disk_is_given_back_with_the_table(monkeypatch):
    closed = []
    close = record_log.RecordLog.close
    monkeypatch.setattr(record_log.RecordLog, "close", lambda log: closed.append(close(log)))
    gc.disable()
    try:
        table = EmbeddingTable(with_disk(CONFIG))
        table.apply(np.arange(3), gradients(0, 3), 0)
        del table
        assert closed == [None]
    finally:
        gc.enable()


def test_memory_is_given_back_to_the_system_when_rows_make_room_for_the_map(few_rows, monkeypatch):
    given_back = []
    monkeypatch.setattr(tiered_rows.Records, "give_back", lambda self, num_rows: given_back.append(num_rows))
    few_rows(100)
    table = EmbeddingTable(with_disk(CONFIG))
    table.apply(np.arange(80), gradients(0, 80), 0)
    few_rows(50)
    table.lookup(np.arange(5))
    assert given_back == [50]
    assert os.path.isdir(table.config.disk.folder_path)


def test_what_waits_for_admission_counts_after_a_load_and_a_way_back_as_before():
    admission = IdAdmissionConfig(min_sightings=3)
    config = with_disk(CONFIG.model_copy(update={"admission": admission}))
    table, ids_M = EmbeddingTable(config), np.arange(50_000)
    room = table._rows.bytes_after(0)
    table.apply(ids_M, gradients(0, 50_000, 3), 0)
    waiting = room - table._rows.bytes_after(0)
    assert waiting > 50_000 * 8
    loaded = EmbeddingTable(config)
    loaded.load([table.export()])
    assert room - loaded._rows.bytes_after(0) == waiting
    loaded.roll_back(np.empty(0, np.int64), [])
    assert room - loaded._rows.bytes_after(0) < waiting / 10
    loaded.apply(ids_M, gradients(0, 50_000, 3), 1)
    assert room - loaded._rows.bytes_after(0) == waiting
