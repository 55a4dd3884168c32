"""Versions change under load behind a real service: every answer is entirely of one of them, and at the end
everything that was to be taken down lies in files."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.checked_load import Checked, Expected, Window, checks
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.serve.config.events import EventsConfig, LogConfig, RequestLogConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.launch import serving
from tests.helpers.http import free_port
from tests.helpers.runs import make_run

K = 5
USERS = [f"u{number}" for number in range(10)]
NEVER_S = 3600.0
"""So old no row gets in a test: what is in files at the end was written because it was the end."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    settings = {"item_matrix": "sparse", "user_embedding": True}
    return RunFolder.open(make_run(tmp_path_factory.mktemp("run"), snapshots_after=(0, 1), **settings))


def expected_of(run: RunFolder) -> Expected:
    """Of the versions 1, 2, ..., one for each snapshot."""
    found = {}
    for number, name in enumerate(run.snapshot_names(), 1):
        recommender = Recommender(TrainedModel.load(run.path, name))
        queries = [recommender.query_of_user(user) for user in USERS]
        answers = recommender.recommend([query for query in queries if query is not None], K)
        found[number] = {
            user: ([item.item_key for item in items], [item.score for item in items])
            for user, items in zip(USERS, answers, strict=True)
        }
    return found


class Clients:
    """Ask all the time, on a thread, in windows of a moment each."""

    def __init__(self, url: str, expected: Expected) -> None:
        self.windows: list[Checked] = []
        self._measure, self._window = checks(expected, K), Window(f"{url}/v1/recommend", 4, 0.05)
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped:
                window = self._measure(self._window)
                with self._changed:
                    self.windows.append(window)
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def wait_until_all_are_of(self, version: int) -> None:
        """Of several windows in a row, which all replicas have answered in; as long as that takes."""
        with self._changed:
            first = len(self.windows)
            self._changed.wait_for(lambda: self._stopped or self._are_of(version, self.windows[first:]))
            assert not self._stopped

    def _are_of(self, version: int, windows: list[Checked]) -> bool:
        answered = [window for window in windows if window.versions]
        return len(answered) >= 4 and all(set(each.versions) == {version} for each in answered[-4:])

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


def post(url: str, body: object) -> object:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with opener.open(request, timeout=30) as answer:
        return json.load(answer)


def rows_below(folder: Path) -> list[dict[str, object]]:
    return [row for file in folder.rglob("part-*.parquet") for row in pq.read_table(file).to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.ray)])
def test_each_answer_is_of_one_version_across_flips_and_nothing_of_the_logs_is_lost(
    run, tmp_path, request, replicas
):
    if replicas > 1:
        request.getfixturevalue("ray_cluster")
    store = VersionStore(tmp_path / "store")
    publisher, names = Publisher(run, store), run.snapshot_names()

    def publish(place: int) -> None:
        publisher.publish(read_snapshot(run.snapshots / names[place]))

    publish(0)
    config = ServeConfig(
        port=free_port(),
        num_replicas=replicas,
        single_process=replicas == 1,
        timeout_s=120.0,  # on a busy machine too, no request is refused because it would be late
        follow_every_s=0.1,
        events=EventsConfig(
            store=str(tmp_path / "state"), log=LogConfig(folder=str(tmp_path / "events"), roll_s=NEVER_S)
        ),
        request_log=RequestLogConfig(folder=str(tmp_path / "requests"), roll_s=NEVER_S, share=1.0),
    )
    events = [{"user_id": f"new{number}", "item_id": "i1", "timestamp": 1_700_000_000} for number in range(6)]
    with serving(store.url, config) as url:
        clients = Clients(url, expected_of(run))
        try:
            clients.wait_until_all_are_of(1)
            publish(1)
            clients.wait_until_all_are_of(2)
            for number in (1, 2, 1):
                store.point_to(number, is_held=True)
                clients.wait_until_all_are_of(number)
            publish(2)
            store.point_to(3, is_held=False)
            clients.wait_until_all_are_of(3)
            store.point_to(2, is_held=True)
            clients.wait_until_all_are_of(2)
        finally:
            clients.stop()
        for event in events:
            post(f"{url}/v1/events", event)

    assert [wrong for window in clients.windows for wrong in window.wrong] == []
    assert sum(window.again for window in clients.windows) == 0
    answers = sum(sum(window.versions.values()) for window in clients.windows)
    requests = rows_below(tmp_path / "requests")
    assert len(requests) == answers
    assert {row["version"] for row in requests} == {1, 2, 3}
    assert len(rows_below(tmp_path / "events")) == len(events)
    assert len({row["user_id"] for row in rows_below(tmp_path / "events")}) == len(events)
