"""A cluster that exists in memory: nodes, Ray's jobs, runs with snapshots, a head that goes away, and kills.

Time passes only in `sleep`. What Ray would do by itself happens there: processes take their cards, work, end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rayrec.jobs.ledger import ClusterId, Ledger
from rayrec.jobs.runner import HeadDownError, Report, Submission
from rayrec.jobs.trainings import Asked
from rayrec.jobs.watcher import Awaited, View
from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.reservation import NODES_VARIABLE

SNAPSHOT_TAKES_S, STOP_TAKES_S = 2.0, 1.0


class KilledError(BaseException):
    """As if the process of the queue was killed here."""


class Kills:
    """Counts the points between writes and acts, and kills at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self._at = at
        self.num_points = 0

    def __call__(self) -> None:
        self.num_points += 1
        if self.num_points - 1 == self._at:
            raise KilledError


class KilledLedger(Ledger):
    """May be killed before, in and after every transaction."""

    def __init__(self, path: Path, kills: Callable[[], None] = lambda: None) -> None:
        self._kills: Callable[[], None] = lambda: None
        super().__init__(path)
        self._db.execute("PRAGMA synchronous = OFF")  # no power is cut here
        self._kills = kills

    @contextmanager
    def change(self) -> Iterator[None]:
        self._kills()
        with super().change():
            yield
            self._kills()
        self._kills()


@dataclass
class Process:
    """An attempt as Ray runs it."""

    submission: Submission
    state: str = "RUNNING"
    holds: Counter[str] = field(default_factory=Counter)
    """Cards by node."""
    gone_at: float | None = None
    """When its actors are gone, once it has ended."""
    stops_at: float | None = None
    done_s: float = 0.0
    """Card-seconds of this attempt, beyond what it began with."""
    exit_code: int | None = None
    never_ran: bool = False

    @property
    def job_id(self) -> str:
        return self.submission.id.rpartition("-")[0]

    @property
    def is_over(self) -> bool:
        return self.state != "RUNNING"


class FakeCluster:
    """See the module. A job's work is in card-seconds; 0 is a job that fails at once."""

    def __init__(self, nodes: Sequence[Node], work: dict[str, float]) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.work = work
        self.now = 1_000.0
        self.kills: Callable[[], None] = lambda: None
        self.cluster: ClusterId | None = ClusterId("head:6379", "first")
        self.processes: dict[str, Process] = {}
        self.history: list[str] = []
        """Submissions that were started, in order."""
        self.saved: Counter[str] = Counter()
        """By job, card-seconds that its last snapshot has."""
        self.saved_at: dict[str, float] = {}
        """When that was."""
        self.worked: Counter[str] = Counter()
        """By job, all card-seconds that were spent on it."""
        self.asked: dict[str, float] = {}
        self.writes_snapshots = True
        self.silent: set[str] = set()
        """Submissions of which the head does not say how they stand."""
        self.failures_left: Counter[str] = Counter()
        """By job, attempts that fail before one goes well."""

    # The world

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for process in self.processes.values():
            self._pass(process, seconds)

    def _pass(self, process: Process, seconds: float) -> None:
        if process.is_over:
            if process.gone_at is not None and self.now >= process.gone_at:
                process.holds.clear()
            return
        job = process.job_id
        if self.failures_left[job]:
            self.failures_left[job] -= 1
            self._end(process, "FAILED", 1)
            return
        if process.stops_at is not None and self.now >= process.stops_at:
            self._end(process, "STOPPED")
            return
        spent = seconds * sum(process.holds.values())
        process.done_s += spent
        self.worked[job] += spent
        asked = self.asked.get(process.submission.id)
        if asked is not None and self.writes_snapshots and self.now >= asked + SNAPSHOT_TAKES_S:
            self.saved[job] += process.done_s
            process.done_s = 0.0
            self.saved_at.setdefault(job, self.now)
        if self.saved[job] + process.done_s >= self.work[job]:
            self._end(process, "SUCCEEDED", 0)

    def _end(self, process: Process, state: str, exit_code: int | None = None) -> None:
        process.state, process.exit_code = state, exit_code
        process.gone_at = self.now + STOP_TAKES_S

    def lose_head(self) -> None:
        self.cluster = None
        self.processes.clear()

    def new_head(self, name: str) -> None:
        self.cluster = ClusterId("head:6379", name)

    def live(self, job: str) -> list[str]:
        return [
            each.submission.id for each in self.processes.values() if each.job_id == job and not each.is_over
        ]

    # What the queue asks

    def _answers(self) -> ClusterId:
        if self.cluster is None:
            raise HeadDownError("no head answers")
        return self.cluster

    def look(self, awaited: Sequence[Awaited] = ()) -> View:
        self.kills()
        cluster = self._answers()
        held: Counter[tuple[str, str]] = Counter()
        for process in self.processes.values():
            for node, cards in process.holds.items():
                held[node, "GPU"] += cards
        nodes = tuple(
            replace(node, free={name: count - held[node.id, name] for name, count in node.total.items()})
            for node in self.nodes.values()
        )
        actors = {
            each.submission: sum(self.processes[each.submission].holds.values())
            for each in awaited
            if each.submission in self.processes
        }
        self.kills()
        return View(cluster, nodes, actors, "http://head")

    def submit(self, submission: Submission) -> None:
        self.kills()
        self._answers()
        if submission.id not in self.processes:
            process = Process(submission)
            others = self.live(process.job_id)
            assert not others, f"{submission.id} is started while {others} runs"
            self.history.append(submission.id)
            self.processes[submission.id] = process
            self._take_cards(process)
        self.kills()

    def _take_cards(self, process: Process) -> None:
        """On the nodes that were chosen; no two jobs on one card."""
        trainers = re.search(r"num_trainers=(\d+)", process.submission.entrypoint)
        wanted = int(trainers[1]) if trainers else int(process.submission.resources.get("GPU", 1))
        for node in process.submission.env[NODES_VARIABLE].split(","):
            free = self.nodes[node].total["GPU"] - sum(other.holds[node] for other in self.processes.values())
            taken = min(wanted, int(free))
            process.holds[node] += taken
            wanted -= taken
        assert wanted == 0, f"{process.submission.id} finds {wanted} of its cards in use"

    def report(self, submission: str) -> Report | None:
        self.kills()
        self._answers()
        if submission in self.silent:
            raise HeadDownError(f"{submission}: status 500")
        process = self.processes.get(submission)
        if process is None:
            return None
        return Report(
            process.state,
            process.exit_code,
            f"it said\nthe last line\nRunning entrypoint for job {submission}: x",
            submission,
            process.never_ran,
        )

    def stop(self, submission: str) -> None:
        self.kills()
        self._answers()
        process = self.processes.get(submission)
        if process is not None and process.stops_at is None:
            process.stops_at = self.now + STOP_TAKES_S
        self.kills()

    def logs(self, submission: str) -> str:
        return ""

    def ask_snapshot(self, submission: str, run: Path) -> Asked | None:
        self.kills()
        asked = self.asked.setdefault(submission, self.now)
        self.kills()
        if not self.writes_snapshots or self.now < asked + SNAPSHOT_TAKES_S:
            return None
        return Asked("step-000000010")

    def lost_s(self, run: Path, since: float, now: float) -> float:
        return now - max(since, self.saved_at.get(run.name, 0.0))

    def left_s(self, submission: str, run: Path, now: float) -> float | None:
        return None
