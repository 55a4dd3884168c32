"""Snapshots of a run while it trains on: promises in, folders out, on a thread of the driver.

training loop ── begin(pending) ──► thread: wait for rows and dense state
                                             servers write their rows
                                             manifest, name, run.json, copy, old ones deleted
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrec.embeddings.snapshot.saved_files import SavedFile
from rayrec.embeddings.storage.consistent_snapshot import SnapshotEndedError
from rayrec.pipelines.config.sections import PublishConfig, SnapshotConfig
from rayrec.pipelines.runs.run_copy import RunCopy
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshot_requests import SnapshotAnswer, SnapshotRequests
from rayrec.pipelines.runs.snapshots import (
    MANIFEST,
    RunState,
    Snapshot,
    base_of,
    read_snapshot,
    restate_snapshot,
    write_snapshot,
)
from rayrec.pipelines.training.pipeline import PendingSnapshot
from rayrec.pipelines.training.stages import Stages
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from rayrec.platform.ray_errors import root_cause
from rayrec.samples.reading.consumed_segments import ConsumedSegments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """What run.json says of a snapshot."""

    progress: dict[str, Any]
    is_best: bool


@dataclass(frozen=True)
class _Last:
    """The snapshot before, which an increment may build on."""

    name: str
    step: int
    num_increments: int
    """That it builds on itself, and is."""


@dataclass(frozen=True)
class _Chain:
    names: list[str]
    """From a snapshot to the full one that it builds on."""
    is_whole: bool


class SnapshotWriter:
    """One snapshot at a time."""

    def __init__(
        self,
        folder: RunFolder,
        stages: Stages,
        config: SnapshotConfig,
        loaded: Snapshot | None = None,
    ) -> None:
        """
        Args:
            loaded: the snapshot that the servers were loaded with.
        """
        self._folder = folder
        self._stages = stages
        self._config = config
        self._consumed = ConsumedSegments()
        self._last: _Last | None = None
        if loaded is not None:
            self._last = _Last(loaded.path.name, loaded.committed_step, len(loaded.sparse_chain) - 1)
        begun_with = "" if loaded is None else loaded.path.name
        self._own = {name for name in folder.snapshot_names() if name <= begun_with}
        """Names of snapshots of this run as it is now, not of steps that it has gone back from."""
        self._requests = SnapshotRequests(folder.path)
        self._copy = None if config.copy_to is None else RunCopy(config.copy_to)
        self._published = None if config.publish is None else PublishedRun(folder, config.publish)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    @property
    def saved_steps(self) -> int:
        """Steps from the first on whose updates the last snapshot has."""
        return 0 if self._last is None else self._last.step + 1

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for a snapshot on demand."""
        return bool(self._requests.pending())

    def begin(
        self,
        pending: PendingSnapshot,
        state: RunState,
        cursor: pa.Table,
        shown: Shown,
        consumed: pa.Table | None = None,
    ) -> None:
        """Write a snapshot in the background, once the one before is written; raises what became of that.

        Args:
            consumed: segments of a growing folder that were read to their end since this was called last.
        """
        self.wait()
        if consumed is not None:
            self._consumed.add(consumed)
        requests = self._requests.pending()
        self._writing = self._thread.submit(self._write, pending, state, cursor, shown, requests)

    def restate(self, state: RunState, shown: Shown) -> None:
        """Let the last snapshot, after which no step was trained, say what has become of the run since.

        A snapshot of its step again would take its place, and might build on it.
        """
        self.wait()
        assert self.saved_steps == state.committed_step + 1, "it is of another step"
        self._writing = self._thread.submit(self._restate, state, shown, self._requests.pending())

    def wait(self) -> None:
        """Until nothing is being written; raises the error of what was."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def check(self) -> None:
        """Raise the error of a snapshot that could not be written, if there is one by now."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def close(self) -> None:
        """When the actors are gone: return when the thread has ended, whatever became of its work."""
        self._thread.shutdown(wait=True)

    def _write(
        self, pending: PendingSnapshot, state: RunState, cursor: pa.Table, shown: Shown, requests: list[str]
    ) -> None:
        path = self._folder.snapshot_path(pending.step + 1)
        try:
            self._write_to(path, pending, state, cursor)
        except Exception as error:
            cause = root_cause(error)
            self._requests.answer(requests, SnapshotAnswer(None, f"{type(cause).__name__}: {cause}"))
            if not isinstance(cause, SnapshotEndedError):
                raise
            logger.warning("no snapshot after step %d: %s", pending.step, cause)  # training went before
            return
        self._show(path, shown, requests)

    def _restate(self, state: RunState, shown: Shown, requests: list[str]) -> None:
        path = self._folder.snapshot_path(state.committed_step + 1)
        restate_snapshot(path, state)
        self._show(path, shown, requests, is_new=False)

    def _show(self, path: Path, shown: Shown, requests: list[str], is_new: bool = True) -> None:
        """A snapshot is whole: it is named, published, copied, and others make room."""
        self._own.add(path.name)
        best = path.name if shown.is_best else self._folder.state["best"]
        # One write: what run.json says belongs to one snapshot.
        self._folder.update(last=path.name, best=best, progress=shown.progress)
        self._requests.answer(requests, SnapshotAnswer(path.name))
        kept = self._kept(path.name, best)
        if self._published is not None and is_new:
            self._published.update(path)
        if self._copy is not None:
            whole = {name for name in kept if (self._folder.snapshots / name / MANIFEST).exists()}
            is_whole = all(self._chain(name).is_whole for name in kept)
            try:
                # What is missing here, the copy may have: it is the last one then.
                self._copy.update(self._folder.path, whole, deletes_others=is_whole)
            except Exception as error:
                # Its own folder is whole, and the next copy brings what this one lacks.
                _warn(error, f"{path.name} was not copied to {self._config.copy_to}")
                self._folder.update(failed_copies=self._folder.state.get("failed_copies", 0) + 1)
        self._folder.keep_only(kept)

    def _write_to(self, path: Path, pending: PendingSnapshot, state: RunState, cursor: pa.Table) -> None:
        watch = self._stages.watch
        watch.get(pending.drained)
        weights, optimizer_state = watch.get([pending.weights, pending.optimizer_state])
        base = self._last
        if base is not None and base.num_increments >= self._config.increments:
            base = None
        if base is not None and not self._chain(base.name).is_whole:
            base = None  # an increment would be worth nothing
        assert base is None or base.step < pending.step, "it would take the place of what it builds on"
        self._folder.check_own()
        write_snapshot(
            path,
            state,
            weights=weights,
            optimizer_state=optimizer_state,
            cursor=cursor,
            save_sparse=lambda folder: self._save_sparse(
                folder, pending.step, None if base is None else base.step, state.incarnation
            ),
            base=None if base is None else base.name,
            consumed=self._consumed,
        )
        self._last = _Last(path.name, pending.step, 0 if base is None else base.num_increments + 1)

    def _save_sparse(self, folder: str, step: int, since: int | None, incarnation: int) -> list[SavedFile]:
        saving = [server.save.remote(folder, step, since, incarnation) for server in self._stages.servers]
        try:
            files: list[list[SavedFile]] = self._stages.watch.get(saving, may_take_long=True)
        except Exception:
            self._give_up(saving, step, incarnation)
            raise
        return [file for files_of_server in files for file in files_of_server]

    def _give_up(self, saving: list[Any], step: int, incarnation: int) -> None:
        """When one server has failed: return when none writes any more, and all can make another cut."""
        for server in self._stages.servers:
            server.release.remote(step, incarnation)
        for promise in saving:
            with contextlib.suppress(Exception):
                self._stages.watch.get([promise], may_take_long=True)

    def _kept(self, newest: str, best: str | None) -> set[str]:
        """Names of the snapshots that stay: the newest, the best, and what they build on."""
        before = [name for name in self._folder.snapshot_names() if name < newest and name in self._own]
        wanted = [newest, *before[max(0, len(before) - (self._config.keep - 1)) :]]
        if best is not None:
            wanted.append(best)
        return {name for each in wanted for name in self._chain(each).names}

    def _chain(self, newest: str) -> _Chain:
        """A snapshot and what it builds on, as far as somebody has not deleted it or it cannot be read."""
        names: list[str] = []
        following: str | None = newest
        while following is not None:
            path = self._folder.snapshots / following
            if not path.is_dir():
                logger.warning("%s: somebody has deleted this snapshot, which is kept otherwise", path)
                return _Chain(names, is_whole=False)
            names.append(following)
            try:
                following = base_of(path)
            except (OSError, InputError) as error:
                logger.warning("%s: is kept, but what it builds on is unknown: %s", path, error)
                return _Chain(names, is_whole=False)
        return _Chain(names, is_whole=True)


def _warn(error: Exception, what: str) -> None:
    """Log what a place elsewhere has answered; with a traceback where it may be a mistake of ours.

    Implementations of fsspec and SDKs of clouds raise errors of all kinds.
    """
    is_known = isinstance(error, (OSError, InputError))
    logger.warning("%s: %s: %s", what, type(error).__name__, error, exc_info=None if is_known else error)


class PublishedRun:
    """What is published of a run. Not thread-safe."""

    def __init__(self, folder: RunFolder, config: PublishConfig) -> None:
        """
        Raises:
            InputError: the place holds something else than versions.
        """
        self._folder, self._config = folder, config
        self._publisher: Publisher | None = None
        self._store = VersionStore(config.to)
        try:
            self._store.check_place()
        except InputError:
            raise
        except Exception as error:
            _warn(error, f"{config.to} does not answer now; publications try again")

    def update(self, snapshot: Path) -> None:
        """Publish a snapshot that has just been written; an error is logged and counted in run.json.

        The next one brings what this one did not.
        """
        try:
            if self._publisher is None:
                config = self._config
                self._publisher = Publisher(
                    self._folder,
                    self._store,
                    config.dense_every_s,
                    min_overlap=config.min_overlap,
                    rows=config.rows,
                )
            version = self._publisher.publish(read_snapshot(snapshot, checksums=False))
            self._store.keep_newest(self._config.keep)
        except Exception as error:
            failed = self._folder.state.get("failed_publications", 0) + 1
            _warn(error, f"{snapshot.name} was not published to {self._config.to}")
            self._folder.update(failed_publications=failed)
            return
        self._folder.update(published_version=version.number)
