"""Events come to a service, a worker follows them, and the service answers with what the worker computed."""

import time
from types import SimpleNamespace

import ray
from fastapi.testclient import TestClient

from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import WEIGHTS, read_snapshot
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import CURRENT, VersionStore
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.events import EventsConfig
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.nearline import (
    AGAIN_AFTER_S,
    VERSIONS_EVERY_S,
    NearlineJob,
    NearlineLoop,
    run_actors,
)
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.runs import make_run


def test_a_worker_and_a_service_mean_the_same_history(tmp_path):
    """Of a user of the data set with new events, and of one that only the store knows."""
    run, events, products = make_run(tmp_path), str(tmp_path / "events"), str(tmp_path / "products")
    always = {"do": "cached_answer", "enter": 0.001, "leave": 0.0}
    no_cache = {"max_age_s": 1e-9}
    config = ServeConfig(
        page=False,
        events=EventsConfig(store=events, by_item=True),
        nearline=NearlineReadConfig(store=products, products=("candidates",)),
        admission=AdmissionConfig.parse({"degrade": {"steps": [always], "cache": no_cache}}),
    )
    with TestClient(load_api(run, config, PrometheusMeter())) as client:

        def ask(user):
            return client.post("/v1/recommend", json={"user_id": user, "k": 3}).json()

        def happens(user, item, ago_s=0):
            event = {"user_id": user, "item_id": item, "timestamp": int(time.time()) - ago_s}
            assert client.post("/v1/events", json=event).status_code == 200

        happens("u1", "i3", ago_s=100)
        happens("stranger", "i4")
        before = {user: ask(user) for user in ("u1", "stranger")}
        assert [each["source"] for each in before.values()] == ["model", "model"]
        loop = NearlineLoop(NearlineJob(str(run), products, events, NearlineConfig(debounce_s=0)))
        loop.finish()
        happens("u1", "i5")
        stale = ask("u1")
        assert (stale["source"], stale["degraded"]) == ("nearline", ["cached_answer", "earlier_history"])
        while loop.step():
            pass
        loop.close()

        after = {user: ask(user) for user in ("u1", "stranger")}
        for answer in after.values():
            assert (answer["source"], answer["degraded"]) == ("nearline", ["cached_answer"])
        found = [item["item_id"] for item in after["stranger"]["items"]]
        assert found == [item["item_id"] for item in before["stranger"]["items"]]
        assert "rayrec_serving_answers_nearline_total 3.0" in client.get("/metrics").text


def test_a_version_that_cannot_be_had_now_does_not_end_the_work_on_the_one_before(tmp_path, caplog):
    """Replicas went on, and their worker had ended, with an error of the store."""
    run = RunFolder.open(make_run(tmp_path, snapshots_after=(0,)))
    store, products = VersionStore(tmp_path / "versions"), str(tmp_path / "products")
    first, second = (read_snapshot(run.snapshots / name) for name in run.snapshot_names()[:2])
    Publisher(run, store).publish(first)
    now = [1000.0]
    job = NearlineJob(store.url, products, None, NearlineConfig())
    loop = NearlineLoop(job, clock=lambda: now[0])
    while loop.step():
        pass
    worker, computed = loop.worker, loop.report().computed
    version = Publisher(run, store).publish(second)
    weights = store.fetch(version.weights) / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(b"")
    current = tmp_path / "versions" / CURRENT
    pointer = current.read_bytes()

    def look_later(seconds):
        now[0] += seconds
        while loop.step():
            pass
        return loop.worker is worker

    assert look_later(VERSIONS_EVERY_S)
    assert "not as it was published" in caplog.text
    weights.write_bytes(content)
    current.write_text("[]")
    assert look_later(AGAIN_AFTER_S)
    assert "current.json" in caplog.text
    current.write_bytes(pointer)
    assert look_later(VERSIONS_EVERY_S)  # nor is it tried at every look
    assert not look_later(AGAIN_AFTER_S)
    assert loop.report().errors == 2
    assert loop.report().computed == 2 * computed
    loop.close()


class Worker:
    """An actor that Ray restarts a few times while it is told to stop: it has forgotten that then."""

    def __init__(self, num_restarts: int) -> None:
        self._num_restarts, self.is_done = num_restarts, False
        self.run = SimpleNamespace(remote=lambda: self)
        self.stop = SimpleNamespace(remote=self._told)

    def _told(self) -> None:
        self.is_done = not self._num_restarts
        self._num_restarts = max(self._num_restarts - 1, 0)


def test_workers_that_are_restarted_while_they_stop_are_told_again(monkeypatch):
    """They went on as long as the cluster lived, and the command waited for them."""

    def get(refs):
        assert all(ref is None or ref.is_done for ref in refs), "it would wait for ever"
        return refs

    def wait(refs, num_returns=1, timeout=None):
        assert timeout is not None
        return [ref for ref in refs if ref.is_done], [ref for ref in refs if not ref.is_done]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    workers = [Worker(0), Worker(2)]

    assert run_actors(workers, lambda wait_s: True) == workers
