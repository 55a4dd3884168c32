"""What snapshots of a run that follows a folder keep of it: consumed segments in shared files."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.runs import snapshots
from rayrec.pipelines.runs.accepted_files import AcceptedFiles
from rayrec.pipelines.runs.snapshots import (
    MANIFEST,
    RunState,
    checksum_of,
    read_consumed,
    read_snapshot,
    restate_snapshot,
    write_snapshot,
)
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_json
from rayrec.samples.reading.consumed_segments import ConsumedSegments, take
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.followed_plan import FollowedPlan
from rayrec.samples.reading.read_plan import Batching, ReadSettings
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.data import write_log
from tests.helpers.examples import cases

SETTINGS = ReadSettings(Batching(batch_size=4), seed=3, window_rows=8)


class Life:
    """One process of a run: what the training loop does with plan, cursor and snapshots."""

    def __init__(self, run: Path, folder: Path, filters=(), full_rows: int = 3) -> None:
        self.run = run
        whole = sorted((run / "snapshots").glob("step-*"))
        snapshot = read_snapshot(whole[-1]) if whole else None
        self.step = 0 if snapshot is None else snapshot.committed_step + 1
        followed = AcceptedFiles(run).state_since(None if snapshot is None else snapshot.followed)
        if followed is None:
            self.plan = FollowedPlan(folder, SETTINGS, filters=filters)
            self.plan.refresh()
        else:
            state = json.loads(json.dumps(followed))
            self.plan = FollowedPlan.restore(state, folder, SETTINGS, self.step, filters=filters)
        self.cursor = Cursor(self.plan.fingerprint) if snapshot is None else snapshot.cursor
        self.accepted = AcceptedFiles(run)
        self.accepted.keep(self.plan)
        self.consumed, self.first = ConsumedSegments(full_rows), 0
        self.reader = SampleReader(self.plan.spec)

    def look(self) -> None:
        self.plan.refresh()
        self.accepted.keep(self.plan)

    def train(self) -> list[int] | None:
        """One step; returns its rows."""
        plan = self.plan.batch(self.step)
        if plan is None:
            return None
        batch = self.reader.read_batch(plan)
        self.cursor.commit(plan.epoch, batch.cursor)
        self.step += 1
        return batch.row_keys_B.tolist()

    def state(self) -> RunState:
        position = self.plan.position(self.step)
        followed = self.plan.to_json(position.epoch)
        return RunState(self.step - 1, 1, self.plan.fingerprint, None, position, followed=followed)

    def save(self) -> Path:
        state = self.state()
        first, self.first = self.first, state.read_position.epoch
        self.consumed.add(take(self.plan, self.cursor, first, self.first))
        path = self.run / "snapshots" / f"step-{self.step:09d}"
        write_snapshot(
            path,
            state,
            weights={},
            optimizer_state={},
            cursor=self.cursor.to_table(),
            save_sparse=lambda folder: [],
            consumed=self.consumed,
        )
        return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(range(3), (0,)))
def test_every_row_once_and_in_the_same_step_whatever_arrives_and_dies(tmp_path, seed):
    choose = random.Random(seed)
    run, folder = tmp_path / "run", tmp_path / "log"
    run.mkdir()
    filters = [["price", "<", 5.0]] if seed % 3 == 2 else []
    write_log(folder, {"0.parquet": 6})
    life = Life(run, folder, filters)
    rows_of_step: dict[int, list[int]] = {}
    names = 1
    for _ in range(120):
        action = choose.choices(["arrive", "train", "save", "kill"], [3, 8, 2, 1])[0]
        if action == "arrive" and names < 25:
            for _ in range(choose.randint(1, 3)):  # late ones get names before those that are there
                name = f"{choose.randint(0, 9)}-{names:02d}.parquet"
                write_log(folder, {name: choose.randint(1, 9)}, seed=names)
                names += 1
            life.look()
        elif action == "train":
            step = life.step
            if (rows := life.train()) is not None:
                assert rows_of_step.setdefault(step, rows) == rows
        elif action == "save" and life.step:
            life.save()
        elif action == "kill":
            life = Life(run, folder, filters)
    life.look()
    while life.step < life.plan.known_steps:
        step = life.step
        assert rows_of_step.setdefault(step, rows := life.train()) == rows
    path = life.save()

    trained = [row for rows in rows_of_step.values() for row in rows]
    assert len(trained) == len(set(trained))
    state, cursor = read_consumed(path)
    assert sum(cursor.num_rows(epoch) for epoch in cursor.epochs) == len(trained)
    assert json.loads(json.dumps(state.followed)) == json.loads(json.dumps(life.plan.to_json()))
    everything = FollowedPlan(folder, SETTINGS, filters=filters)
    everything.refresh()
    passing = sum(segment["num_rows"] for segment in everything.segments_to_json(0))
    assert len(trained) == passing
    again = Life(run, folder, filters)
    assert (again.step, again.plan.refresh()) == (life.step, 0)


@pytest.fixture
def life(tmp_path) -> Life:
    """Four segments, of which two are consumed."""
    (tmp_path / "run").mkdir()
    write_log(tmp_path / "log", {"a.parquet": 4})
    life = Life(tmp_path / "run", tmp_path / "log", full_rows=2)
    for name in "bcd":
        write_log(tmp_path / "log", {f"{name}.parquet": 4}, seed=ord(name))
        life.look()
    life.train()
    life.train()
    return life


def test_a_snapshot_has_of_consumed_segments_what_is_new_and_links_the_rest(life):
    first = life.save()
    life.train()
    life.train()
    second = life.save()

    manifests = [json.loads((path / MANIFEST).read_text()) for path in (first, second)]
    assert [len(manifest["followed"]["segments"]) for manifest in manifests] == [2, 0]
    assert life.cursor.to_table().num_rows == 0
    names = sorted(path.name for path in second.glob("consumed-*"))
    assert names == ["consumed-00000.parquet", "consumed-00001.parquet"]
    assert (first / names[0]).stat().st_ino == (second / names[0]).stat().st_ino
    shutil.rmtree(first)
    assert len(read_snapshot(second).followed["segments"]) == 4
    with pytest.raises(ValueError, match=r"row 0 of b\.parquet was to be consumed twice in epoch 1"):
        life.cursor.commit(1, read_snapshot(second).cursor.intervals(1))


def test_without_links_and_without_the_snapshot_before_the_files_are_written_again(life, monkeypatch):
    shutil.rmtree(life.save())
    life.train()
    assert read_snapshot(life.save()).cursor.num_rows(0) == 4


def with_other_names(path: Path) -> None:
    table = pq.read_table(path)
    names, field = pa.array(["other"] * table.num_rows), table.schema.field("name")
    pq.write_table(table.set_column(table.schema.get_field_index("name"), field, names), path)


def test_a_file_that_was_changed_is_not_linked(life):
    first = life.save()
    with_other_names(first / "consumed-00000.parquet")
    life.train()

    files = [
        file["name"] for each in read_snapshot(life.save()).followed["segments"] for file in each["files"]
    ]
    assert files == ["a.parquet", "b.parquet", "c.parquet", "d.parquet"]
    with pytest.raises(InputError, match=r"consumed-00000\.parquet"):
        read_snapshot(first)


def test_what_a_disk_does_to_a_file_never_gets_a_checksum(life):
    path = life.save() / "consumed-00000.parquet"
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-5] + b"?PAR1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    life.train()

    second = life.save()
    with pytest.raises(InputError, match=r"consumed-00000\.parquet"):
        read_snapshot(second)


def test_files_of_the_snapshot_before_are_not_read_again(life, monkeypatch):
    life.save()
    read = []
    real = snapshots.checksum_file
    monkeypatch.setattr(snapshots, "checksum_file", lambda path: read.append(path.name) or real(path))
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name))
    life.train()
    life.save()
    assert not [name for name in read if name.startswith("consumed-")]


def test_a_snapshot_that_says_otherwise_keeps_its_segments(life):
    path = life.save()
    before = read_snapshot(path).followed
    restate_snapshot(path, life.state())
    assert read_snapshot(path).followed == before


def test_a_snapshot_of_version_2_is_opened_restated_and_gone_on_from(life):
    """Its manifest has every segment, and its cursor every row."""
    whole = RunState(**{**vars(life.state()), "followed": _as_before(life.plan.to_json())})
    path = life.run / "snapshots" / f"step-{life.step:09d}"
    table = life.cursor.to_table()
    write_snapshot(path, whole, weights={}, optimizer_state={}, cursor=table, save_sparse=lambda folder: [])
    manifest = json.loads((path / MANIFEST).read_text()) | {"format_version": 2}
    del manifest["checksum"]
    write_json(path / MANIFEST, manifest | {"checksum": checksum_of(manifest)})

    for _ in range(2):
        assert read_snapshot(path).followed["segments"] == json.loads(
            json.dumps(life.plan.segments_to_json(0))
        )
        assert read_snapshot(path).cursor.to_table().equals(table)
        restate_snapshot(path, life.state())
    again = Life(life.run, life.plan.spec.folder.url, full_rows=2)
    again.train()
    assert len(read_snapshot(again.save()).followed["segments"]) == 4


def test_a_snapshot_that_lacks_consumed_segments_is_refused(life):
    path = life.save()
    (path / "consumed-00000.parquet").unlink()
    with pytest.raises(InputError, match=r"consumed-00000\.parquet: missing from the snapshot"):
        read_snapshot(path)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["checksum"], manifest["checksums"]["consumed-00000.parquet"]
    write_json(path / MANIFEST, manifest | {"checksum": checksum_of(manifest)})
    with pytest.raises(InputError, match="2 segments of the folder are consumed, but 0 are in the"):
        _ = read_snapshot(path).followed


def test_taking_and_writing_cost_what_is_new(life, monkeypatch):
    """With 100,000 files, the loop waited 0.4 s for every snapshot."""
    asked = []
    segments_to_json = life.plan.segments_to_json

    def counted(first, stop=None):
        asked.append((first, stop))
        return segments_to_json(first, stop)

    monkeypatch.setattr(life.plan, "segments_to_json", counted)
    life.save()
    life.train()
    life.save()
    assert [pair for pair in asked if pair[1] is not None] == [(0, 2), (2, 3)]
    assert [pair[0] for pair in asked if pair[1] is None] == [2, 3]


def _as_before(followed: dict) -> dict:
    del followed["first_segment"]
    return followed


def test_other_tables_are_not_taken_for_consumed_segments(life):
    path = life.save()
    pq.write_table(pa.table({"a": [1]}), path / "consumed-00000.parquet")
    with pytest.raises(InputError, match="not consumed segments of a folder; found columns a"):
        _ = read_snapshot(path, checksums=False).followed
