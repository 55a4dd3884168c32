"""What becomes of cuts, with stand-ins for the servers that write their rows of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrec.embeddings.snapshot.saved_files import SavedFile, checksum_file
from rayrec.embeddings.storage.consistent_snapshot import SnapshotEndedError
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import SnapshotConfig
from rayrec.pipelines.runs.run_copy import RunCopy
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import RunState, base_of, read_snapshot
from rayrec.pipelines.training.pipeline import PendingSnapshot
from rayrec.pipelines.training.snapshot_writer import Shown, SnapshotWriter
from rayrec.platform.errors import InputError
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.read_plan import ReadPosition

CONFIG = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}})
STATE = RunState(0, 0, "data", None, ReadPosition(epoch=0, rows=0, order="of these rows"))
NOT_BEST = Shown({"best_value": 0.5}, is_best=False)


@dataclass
class Server:
    """Answers are made when they are waited for."""

    shard: int = 0
    asked: list[tuple[int, int | None]] = field(default_factory=list)
    """(step, since) of every save."""
    events: list[str] = field(default_factory=list)
    fails_with: Exception | None = None

    @property
    def save(self) -> Any:
        return SimpleNamespace(remote=lambda *arguments: lambda: self._save(*arguments))

    @property
    def release(self) -> Any:
        return SimpleNamespace(remote=lambda step, _: self.events.append(f"release {step}"))

    def _save(self, folder: str, step: int, since: int | None, incarnation: int) -> list[SavedFile]:
        self.asked.append((step, since))
        if self.fails_with is not None:
            raise self.fails_with
        path = Path(folder) / f"item-{self.shard:05d}.parquet"
        path.write_bytes(f"rows of {step}".encode())
        self.events.append(f"saved {step}")
        return [SavedFile(path.name, path.stat().st_size, checksum_file(path))]


class Watch:
    def get(self, promises: Sequence[Callable[[], Any]], may_take_long: bool = False) -> list[Any]:
        return [promise() for promise in promises]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", CONFIG)


def writer_of(folder: RunFolder, *servers: Server, loaded: str | None = None, **settings: Any) -> Any:
    stages: Any = SimpleNamespace(servers=servers or [Server()], watch=Watch())
    snapshot = None if loaded is None else read_snapshot(folder.snapshots / loaded)
    return SnapshotWriter(folder, stages, SnapshotConfig.parse(settings), snapshot)


def write(writer: SnapshotWriter, *steps: int) -> None:
    for step in steps:
        writer.begin(*pending(step), NOT_BEST)
        writer.wait()


def pending(step: int) -> tuple[PendingSnapshot, RunState, pa.Table]:
    weights = {"w": np.zeros(2, dtype=np.float32)}
    promised: Any = PendingSnapshot(step, [], lambda: weights, lambda: weights)
    return promised, replace(STATE, committed_step=step), Cursor("data").to_table()


def test_what_is_said_of_the_last_snapshot_can_change_and_its_rows_do_not(folder):
    """Nothing was trained since: another snapshot of the same step would be built on itself."""
    server = Server()
    writer = writer_of(folder, server, increments=2)
    write(writer, 3, 7)

    state = replace(STATE, committed_step=7, progress={"stale": 1})
    writer.restate(state, Shown(state.progress, is_best=True))
    writer.wait()

    assert server.asked == [(3, None), (7, 3)]
    assert base_of(folder.snapshot_path(8)) == "step-000000004"
    assert read_snapshot(folder.snapshot_path(8)).state == state
    assert folder.state["best"] == folder.state["last"] == "step-000000008"
    with pytest.raises(AssertionError, match="would take the place of what it builds on"):
        write(writer, 7)
    assert read_snapshot(folder.snapshot_path(8)).state == state


def test_whoever_asks_for_a_snapshot_that_is_there_gets_it(folder):
    writer = writer_of(folder)
    write(writer, 3)
    (folder.path / "requests" / "mine").touch()
    assert writer.is_asked

    writer.restate(replace(STATE, committed_step=3), NOT_BEST)
    writer.wait()

    assert not writer.is_asked
    assert "step-000000004" in (folder.path / "requests" / "mine.answer").read_text()


@pytest.mark.parametrize("keep", [1, 2, 4, 5])
def test_the_newest_are_kept_however_few_there_are_yet(folder, keep):
    writer = writer_of(folder, keep=keep)

    for step in range(7):
        write(writer, step)
        assert len(folder.snapshot_names()) == min(step + 1, keep)


def test_snapshots_of_steps_that_the_run_has_gone_back_from_are_not_kept(folder):
    """They may be damaged, which is why it went back; and their steps have been trained anew."""
    write(writer_of(folder, keep=3), 3, 7, 9)
    (folder.snapshots / "step-000000010" / "manifest.json").unlink()

    write(writer_of(folder, keep=3, loaded="step-000000004"), 11)

    assert folder.snapshot_names() == ["step-000000004", "step-000000012"]
    assert folder.chosen_snapshot("previous").name == "step-000000004"


def test_a_snapshot_that_is_half_deleted_is_not_seen(folder, monkeypatch):
    write(writer_of(folder, keep=2), 3, 7)

    def killed(path: Path) -> None:
        (path / "item-00000.parquet").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.keep_only({"step-000000008"})

    assert folder.snapshot_names() == ["step-000000008"]
    folder.keep_only({"step-000000008"})
    assert [entry.name for entry in folder.snapshots.iterdir()] == ["step-000000008"]


def test_a_cut_that_one_server_gives_up_is_given_up_by_all_before_there_is_another(folder):
    """One that still writes would refuse the next snapshot, and end the run."""
    lagging, other = Server(0), Server(1)
    writer = writer_of(folder, lagging, other, increments=3)
    write(writer, 3)
    lagging.fails_with = SnapshotEndedError("it was read too slowly")

    write(writer, 7)

    assert other.events == ["saved 3", "release 7", "saved 7"]
    assert folder.state["last"] == "step-000000004"
    lagging.fails_with = None
    write(writer, 9)
    assert other.asked[-1] == (9, 3)
    assert base_of(folder.snapshot_path(10)) == "step-000000004"


def test_a_best_snapshot_that_somebody_has_deleted_is_no_reason_to_end(folder, caplog):
    writer = writer_of(folder, keep=1, copy_to=(folder.path.parent / "copy").as_uri())
    writer.begin(*pending(3), replace(NOT_BEST, is_best=True))
    write(writer, 5)
    assert folder.snapshot_names() == ["step-000000004", "step-000000006"]
    shutil.rmtree(folder.snapshots / "step-000000004")

    write(writer, 7)

    assert folder.snapshot_names() == ["step-000000008"]
    assert f"{folder.snapshots}/step-000000004: somebody has deleted this snapshot" in caplog.text
    assert "failed_copies" not in folder.state


def test_a_kept_snapshot_that_cannot_be_read_stays(folder, caplog):
    """The disk may have failed just then."""
    writer = writer_of(folder, keep=2, copy_to=(folder.path.parent / "copy").as_uri())
    write(writer, 3)
    (folder.snapshots / "step-000000004" / "manifest.json").unlink()

    write(writer, 5)

    assert folder.snapshot_names() == ["step-000000004", "step-000000006"]
    assert "step-000000004" in caplog.text
    assert "failed_copies" not in folder.state


@pytest.mark.parametrize("deleted", ["step-000000004", "step-000000006"])
def test_no_increment_builds_on_what_somebody_has_deleted(folder, deleted):
    server = Server()
    writer = writer_of(folder, server, keep=1, increments=5)
    write(writer, 3, 5)
    shutil.rmtree(folder.snapshots / deleted)

    write(writer, 7, 9)

    assert server.asked == [(3, None), (5, 3), (7, None), (9, 7)]
    assert folder.snapshot_names() == ["step-000000008", "step-000000010"]


class ServiceError(Exception):
    """As SDKs of clouds have them: not an OSError."""


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (OSError("the bucket does not answer"), False),
        (InputError("the copy of another run"), False),
        (ServiceError("503"), True),
        (AttributeError("a mistake of ours"), True),
    ],
)
def test_a_copy_that_fails_is_counted_and_the_run_goes_on(folder, monkeypatch, caplog, error, has_traceback):
    def down(self: RunCopy, run: Path, snapshots: set[str], deletes_others: bool) -> None:
        raise error

    monkeypatch.setattr(RunCopy, "update", down)
    request = folder.path / "requests" / "wish"
    writer = writer_of(folder, copy_to="memory://bucket/runs/mine")
    request.write_bytes(b"")

    write(writer, 3)

    assert folder.state["last"] == "step-000000004"
    assert folder.state["failed_copies"] == 1
    assert f"was not copied to memory://bucket/runs/mine: {type(error).__name__}: {error}" in caplog.text
    assert ("Traceback" in caplog.text) == has_traceback
    assert '"snapshot": "step-000000004"' in request.with_name("wish.answer").read_text()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_copy_is_no_copy_that_failed(folder, monkeypatch, interrupt):
    def interrupted(self: RunCopy, run: Path, snapshots: set[str], deletes_others: bool) -> None:
        raise interrupt

    monkeypatch.setattr(RunCopy, "update", interrupted)
    with pytest.raises(interrupt):
        write(writer_of(folder, copy_to="memory://bucket/runs/mine"), 3)
