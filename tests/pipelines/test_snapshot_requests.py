"""A snapshot on demand: the process that asks, and the one that trains, here two threads."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshot_requests import SnapshotAnswer, SnapshotRequests, request_snapshot
from rayrec.platform.errors import InputError, MachineError

CONFIG = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}})


@pytest.fixture
def run(tmp_path) -> Path:
    return RunFolder.create(tmp_path / "run", CONFIG).path


def answer_one(run: Path, answer: SnapshotAnswer) -> threading.Thread:
    requests = SnapshotRequests(run)

    def work() -> None:
        while not (pending := requests.pending()):
            time.sleep(0.005)
        requests.answer(pending, answer)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_who_asks_is_told_where_the_snapshot_is_and_nothing_is_left(run):
    with RunFolder.locked(run, "run"):
        thread = answer_one(run, SnapshotAnswer("step-000000007"))
        path = request_snapshot(run, timeout_s=30.0)
        thread.join()

    assert path == run / "snapshots" / "step-000000007"
    assert list((run / "requests").iterdir()) == []


def test_a_snapshot_that_fails_says_why(run):
    with RunFolder.locked(run, "run"):
        thread = answer_one(run, SnapshotAnswer(None, "OSError: no space left"))
        with pytest.raises(MachineError, match="could not be written: OSError: no space left"):
            request_snapshot(run, timeout_s=30.0)
        thread.join()


def test_nobody_is_asked_where_nothing_trains(run):
    with pytest.raises(InputError, match=r"nothing trains in this folder now \(its state: died\)"):
        request_snapshot(run, timeout_s=30.0)

    assert SnapshotRequests(run).pending() == []


def test_a_run_that_ends_while_it_is_asked_is_not_waited_for(run, monkeypatch):
    is_alive = iter([True, False])
    monkeypatch.setattr(RunFolder, "is_alive", property(lambda self: next(is_alive, False)))

    with pytest.raises(MachineError, match="the run ended before it wrote the snapshot"):
        request_snapshot(run, timeout_s=30.0)

    assert SnapshotRequests(run).pending() == []


def test_who_has_waited_long_enough_takes_the_request_back(run):
    with RunFolder.locked(run, "run"), pytest.raises(MachineError, match="no snapshot after 0 s"):
        request_snapshot(run, timeout_s=0.0)

    assert SnapshotRequests(run).pending() == []


def test_an_answer_that_is_a_runs_last_act_is_heard(run, monkeypatch):
    requests = SnapshotRequests(run)
    asked = iter([True])

    def is_alive(self: RunFolder) -> bool:
        if next(asked, False):
            return True
        requests.answer(requests.pending(), SnapshotAnswer("step-000000007"))
        return False

    monkeypatch.setattr(RunFolder, "is_alive", property(is_alive))

    assert request_snapshot(run, timeout_s=30.0).name == "step-000000007"


def test_requests_that_were_deleted_do_not_end_the_training(run):
    requests = SnapshotRequests(run)
    (run / "requests" / "one").touch()
    pending = requests.pending()
    shutil.rmtree(run / "requests")

    requests.answer(pending, SnapshotAnswer("step-000000007"))

    assert requests.pending() == []


def test_who_has_stopped_waiting_is_not_answered(run):
    requests = SnapshotRequests(run)
    (run / "requests" / "one").touch()
    pending = requests.pending()
    (run / "requests" / "one").unlink()

    requests.answer(pending, SnapshotAnswer("step-000000007"))

    assert list((run / "requests").iterdir()) == []  # nobody would delete it
