"""The part of a service of several parts that takes events."""

import time

from fastapi.testclient import TestClient

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.serve.config.events import EventsConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.features import FeaturesPart
from tests.helpers.later_data import run_of_words
from tests.helpers.runs import make_run

MOST_S = 30.0
"""To wait for a thread that looks many times a second."""


def test_items_of_a_later_catalog_are_known_once_it_serves(tmp_path):
    path, later = run_of_words(tmp_path)
    run, store = RunFolder.open(path), VersionStore(tmp_path / "store")
    Publisher(run, store).publish(read_snapshot(run.chosen_snapshot("last")))
    part = FeaturesPart.open(store.url, ServeConfig(events=EventsConfig(), follow_every_s=0.02))
    event = {"user_id": "new", "item_id": "a0", "timestamp": time.time()}
    with TestClient(part.api()) as client:

        def num_unknown() -> int:
            answer = client.post("/v1/events", json=event)
            assert answer.status_code == 200, answer.text
            return answer.json()["unknown_items"]

        assert num_unknown() == 1
        Publisher(run, store, data=later.root).publish_catalog()
        until = time.monotonic() + MOST_S
        while num_unknown() and time.monotonic() < until:
            time.sleep(0.02)
        assert num_unknown() == 0
    part.close()


def test_events_are_not_taken_for_a_version_whose_ids_are_of_another_kind(tmp_path, caplog):
    store = VersionStore(tmp_path / "store")
    for name in ("texts", "numbers"):
        run = RunFolder.open(make_run(tmp_path / name, integer_users=name == "numbers"))
        Publisher(run, store, other_catalog=True).publish(read_snapshot(run.chosen_snapshot("last")))
    store.point_to(1, is_held=True)
    part = FeaturesPart.open(store.url, ServeConfig(events=EventsConfig(), follow_every_s=0.02))
    store.point_to(2, is_held=False)
    until = time.monotonic() + MOST_S
    while "other kinds of ids" not in caplog.text and time.monotonic() < until:
        time.sleep(0.02)
    part.close()

    assert "version 2 has other kinds of ids or other behaviors than events are taken in here" in caplog.text
