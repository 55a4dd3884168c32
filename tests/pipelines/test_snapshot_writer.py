"""What becomes of cuts, with stand-ins for the servers that write their rows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayrec.embeddings.cut import CutEndedError
from rayrec.embeddings.saved_files import SavedFile, checksum_file
from rayrec.pipelines.config import RunConfig, SnapshotConfig
from rayrec.pipelines.run_folder import RunFolder
from rayrec.pipelines.snapshot_writer import Shown, SnapshotWriter
from rayrec.pipelines.snapshots import RunState, base_of, read_snapshot
from rayrec.pipelines.training_pipeline import Cut
from rayrec.samples.cursor import Cursor
from rayrec.samples.read_plan import ReadPosition

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
        return SimpleNamespace(remote=lambda step: self.events.append(f"release {step}"))

    def _save(self, folder: str, step: int, since: int | None) -> list[SavedFile]:
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
    weights = {"w": np.zeros(2, dtype=np.float32)}
    for step in steps:
        cut = Cut(step, [], lambda: weights, lambda: weights)
        writer.begin(cut, replace(STATE, committed_step=step), Cursor("data").to_table(), NOT_BEST)
        writer.wait()


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
