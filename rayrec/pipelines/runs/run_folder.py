"""What a run leaves on disk, and which run a folder belongs to.

RUN/config.yaml            the settings
RUN/rl.yaml                those of reinforcement learning besides, in a run of `rayrec rl`
RUN/columns.arrow          names and types of the columns that training rows have before any operation
RUN/accepted.jsonl         of a growing folder, the files that were accepted (see `accepted_files`)
RUN/attention-N.json       where attention is measured, which backends trainer N has taken (see `choice`)
RUN/.lock                  held by the process that trains; names it
RUN/.reserve               room on the disk to say how the run ended
RUN/run.json               state, the error that ended it, best and last snapshot
RUN/metrics.jsonl          one line per validation (`valid`), and one every so many steps (`training_loss`)
RUN/recoveries.jsonl       one line per return to a snapshot, with the reason
RUN/snapshots/step-N/      dense weights, optimizer state, embedding rows, cursor, manifest.json
RUN/requests/              who waits for a snapshot on demand
RUN/evaluation-SPLIT.json  written by `rayrec evaluate`
RUN/evaluation-SPLIT-SNAPSHOT.positions.parquet  of recommenders, where each user's target is in the lists
RUN/compiled/              programs for ranking, of `rayrec serve --compile`; may be deleted
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TextIO

import pyarrow as pa

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import TABLE_SEEDS
from rayrec.platform.config import differing_keys, is_among
from rayrec.platform.errors import InputError, MachineError, looked_in
from rayrec.platform.files import (
    append_line,
    is_unfinished,
    no_room,
    without_nan,
    write_atomically,
    write_json,
)
from rayrec.platform.ray_errors import root_cause

logger = logging.getLogger(__name__)

FREE_TO_CHANGE = (
    "cluster.",
    "placement.",
    "pipeline.",
    "snapshots.",
    "recovery.",
    "tracking.",
    "sparse.num_servers",
    "sparse.wait_timeout_s",
    "sparse.transport",
    "sparse.cache_rows",
    "sparse.server_memory",
    "sparse.server_threads",
    "sparse.step_buffer",
    "sparse.expected_rows.",
    "sparse.eviction.remember_steps",
    *(
        f"sparse.tables.{table}.{key}"
        for table in TABLE_SEEDS
        for key in ("disk", "disk.", "servers", "eviction.remember_steps")
    ),
    "evaluation.every_epochs",
    "evaluation.every_steps",
    "evaluation.patience",
    "evaluation.batch_size",
    "training.micro_batches",
    "training.compile",
    "training.parallel",
    "training.reduce_bucket",
    "model.attention",
    "data.path",
    "data.semantic_ids",
    "data.samples",
    "data.follow.",
    "data.on_corrupt",
    "data.cache",
    "data.cache.",
)
"""Settings that a resumed run may change: they move work about, or say when to look at it. Sections end
in a dot; those that may be missing are named as a whole, too.

What is validated (`evaluation.metric`, `evaluation.max_users`) stays, or the best value so far would be
compared with values of another kind. Where data and semantic IDs lie is free: a snapshot knows the
fingerprint of the one and the version of the other, and its cursor that of the training rows.
"""

LOCK_FILE = ".lock"
LOCK_TRIES, LOCK_PAUSE_S = 25, 0.02
RESERVE_FILE, RESERVED_BYTES = ".reserve", 64 * 1024
"""Room on the disk that is given up to write how a run ended, if there is no other."""
COLUMNS_FILE, ACCEPTED_FILE = "columns.arrow", "accepted.jsonl"
RL_CONFIG = "rl.yaml"
ATTENTION_FILES = "attention-*.json"
_SNAPSHOT_PREFIX = "step-"


class StoppedError(Exception):
    """A run that was ended on purpose before it was over; says why."""


class RunFolder:
    """One run's folder; see the module's docstring for what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._updates = threading.Lock()
        self._start: str | None = None
        """Of `mark_start`; None in a folder that is only looked at."""

    @classmethod
    @contextmanager
    def locked(cls, path: Path, holds: Literal["run", "part", "nothing"]) -> Iterator[None]:
        """Inside the block, no other process trains in the folder; around `create` or `resume`.

        Args:
            holds: what the folder has to hold: a run to be resumed; at most a part of one, which comes back
                from its copy inside the block, and may have been stopped at that before; or nothing.

        The lock is the operating system's (flock): it ends with the process that holds it, however that
        ends. A new run's folder is made.

        Raises:
            MachineError: a run is alive in the folder; it may be an earlier try that takes its time to end.
            InputError: the folder is none that could be locked: it holds no run, or something else.
        """
        if holds == "run":
            cls.open(path)
        else:
            if holds == "nothing":
                _refuse_other_content(path)
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"{path}: the run's folder cannot be made ({error.strerror}); choose another with --run"
                ) from error
        # Never deleted: another process may be about to lock the file that would be gone.
        with open(path / LOCK_FILE, "a+") as lock:
            if not _take(lock):
                lock.seek(0)
                raise MachineError(
                    f"{path}: a run is alive in this folder ({lock.read() or 'just started'}); "
                    "wait until it ends, or choose another folder with --run"
                )
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            yield

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """Begin a run in a new or empty folder, or in that of a run that ended before its first snapshot.

        Raises:
            InputError: the folder already holds a run, or something else.
        """
        folder = cls(path)
        held = folder.state if (path / "run.json").exists() else None
        if held is not None and held["last"] is not None:
            state = "died" if held["state"] == "running" else held["state"]  # nobody else has the lock
            raise InputError(
                f"{path}: this folder holds a run already (its state: {state}); "
                "continue it with --resume, or choose another folder with --run"
            )
        _refuse_other_content(path)
        path.mkdir(parents=True, exist_ok=True)
        for left in (path / COLUMNS_FILE, path / ACCEPTED_FILE, *path.glob(ATTENTION_FILES)):
            left.unlink(missing_ok=True)
        write_atomically(path / "config.yaml", config.to_yaml().encode())
        outdated = {"deleted": None} if held is not None and "deleted" in held else {}
        folder.update(state="running", error=None, best=None, last=None, **outdated)
        return folder

    @staticmethod
    def as_begun(path: Path, config: RunConfig) -> RunConfig:
        """The settings with which a run goes on; what its version did not know stays as it was then."""
        if not (path / "config.yaml").is_file() or config.training.windows is not None:
            return config
        windows = RunFolder(path).config.training.windows
        training = config.training.model_copy(update={"windows": windows})
        return config.model_copy(update={"training": training})

    @classmethod
    def resume(cls, path: Path, config: RunConfig) -> RunFolder:
        """The folder of a run that may continue with these settings; `begin` says that it does.

        Raises:
            InputError: there is no run, or its settings differ in what the results depend on.
        """
        folder = cls.open(path)
        if folder.config.model.quantization is not None:
            made_of = folder.state.get("quantized_from", "the run that it was made of")
            raise InputError(
                f"{path}: holds a quantized run, which cannot be trained; resume {made_of}, and quantize "
                "that again"
            )
        free: tuple[str, ...] = FREE_TO_CHANGE
        if config.training.schedule.decay == "none":  # otherwise the rates of steps already taken hang on it
            free += ("training.epochs",)
        changed = [key for key in differing_keys(folder.config, config) if not is_among(key, free)]
        if changed:
            raise InputError(
                f"{path}: holds another run: it differs from this config in {', '.join(changed)}; "
                f"use what it was begun with ({path / 'config.yaml'}), or choose another folder with --run"
            )
        folder._put_back_replaced()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder in which a run was begun."""
        if not (path / "run.json").is_file() or not (path / "config.yaml").is_file():
            found = "" if path.exists() else f" (there is no such folder{looked_in(path)})"
            raise InputError(f"{path}: not a run folder{found}; expected one that 'rayrec train' made")
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> RunConfig:
        config = RunConfig.load(self.path / "config.yaml")
        if "windows" in config.training.model_fields_set:
            return config
        # Begun by a version that read the newest events alone: it goes on as it began.
        training = config.training.model_copy(update={"windows": 1})
        return config.model_copy(update={"training": training})

    @property
    def state(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        return values

    def mark_start(self) -> None:
        """From now on the run is the one that this process has started: its copy knows it by that."""
        self._start = None
        start = uuid.uuid4().hex
        self.update(start=start, id=self.state.get("id") or uuid.uuid4().hex)
        self._start = start
        write_atomically(self.path / RESERVE_FILE, bytes(RESERVED_BYTES))

    def check_own(self) -> None:
        """Before something of the folder is replaced.

        Raises:
            InputError: another process has started the run since: the lock was lost, as some network file
                systems lose them when a machine is cut off.
        """
        self._check_start(self.state)

    def _check_start(self, state: dict[str, Any]) -> None:
        if self._start is not None and state.get("start") != self._start:
            raise InputError(
                f"{self.path}: another process has started this run again; this one ends, and changes "
                "nothing in the folder any more"
            )

    def begin(self, config: RunConfig) -> None:
        """From now on the run is running, with these settings."""
        write_atomically(self.path / "config.yaml", config.to_yaml().encode())
        self.update(state="running", error=None)

    @property
    def columns(self) -> pa.Schema | None:
        """Columns of the training rows as they were read; None in the folder of a run that did not begin.

        Raises:
            InputError: the file is not as it was written.
        """
        return read_columns(self.path / COLUMNS_FILE)

    def keep_columns(self, schema: pa.Schema) -> None:
        """For users of the model when the training rows are gone."""
        write_atomically(self.path / COLUMNS_FILE, schema.serialize().to_pybytes())

    @contextmanager
    def ending(
        self, explained: Callable[[BaseException], BaseException] = lambda cause: cause
    ) -> Iterator[None]:
        """Leave in the folder how a run ends that is stopped or fails; the error that is raised is its cause.

        Args:
            explained: an error with what is known of it besides.
        """
        try:
            yield
        except (
            KeyboardInterrupt,
            SystemExit,
        ) as stop:  # Ray's drivers exit on SIGTERM, which job managers send
            self.update(
                state="stopped", error="terminated" if isinstance(stop, SystemExit) else "interrupted"
            )
            if self.state["last"] is None:
                logger.info("stopped before the first snapshot; resumed, it begins again")
            else:
                logger.info("stopped; resumed, it goes on from %s", self.chosen_snapshot("last"))
            raise
        except StoppedError as stop:
            self.update(state="stopped", error=str(stop))
            raise
        except Exception as error:
            cause = explained(root_cause(error))
            if (full := no_room(cause, self.path, then=", and continue with --resume")) is not None:
                cause = full
            with suppress(OSError, InputError):  # what ended the run is said in any case
                self.update(state="failed", error=f"{type(cause).__name__}: {cause}")
            if cause is error:
                raise
            raise cause from error

    def update(self, **values: Any) -> None:
        """Change fields of run.json; from any thread."""
        with self._updates:
            # The id is made with the file, and names the run wherever its folder is moved or copied to.
            state = self.state if (self.path / "run.json").exists() else {"id": uuid.uuid4().hex}
            self._check_start(state)
            try:
                write_json(self.path / "run.json", {**state, **values})
            except OSError as error:
                reserve = self.path / RESERVE_FILE
                if no_room(error) is None or not reserve.exists():
                    raise
                reserve.unlink()  # how the run ended is said also on a disk that is full
                write_json(self.path / "run.json", {**state, **values})

    @property
    def is_alive(self) -> bool:
        """Whether a process trains in the folder now."""
        try:
            with open(self.path / LOCK_FILE) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def condition(self) -> str:
        """`running`, `finished`, `stopped`, `failed`; or `died`, if its process ended without a word."""
        state = str(self.state["state"])
        return "died" if state == "running" and not self.is_alive else state

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    def snapshot_path(self, step: int) -> Path:
        return self.snapshots / f"{_SNAPSHOT_PREFIX}{step:09d}"

    def chosen_snapshot(self, which: str) -> Path:
        """Folder of the `best` or the `last` snapshot, of the one before the last (`previous`), or by name.

        Raises:
            InputError: there is none.
        """
        if which not in ("best", "last", "previous"):
            if not (self.snapshots / which).is_dir():
                raise InputError(
                    f"{self.path}: has no snapshot {which!r}; it has {self.snapshot_names() or 'none'}"
                )
            return self.snapshots / which
        last = self.state["best" if which == "best" else "last"]
        if last is None and self.state["last"] is not None:
            raise InputError(
                f"{self.path}: has no best snapshot, since none was validated yet; take --snapshot last"
            )
        if last is None and self.state.get("deleted") is not None:
            raise InputError(f"{self.path}: the run has no snapshot any more: {self.state['deleted']}")
        if last is None:
            raise InputError(
                f"{self.path}: the run has no snapshot yet (its state: {self.condition}); rayrec train with "
                "its config begins it anew"
            )
        if which != "previous":
            return self.snapshots / str(last)
        earlier = [name for name in self.snapshot_names() if name < last]
        if not earlier:
            raise InputError(f"{self.path}: has no snapshot before {last}; see snapshots.keep")
        return self.snapshots / earlier[-1]

    def snapshot_names(self) -> list[str]:
        """Of all snapshots, oldest first."""
        if not self.snapshots.is_dir():
            return []
        return sorted(
            entry.name
            for entry in self.snapshots.iterdir()
            if entry.name.startswith(_SNAPSHOT_PREFIX) and entry.is_dir()
        )

    def _put_back_replaced(self) -> None:
        """Bring back a snapshot that made room for another of its step, where that one did not arrive."""
        for replaced in self.snapshots.glob(".*.replaced"):
            path = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
            if not path.exists():
                replaced.rename(path)

    def keep_only(self, names: set[str]) -> None:
        """Delete every snapshot that is not named, and leftovers of them; other things that lie there stay.

        What cannot be deleted is logged, and tried again the next time.
        """
        if not self.snapshots.is_dir():
            return
        for folder in sorted(self.snapshots.iterdir()):  # leftovers, which are hidden, first
            is_leftover = folder.name.startswith(f".{_SNAPSHOT_PREFIX}")
            is_snapshot = is_leftover or folder.name.startswith(_SNAPSHOT_PREFIX)
            if folder.name in names or not is_snapshot or not folder.is_dir():
                continue
            try:
                if not is_leftover:  # half of one must not look like one
                    folder = folder.rename(folder.with_name(f".{folder.name}.deleted"))
                shutil.rmtree(folder)
            except FileNotFoundError:  # somebody else deletes it, too
                continue
            except OSError as error:
                logger.warning("%s: cannot be deleted: %s", folder, error)

    def log(self, record: dict[str, Any]) -> None:
        self._append("metrics.jsonl", record)

    def records(self) -> list[dict[str, Any]]:
        """What was logged, in order: with `valid`, the figures of a validation."""
        log = self.path / "metrics.jsonl"
        return [record for _, record in _records(log)] if log.exists() else []

    def log_recovery(self, record: dict[str, Any]) -> None:
        self._append("recoveries.jsonl", record)

    def forget_after(self, step: int) -> None:
        """Drop the records of validations behind a step, to which the run goes back."""
        log = self.path / "metrics.jsonl"
        if log.exists():
            kept = [line for line, record in _records(log) if record["step"] <= step]
            write_atomically(log, b"".join(line + b"\n" for line in kept))

    def _append(self, name: str, record: dict[str, Any]) -> None:
        append_line(self.path / name, json.dumps(without_nan(record), allow_nan=False).encode())


def _take(lock: TextIO) -> bool:
    """Lock a file, unless a process has it.

    `RunFolder.is_alive` has it for a moment, too, which is no run: hence the tries.
    """
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(LOCK_PAUSE_S)
    return False


def _records(log: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines of a log and what they say, without those that a full disk or a power cut has cut short."""
    for number, line in enumerate(log.read_bytes().split(b"\n"), start=1):
        try:
            record = json.loads(line) if line else None
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record
        elif line:
            logger.warning("%s: line %d was cut short and is left out", log, number)


def read_columns(path: Path) -> pa.Schema | None:
    """Columns as `RunFolder.keep_columns` wrote them; None where there is no such file.

    Raises:
        InputError: the file is not as it was written.
    """
    if not path.exists():
        return None
    try:
        return pa.ipc.read_schema(pa.py_buffer(path.read_bytes()))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not the columns of a run's rows; the file was changed") from error


def _refuse_other_content(path: Path) -> None:
    if (path / "run.json").exists() or not path.exists():
        return
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else None
    if names is None or not all(name == LOCK_FILE or _was_begun_with(name, names) for name in names):
        raise InputError(f"{path}: not an empty folder; choose another one with --run")


def _was_begun_with(name: str, names: Collection[str]) -> bool:
    """Whether a run that was killed before it had its run.json may have left this beside its lock. Settings
    without a lock are somebody's own."""
    return LOCK_FILE in names and (name == "config.yaml" or is_unfinished(name))
