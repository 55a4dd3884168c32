"""The ledger: what is written is found again, or not at all; and what it refuses."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from rayrec.jobs.job import Job, Plan, Running, Size, Step, Waiting
from rayrec.jobs.ledger import (
    Attempt,
    ClusterId,
    Command,
    JobState,
    Ledger,
    LedgerBusyError,
    Phase,
    ledger_path,
)
from rayrec.jobs.queues import CohortConfig, QueueConfig, ResourceQuota
from rayrec.pipelines.cluster.placement import ActorGroup, Node
from rayrec.platform.errors import InputError

GANG = Size((ActorGroup("trainer", "placement.trainers", 2, {"GPU": 1.0, "CPU": 0.25}, {"rack": "r1"}),))
JOB = Job("a-training", "team-a", (GANG,), 5.0, priority=3, kind="train", expected_s=60.0, within="rack")
COMMAND = Command(("train", "c.yaml"), {"X": "1"}, "/work", is_rayrec=True, run="/runs/a", retries=3)
QUEUE = QueueConfig(name="team-a", cohort="all", quotas={"GPU": ResourceQuota(nominal=4, borrowing_limit=2)})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "deep" / "jobs.db")


def test_a_job_is_found_again_as_it_was_submitted(ledger):
    with ledger.change():
        ledger.add(JOB, COMMAND)

    entry = Ledger(ledger.path).job("a-training")
    assert entry.job == JOB
    assert entry.command == COMMAND
    assert entry.state is JobState.waiting
    assert entry.waiting == Waiting(JOB)


def test_all_of_a_running_job_is_found_again(ledger):
    placed = {"trainer": ("n1", "n2")}
    running = Running(
        JOB,
        0,
        placed,
        7.0,
        {"trainer": ("c0", "c1")},
        ends_at=99.0,
        lost_s=1.5,
        num_shrunk=2,
        step=Step(None, {}, "b"),
    )
    waiting = Waiting(JOB, 4, Plan(0, placed, 6.0), 30.0, 2, 8.0)
    attempt = Attempt("a-training", 1, "a-training-1", "cluster", 0, Phase.asked, 7.0, asked_at=9.0)
    with ledger.change():
        entry = ledger.add(JOB, COMMAND)
        ledger.update(
            replace(
                entry,
                state=JobState.running,
                running=running,
                waiting=waiting,
                attempt=1,
                num_failures=2,
                reason="starts",
                starts_at=None,
            )
        )
        ledger.put_attempt(attempt)

    again = Ledger(ledger.path)
    found = again.job("a-training")
    assert found.running == running
    assert found.waiting == waiting
    assert (found.attempt, found.num_failures, found.reason) == (1, 2, "starts")
    assert again.attempts() == again.attempts("a-training") == [attempt]


def test_of_a_change_that_is_interrupted_nothing_stays(ledger):
    with pytest.raises(KeyboardInterrupt), ledger.change():  # noqa: PT012
        ledger.add(JOB, COMMAND)
        ledger.put_queue(QUEUE)
        raise KeyboardInterrupt

    assert ledger.jobs() == []
    assert ledger.queues().queues == ()
    with ledger.change():  # and the next one is possible
        ledger.add(JOB, COMMAND)


def test_submitting_twice_is_submitting_once(ledger):
    with ledger.change():
        ledger.add(JOB, COMMAND)
        again = ledger.add(replace(JOB, submitted_at=77.0), COMMAND)

    assert again.job.submitted_at == 5.0
    assert len(ledger.jobs()) == 1


def test_an_id_of_another_job_is_refused(ledger):
    with ledger.change():
        ledger.add(JOB, COMMAND)
    with pytest.raises(InputError, match="--id a-training: a job of this id was submitted"), ledger.change():
        ledger.add(JOB, replace(COMMAND, argv=("train", "other.yaml")))


def test_queues_and_cohorts_are_found_again(ledger):
    cells = QueueConfig.parse({"name": "team-b", "cells": [{"resources": {"GPU": 8.0}, "count": 2}]})
    with ledger.change():
        ledger.put_queue(QUEUE)
        ledger.put_queue(cells)
        ledger.put_cohort(CohortConfig(name="all"))

    config = Ledger(ledger.path).queues()
    assert config.queues == (QUEUE, cells)
    assert config.queue("team-b").all_quotas["GPU"].nominal == 16
    assert [each.name for each in config.cohorts] == ["all"]


def test_a_queue_with_jobs_is_not_removed(ledger):
    with ledger.change():
        ledger.put_queue(QUEUE)
        ledger.add(JOB, COMMAND)
    with (
        pytest.raises(InputError, match=r"queue 'team-a': 1 jobs wait or run in it \(a-training\)"),
        ledger.change(),
    ):
        ledger.remove_queue("team-a")
    with ledger.change():
        ledger.cancel("a-training", 9.0)
        ledger.remove_queue("team-a")
    assert ledger.queues().queues == ()
    assert ledger.job("a-training").state is JobState.stopped


def test_an_unknown_queue_is_not_removed(ledger):
    with pytest.raises(InputError, match="there is no queue 'nobody'"), ledger.change():
        ledger.remove_queue("nobody")


def test_a_new_head_at_the_same_address_is_the_same_cluster(ledger):
    for cluster in (ClusterId("h:1", "x"), ClusterId("h:1", "y"), ClusterId("moved:1", "y")):
        with ledger.change():
            ledger.bind(cluster)
        assert ledger.cluster == cluster


def test_a_ledger_of_another_cluster_is_refused_in_one_sentence(ledger):
    with ledger.change():
        ledger.bind(ClusterId("h:1", "x" * 20))
    with pytest.raises(InputError) as refused, ledger.change():
        ledger.bind(ClusterId("other:1", "y" * 20))
    assert str(refused.value) == (
        f"{ledger.path}: a ledger of the Ray cluster at h:1 (xxxxxxxx), and the one at other:1 (yyyyyyyy) is "
        "another; name its own with --ledger, or start the queue once with --moved if it is the same cluster "
        "with a new head"
    )
    with ledger.change():
        ledger.bind(ClusterId("other:1", "y" * 20), has_moved=True)


def test_nodes_are_kept_for_commands_that_join_no_cluster(ledger):
    assert ledger.nodes() is None
    nodes = (Node("n1", "10.0.0.1", {"rack": "r1"}, {"GPU": 8.0}, {"GPU": 2.0}, "host", True, "too hot"),)
    with ledger.change():
        ledger.keep_nodes(nodes, 12.0)

    assert Ledger(ledger.path).nodes() == nodes
    assert ledger.seen_at() == 12.0


def test_decisions_are_kept_in_their_order(ledger):
    with ledger.change():
        ledger.add(JOB, COMMAND)
        ledger.note(6.0, "a-training", "start", "starts on n1")
    assert [(each.kind, each.reason) for each in ledger.noted("a-training")] == [
        ("submit", "submitted to queue 'team-a'"),
        ("start", "starts on n1"),
    ]


def test_two_processes_write_one_after_the_other(ledger):
    other = Ledger(ledger.path)
    with ledger.change():
        ledger.add(JOB, COMMAND)
        assert other.find("a-training") is None  # what is not committed is not seen
    with other.change():
        other.cancel("a-training", 8.0)
    assert ledger.job("a-training").state is JobState.stopped


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "jobs.db").write_text("nothing like a database, but long enough to be read as one" * 9)
    with pytest.raises(InputError, match=r"jobs\.db: not a ledger of the queue"):
        Ledger(tmp_path / "jobs.db")


def test_a_ledger_of_a_later_version_is_refused(ledger):
    with sqlite3.connect(ledger.path) as database:
        database.execute("UPDATE about SET value = '7' WHERE key = 'schema'")
    with pytest.raises(InputError, match="a ledger of schema 7, and this version of rayrec reads schema 1"):
        Ledger(ledger.path)


def test_where_the_ledger_is(tmp_path):
    assert ledger_path(tmp_path / "a.db", {"RAYREC_LEDGER": "/b.db"}) == tmp_path / "a.db"
    assert ledger_path(None, {"RAYREC_LEDGER": "/b.db"}) == Path("/b.db")
    assert ledger_path(None, {}) == Path.home() / ".rayrec" / "jobs.db"


def test_who_cannot_write_since_somebody_else_does_is_told_so(ledger):
    ledger._db.execute("PRAGMA busy_timeout = 0")
    with Ledger(ledger.path).change():
        with pytest.raises(LedgerBusyError, match=r"jobs\.db: another process has"), ledger.change():
            raise AssertionError("it is written by two")
        assert ledger.jobs() == []
    with ledger.change():
        ledger.add(JOB, COMMAND)


def test_it_is_read_while_somebody_writes(ledger):
    with ledger.change():
        ledger.add(JOB, COMMAND)
    with ledger.change():
        ledger.cancel("a-training", 9.0)
        assert Ledger(ledger.path).job("a-training").state is JobState.waiting


def test_jobs_that_ended_before_a_time_are_forgotten_with_all_that_belongs_to_them(ledger):
    with ledger.change():
        for name, ended_at in (("old", 10.0), ("new", 30.0), ("waits", None)):
            entry = ledger.add(replace(JOB, id=name), COMMAND)
            ledger.put_attempt(Attempt(name, 1, f"{name}-1", "cluster", 0, Phase.ended, 7.0))
            if ended_at is not None:
                ledger.update(replace(entry, state=JobState.succeeded, ended_at=ended_at))
        assert ledger.prune(20.0) == 1
    assert ledger.num_jobs() == {"succeeded": 1, "waiting": 1}
    assert ledger.find("old") is None
    assert ledger.attempts("old") == ledger.noted("old") == []
    assert ledger.attempts("new") != []
