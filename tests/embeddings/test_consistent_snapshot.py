"""A table as a step left it, read while later steps commit: held to a dictionary, and to a whole snapshot.

Where the writer is when something changes is for the test to say: it takes the next part when it wants to.
"""

import copy
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rayrec.embeddings.base.layout import STEP_WORD
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import (
    AdamConfig,
    DiskConfig,
    EvictionConfig,
    IdAdmissionConfig,
    RowwiseAdagradConfig,
    TableConfig,
)
from rayrec.embeddings.shard.contributions import Part, UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot import snapshot
from rayrec.embeddings.snapshot.saved_files import checksum_file
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.embeddings.storage import consistent_snapshot as cut_module
from rayrec.embeddings.storage.consistent_snapshot import (
    ConsistentSnapshot,
    SnapshotEndedError,
    SnapshotRecords,
)
from rayrec.embeddings.storage.copy_on_write import ENTRY_BYTES
from rayrec.embeddings.storage.disk import record_log, tiered_rows
from rayrec.embeddings.storage.disk.page_reads import ALIGNMENT
from rayrec.embeddings.storage.disk.tiered_rows import TieredRows
from rayrec.embeddings.storage.index import IdMap
from rayrec.embeddings.storage.row_storage import MemoryRows
from rayrec.embeddings.table import ids_since
from rayrec.embeddings.table.table_rows import TableRows
from tests.embeddings.dictionary_oracle import DictionaryTable
from tests.embeddings.test_admission_and_eviction import check_calendar
from tests.helpers.examples import cases, examples

PLAIN = TableConfig(name="items", dim=3, seed=1, optimizer=RowwiseAdagradConfig())
RULED = TableConfig(
    name="items",
    dim=3,
    seed=1,
    optimizer=AdamConfig(),
    weight_dtype="bfloat16",
    admission=IdAdmissionConfig(min_sightings=2, forget_after_steps=3, every_steps=2),
    eviction=EvictionConfig(max_age_steps=2, every_steps=2, remember_steps=3),
)
TIMED = RULED.model_copy(
    update={"eviction": EvictionConfig(ttl_hours=1.5, max_age_steps=9, every_steps=2, remember_steps=3)}
)
CONFIGS = {"plain": PLAIN, "ruled": RULED, "timed": TIMED}
IDS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=60)


@pytest.fixture(autouse=True, scope="module")
def parts_of_a_few_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_module, "_PART_BYTES", 200)
        patch.setattr(cut_module, "_SCANNED_SLOTS", 100)
        patch.setattr(cut_module, "_LEAST_LISTED", 16)
        patch.setattr(cut_module, "_SLOTS_PER_LISTED_ID", 2**20)
        patch.setattr(cut_module, "_KEPT_IDS", 4)
        patch.setattr(snapshot, "_ROWS_PER_GROUP", 16)
        patch.setattr(snapshot, "_ROWS_PER_PART", 8)
        yield


@st.composite
def batches(draw, most_steps: int = 12) -> list[list[int]]:
    """Which of the ids every step names."""
    num_steps = draw(st.integers(1, most_steps))
    return [sorted(draw(st.sets(st.integers(0, len(IDS) - 1), max_size=40))) for _ in range(num_steps)]


class Run:
    """Shards that commit given batches, and a dictionary of what they mean."""

    def __init__(self, config: TableConfig, num_shards: int, steps: list[list[int]]) -> None:
        self.config = config
        self.shard_map = ShardMap(num_shards)
        self.shards = [EmbeddingShard([config], shard, 1) for shard in range(num_shards)]
        self.oracle = DictionaryTable(config)
        self._steps = steps
        self.step = -1

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def is_over(self) -> bool:
        return self.step + 1 == self.num_steps

    def commit(self) -> None:
        self.step += 1
        ids_M = IDS[self._steps[self.step]]
        random = np.random.default_rng(self.step)
        grads_MD = random.standard_normal((len(ids_M), self.config.dim)).astype(np.float32)
        # Half an hour later each time; now and then an old event, or none.
        newest_event = None if self.step % 5 == 3 else 1_700_000_000 + 1800 * (self.step - self.step % 4)
        for shard, at in zip(self.shards, self.shard_map.split(ids_M), strict=True):
            tag = UpdateTag(shard.incarnation, self.step, 0, newest_event=newest_event)
            shard.apply(tag, {"items": (ids_M[at], grads_MD[at])})
        grads = {int(i): grad_D for i, grad_D in zip(ids_M, grads_MD, strict=True)}
        self.oracle.commit(self.step, grads, newest_event)

    def commit_until(self, step: int) -> None:
        while self.step < step:
            self.commit()

    def go_back(self, oracle: DictionaryTable, shards: list[EmbeddingShard], step: int) -> None:
        """Steps after a snapshot are lost, and will be done again by shards that have loaded it."""
        self.oracle, self.shards, self.step = oracle, shards, step
        self.shard_map = ShardMap(len(shards))

    def expected(self) -> dict:
        return {
            "rows": self.oracle.everything(),
            "sighted": dict(self.oracle.sightings),
            "evicted": {
                i: step
                for i, step in self.oracle.evicted.items()
                if i not in self.oracle.rows and self._is_remembered(step)
            },
        }

    def _is_remembered(self, step: int) -> bool:
        """Tombstones that are too old go when the next eviction is due."""
        eviction = self.config.eviction
        assert eviction is not None
        last_due = (self.step + 1) // eviction.every_steps * eviction.every_steps - 1
        return last_due - step <= eviction.remember_steps


def contents(parts: list[TableRows]) -> dict:
    """What parts hold, as `Run.expected` has it; every id once."""
    found: dict = {"rows": {}, "sighted": {}, "evicted": {}}
    for rows in parts:
        columns = (rows.ids_M.tolist(), rows.weights_MD, rows.state_MS, rows.steps_M, rows.counts_M)
        for i, weights_D, state_S, step, count in zip(*columns, strict=True):
            assert i not in found["rows"]
            found["rows"][i] = (weights_D.tobytes(), state_S.tobytes(), step, count)
        counted = zip(rows.sighted.counts_K.tolist(), rows.sighted.steps_K.tolist(), strict=True)
        found["sighted"] |= dict(zip(rows.sighted.ids_K.tolist(), counted, strict=True))
        found["evicted"] |= dict(zip(rows.evicted.ids_V.tolist(), rows.evicted.steps_V.tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", CONFIGS)
@examples(80)
@given(
    steps=batches(), num_shards=st.integers(1, 2), at=st.integers(-1, 11), pauses=st.lists(st.integers(0, 4))
)
def test_a_cut_is_what_the_step_left_however_many_steps_commit_meanwhile(name, steps, num_shards, at, pauses):
    check_cut(Run(CONFIGS[name], num_shards, steps), at, pauses)


def check_cut(run: Run, at: int, pauses: list[int]) -> None:
    """
    Args:
        pauses: parts that are read between two steps.
    """
    at = min(at, run.num_steps - 1)
    run.commit_until(at)
    for shard in run.shards:
        shard.begin_snapshot(at)
    expected = run.expected()
    readings = [shard.export_snapshot("items", at) for shard in run.shards]
    parts: list[TableRows] = []
    for num_parts in pauses:
        if not run.is_over:
            run.commit()
        for _ in range(num_parts):
            parts += [part for part in (next(reading, None) for reading in readings) if part is not None]
    for reading in readings:
        parts += reading
    assert contents(parts) == expected
    for number, shard in enumerate(run.shards):
        shard.release(at)
        assert shard._tables["items"]._snapshot is None, number
    while not run.is_over:
        run.commit()
    assert contents([shard.export("items") for shard in run.shards])["rows"] == run.oracle.everything()


@pytest.fixture
def four_rows_in_memory(monkeypatch):
    monkeypatch.setattr(tiered_rows, "_MIN_ROWS", 1)
    monkeypatch.setattr(tiered_rows, "_COPY_BYTES", 100)
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", 2 * ALIGNMENT)
    monkeypatch.setattr(TieredRows, "_capacity_beside", lambda self, num_bytes: 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=batches(), at=st.integers(-1, 11), pauses=st.lists(st.integers(0, 4)))
def test_rows_on_disk_are_as_the_step_left_them_wherever_they_have_moved(
    four_rows_in_memory, name, steps, at, pauses
):
    on_disk = CONFIGS[name].model_copy(update={"disk": DiskConfig(memory=64 * 2**20)})
    check_cut(Run(on_disk, 1, steps), at, pauses)


class Snapshots:
    """Cuts of a run, written while it goes on; restored by any number of shards."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self._folder = folder
        self.chain: list[list[Path]] = []
        self.expected: dict = {}
        self.oracle = run.oracle
        self._num_written = 0

    def write(self, at: int, is_full: bool, pauses: list[int]) -> None:
        """Write a snapshot after step `at`, and let steps commit between parts, as many as `pauses` says."""
        run = self.run
        run.commit_until(at)
        since = None if is_full or not self.chain else self._step
        for shard in run.shards:
            shard.begin_snapshot(at)
        self.expected, self.oracle, self._step = run.expected(), copy.deepcopy(run.oracle), at
        folder = self._folder / str(self._num_written)
        self._num_written += 1
        folder.mkdir(parents=True)
        files = []
        for number, shard in enumerate(run.shards):
            parts = with_steps_between(run, shard.export_snapshot("items", at, since), pauses)
            files += write_table(folder, run.config, run.shard_map, number, at, parts)
            shard.release(at)
        for file in files:
            assert checksum_file(folder / file.name) == file.checksum
            assert (folder / file.name).stat().st_size == file.bytes
        self.chain = [] if since is None else self.chain
        self.chain.append([folder / file.name for file in files])

    def load(self, num_shards: int, config: TableConfig) -> list[EmbeddingShard]:
        shards = [EmbeddingShard([config], shard, 1) for shard in range(num_shards)]
        for number, shard in enumerate(shards):
            shard.restore(load_tables(self.chain, [config], ShardMap(num_shards), number))
            shard.begin(self._step, 1 + self._num_written)
        return shards


def with_steps_between(run: Run, parts: Iterator[TableRows], pauses: list[int]) -> Iterator[TableRows]:
    for num_steps in pauses:
        for _ in range(num_steps):
            if not run.is_over:
                run.commit()
        part = next(parts, None)
        if part is None:
            return
        yield part
    yield from parts


snapshots = st.tuples(
    st.integers(0, 3),  # steps since what was committed last
    st.sampled_from([True, False, False, False]),  # whether all rows are written
    st.lists(st.integers(0, 2), max_size=8),
    st.sampled_from([None, None, 1, 2, 3]),  # shards that go on from it, unless those that wrote it do
)


@pytest.mark.parametrize(
    ("name", "known"), cases(itertools.product(CONFIGS, (2, 1000)), {("ruled", 2), ("timed", 1000)})
)
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=batches(30), num_shards=st.integers(1, 3), plan=st.lists(snapshots, min_size=1, max_size=5))
def test_a_snapshot_and_its_increments_are_a_whole_snapshot(
    tmp_path_factory, monkeypatch, name, known, steps, num_shards, plan
):
    """Also where too many rows were changed or given up for a shard to know which."""
    monkeypatch.setattr(ids_since, "_LEAST_IDS", known)
    check_chain(Run(CONFIGS[name], num_shards, steps), tmp_path_factory.mktemp("chain"), plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(CONFIGS, ["ruled"]))
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=batches(20), num_shards=st.integers(1, 2), plan=st.lists(snapshots, min_size=1, max_size=4))
def test_increments_of_rows_on_disk_are_whole_too(
    four_rows_in_memory, tmp_path_factory, name, steps, num_shards, plan
):
    on_disk = CONFIGS[name].model_copy(update={"disk": DiskConfig(memory=64 * 2**20)})
    check_chain(Run(on_disk, num_shards, steps), tmp_path_factory.mktemp("chain"), plan)


def check_chain(run: Run, folder: Path, plan: list) -> None:
    snapshots = Snapshots(run, folder)
    for num_steps, is_full, pauses, num_after in plan:
        at = run.step + num_steps
        if at >= run.num_steps:
            break
        snapshots.write(at, is_full, pauses)
        loaded = snapshots.load(num_after or 2, run.config)
        assert contents([shard.export("items") for shard in loaded]) == snapshots.expected
        for shard in loaded:
            check_calendar(shard._tables["items"])
        if num_after is not None:
            run.go_back(snapshots.oracle, loaded, at)


# ------------------------------------------------------------------------------------------ one at a time


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def shard_of(config: TableConfig = PLAIN, num_rows: int = 50, **options) -> EmbeddingShard:
    """Rows 0 to num_rows - 1, created by step 0."""
    shard = EmbeddingShard([config], 0, 1, **{"wait_timeout_s": 20.0, **options})
    commit(shard, 0, *range(num_rows))
    return shard


def commit(shard: EmbeddingShard, step: int, *values: int) -> None:
    grads_MD = np.ones((len(values), 3), np.float32)
    shard.apply(UpdateTag(0, step, 0), {"items": (ids(*values), grads_MD)})


def steps_by_id(parts) -> dict[int, int]:
    return {
        i: step for rows in parts for i, step in zip(rows.ids_M.tolist(), rows.steps_M.tolist(), strict=True)
    }


def test_a_snapshot_may_begin_before_its_step_commits_and_until_the_next_one_has_begun():
    shard = EmbeddingShard([PLAIN], 0, 1)
    shard.begin_snapshot(0)
    commit(shard, 0, 1, 2)
    commit(shard, 1, 2, 3)
    assert steps_by_id(shard.export_snapshot("items", 0)) == {1: 0, 2: 0}
    shard.release(0)
    with pytest.raises(ValueError, match="too late for a snapshot after step 0: rows have changes of step 1"):
        shard.begin_snapshot(0)
    shard.take_head(UpdateTag(0, 2, 0, Part.HEAD), {"items": (ids(9), np.ones((1, 3), np.float32))}, {})
    with pytest.raises(ValueError, match="too late for a snapshot after step 1: rows have changes of step 2"):
        shard.begin_snapshot(1)
    shard.begin_snapshot(2)


def test_a_step_whose_head_comes_after_the_cut_is_not_in_it():
    shard = shard_of(num_rows=3)
    shard.begin_snapshot(0)
    shard.take_head(UpdateTag(0, 1, 0, Part.HEAD), {"items": (ids(0, 9), np.ones((2, 3), np.float32))}, {})
    parts = shard.export_snapshot("items", 0)
    next(parts)
    shard.apply(UpdateTag(0, 1, 0, Part.REST), {"items": (ids(1), np.ones((1, 3), np.float32))})
    assert steps_by_id(parts) == {0: 0, 1: 0, 2: 0}


def test_rows_that_trainers_bring_back_after_the_step_are_in_its_cut():
    shard = shard_of()
    shard.begin_snapshot(0)
    (records_MW, _) = shard.fetch({"items": ids(7)})["items"]
    records_MW = records_MW.copy()
    records_MW[:, :3] = np.array([[4, 5, 6]], np.float32).view(np.int32)
    shard.write_back(0, 0, {"items": (ids(7), records_MW)})
    commit(shard, 1, 7)

    rows = [part for part in shard.export_snapshot("items", 0) if 7 in part.ids_M]
    assert rows[0].weights_MD[rows[0].ids_M == 7].tolist() == [[4, 5, 6]]


def increment(shard: EmbeddingShard, step: int, since: int | None) -> dict[int, int]:
    """Step by id of what has changed since an earlier snapshot."""
    shard.begin_snapshot(step)
    found = steps_by_id(shard.export_snapshot("items", step, since))
    shard.release(step)
    return found


def test_rows_that_trainers_bring_back_are_in_the_next_increment():
    shard = shard_of()
    increment(shard, 0, None)
    for step in (1, 2):  # the second time a later step has stamped the record already
        (records_MW, _) = shard.fetch({"items": ids(7)})["items"]
        records_MW = records_MW.copy()
        records_MW[:, STEP_WORD] = step
        shard.apply(UpdateTag(0, step, 0), {}, {"items": (ids(7), records_MW)})
    assert increment(shard, 2, 0) == {7: 2}
    commit(shard, 3, 7, 8)
    assert increment(shard, 3, 2) == {7: 3, 8: 3}


def test_an_increment_looks_at_what_has_changed_and_not_at_the_table(monkeypatch):
    monkeypatch.setattr(ids_since, "_LEAST_IDS", 4)
    shard = shard_of()
    increment(shard, 0, None)
    scanned = []
    ids_from = IdMap.ids_from
    monkeypatch.setattr(IdMap, "ids_from", lambda *args: scanned.append(args[0]) or ids_from(*args))
    commit(shard, 1, 7, 8)
    commit(shard, 2, 8, 99)
    assert increment(shard, 2, 0) == {7: 1, 8: 2, 99: 2}
    rows = shard._tables["items"]._rows
    assert rows.ids not in scanned
    commit(shard, 3, *range(10))  # too many to be remembered
    assert increment(shard, 3, 2) == dict.fromkeys(range(10), 3)
    assert rows.ids in scanned


def test_a_row_that_came_and_went_between_snapshots_gets_too_old_behind_a_restore():
    eviction = EvictionConfig(max_age_steps=2, every_steps=1)
    config = TableConfig(name="items", dim=3, eviction=eviction)
    shard = EmbeddingShard([config], 0, 1)
    parts = []
    for step, values in enumerate(([1], [1, 9], [1], [1], [1], [1, 9])):  # 9 is given up after step 4
        commit(shard, step, *values)
        if step in (0, 5):
            shard.begin_snapshot(step)
            parts += shard.export_snapshot("items", step, 0 if step else None)
            shard.release(step)
    restored = EmbeddingShard([config], 0, 1)
    restored.restore({"items": parts})
    restored.begin(5, 1)
    for step in range(6, 10):
        restored.apply(UpdateTag(1, step, 0), {"items": (ids(1), np.ones((1, 3), np.float32))})
    assert restored.export("items").ids_M.tolist() == [1]


def test_only_what_was_brought_back_before_it_was_read_is_in_a_cut():
    shard = shard_of()
    shard.begin_snapshot(0)
    expected = contents([shard.export("items")])
    parts = shard.export_snapshot("items", 0)
    found = [next(parts)]
    records_MW = np.zeros_like(shard.fetch({"items": np.arange(50)})["items"][0])
    shard.write_back(0, 0, {"items": (np.arange(50), records_MW)})  # with a step before the snapshot's, too
    assert contents([*found, *parts]) == expected


def test_there_is_one_snapshot_at_a_time():
    shard = shard_of()
    shard.begin_snapshot(0)
    with pytest.raises(
        RuntimeError, match="the snapshot after step 0 is not written yet; a snapshot after step 1"
    ):
        shard.begin_snapshot(1)
    with pytest.raises(
        RuntimeError, match="expected a snapshot after step 1 to read, but there is one after step 0"
    ):
        next(shard.export_snapshot("items", 1))
    shard.release(1)  # which is not there
    shard.release(0, incarnation=shard.incarnation - 1)  # a writer of before a return, which ends late
    commit(shard, 1, 5)
    parts = shard.export_snapshot("items", 0)
    next(parts)
    shard.release(0)
    with pytest.raises(SnapshotEndedError, match="the snapshot after step 0 is given up: it was released"):
        list(parts)
    with pytest.raises(RuntimeError, match="expected a snapshot after step 0 to read, but there is none"):
        next(shard.export_snapshot("items", 0))
    shard.begin_snapshot(1)


@pytest.mark.parametrize("happening", ["incarnation 1 began", "other rows are restored"])
def test_a_recovery_ends_the_cut(happening):
    shard = shard_of()
    shard.begin_snapshot(0)
    parts = shard.export_snapshot("items", 0)
    next(parts)
    if happening == "incarnation 1 began":
        shard.begin(0, 1)
    else:
        shard.restore({"items": []})
    with pytest.raises(SnapshotEndedError, match=happening):
        list(parts)


def test_what_the_writer_has_passed_is_not_kept():
    shard = shard_of()
    shard.begin_snapshot(0)
    commit(shard, 1, *range(20))
    snapshot = shard._snapshot.tables["items"].rows
    assert snapshot.num_buffered == 20
    commit(shard, 2, *range(20))
    assert snapshot.num_buffered == 20, "once is enough"
    parts = shard.export_snapshot("items", 0)
    seen = []
    while len(seen) < 30:
        seen += next(parts).ids_M.tolist()
    assert snapshot.num_buffered == len(set(range(20)) - set(seen))
    commit(shard, 3, *seen)
    assert snapshot.num_buffered == len(set(range(20)) - set(seen))
    left = [i for i in range(50) if i not in seen]
    commit(shard, 4, *left)
    assert snapshot.num_buffered == len(left)
    assert steps_by_id(parts) == dict.fromkeys(left, 0)
    assert snapshot.num_buffered == 0


def test_tombstones_of_ids_that_come_back_are_in_the_cut():
    config = PLAIN.model_copy(
        update={"eviction": EvictionConfig(max_age_steps=1, every_steps=1, remember_steps=2)}
    )
    shard = shard_of(config, 4)
    for step in (1, 2):
        commit(shard, step, 0)
    shard.begin_snapshot(2)
    evicted = contents([shard.export("items")])["evicted"]
    assert evicted == {1: 2, 2: 2, 3: 2}
    commit(shard, 3, 1)  # which has a row again
    for step in range(4, 9):
        commit(shard, step)  # until all are forgotten
    assert len(shard.export("items").evicted) < 3
    assert contents(shard.export_snapshot("items", 2))["evicted"] == evicted


# ---------------------------------------------------------------------------------------- too much aside


def test_a_step_waits_for_the_writer_when_too_much_is_aside(monkeypatch):
    monkeypatch.setattr(cut_module, "MIN_BUFFER_BYTES", 10 * 4 * 6)
    monkeypatch.setattr(cut_module, "BUFFER_SHARE", 10**9)
    shard = shard_of()
    shard.begin_snapshot(0)
    expected = contents([shard.export("items")])
    held_up = threading.Event()
    hold_up = shard._lock.hold_up

    def telling(until, timeout_s):
        held_up.set()
        return hold_up(until, timeout_s)

    monkeypatch.setattr(shard._lock, "hold_up", telling)
    with ThreadPoolExecutor(3) as pool:
        applied = pool.submit(commit, shard, 1, *range(50))
        assert held_up.wait(20)
        snapshot = shard._snapshot.tables["items"].rows
        assert snapshot.num_buffered <= 10
        others = [
            pool.submit(shard.lookup, {"items": ids(1)}, 0),
            pool.submit(shard.stats),
        ]
        assert not wait([applied, *others], timeout=0.05).done, "nobody comes in before the step goes on"
        found, most = [], 0
        for part in shard.export_snapshot("items", 0):
            found.append(part)
            most = max(most, snapshot.num_buffered)
        applied.result(20)
        for other in others:
            other.result(20)
    assert most <= 10
    assert contents(found) == expected
    assert steps_by_id([shard.export("items")]) == dict.fromkeys(range(50), 1)


def test_what_the_reader_passed_while_a_step_waited_is_not_set_aside(monkeypatch):
    monkeypatch.setattr(cut_module, "_PART_BYTES", 2 * 16)
    rows = MemoryRows(4)
    ids_M = np.arange(50)
    rows_M = rows.add(ids_M)
    rows.records.write(rows_M, 0, np.zeros((50, 4), dtype=np.int32))
    seen: list[int] = []

    def read_on(is_room):
        passed = range(snapshot._passed)
        assert snapshot._buffer.end_within(passed, most=0) == passed.stop, "nobody would take it"
        while not is_room():
            for _ in range(12):  # more than were asked for
                seen.extend(next(parts, SnapshotRecords(np.empty(0, np.int64), np.empty(0))).ids_K.tolist())

    snapshot = ConsistentSnapshot(rows, 0, most_bytes=10 * (4 * 4 + ENTRY_BYTES), wait=read_on)
    parts = snapshot.parts(nullcontext)
    snapshot.keep(ids_M, np.zeros(50, dtype=np.int32), lambda at_K: np.zeros((len(at_K), 4), dtype=np.int32))
    assert seen
    assert snapshot.num_buffered == 50 - len(seen)
    seen += [i for part in parts for i in part.ids_K.tolist()]
    assert sorted(seen) == list(range(50))


def test_rows_come_when_nothing_waits_for_the_reader_any_more(monkeypatch):
    """Until a step has stamped them they look older than the snapshot."""
    shard = shard_of(PLAIN, 4)
    table = shard._tables["items"]
    forget, num_rows = table._tombstones.forget, []

    def telling(ids_M):
        num_rows.append(table.num_rows)
        forget(ids_M)

    monkeypatch.setattr(table._tombstones, "forget", telling)
    before = table.num_rows
    commit(shard, 1, 55)
    assert table.num_rows == before + 1
    assert num_rows == [before]


def test_a_cut_that_nobody_reads_is_given_up_before_it_stops_the_training(monkeypatch):
    monkeypatch.setattr(cut_module, "MIN_BUFFER_BYTES", 10 * 4 * 6)
    monkeypatch.setattr(cut_module, "BUFFER_SHARE", 10**9)
    shard = shard_of(wait_timeout_s=0.01)
    shard.begin_snapshot(0)
    parts = shard.export_snapshot("items", 0)
    next(parts)
    commit(shard, 1, *range(50))
    assert shard.committed_step == 1
    with pytest.raises(SnapshotEndedError, match=r"fills the memory that it may take.* 0\.0025 s"):
        list(parts)
    shard.begin_snapshot(1)
    assert len(steps_by_id(shard.export_snapshot("items", 1))) == 50


def test_a_lookup_outlasts_a_snapshot_that_holds_up_its_step(monkeypatch):
    """It began to wait before the last trainer's part came, which is what the step was held up with."""
    monkeypatch.setattr(cut_module, "MIN_BUFFER_BYTES", 10 * 4 * 6)
    monkeypatch.setattr(cut_module, "BUFFER_SHARE", 10**9)
    shard = EmbeddingShard([PLAIN], 0, 2, wait_timeout_s=4.0)
    update = {"items": (np.arange(50), np.ones((50, 3), np.float32))}
    for step, rank in [(0, 0), (0, 1), (1, 0)]:
        shard.apply(UpdateTag(0, step, rank), update if rank == 0 else {})
    shard.begin_snapshot(0)
    waits, wait_for = threading.Event(), shard._wait_for

    def telling(*arguments):
        waits.set()
        wait_for(*arguments)

    monkeypatch.setattr(shard, "_wait_for", telling)
    with ThreadPoolExecutor(1) as pool:
        looked_up = pool.submit(shard.lookup, {"items": ids(1)}, 1)
        assert waits.wait(20)
        time.sleep(0.2)
        assert shard.apply(UpdateTag(0, 1, 1), {}) == 1
        assert looked_up.result(20)["items"].shape == (1, 3)
    assert shard._snapshot is None, "it was given up"


def test_a_step_is_held_up_for_less_than_others_wait_for_it_however_often(monkeypatch):
    monkeypatch.setattr(cut_module, "MIN_BUFFER_BYTES", 10 * 4 * 6)
    monkeypatch.setattr(cut_module, "BUFFER_SHARE", 10**9)
    monkeypatch.setattr(cut_module, "_KEPT_IDS", 5)
    now, timeouts = [0.0], []
    shard = shard_of(wait_timeout_s=8.0, clock=lambda: now[0])
    shard.begin_snapshot(0)

    def slow(until, timeout_s):
        timeouts.append(timeout_s)
        now[0] += min(timeout_s, 0.75)
        if timeout_s > 0.75:
            shard._snapshot.tables["items"].rows._buffer.take(0, cut_module.NUM_BUCKETS)
        return until()

    monkeypatch.setattr(shard._lock, "hold_up", slow)
    commit(shard, 1, *range(50))
    assert timeouts == [2.0, 1.25, 0.5]
    assert shard._snapshot is None
    shard.begin_snapshot(1)
    commit(shard, 2, *range(50))
    assert timeouts[3:] == [2.0, 1.25, 0.5]


def test_no_memory_for_what_changes_gives_up_the_cut_and_not_the_step(monkeypatch):
    shard = shard_of()
    shard.begin_snapshot(0)
    parts = shard.export_snapshot("items", 0)
    next(parts)

    def no_memory(ids_M):
        raise MemoryError("no memory for another block")

    monkeypatch.setattr(shard._snapshot.tables["items"].rows._buffer, "add", no_memory)
    commit(shard, 1, *range(50))
    assert steps_by_id([shard.export("items")]) == dict.fromkeys(range(50), 1)
    with pytest.raises(SnapshotEndedError, match="no memory for what steps change"):
        list(parts)


def test_steps_and_writer_on_threads_of_their_own():
    shard, num_steps = shard_of(num_rows=2000), 60
    shard.begin_snapshot(0)
    expected = contents([shard.export("items")])
    random = np.random.default_rng(0)
    batches = [random.choice(3000, size=300, replace=False) for _ in range(num_steps)]
    started = threading.Barrier(2)

    def train() -> None:
        started.wait(20)
        for step, batch in enumerate(batches, start=1):
            commit(shard, step, *batch)

    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train)
        started.wait(20)
        found = contents(shard.export_snapshot("items", 0))
        trained.result(60)
    assert found == expected
