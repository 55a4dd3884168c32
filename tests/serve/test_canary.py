"""A canary in a service: who is answered by it, and how it ends by itself."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from fsspec.implementations.memory import MemoryFileSystem

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import WEIGHTS, read_snapshot
from rayrec.pipelines.versions.canary import Canaries, Canary, CanarySettings
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import UnavailableError
from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.admission import USER_HEADER, AdmissionConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.canary import LEAST_LOADS, LOADS_FOR_S, REPORT_EVERY_S, RunningCanary
from rayrec.serve.engine.current import CurrentService
from rayrec.serve.engine.following import VersionFollower
from rayrec.serve.engine.pointer import AGAIN_AFTER_S
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import RefusedRequestError
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.runs import make_run

SETTINGS = CanarySettings(share=0.25, min_requests=30, min_users=30, for_s=60)
USERS = [f"u{number}" for number in range(400)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFolder.open(make_run(tmp_path_factory.mktemp("run"), snapshots_after=(0,)))


@pytest.fixture
def store(tmp_path, run):
    store = VersionStore(tmp_path / "store")
    publish(run, store, 0)
    return store


def publish(run, store, place):
    Publisher(run, store).publish(read_snapshot(run.snapshots / run.snapshot_names()[place]))


def start_canary(run, store, clock, settings=SETTINGS):
    canaries = Canaries(store, clock)
    was_held = canaries.hold_baseline()
    publish(run, store, 1)
    return canaries, canaries.start(2, settings, was_held)


class Replica:
    """A follower and what it follows with; its clock is moved by hand."""

    def __init__(self, store, clock):
        self.built = []
        loaded = load_version(store, store.serving())
        self.current = CurrentService(self.build(loaded))
        self.follower = VersionFollower(
            store, self.current, loaded, self.build, clock=clock, wall_clock=clock
        )
        self.look = self.follower.look

    def build(self, version):
        self.built.append(version.manifest.number)
        return RecommendationService(Recommender(version.model), max_k=50)

    def answer(self, users, seconds=0.01, errors=()):
        for user in users:
            pinned, note = self.current.drawn_for(user)
            if note is not None:
                note(seconds, RuntimeError("failed") if pinned.model.version in errors else None)

    def version_for(self, user):
        return self.current.drawn_for(user)[0].model.version


@pytest.fixture
def clock():
    now = SimpleNamespace(s=1000.0)
    now.read = lambda: now.s
    return now


def test_a_share_of_the_users_is_answered_by_it_and_always_the_same_in_every_replica(run, store, clock):
    first, second = Replica(store, clock.read), Replica(store, clock.read)
    start_canary(run, store, clock.read)
    first.look()
    second.look()
    of_first = {user: first.version_for(user) for user in USERS}
    assert of_first == {user: second.version_for(user) for user in USERS}
    assert 60 <= list(of_first.values()).count(2) <= 140  # of 400, a quarter
    drawn = [first.version_for(None) for _ in range(400)]
    assert 60 <= drawn.count(2) <= 140
    assert first.current.pinned.model.version == 1
    assert (first.current.version("2").model.version, first.current.version("7")) == (2, None)
    assert first.follower.metrics()["canary_version"] == 2


def test_one_that_fails_is_taken_back_in_all_replicas_by_what_they_count_together(run, store, clock):
    replicas = [Replica(store, clock.read) for _ in range(2)]
    canaries, canary = start_canary(run, store, clock.read)
    for replica in replicas:
        replica.look()
    replicas[0].answer(USERS[:300], errors=(2,))
    clock.s += REPORT_EVERY_S
    replicas[1].answer(USERS[300:])
    replicas[1].look()  # has seen nothing wrong
    assert canaries.running() == canary
    replicas[0].look()
    assert canaries.end(canary).state == "returned"
    assert "requests have failed" in canaries.end(canary).reason
    replicas[1].look()
    for replica in replicas:
        assert {replica.version_for(user) for user in USERS} == {1}
        assert replica.follower.metrics()["canary_version"] == 0
        assert replica.follower.metrics()["canaries_returned_total"] == 1
    assert store.current().version == 1


def test_one_that_passes_serves_everybody_and_is_not_loaded_again(run, store, clock):
    replica = Replica(store, clock.read)
    canaries, canary = start_canary(run, store, clock.read)
    replica.look()
    for _ in range(6):
        replica.answer(USERS)
    clock.s += REPORT_EVERY_S
    replica.look()
    assert canaries.verdict(canary).reason == "5 of 60 s so far"
    clock.s += 60
    mine = next(user for user in USERS if replica.version_for(user) == 2)
    replica.look()
    assert canaries.end(canary).state == "promoted"
    assert (replica.current.model.version, replica.version_for(mine)) == (1, 2)  # who keeps it meanwhile
    replica.look()
    assert replica.current.model.version == 2
    assert replica.current.drawn_for(mine)[1] is None
    assert replica.follower.metrics()["canary_version"] == 0
    assert replica.built == [1, 2]
    publish(run, store, 0)
    assert replica.look()
    assert replica.current.model.version == 3


def test_one_that_waits_for_somebody_is_not_promoted_by_itself(run, store, clock):
    replica = Replica(store, clock.read)
    settings = SETTINGS.model_copy(update={"promotes": False})
    canaries, canary = start_canary(run, store, clock.read, settings)
    replica.look()
    for _ in range(6):
        replica.answer(USERS)
    clock.s += 100
    replica.look()
    assert canaries.verdict(canary).state == "passed"
    assert canaries.running() == canary


def test_one_that_cannot_be_loaded_is_taken_back_and_the_others_answer(run, store, clock, caplog):
    replica = Replica(store, clock.read)
    canaries, canary = start_canary(run, store, clock.read)
    (store.fetch(store.version(2).weights) / WEIGHTS).write_bytes(b"")
    replica.look()
    end = canaries.end(canary)
    assert end.state == "returned"
    assert "it could not be loaded" in end.reason
    assert replica.version_for("u1") == 1
    assert "the canary, version 2, is taken back" in caplog.text


def test_one_whose_files_the_store_does_not_give_now_is_loaded_later(run, clock, tmp_path, monkeypatch):
    """The SDK of a cloud says so with an error of its own, for which the canary was taken back."""

    class ServiceError(Exception):
        pass

    store = VersionStore(f"memory://{tmp_path.name}", cache=tmp_path / "cache")
    publish(run, store, 0)
    replica = Replica(store, clock.read)
    canaries, canary = start_canary(run, store, clock.read)

    opened = MemoryFileSystem._open

    def down(self, path, *arguments, **more):
        if "/bundles/" in path:
            raise ServiceError("503")
        return opened(self, path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", down)
        replica.look()
    assert canaries.end(canary) is None
    assert {replica.version_for(user) for user in USERS} == {1}
    clock.s += AGAIN_AFTER_S
    replica.look()
    assert canaries.end(canary) is None
    assert {replica.version_for(user) for user in USERS} == {1, 2}


def test_one_that_waits_for_another_service_is_loaded_later(run, store, clock, monkeypatch):
    """A dense part that was still loading it, or an event store that was away, took it back for good."""
    replica = Replica(store, clock.read)
    canaries, canary = start_canary(run, store, clock.read)

    def unavailable(version):
        raise UnavailableError("the dense part", 1, "no answer in time")

    with monkeypatch.context() as patch:
        patch.setattr(replica.follower, "_build", unavailable)
        replica.look()
    assert canaries.running() == canary
    clock.s += AGAIN_AFTER_S
    replica.look()
    assert {replica.version_for(user) for user in USERS} == {1, 2}


def test_one_that_never_can_be_loaded_in_time_is_given_up_and_says_why(run, store, clock, monkeypatch):
    replica = Replica(store, clock.read)
    canaries, canary = start_canary(run, store, clock.read)
    tried = []

    def late(version):
        tried.append(version.manifest.number)
        raise TimeoutError("no answer in 30 s")

    with monkeypatch.context() as patch:
        patch.setattr(replica.follower, "_build", late)
        for _ in range(LEAST_LOADS + 5):  # what it waits for may be loading it
            replica.look()
            clock.s += AGAIN_AFTER_S
        assert canaries.running() == canary
        clock.s = 1000.0 + LOADS_FOR_S
        for _ in range(5):
            replica.look()
            clock.s += AGAIN_AFTER_S
    assert tried == [2] * (LEAST_LOADS + 6)
    end = canaries.end(canary)
    assert (end.state, end.reason) == (
        "returned",
        f"it could not be loaded in {LEAST_LOADS + 6} tries, for 900 s: no answer in 30 s",
    )
    assert replica.follower.metrics()["canaries_returned_total"] == 1

    # The next one has as many.
    canaries.start(2, SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(replica.follower, "_build", late)
        replica.look()
    clock.s += AGAIN_AFTER_S
    replica.look()
    assert {replica.version_for(user) for user in USERS} == {1, 2}


def test_one_whose_baseline_is_gone_back_from_is_stopped(run, store, clock):
    publish(run, store, 1)
    replica = Replica(store, clock.read)
    canaries = Canaries(store, clock.read)
    canary = canaries.start(1, SETTINGS)
    replica.look()
    assert canaries.running() == canary
    publish(run, store, 0)
    store.let_newest_serve()
    replica.look()
    assert canaries.end(canary).state == "stopped"
    assert replica.current.model.version == 3
    assert {replica.version_for(user) for user in USERS} == {3}


def test_one_that_was_taken_back_can_serve_while_another_one_is_tried(run, store, clock):
    """The one that runs took its place among those that are held; the pointer moved to a version of
    which the follower knew nothing, and neither metrics nor later versions were there any more."""
    replica = Replica(store, clock.read)
    canaries, first = start_canary(run, store, clock.read)
    replica.look()
    canaries.finish(first, "returned", "by hand")
    replica.look()
    publish(run, store, 0)
    canaries.start(3, SETTINGS)
    replica.look()
    assert replica.follower.metrics()["canary_version"] == 3

    store.point_to(2, is_held=True)
    assert replica.look()

    metrics = replica.follower.metrics()
    assert (metrics["serving_version"], metrics["serving_version_errors_total"]) == (2, 0)
    assert replica.current.model.version == 2
    store.point_to(1, is_held=True)
    assert replica.look()
    store.point_to(3, is_held=True)
    assert replica.look()
    assert replica.current.model.version == 3


def test_what_callers_do_wrong_is_no_error_of_a_version():
    canary = Canary(id="c", version=2, baseline=1, began_at=0.0, was_held=False, settings=SETTINGS)
    running = RunningCanary(canary, SimpleNamespace(model=SimpleNamespace(version=2)))
    is_canarys, note = next(draw for user in USERS if (draw := running.draw(user)).is_canarys)
    for error in (None, RefusedRequestError("k is too large"), asyncio.CancelledError(), TimeoutError()):
        note(0.1, error)
    assert is_canarys
    assert (running.counts.canary.num_requests, running.counts.canary.num_errors) == (2, 1)
    assert running.counts.baseline.num_requests == 0


def test_only_messages_that_were_drawn_are_counted_and_once(run, store, clock):
    replica = Replica(store, clock.read)
    start_canary(run, store, clock.read)
    replica.look()
    of_two, of_one = (next(u for u in USERS if replica.version_for(u) == number) for number in (2, 1))
    other = next(u for u in USERS if u not in (of_two, of_one))
    costs = BatchCosts({1: 1.0}, 8)
    batcher = Batcher(lambda requests: replica.current.pinned.recommend_all(requests), costs, 64)
    admission = AdmissionControl(AdmissionConfig(), replica.current, batcher, 10.0)

    async def ask(*users, header=None, named=None):
        info = admission.read_headers({} if header is None else {USER_HEADER: header}, None)
        requests = [RecommendRequest(user_id=user, k=3) for user in users]
        pinned = admission.draw(users, info) if named is None else named
        await asyncio.gather(*admission.begin_all(requests, info, pinned))
        return pinned.model.version

    def counted():
        counts = replica.follower._canary.running.counts
        return counts.baseline.num_requests, counts.canary.num_requests

    try:
        assert asyncio.run(ask(of_two)) == 2
        assert asyncio.run(ask(of_one)) == 1
        assert counted() == (1, 1)
        assert asyncio.run(ask(of_two, of_two)) == 2  # several rows of one message
        assert asyncio.run(ask(of_one, header=of_two)) == 1  # the body says more
        assert counted() == (2, 2)
        assert asyncio.run(ask(of_two, of_one)) == 1  # one of them would meet both versions
        assert asyncio.run(ask(of_two, named=replica.current.version("2"))) == 2
        assert counted() == (2, 2)
        assert asyncio.run(ask(of_one, other, header=of_two)) == 2
        assert counted() == (2, 3)
    finally:
        batcher.close()


def test_a_replica_that_starts_answers_the_canarys_users_from_its_first_request(run, store):
    start_canary(run, store, lambda: 0.0)
    config = ServeConfig(follow_every_s=60, page=False)
    with TestClient(load_api(store.url, config, PrometheusMeter())) as client:
        assert "rayrec_canary_version 2.0" in client.get("/metrics").text


def test_over_http_answers_say_which_version_they_are_of(run, store):
    config = ServeConfig(follow_every_s=0.02, page=False)
    with TestClient(load_api(store.url, config, PrometheusMeter())) as client:
        canaries, canary = start_canary(run, store, lambda: 0.0)

        def version_for(user):
            answer = client.post("/v1/recommend", json={"user_id": user, "k": 3})
            assert answer.status_code == 200
            return answer.json()["model"]["version"]

        for _ in range(2000):
            if "rayrec_canary_version 2.0" in client.get("/metrics").text:
                break
        else:
            pytest.fail("the canary did not begin")
        versions = {user: version_for(user) for user in USERS[:40]}
        assert set(versions.values()) == {1, 2}
        assert versions == {user: version_for(user) for user in USERS[:40]}
        mine = next(user for user, version in versions.items() if version == 2)
        body = {
            "inputs": [{"name": "user_id", "shape": [1], "datatype": "BYTES", "data": [mine]}],
            "parameters": {"k": 3},
        }
        plain = client.post("/v2/models/recommend/infer", json=body).json()
        named = client.post("/v2/models/recommend/versions/2/infer", json=body).json()
        header = {"X-User-Id": mine}
        several = [{"name": "user_id", "shape": [2], "datatype": "BYTES", "data": USERS[:2]}]
        by_header = client.post("/v2/models/recommend/infer", json={"inputs": several}, headers=header).json()
        of_several = client.post("/v2/models/recommend/infer", json={"inputs": several}).json()
        found = [each["model_version"] for each in (plain, named, by_header, of_several)]
        assert found == ["2", "2", "2", "1"]
        metrics = client.get("/metrics").text
        assert "rayrec_canary_share 0.25" in metrics
        assert canaries.running() == canary
