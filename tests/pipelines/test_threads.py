"""Objects that several threads of one process use: each is held to its lock, without a race."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayrec.embeddings.lookup.lookups import LookupStats
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from rayrec.pipelines.cluster import watch
from rayrec.pipelines.cluster.watch import Watch
from rayrec.pipelines.runs import run_folder
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.metrics import MeterClock, RayMetrics


class Promise:
    """An answer of an actor, which may be an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


def watch_of(monkeypatch: pytest.MonkeyPatch, answers: list[Promise]) -> Watch:
    """A watch of one actor each, whose answers are there at once; uses of what threads share are checked."""
    watched = Watch(None, frozenset(), 1.0)  # type: ignore[arg-type]

    def wait(refs: list[Promise], num_returns: int, timeout: float) -> tuple[list[Promise], list[Promise]]:
        assert watched._asking.locked()
        assert len(set(refs)) == len(refs)
        return refs, []

    def get(ref: Promise) -> None:
        assert not watched._asking.locked()
        if ref.error is not None:
            raise ref.error

    def asked(promise: Promise) -> Callable[[], Promise]:
        def remote() -> Promise:
            assert watched._asking.locked()
            return promise

        return remote

    monkeypatch.setattr(watch, "ray", SimpleNamespace(wait=wait, get=get))
    actors: list[Any] = [SimpleNamespace(stats=SimpleNamespace(remote=asked(each))) for each in answers]
    watched._stateful = actors
    return watched


def test_the_training_loop_and_the_snapshot_thread_do_not_ask_at_once(monkeypatch):
    """A KeyError of two that did ended runs which should have gone back to a snapshot."""
    watched = watch_of(monkeypatch, [Promise(), Promise()])

    watched._ask_stateful()

    assert watched._asked == {}


def test_each_of_two_threads_hears_of_a_death(monkeypatch):
    watched = watch_of(monkeypatch, [Promise(), Promise(RuntimeError("the server died"))])

    for _ in range(2):
        with pytest.raises(RuntimeError, match="the server died"):
            watched._ask_stateful()


def test_run_json_is_read_and_written_under_a_lock(tmp_path, monkeypatch):
    folder, write_json = RunFolder(tmp_path), run_folder.write_json

    def checked(path: Any, values: Any) -> None:
        assert folder._updates.locked()
        write_json(path, values)

    monkeypatch.setattr(run_folder, "write_json", checked)
    folder.update(state="running")
    folder.update(last="step-000000005")

    assert folder.state["state"] == "running"


def test_a_servers_clock_is_read_whole_while_others_start_and_stop_it():
    clocks: list[MeterClock] = []

    def meter_s() -> float:
        assert clocks[0]._lock.locked()
        return 1.0

    clocks.append(MeterClock(meter_s, lambda: 5.0))
    clocks[0].start()
    assert clocks[0].times(3).num_batches == 3
    clocks[0].stop()


def test_calls_of_a_server_make_a_gauge_once(monkeypatch):
    metrics, made = RayMetrics({"run": "mine"}), []

    def gauge(name: str, *_: Any) -> Any:
        assert metrics._lock.locked()
        made.append(name)
        return SimpleNamespace(set=lambda value, tags: None)

    monkeypatch.setitem(__import__("sys").modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(
        "rayrec.platform.metrics.importlib.import_module", lambda name: SimpleNamespace(Gauge=gauge)
    )
    metrics.publish({"loss": 1.0})
    metrics.publish({"loss": 2.0})

    assert made == ["rayrec_loss"]


def test_the_thread_of_lookups_finds_whom_to_tell_however_soon_it_runs():
    class Mode:
        """Delivers rows within `prefetch`."""

        stats = LookupStats()
        on_rows: Any = None

        def prefetch(self, step: int, lookups: Any) -> None:
            self.on_rows(step, {"item": np.zeros(1)})

        def rows(self, step: int, lookups: Any) -> Any:
            raise AssertionError("they have been delivered")

    lookups = ThreadedLookups(Mode())  # type: ignore[arg-type]
    ran = threading.Event()
    submit = lookups._thread.submit

    def at_once(*arguments: Any) -> Any:
        future = submit(*arguments)
        future.result()  # the thread is done before the caller goes on
        ran.set()
        return future

    lookups._thread.submit = at_once  # type: ignore[method-assign]
    lookups.prefetch(3, {})
    lookups.close()

    assert ran.is_set()
    assert lookups._error is None
    assert lookups._rows[3].done()
