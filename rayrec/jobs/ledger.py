"""What the queue knows, on disk: queues, jobs, their attempts, and what was decided and why.

It lies outside of Ray, which forgets jobs with its head. Every change is one transaction, written before the
act that follows from it: a process that opens the ledger after a kill finds what was meant to be done, and
does it (again).

queues, cohorts ─┐
jobs ────────────┼─► decide ─► change: jobs, attempts, decisions ─► act: submit, snapshot, stop
nodes, as seen ──┘                                 ▲                      │
                                                   └── change: it is done ┘

SQLite in WAL mode: several processes of one machine read and write it, so it must not be on a network disk.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rayrec.jobs.job import Job, Running, Waiting
from rayrec.jobs.queues import CohortConfig, QueueConfig, QueuesConfig
from rayrec.pipelines.cluster.placement import Node
from rayrec.platform.errors import InputError, MachineError, NoRoomError

LEDGER_VARIABLE = "RAYREC_LEDGER"
SCHEMA = 1
BUSY_S = 30.0
"""Time to wait for another process that is writing."""

TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE queues (name TEXT PRIMARY KEY, settings TEXT NOT NULL);
CREATE TABLE cohorts (name TEXT PRIMARY KEY, settings TEXT NOT NULL);
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    queue TEXT NOT NULL,
    state TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    job TEXT NOT NULL,
    command TEXT NOT NULL,
    waiting TEXT NOT NULL DEFAULT '{}',
    running TEXT,
    attempt INTEGER NOT NULL DEFAULT 0,
    num_failures INTEGER NOT NULL DEFAULT 0,
    is_cancelled INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    starts_at REAL,
    ended_at REAL
);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE attempts (
    job TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    submission TEXT NOT NULL UNIQUE,
    cluster TEXT NOT NULL,
    size INTEGER NOT NULL,
    phase TEXT NOT NULL,
    began_at REAL NOT NULL,
    asked_at REAL,
    ended_at REAL,
    lost_s REAL,
    outcome TEXT,
    PRIMARY KEY (job, number)
);
CREATE TABLE decisions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    job TEXT NOT NULL REFERENCES jobs (id),
    kind TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE INDEX decisions_by_job ON decisions (job, number);
"""


class JobState(StrEnum):
    """What has become of a job."""

    waiting = "waiting"
    running = "running"
    """It has room; its attempt may be starting or about to leave."""
    succeeded = "succeeded"
    failed = "failed"
    stopped = "stopped"
    """By its user."""

    @property
    def is_over(self) -> bool:
        return self not in (JobState.waiting, JobState.running)


class Phase(StrEnum):
    """How far an attempt is; every phase is written before what it stands for is done."""

    starting = "starting"
    """It is handed to Ray, perhaps it was already."""
    started = "started"
    asked = "asked"
    """It is to leave its room, and asked for a snapshot first."""
    stopping = "stopping"
    ended = "ended"


@dataclass(frozen=True)
class Command:
    """What a job runs."""

    argv: tuple[str, ...]
    """Of a training, without what the queue sets: number of trainers, run folder, resume."""
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    """Folder that all nodes see, or a URI of a package that Ray unpacks; None: wherever Ray starts it."""
    is_rayrec: bool = False
    """`argv` is a command of rayrec, and no program."""
    holds_resources: bool = False
    """The command itself takes what the job asks for; else its actors ask Ray for it."""
    run: str | None = None
    """Of a training, the folder of its run."""
    retries: int = 0
    """Failures in a row after which it is tried again."""


@dataclass(frozen=True)
class JobEntry:
    """A job in the ledger."""

    job: Job
    command: Command
    state: JobState = JobState.waiting
    waiting: Waiting | None = None
    """What is known of its waiting; of a running job, what is kept for the case that it waits again."""
    running: Running | None = None
    attempt: int = 0
    """Number of the last one; 0: there was none."""
    num_failures: int = 0
    """In a row."""
    is_cancelled: bool = False
    """Its user wants it to stop."""
    reason: str = ""
    """Why it waits, runs, or ended."""
    starts_at: float | None = None
    ended_at: float | None = None

    @property
    def id(self) -> str:
        return self.job.id


@dataclass(frozen=True)
class Attempt:
    """One submission of a job to Ray."""

    job_id: str
    number: int
    submission: str
    """Ray takes an id once, so that no attempt is started twice."""
    cluster: str
    """Ray's id of the cluster that it was for; a new head has a new one."""
    size: int
    phase: Phase
    began_at: float
    asked_at: float | None = None
    ended_at: float | None = None
    lost_s: float | None = None
    """Of one that had to leave: seconds of work that its successor does again."""
    outcome: str | None = None


@dataclass(frozen=True)
class ClusterId:
    """Which cluster a ledger is of."""

    address: str
    """Host and port of the head."""
    id: str
    """That Ray drew when the head started."""


@dataclass(frozen=True)
class Noted:
    """One decision in the ledger."""

    at: float
    job_id: str
    kind: str
    reason: str


_JOB: TypeAdapter[Job] = TypeAdapter(Job)
_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)
_WAITING: TypeAdapter[Waiting] = TypeAdapter(Waiting)
_RUNNING: TypeAdapter[Running] = TypeAdapter(Running)
_NODES: TypeAdapter[tuple[Node, ...]] = TypeAdapter(tuple[Node, ...])


def ledger_path(option: Path | None, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the ledger is: what is given, else what the environment names, else `~/.rayrec/jobs.db`."""
    if option is not None:
        return option
    return Path(environment.get(LEDGER_VARIABLE) or Path.home() / ".rayrec" / "jobs.db").expanduser()


class LedgerBusyError(MachineError):
    """Another process has been writing the ledger for too long; nothing was changed."""

    @classmethod
    def of(cls, ledger: Path) -> LedgerBusyError:
        return cls(f"{ledger}: another process has been writing it for {BUSY_S:.0f} s; try again")


class Ledger:
    """The ledger, open in this process. All that changes it is called inside of `change`."""

    def __init__(self, path: Path) -> None:
        """Opens the ledger, and makes it if there is none.

        Raises:
            InputError: the file is no ledger, or one of a later version.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Transactions are begun and ended here, and by nobody else.
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            self._prepare()
        except (sqlite3.DatabaseError, OSError) as error:
            if "locked" in str(error):
                raise LedgerBusyError.of(path) from error
            raise InputError(
                f"{path}: not a ledger of the queue ({error}); name another with --ledger or "
                f"{LEDGER_VARIABLE}"
            ) from error
        self._jobs: dict[str, tuple[Job, Command]] = {}
        """Of every job that was read: they do not change."""

    def _prepare(self) -> None:
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        # A decision that is acted upon has to be on disk, also if the power is cut.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if not self._has_tables():  # who only reads waits for nobody who writes
            with self.change():
                if not self._has_tables():
                    for statement in TABLES.split(";"):
                        self._db.execute(statement)
                    self._put("schema", str(SCHEMA))
        found = int(self.about("schema") or 0)
        if found != SCHEMA:
            raise InputError(
                f"{self.path}: a ledger of schema {found}, and this version of rayrec reads schema {SCHEMA}; "
                "use the version that made it, or name another with --ledger"
            )

    def _has_tables(self) -> bool:
        found = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone()
        return found is not None

    @property
    def owner(self) -> str:
        """By what name a Ray cluster knows this ledger."""
        return f"{self.path.resolve()} on {socket.gethostname()}"

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """All changes inside the block happen, or none; nobody else changes anything meanwhile.

        Raises:
            LedgerBusyError: somebody else does.
            NoRoomError: its disk is full; nothing was changed.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise LedgerBusyError.of(self.path) from error
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:  # where the disk is full, SQLite has ended it
                self._db.execute("ROLLBACK")
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise NoRoomError(f"{self.path}: its disk is full ({error}); make room there") from error
            raise

    def version(self) -> tuple[int, int]:
        """Changes whenever this or another process has changed something."""
        by_others = self._db.execute("PRAGMA data_version").fetchone()[0]
        return int(by_others), self._db.total_changes

    # The cluster

    def about(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row["value"])

    def _put(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, value))

    @property
    def cluster(self) -> ClusterId | None:
        """The cluster whose jobs are here; None before the queue ran for the first time."""
        address, number = self.about("address"), self.about("cluster")
        return None if address is None or number is None else ClusterId(address, number)

    def bind(self, cluster: ClusterId, has_moved: bool = False) -> None:
        """Note the cluster that the ledger is of. A new head at its address is the same cluster.

        Args:
            has_moved: it is the same cluster, whatever its address.

        Raises:
            InputError: it is of another cluster.
        """
        known = self.cluster
        if (
            known is not None
            and not has_moved
            and known.address != cluster.address
            and known.id != cluster.id
        ):
            raise InputError(
                f"{self.path}: a ledger of the Ray cluster at {known.address} ({known.id[:8]}), and the one "
                f"at {cluster.address} ({cluster.id[:8]}) is another; name its own with --ledger, or start "
                "the queue once with --moved if it is the same cluster with a new head"
            )
        self._put("address", cluster.address)
        self._put("cluster", cluster.id)

    def keep_nodes(self, nodes: Sequence[Node], now: float) -> None:
        """The nodes as they are seen now, for commands that do not join the cluster."""
        self._put("nodes", _NODES.dump_json(tuple(nodes)).decode())
        self._put("nodes_at", str(now))

    def keep_lacking(self, sentences: Sequence[str]) -> None:
        """Guaranteed cells that find no node now."""
        self._put("lacking", json.dumps(list(sentences)))

    def lacking(self) -> list[str]:
        """As the queue found them last."""
        return [str(each) for each in json.loads(self.about("lacking") or "[]")]

    def nodes(self) -> tuple[Node, ...] | None:
        """As the queue saw them last; None if it has not run."""
        kept = self.about("nodes")
        return None if kept is None else _NODES.validate_json(kept)

    def seen_at(self) -> float | None:
        """When the queue saw the cluster last."""
        kept = self.about("nodes_at")
        return None if kept is None else float(kept)

    # Queues

    def queues(self) -> QueuesConfig:
        """
        Raises:
            InputError: settings that contradict each other, which no command writes.
        """
        return QueuesConfig.parse(
            {
                "queues": [json.loads(each["settings"]) for each in self._all("queues")],
                "cohorts": [json.loads(each["settings"]) for each in self._all("cohorts")],
            },
            source=str(self.path),
        )

    def _all(self, table: str) -> list[sqlite3.Row]:
        return self._db.execute(f"SELECT * FROM {table} ORDER BY name").fetchall()

    def put_queue(self, queue: QueueConfig) -> None:
        self._db.execute("INSERT OR REPLACE INTO queues VALUES (?, ?)", (queue.name, _settings(queue)))

    def put_cohort(self, cohort: CohortConfig) -> None:
        self._db.execute("INSERT OR REPLACE INTO cohorts VALUES (?, ?)", (cohort.name, _settings(cohort)))

    def remove_queue(self, name: str) -> None:
        """
        Raises:
            InputError: there is none of this name, or jobs wait or run in it.
        """
        self.queues().queue(name)
        using = [each.id for each in self.jobs(JobState.waiting, JobState.running) if each.job.queue == name]
        if using:
            raise InputError(
                f"queue {name!r}: {len(using)} jobs wait or run in it ({', '.join(using[:3])}"
                f"{', …' if len(using) > 3 else ''}); stop them first (rayrec jobs --stop ID) or let them end"
            )
        self._db.execute("DELETE FROM queues WHERE name = ?", (name,))

    # Jobs

    def add(self, job: Job, command: Command) -> JobEntry:
        """Queue a job; of an id that is there already with the same content, nothing happens.

        Raises:
            InputError: the id is that of another job.
        """
        known = self.find(job.id)
        if known is not None:
            if replace(known.job, submitted_at=job.submitted_at) == job and known.command == command:
                return known
            raise InputError(
                f"--id {job.id}: a job of this id was submitted at another time with other settings; choose "
                "another id, or leave it out"
            )
        self._db.execute(
            "INSERT INTO jobs (id, queue, state, submitted_at, job, command) VALUES (?, ?, ?, ?, ?, ?)",
            (
                job.id,
                job.queue,
                JobState.waiting,
                job.submitted_at,
                _JOB.dump_json(job).decode(),
                _COMMAND.dump_json(command).decode(),
            ),
        )
        self.note(job.submitted_at, job.id, "submit", f"submitted to queue {job.queue!r}")
        return self.job(job.id)

    def find(self, job_id: str) -> JobEntry | None:
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else self._entry(row)

    def job(self, job_id: str) -> JobEntry:
        """
        Raises:
            InputError: there is none of this id.
        """
        entry = self.find(job_id)
        if entry is None:
            raise InputError(f"there is no job {job_id!r} in {self.path}; `rayrec jobs` lists them")
        return entry

    def jobs(self, *states: JobState) -> list[JobEntry]:
        """Those in one of these states, in the order of submission; without states, all."""
        wanted = states or tuple(JobState)
        marks = ", ".join("?" * len(wanted))
        rows = self._db.execute(
            f"SELECT * FROM jobs WHERE state IN ({marks}) ORDER BY submitted_at, id", wanted
        )
        return [self._entry(row) for row in rows]

    def num_jobs(self) -> dict[str, int]:
        """By state, all jobs that are kept."""
        rows = self._db.execute("SELECT state, COUNT(*) AS count FROM jobs GROUP BY state")
        return {row["state"]: row["count"] for row in rows}

    def prune(self, before: float) -> int:
        """Forget jobs that ended before a time, with their attempts and decisions.

        Returns:
            How many.
        """
        old = [row["id"] for row in self._db.execute("SELECT id FROM jobs WHERE ended_at < ?", (before,))]
        for job_id in old:
            for table in ("decisions", "attempts"):
                self._db.execute(f"DELETE FROM {table} WHERE job = ?", (job_id,))
            self._db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            self._jobs.pop(job_id, None)
        return len(old)

    def _entry(self, row: sqlite3.Row) -> JobEntry:
        known = self._jobs.get(row["id"])
        if known is None:
            known = _JOB.validate_json(row["job"]), _COMMAND.validate_json(row["command"])
            self._jobs[row["id"]] = known
        job, command = known
        waiting = _WAITING.validate_python({"job": job, **json.loads(row["waiting"])})
        running = None
        if row["running"] is not None:
            running = _RUNNING.validate_python({"job": job, **json.loads(row["running"])})
        return JobEntry(
            job,
            command,
            JobState(row["state"]),
            replace(waiting, job=job),
            None if running is None else replace(running, job=job),
            row["attempt"],
            row["num_failures"],
            bool(row["is_cancelled"]),
            row["reason"],
            row["starts_at"],
            row["ended_at"],
        )

    def update(self, entry: JobEntry) -> None:
        """Write all of a job that may change."""
        assert entry.waiting is not None, "it comes from the ledger"
        self._db.execute(
            "UPDATE jobs SET state = ?, waiting = ?, running = ?, attempt = ?, num_failures = ?, "
            "is_cancelled = ?, reason = ?, starts_at = ?, ended_at = ? WHERE id = ?",
            (
                entry.state,
                _without_job(_WAITING, entry.waiting),
                None if entry.running is None else _without_job(_RUNNING, entry.running),
                entry.attempt,
                entry.num_failures,
                int(entry.is_cancelled),
                entry.reason,
                entry.starts_at,
                entry.ended_at,
                entry.id,
            ),
        )

    def cancel(self, job_id: str, now: float) -> JobEntry:
        """A job's user wants it to stop: at once if it waits, else the queue stops it.

        Raises:
            InputError: there is none of this id.
        """
        entry = self.job(job_id)
        if entry.state.is_over:
            return entry
        entry = replace(entry, is_cancelled=True)
        if entry.state is JobState.waiting:
            entry = replace(entry, state=JobState.stopped, ended_at=now, reason="stopped by its user")
        self.update(entry)
        self.note(now, job_id, "cancel", "its user wants it to stop")
        return entry

    # Attempts

    def attempts(self, job_id: str | None = None) -> list[Attempt]:
        """Of one job all, in order; without one, those of all jobs that have not ended."""
        if job_id is None:
            rows = self._db.execute(
                "SELECT * FROM attempts WHERE phase != ? ORDER BY began_at, job", (Phase.ended,)
            )
        else:
            rows = self._db.execute("SELECT * FROM attempts WHERE job = ? ORDER BY number", (job_id,))
        return [
            Attempt(
                row["job"],
                row["number"],
                row["submission"],
                row["cluster"],
                row["size"],
                Phase(row["phase"]),
                row["began_at"],
                row["asked_at"],
                row["ended_at"],
                row["lost_s"],
                row["outcome"],
            )
            for row in rows
        ]

    def put_attempt(self, attempt: Attempt) -> None:
        """Write a new attempt, or what has become of one."""
        self._db.execute(
            "INSERT OR REPLACE INTO attempts (job, number, submission, cluster, size, phase, began_at, "
            "asked_at, ended_at, lost_s, outcome) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                attempt.job_id,
                attempt.number,
                attempt.submission,
                attempt.cluster,
                attempt.size,
                attempt.phase,
                attempt.began_at,
                attempt.asked_at,
                attempt.ended_at,
                attempt.lost_s,
                attempt.outcome,
            ),
        )

    # Decisions

    def note(self, at: float, job_id: str, kind: str, reason: str) -> None:
        self._db.execute(
            "INSERT INTO decisions (at, job, kind, reason) VALUES (?, ?, ?, ?)", (at, job_id, kind, reason)
        )

    def noted(self, job_id: str) -> list[Noted]:
        """Of one job, oldest first."""
        rows = self._db.execute("SELECT * FROM decisions WHERE job = ? ORDER BY number", (job_id,))
        return [Noted(row["at"], row["job"], row["kind"], row["reason"]) for row in rows]


def _settings(config: QueueConfig | CohortConfig) -> str:
    # What was not given stays out: a quota of cells must not be given a second time as numbers.
    return config.model_dump_json(exclude_unset=True)


def _without_job(adapter: TypeAdapter[Any], value: Waiting | Running) -> str:
    return json.dumps(adapter.dump_python(value, mode="json", exclude={"job"}))
