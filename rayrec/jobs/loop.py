"""`rayrec queue run`: one process that starts, shrinks and stops jobs as the ledger and the cluster say.

every second:
    runner: how attempts stand ─┐
    cluster: nodes, actors ─────┼─► follow each attempt ─► decide ─► ledger ─► act ─► the next look
    ledger: jobs, queues ───────┘

An attempt:  starting ─► started ─► asked (for a snapshot) ─► stopping ─► ended
                            │   it has to leave: another size, or none        │
                            └───────────── it ends by itself ─────────────────┤
                 ended: a new attempt of another size, waiting again, or over ┘

What is to be done is written first, and every act can be done again: submission ids are used once, a second
snapshot or SIGTERM does no harm. So a kill between any two lines loses no job and starts none twice. While
Ray's head does not answer, nothing changes; one that has forgotten an attempt has lost it, and the job waits
again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from rayrec.jobs.admission import SchedulingConfig, decide, lacking_cells
from rayrec.jobs.job import (
    Decision,
    Grow,
    Placed,
    Reserve,
    Running,
    Shrink,
    Start,
    Step,
    Stop,
    Wait,
)
from rayrec.jobs.ledger import Attempt, ClusterId, JobEntry, JobState, Ledger, LedgerBusyError, Phase
from rayrec.jobs.runner import HeadDownError, Report, Runner, submission_of
from rayrec.jobs.trainings import Trainings
from rayrec.jobs.watcher import Awaited, View
from rayrec.pipelines.cluster.placement import Node
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError, MachineError, NoRoomError

logger = logging.getLogger(__name__)

WRONG_INPUT = 2
"""Exit code of rayrec's commands, which no second try mends."""
KEEP_NODES_S = 10.0
"""Between two writes of the nodes for other commands."""
MEMORY = {"memory", "object_store_memory"}
"""Resources that Ray counts in bytes, and jobs do not ask for."""
DAY_S = 86_400.0
SILENT_ATTEMPTS = 3
"""In a row, of which the head does not say how they stand: then it is down."""
NO_PROCESS, MOST_WITHOUT_PROCESS = "no process", 10
"""What became of an attempt for which Ray had none; and how many in a row are tried."""
RAYS_LINE = "Running entrypoint for job"
SHOWN_CHARACTERS = 300
"""Of what a failed attempt said last."""

Scale = Callable[[JobEntry, int], bool]
"""Tell the controller of a running service how many replicas it may have; whether it has no more."""
ReplicaNodes = Callable[[JobEntry], Sequence[str]]
"""Of every replica of a service that exists; none if that is not known."""
Look = Callable[[Sequence[Awaited]], View]


class QueueRunConfig(Config):
    """How the queue's process works."""

    tick_s: float = Field(default=1.0, gt=0)
    decide_s: float = Field(default=5.0, ge=0)
    """Time after which it is decided again although nothing has happened: times of reservations come."""
    snapshot_s: float = Field(default=45.0, ge=0)
    """Time that a training that has to leave has for its snapshot; then it is stopped at its last one."""
    fast_s: float = Field(default=300.0, ge=0)
    """An attempt that failed sooner has failed fast, and the next one reclaims nothing for a while."""
    python: str | None = None
    """Interpreter that has rayrec, by its path on the cluster; None: the path of the queue's own."""
    keep_days: float = Field(default=90.0, gt=0)
    """After so long, a job that is over is forgotten. Its id may come again once Ray has forgotten it."""
    scheduling: SchedulingConfig = SchedulingConfig()


@contextmanager
def alone(ledger: Path) -> Iterator[None]:
    """Inside the block, no other process runs the queue of this ledger.

    Raises:
        MachineError: one does; says which.
    """
    ledger = ledger.resolve()  # by whatever name it is known
    # Never deleted: another process may be about to lock the file that would be gone.
    with open(ledger.with_name(ledger.name + ".lock"), "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise MachineError(
                f"{ledger}: another process runs this queue ({lock.read() or 'just started'}); let it run, "
                "or end it first"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


class QueueLoop:
    """Follows the ledger and the cluster; see the module's docstring."""

    def __init__(
        self,
        ledger: Ledger,
        look: Look,
        runner: Runner,
        trainings: Trainings,
        settings: QueueRunConfig | None = None,
        scale: Scale | None = None,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        has_moved: bool = False,
        check_alone: Callable[[Sequence[Node]], None] = lambda nodes: None,
        replica_nodes: ReplicaNodes = lambda entry: (),
    ) -> None:
        """
        Args:
            scale: of services; None: they are started again with another number of replicas.
            has_moved: the cluster is the ledger's, although head and address are new.
            check_alone: raises an `InputError` where another queue, such as Kueue's, has these nodes.
        """
        self._ledger, self._look, self._runner, self._trainings = ledger, look, runner, trainings
        self._settings = settings or QueueRunConfig()
        self._scale, self._now, self._sleep = scale, now, sleep
        self._has_moved, self._check_alone = has_moved, check_alone
        self._replica_nodes = replica_nodes
        self._said: str | None = None
        self._unwritten: str | None = None
        """What was said last of a ledger that could not be written."""
        self._cluster: ClusterId | None = None
        """That this process has seen last."""
        self._nodes_kept_at = self._decided_at = float("-inf")
        self._troubles: dict[str, str] = {}
        """By submission, what was said last instead of an answer."""
        self._last_seen: float | None = None
        """When the cluster was seen before this look."""
        self._decided_on: object = None
        """State of the ledger and of the nodes after the last decision."""

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Work until the process is ended, or until there is no more to do.

        Raises:
            InputError: the ledger is of another cluster, or another queue has this one.
        """
        while not is_over():
            began = self._now()
            self.tick()
            left_s = self._settings.tick_s - (self._now() - began)
            self._sleep(min(max(0.0, left_s), self._settings.tick_s))  # the clock may be put back meanwhile

    def tick(self) -> bool:
        """Look once, and do what follows.

        Returns:
            Whether Ray's head answered, and the ledger could be written.

        Raises:
            InputError: the ledger is of another cluster.
        """
        try:
            self._tick()
        except HeadDownError as error:
            if self._said != str(error):
                logger.warning("%s; jobs stay as they are until it answers", error)
            self._said = str(error)
            # A new head has other addresses, which only a look tells.
            with suppress(HeadDownError):
                self._look(())
            return False
        except (LedgerBusyError, NoRoomError) as error:
            if self._unwritten != str(error):
                logger.warning("%s; what is left to do is done as soon as it can be written", error)
            self._unwritten = str(error)
            return False
        self._unwritten = None
        if self._said is not None:
            logger.info("Ray's head answers again")
            self._said = None
        return True

    def _tick(self) -> None:
        self._last_seen = self._ledger.seen_at()
        attempts = self._ledger.attempts()
        # Reports come before the look: who was over by then has no actors that come later.
        reports = self._reports([each for each in attempts if each.phase is not Phase.starting])
        awaited = [
            Awaited(submission, report.ray_job)
            for submission, report in reports.items()
            if report is not None and report.is_over
        ]
        view = self._look(awaited)
        self._check_cluster(view)
        for attempt in attempts:
            if attempt.phase is Phase.starting or attempt.submission in reports:
                with self._apart(attempt):
                    self._follow(attempt, reports.get(attempt.submission), view)
        if self._is_due(self._decided_at, self._settings.decide_s) or self._decided_on != self._seen(view):
            self._decide(view)
            self._decided_at, self._decided_on = self._now(), self._seen(view)
        for attempt in self._ledger.attempts():
            if attempt.phase is Phase.starting:
                with self._apart(attempt):
                    self._submit(attempt, view)

    def _is_due(self, last: float, every_s: float) -> bool:
        """Whether something is done again; also after the clock was put back."""
        return not last <= self._now() < last + every_s

    def _reports(self, attempts: Sequence[Attempt]) -> dict[str, Report | None]:
        """How attempts stand, without those of which Ray does not answer.

        Raises:
            HeadDownError: it does not answer at all.
        """
        reports: dict[str, Report | None] = {}
        in_vain = 0
        for each in attempts:
            try:
                with self._apart(each, stays_silent=False):
                    reports[each.submission] = self._runner.report(each.submission)
                in_vain = 0
            except HeadDownError:
                in_vain += 1
                if in_vain == SILENT_ATTEMPTS:
                    raise
        return reports

    @contextmanager
    def _apart(self, attempt: Attempt, stays_silent: bool = True) -> Iterator[None]:
        """What Ray, or a disk that nodes share, does not do for one attempt inside the block holds up no
        other one.

        Args:
            stays_silent: it is told in the log alone, and tried again at the next look.
        """
        try:
            yield
        except (HeadDownError, OSError, NoRoomError) as error:
            if self._troubles.get(attempt.submission) != str(error):
                logger.warning("%s: %s; it is tried again", attempt.submission, error)
                self._troubles[attempt.submission] = str(error)
            if not stays_silent:
                raise
        else:
            self._troubles.pop(attempt.submission, None)

    def _seen(self, view: View) -> object:
        """What is decided by, but for the time. How much memory is free changes all the time."""
        nodes = [
            (node.id, node.is_usable, {name: node.free.get(name) for name in node.total.keys() - MEMORY})
            for node in view.nodes
        ]
        return self._ledger.version(), nodes

    def _check_cluster(self, view: View) -> None:
        now = self._now()
        if view.owner not in ("", self._ledger.owner):
            raise InputError(
                f"the queue of another ledger ({view.owner}) has this Ray cluster, and two would give the "
                "same cards away twice; submit to that one, or use --take-over if it does not run any more"
            )
        if self._cluster != view.cluster:
            self._check_alone(view.nodes)
            self._cluster = view.cluster
        if self._ledger.cluster != view.cluster:
            with self._ledger.change():
                self._ledger.bind(view.cluster, self._has_moved)
            self._has_moved = False
        if self._is_due(self._nodes_kept_at, KEEP_NODES_S):
            running = [each.running for each in self._ledger.jobs(JobState.running) if each.running]
            lacking = lacking_cells(self._ledger.queues(), view.nodes, running)
            with self._ledger.change():
                self._ledger.keep_lacking(lacking)
                self._ledger.keep_nodes(view.nodes, now)
                self._ledger.prune(now - self._settings.keep_days * DAY_S)
            self._nodes_kept_at = now

    # Following attempts

    def _follow(self, attempt: Attempt, report: Report | None, view: View) -> None:
        if attempt.phase is Phase.starting:
            self._submit(attempt, view)
        elif report is None:
            is_new = attempt.cluster != view.cluster.id
            self._lost(attempt, "its head is a new one" if is_new else "its head has forgotten it")
        elif report.is_over:
            if not view.num_actors.get(attempt.submission, 0):
                self._over(attempt, report, view)
        elif attempt.phase is Phase.started:
            self._check_leaves(attempt, self._ledger.job(attempt.job_id), view)
        elif attempt.phase is Phase.asked:
            self._await_snapshot(attempt, self._ledger.job(attempt.job_id))
        else:
            self._runner.stop(attempt.submission)

    def _submit(self, attempt: Attempt, view: View) -> None:
        # Also to a new head under the same id: whether the old one had it is not known.
        entry = self._ledger.job(attempt.job_id)
        assert entry.running is not None, "it has an attempt"
        if entry.job.kind == "service" and self._scale is not None:
            self._scale(entry, _num_replicas(entry, attempt.size))  # before it has any
        owner = f"{self._ledger.owner}, of {entry.job.submitted_at}"  # ids that are forgotten may come again
        submission = submission_of(
            attempt, entry.running, entry.command, owner, self._settings.python or sys.executable
        )
        try:
            self._runner.submit(submission)
        except InputError as error:
            with self._ledger.change():
                self._end(attempt, "refused by Ray")
                self._finish(self._ledger.job(entry.id), JobState.failed, str(error))
            return
        with self._ledger.change():
            self._ledger.put_attempt(replace(attempt, phase=Phase.started, cluster=view.cluster.id))

    def _check_leaves(self, attempt: Attempt, entry: JobEntry, view: View) -> None:
        """Whether an attempt has to leave its room."""
        running = entry.running
        assert running is not None
        wanted = running.size if running.step is None else running.step.size
        gone = _gone(running, view)
        if entry.is_cancelled:
            why = "its user wants it to stop"
        elif gone and entry.job.kind != "service":  # Serve replaces replicas by itself
            why = f"{len(gone)} of its nodes are gone"
        elif wanted is None:
            why = entry.reason
        elif wanted == attempt.size:
            if entry.job.kind == "service" and self._scale is not None:
                self._scale(entry, _num_replicas(entry, wanted))  # others may have changed it
            return
        elif entry.job.kind == "service" and self._scale is not None:
            self._scaled(attempt, entry, wanted)
            return
        else:
            why = f"it is to go on as size {wanted + 1} of {len(entry.job.sizes)}"
        with self._ledger.change():
            phase = Phase.asked if entry.job.kind == "train" else Phase.stopping
            lost_s = None if phase is Phase.asked else self._lost_s(attempt, entry)
            self._ledger.put_attempt(replace(attempt, phase=phase, asked_at=self._now(), lost_s=lost_s))
            self._ledger.note(self._now(), entry.id, "leave", f"attempt {attempt.number} leaves: {why}")

    def _scaled(self, attempt: Attempt, entry: JobEntry, wanted: int) -> None:
        """A service gets another number of replicas, without another attempt."""
        assert self._scale is not None
        num_replicas = _num_replicas(entry, wanted)
        if self._scale(entry, num_replicas):
            with self._ledger.change():
                entry = self._ledger.job(entry.id)
                self._ledger.put_attempt(replace(attempt, size=wanted))
                self._ledger.update(replace(entry, running=self._resized(entry)))
                self._ledger.note(self._now(), entry.id, "scaled", f"has {num_replicas} replicas")

    def _await_snapshot(self, attempt: Attempt, entry: JobEntry) -> None:
        assert entry.command.run is not None
        assert attempt.asked_at is not None
        answer = self._trainings.ask_snapshot(attempt.submission, Path(entry.command.run))
        now = self._now()
        if now < attempt.asked_at:  # the clock was put back
            with self._ledger.change():
                self._ledger.put_attempt(replace(attempt, asked_at=now))
            return
        if answer is None and now < attempt.asked_at + self._settings.snapshot_s:
            return
        lost_s = self._lost_s(attempt, entry)
        if answer is not None and answer.snapshot is not None:
            what = f"stops at {answer.snapshot}, which is {lost_s:.0f} s old"
        else:
            why = f"no snapshot within {self._settings.snapshot_s:g} s" if answer is None else answer.error
            what = f"stops at its last snapshot, and {lost_s:.0f} s of work are done again ({why})"
        with self._ledger.change():
            self._ledger.put_attempt(replace(attempt, phase=Phase.stopping, lost_s=lost_s))
            self._ledger.note(now, entry.id, "stop", f"attempt {attempt.number} {what}")
        self._runner.stop(attempt.submission)

    def _lost_s(self, attempt: Attempt, entry: JobEntry) -> float:
        """What stopping an attempt now would lose."""
        if entry.job.kind == "service":
            return 0.0
        if entry.command.run is None:
            return max(0.0, self._now() - attempt.began_at)
        return self._trainings.lost_s(Path(entry.command.run), attempt.began_at, self._now())

    # What is over

    def _over(self, attempt: Attempt, report: Report, view: View) -> None:
        had_to_leave = attempt.phase in (Phase.asked, Phase.stopping)
        with self._ledger.change():
            entry = self._ledger.job(attempt.job_id)
            running = entry.running
            assert running is not None
            self._end(attempt, report.state.lower())
            if report.state == "SUCCEEDED":
                self._finish(entry, JobState.succeeded, "ended without an error")
            elif had_to_leave and not entry.is_cancelled:
                wanted = running.size if running.step is None else running.step.size
                if wanted is None or _gone(running, view):
                    then = "go on" if entry.job.kind == "train" else "start again"
                    self._wait_again(entry, f"gave its room back, and waits to {then}")
                else:
                    self._go_on(attempt, entry, wanted)
            elif entry.is_cancelled:
                self._finish(entry, JobState.stopped, "stopped by its user")
            elif report.state == "STOPPED":
                self._finish(entry, JobState.stopped, "stopped through Ray, and not by the queue")
            elif _gone(running, view):
                self._wait_again(entry, f"attempt {attempt.number} went with a node that is gone")
            elif report.never_ran:
                self._without_process(attempt, entry, report)
            else:
                self._failed(attempt, entry, report)

    def _end(self, attempt: Attempt, outcome: str) -> None:
        self._ledger.put_attempt(replace(attempt, phase=Phase.ended, ended_at=self._now(), outcome=outcome))

    def _finish(self, entry: JobEntry, state: JobState, reason: str) -> None:
        now = self._now()
        self._ledger.update(replace(entry, state=state, running=None, reason=reason, ended_at=now))
        self._ledger.note(now, entry.id, state, reason)

    def _lost(self, attempt: Attempt, why: str) -> None:
        with self._ledger.change():
            entry = self._ledger.job(attempt.job_id)
            self._end(attempt, "lost")
            if entry.is_cancelled:
                self._finish(entry, JobState.stopped, "stopped by its user")
            else:
                # It worked until the cluster was seen last, and what it did since its snapshot is lost.
                at = self._now() if self._last_seen is None else min(self._now(), self._last_seen)
                lost_s = 0.0 if entry.running is None else entry.running.lost_s
                self._wait_again(entry, f"attempt {attempt.number} is lost: {why}", at - lost_s)

    def _without_process(self, attempt: Attempt, entry: JobEntry, report: Report) -> None:
        """No failure of its own: it is tried again, but not for ever."""
        self._end(attempt, NO_PROCESS)
        said = _last_line(report.message)
        last = [each.outcome for each in self._ledger.attempts(entry.id)][-MOST_WITHOUT_PROCESS:]
        if last == [NO_PROCESS] * MOST_WITHOUT_PROCESS:
            reason = f"Ray had no process for its last {MOST_WITHOUT_PROCESS} attempts: {said}"
            self._finish(entry, JobState.failed, reason)
        else:
            self._wait_again(entry, f"attempt {attempt.number} had no process of Ray's: {said}")

    def _failed(self, attempt: Attempt, entry: JobEntry, report: Report) -> None:
        """A failure of its own: tried again a few times, unless no try can succeed."""
        assert entry.waiting is not None
        now = self._now()
        is_fast = now < attempt.began_at + self._settings.fast_s
        # A training that dies before its first snapshot comes no further, however long that takes.
        is_further = not is_fast
        if entry.job.kind == "train" and self._lost_s(attempt, entry) >= now - attempt.began_at:
            is_further = False
        num_failures = 1 if is_further else entry.num_failures + 1
        said = _last_line(report.message)
        code = "" if report.exit_code is None else f" with exit code {report.exit_code}"
        is_wrong = entry.command.is_rayrec and report.exit_code == WRONG_INPUT
        if is_wrong or num_failures > entry.command.retries:
            times = "" if is_wrong or num_failures == 1 else f" {num_failures} times in a row"
            self._finish(entry, JobState.failed, f"attempt {attempt.number} failed{times}{code}: {said}")
            return
        waiting = replace(
            entry.waiting,
            num_fast_failures=0 if is_further else entry.waiting.num_fast_failures + 1,
            failed_at=now,
        )
        self._wait_again(
            replace(entry, waiting=waiting, num_failures=num_failures),
            f"attempt {attempt.number} failed{code}, and is tried again: {said}",
        )

    def _wait_again(self, entry: JobEntry, reason: str, worked_until: float | None = None) -> None:
        """
        Args:
            worked_until: None: until now.
        """
        running, waiting, now = entry.running, entry.waiting, self._now()
        assert running is not None
        assert waiting is not None
        left_s, until = waiting.left_s, now if worked_until is None else worked_until
        if entry.job.kind == "train" and running.ends_at is not None:
            left_s = max(0.0, running.ends_at - until) * entry.job.sizes[running.size].speed
        # Else a training that ran for a day would count as one that waited for a day.
        ran_s = waiting.ran_s + max(0.0, until - running.started_at)
        waiting = replace(waiting, plan=None, left_s=left_s, ran_s=ran_s)
        self._ledger.update(
            replace(
                entry, state=JobState.waiting, waiting=waiting, running=None, reason=reason, starts_at=None
            )
        )
        self._ledger.note(now, entry.id, "wait", reason)

    def _go_on(self, attempt: Attempt, entry: JobEntry, size: int) -> None:
        """The next attempt, of another size, on room that the job has."""
        running = self._resized(entry)
        self._ledger.update(replace(entry, running=running, attempt=entry.attempt + 1))
        self._begin(replace(entry, running=running), entry.attempt + 1, attempt.cluster)
        self._ledger.note(
            self._now(), entry.id, "go on", f"goes on as size {size + 1} of {len(entry.job.sizes)}"
        )

    def _resized(self, entry: JobEntry) -> Running:
        """A running job that has done what it was told, if it was told anything."""
        running, now = entry.running, self._now()
        assert running is not None
        step = running.step
        if step is None or step.size is None:
            return running
        return replace(
            running,
            size=step.size,
            placed=step.placed,
            cells=step.cells,
            step=None,
            ends_at=_ends_at(running, step.size, now),
            changed_at=now,
            num_shrunk=running.num_shrunk + 1,
        )

    def _begin(self, entry: JobEntry, number: int, cluster: str) -> None:
        """Write the attempt that is submitted next."""
        assert entry.running is not None
        self._ledger.put_attempt(
            Attempt(
                entry.id,
                number,
                f"{entry.id}-{number}",
                cluster,
                entry.running.size,
                Phase.starting,
                self._now(),
            )
        )

    # Deciding

    def _decide(self, view: View) -> None:
        now = self._now()
        measured = {each.id: self._measured(each, now) for each in self._ledger.jobs(JobState.running)}
        # From reading to writing nobody else changes anything.
        with self._ledger.change():
            entries = {each.id: each for each in self._ledger.jobs(JobState.waiting, JobState.running)}
            for job_id, running in measured.items():
                if job_id in entries and entries[job_id].running != running:
                    entries[job_id] = replace(entries[job_id], running=running)
                    self._ledger.update(entries[job_id])
            usable = {node.id for node in view.nodes if node.is_usable}
            steps = [each.running.step for each in entries.values() if each.running is not None]
            leave_for = {step.for_job for step in steps if step is not None}
            for each in entries.values():
                if each.waiting is None or (plan := each.waiting.plan) is None:
                    continue
                since = max(plan.since, each.job.not_before or 0.0)
                is_late = now > since + 2 * self._settings.scheduling.grace_s and each.id not in leave_for
                # Of a node that comes back, others may have been given the room by then; and where all have
                # left who were asked to, somebody has it who does not ask the queue.
                if is_late or not usable.issuperset(_nodes(plan.placed)):
                    entries[each.id] = replace(each, waiting=replace(each.waiting, plan=None))
                    self._ledger.update(entries[each.id])
            decisions = decide(
                self._ledger.queues(),
                view.nodes,
                [each.running for each in entries.values() if each.running is not None],
                [
                    each.waiting
                    for each in entries.values()
                    if each.state is JobState.waiting and each.waiting is not None
                ],
                now,
                self._settings.scheduling,
            )
            for decision in decisions:
                entry = entries[decision.job_id]
                changed = self._applied(entry, decision, view, now)
                if changed != entry:
                    self._ledger.update(changed)
                    entries[decision.job_id] = changed
                if isinstance(decision, Start):
                    self._begin(changed, changed.attempt, view.cluster.id)
                if not isinstance(decision, Wait):
                    self._ledger.note(now, decision.job_id, type(decision).__name__.lower(), decision.reason)

    def _measured(self, entry: JobEntry, now: float) -> Running:
        """A running job with what stopping it would lose, and when it ends at its pace."""
        running = entry.running
        assert running is not None
        (attempt,) = [each for each in self._ledger.attempts(entry.id) if each.phase is not Phase.ended]
        lost_s, ends_at = self._lost_s(attempt, entry), running.ends_at
        if entry.command.run is not None and entry.job.kind == "train":
            left_s = self._trainings.left_s(attempt.submission, Path(entry.command.run), now)
            if left_s is not None:
                ends_at = now + left_s
        if entry.job.kind == "service":
            running = _where_it_is(running, self._replica_nodes(entry))
        return replace(running, lost_s=lost_s, ends_at=ends_at)

    def _applied(self, entry: JobEntry, decision: Decision, view: View, now: float) -> JobEntry:
        """A job as it is after a decision."""
        waiting, running = entry.waiting, entry.running
        assert waiting is not None
        match decision:
            case Start(reason=reason, size=size, placed=placed, cells=cells, ends_at=ends_at):
                return replace(
                    entry,
                    state=JobState.running,
                    waiting=replace(waiting, plan=None),
                    running=Running(entry.job, size, placed, now, cells, ends_at, ran_s=waiting.ran_s),
                    attempt=entry.attempt + 1,
                    reason=reason,
                    starts_at=None,
                )
            case Reserve(reason=reason, plan=plan):
                return replace(entry, waiting=replace(waiting, plan=plan), reason=reason)
            case Wait(reason=reason, starts_at=starts_at, num_passed=num_passed):
                return replace(
                    entry,
                    waiting=replace(waiting, num_passed=num_passed),
                    reason=reason,
                    starts_at=starts_at,
                )
            case Shrink(reason=reason, size=size, placed=placed, cells=cells, for_job=for_job):
                assert running is not None
                return replace(
                    entry, running=replace(running, step=Step(size, placed, for_job, cells)), reason=reason
                )
            case Stop(reason=reason, for_job=for_job):
                assert running is not None
                return replace(entry, running=replace(running, step=Step(None, {}, for_job)), reason=reason)
            case Grow(reason=reason, size=size, placed=placed, cells=cells):
                assert running is not None
                return replace(
                    entry,
                    running=replace(
                        running,
                        size=size,
                        placed=placed,
                        cells=cells,
                        ends_at=_ends_at(running, size, now),
                        changed_at=now,
                    ),
                    reason=reason,
                )
        raise AssertionError(f"an unknown decision: {decision}")


def _where_it_is(running: Running, nodes: Sequence[str]) -> Running:
    """A service on the nodes that Ray Serve has chosen, which does not ask the queue."""
    ((stage, members),) = running.placed.items()
    if running.step is not None or len(nodes) != len(members) or sorted(nodes) == sorted(members):
        return running
    return replace(running, placed={stage: tuple(nodes)}, cells=None)


def _num_replicas(entry: JobEntry, size: int) -> int:
    """Of a service."""
    return sum(entry.job.sizes[size].counts().values())


def _gone(running: Running, view: View) -> set[str]:
    """Nodes of a job that the cluster does not have any more."""
    return _nodes(running.placed) - {node.id for node in view.nodes}


def _nodes(placed: Placed) -> set[str]:
    return {node for members in placed.values() for node in members}


def _ends_at(running: Running, size: int, now: float) -> float | None:
    """When a job ends that goes on as another size."""
    if running.ends_at is None:
        return None
    sizes = running.job.sizes
    return now + max(0.0, running.ends_at - now) * sizes[running.size].speed / sizes[size].speed


def _last_line(text: str) -> str:
    """Of what a process wrote, without colors."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    # Ray's own line comes into the file after what the process has written.
    lines = [line.strip() for line in plain.splitlines() if line.strip() and RAYS_LINE not in line]
    return lines[-1][-SHOWN_CHARACTERS:] if lines else "it said nothing"
