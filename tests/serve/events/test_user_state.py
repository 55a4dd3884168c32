"""What users did of late: one meaning in both homes, and what answers make of it."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from fastapi.testclient import TestClient

from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.user_histories import with_recent
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.stores import StoreManifest, open_store
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.config.admission import OPEN, AdmissionConfig
from rayrec.serve.config.events import EventsConfig, LogConfig, RequestLogConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.events.user_state import ProcessState, StoredState, open_state
from rayrec.serve.web.api import build_api
from tests.helpers.runs import make_run

NOW_US = 1_700_000_000 * 1_000_000


@pytest.fixture(scope="module")
def recommender(tmp_path_factory):
    return Recommender.load(make_run(tmp_path_factory.mktemp("state")))


def events(*pairs: tuple[int, int]) -> UserEvents:
    """Of (seconds after now, item)."""
    times = np.array([NOW_US + 1_000_000 * second for second, _ in pairs], dtype=np.int64)
    items = np.array([item for _, item in pairs], dtype=np.int64)
    return UserEvents(times, items, np.full(len(pairs), -1))


@pytest.fixture(params=["process", "store"])
def state(request, recommender, tmp_path):
    store = str(tmp_path / "store") if request.param == "store" else None
    found = open_state(EventsConfig(store=store, last=3), recommender.dataset.manifest)
    yield found
    found.close()


def test_events_are_a_set_in_order_of_time_of_which_the_newest_are_kept(state):
    assert state.append(np.array([1, 1, 2]), events((5, 50), (1, 10), (2, 20))) == 3
    assert state.append(np.array([1, 1]), events((5, 50), (3, 30))) == 1
    assert state.append(np.array([1]), events((4, 40))) == 1
    of_1, of_2, of_nobody = state.histories([1, 2, 3])
    assert of_1.items_E.tolist() == [30, 40, 50]
    assert ((of_1.times_us_E - NOW_US) // 1_000_000).tolist() == [3, 4, 5]
    assert of_2.items_E.tolist() == [20]
    assert of_nobody.items_E.tolist() == []


def test_the_side_by_item_is_written_in_the_same_step(recommender, tmp_path):
    config = EventsConfig(store=str(tmp_path / "store"), by_item=True)
    state = open_state(config, recommender.dataset.manifest)
    threads = [
        threading.Thread(target=state.append, args=(np.array([user]), events((user, 50))))
        for user in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert state.append(np.array([1]), events((1, 50))) == 0
    by_item = open_store(str(tmp_path / "store"), by="item")
    found = by_item.get_many(np.array([50]))
    assert found.columns["items"].tolist() == list(range(8))
    by_item.close()
    state.close()


def test_a_side_that_lacks_the_events_of_the_other_is_built_first(recommender, tmp_path):
    address = str(tmp_path / "store")
    state = open_state(EventsConfig(store=address), recommender.dataset.manifest)
    state.append(np.array([1]), events((1, 50)))
    state.close()

    with pytest.raises(InputError, match="build this first of the same log"):
        open_state(EventsConfig(store=address, by_item=True), recommender.dataset.manifest)
    with pytest.raises(InputError, match="by_item is a side of an event store"):
        EventsConfig.parse({"by_item": True})


def test_sides_of_two_logs_are_refused(recommender, tmp_path):
    manifest = StoreManifest(name="another", by="item")
    open_store(tmp_path / "store", create=manifest, by="item").close()

    with pytest.raises(InputError, match="two sides are not of one log"):
        open_state(EventsConfig(store=str(tmp_path / "store"), by_item=True), recommender.dataset.manifest)


def test_a_process_forgets_who_has_been_away_longest():
    state = ProcessState(last=3, max_users=2)
    for user in (1, 2):
        state.append(np.array([user]), events((0, user)))
    state.histories([1])
    state.append(np.array([3]), events((0, 3)))
    assert [len(found.items_E) for found in state.histories([1, 2, 3])] == [1, 0, 1]


@pytest.mark.parametrize(
    ("stored", "recent", "expected"),
    [
        ([], [(1, 7)], [7]),
        ([(1, 5), (9, 6)], [(4, 7)], [5, 7, 6]),
        ([(1, 5), (2, 6)], [(1, 5), (3, 7)], [5, 6, 7]),
        ([(1, 5)], [(1, 7), (2, 5)], [5, 7, 5]),
        ([(1, 5)], [], [5]),
    ],
)
def test_what_is_stored_and_what_is_recent_are_one_history(stored, recent, expected):
    query = Query(np.array([item for _, item in stored], dtype=np.int64))
    times = np.array([NOW_US // 1_000_000 + second for second, _ in stored], dtype=np.int64)
    merged = with_recent(query, times, events(*recent), (), ())
    assert merged.history_ids.tolist() == expected


@pytest.mark.parametrize(
    ("stored", "recent_ms", "expected"),
    [
        ([(1, 5)], [(1200, 5), (1700, 5)], [5, 5]),  # one is that of the data set, the other came after it
        ([(1, 5), (1, 5)], [(1200, 5), (1700, 5)], [5, 5]),
        ([(1, 5), (1, 5)], [(1200, 5)], [5, 5]),
        ([], [(1200, 5), (1700, 5)], [5, 5]),
        ([(1, 5), (2, 5)], [(1200, 5), (2100, 5), (2200, 6)], [5, 5, 6]),
    ],
)
def test_what_is_in_both_counts_once_and_what_a_user_did_again_in_a_second_counts_again(
    stored, recent_ms, expected
):
    query = Query(np.array([item for _, item in stored], dtype=np.int64))
    times = np.array([NOW_US // 1_000_000 + second for second, _ in stored], dtype=np.int64)
    recent = UserEvents(
        NOW_US // 1_000_000 * 1_000_000 + 1000 * np.array([at for at, _ in recent_ms]),
        np.array([item for _, item in recent_ms]),
        np.full(len(recent_ms), -1),
    )
    assert with_recent(query, times, recent, (), ()).history_ids.tolist() == expected


@pytest.mark.parametrize(
    ("stored", "recent", "expected"),
    [
        ([0], [0, 1], [0, 1]),  # clicked and bought in one second: two events
        ([1], [0, 1], [1, 0]),
        ([0, 1], [1, 0], [0, 1]),
        ([-1], [1], [-1]),  # the log did not say what it was
        ([0], [-1], [0]),
        ([-1, 0], [0, 1], [-1, 0]),
    ],
)
def test_events_of_one_second_are_told_apart_by_their_behaviors_where_both_are_known(
    stored, recent, expected
):
    query = Query(np.full(len(stored), 5), labels={"behavior": np.array(stored)})
    events_ = UserEvents(NOW_US + np.arange(len(recent)), np.full(len(recent), 5), np.array(recent))
    merged = with_recent(
        query, np.full(len(stored), NOW_US // 1_000_000), events_, ("CLICK", "BUY"), ("CLICK", "BUY")
    )
    assert merged.labels["behavior"].tolist() == expected


def test_behaviors_of_a_store_are_those_of_the_data_by_name():
    query = Query(np.array([5]), times=np.array([0]), labels={"behavior": np.array([1])})
    seconds = np.arange(3) * 1_000_000
    recent = UserEvents(NOW_US + seconds, np.array([6, 7, 8]), np.array([0, 1, -1]))
    merged = with_recent(query, np.array([0]), recent, ("LIKE", "SHARE"), ("VIEW", "LIKE"))
    assert merged.labels["behavior"].tolist() == [1, 1, -1, -1]


class Down:
    """A store that does not answer."""

    def __init__(self, store):
        self._store, self.is_down, self.num_reads = store, False, 0
        self.manifest = store.manifest

    def append(self, batch):
        self._check()
        return self._store.append(batch)

    def __getattr__(self, name):
        self.num_reads += 1
        self._check()
        return getattr(self._store, name)

    def _check(self):
        if self.is_down:
            raise UnavailableError("the store", 2, "it is away")


@contextmanager
def service_of(recommender, state, tmp_path, admission=OPEN, **log):
    service = RecommendationService(recommender, max_k=50)
    service.user_state = state
    config = EventsConfig(log=LogConfig(folder=str(tmp_path / "log"), **log), max_events=5)
    intake = EventIntake.open(config, lambda: recommender.dataset)
    intake.state = state
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 8)
    with TestClient(build_api(service, batcher, 20.0, admission, intake=intake)) as client:
        yield client, intake


def test_a_store_that_is_away_takes_no_events_and_answers_go_on_without_it(recommender, tmp_path):
    now = 0.0
    opened = open_state(EventsConfig(store=str(tmp_path / "store")), recommender.dataset.manifest)
    assert isinstance(opened, StoredState)
    store = Down(opened._store)
    state = StoredState(store, last=10, pause_s=5.0, clock=lambda: now)
    key = recommender.dataset.items.keys[0].as_py()
    event = {"user_id": "u1", "item_id": key, "timestamp": 1_700_000_000}
    asked = {"user_id": "u1", "k": 3}
    with service_of(recommender, state, tmp_path) as (client, intake):
        before = client.post("/v1/recommend", json=asked).json()
        store.is_down = True
        refused = client.post("/v1/events", json=event)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert intake.metrics()["event_log_queued"] == intake.metrics()["events_taken_total"] == 0
        without = client.post("/v1/recommend", json=asked).json()
        assert without["degraded"] == ["no_recent_events"]
        assert without["items"] == before["items"]
        reads = store.num_reads
        assert client.post("/v1/recommend", json=asked).json()["degraded"] == ["no_recent_events"]
        assert store.num_reads == reads, "it was asked again at once"
        store.is_down, now = False, 6.0
        assert client.post("/v1/events", json=event).json()["taken"] == 1
        after = client.post("/v1/recommend", json=asked).json()
        assert after["degraded"] == []
        assert after["items"] != before["items"]


def test_what_cannot_be_taken_is_refused_in_whole(recommender, tmp_path):
    state = ProcessState(last=3, max_users=10)
    good = {"user_id": "ann", "item_id": "i1", "timestamp": 1_700_000_000}
    with service_of(recommender, state, tmp_path, max_queued=3) as (client, intake):
        for body, status, said in (
            ([good, good | {"timestamp": 9_000_000_000}], 422, "in the future"),
            ([good | {"user_id": f"u{n}"} for n in range(6)], 422, "more than the 5"),
            ([good, {"user_id": "ann"}], 422, "1.item_id"),
            (good | {"color": "red"}, 422, "color"),
            (good | {"timestamp": "2026-01-26"}, 422, "timestamp: expected a number"),
            (good | {"timestamp": 1_700_000_000_000}, 422, "seconds, not milliseconds"),
            (good | {"timestamp": 9_000_000_000}, 422, "timestamp: 9000000000 is"),
            ([good | {"user_id": f"u{n}"} for n in range(4)], 503, "no room"),
        ):
            answer = client.post("/v1/events", json=body)
            assert answer.status_code == status, answer.text
            assert said in answer.json()["error"]
            assert ("Retry-After" in answer.headers) == (status == 503)
        broken = client.post("/v1/events", content=b"{", headers={"Content-Type": "application/json"})
        assert broken.status_code == 400
        assert client.post("/v1/events", json=[]).json() == {"taken": 0, "repeated": 0, "unknown_items": 0}
        assert intake.metrics()["events_taken_total"] == intake.metrics()["event_log_queued"] == 0
        assert [len(found.items_E) for found in state.histories([1, 2])] == [0, 0]
        assert client.post("/v1/events", json=[good, good]).json()["repeated"] == 1
        assert intake.metrics()["event_log_queued"] == 1


def test_a_history_is_that_of_the_data_and_what_came_since(recommender, tmp_path):
    state = ProcessState(last=5, max_users=10)
    with service_of(recommender, state, tmp_path) as (client, _):
        service = RecommendationService(recommender, max_k=50)
        service.user_state = state
        before = service.known_history("u1", 50)
        at = recommender.dataset.history_times_of("u1")[-1].item()
        again = recommender.dataset.items.keys[0].as_py()
        same = {"user_id": "u1", "item_id": before.newest[0].item_key, "timestamp": at}
        new = {"user_id": "u1", "item_id": again, "timestamp": 1_700_000_000}
        unknown = {"user_id": "ann", "item_id": "no such item", "timestamp": 1_700_000_000}
        assert client.post("/v1/events", json=[same, new, unknown]).json()["taken"] == 3

        after = service.known_history("u1", 50)
        assert service.known_history("ann", 50).num_events == 0
        assert service.known_history("nobody", 50) is None

    assert not any(event.is_new for event in before.newest)
    assert after.num_events == before.num_events + 1
    assert (after.newest[0].item_key, after.newest[0].is_new) == (again, True)
    assert after.newest[1:] == before.newest


def test_limits_of_callers_hold_for_events_too(recommender, tmp_path):
    admission = AdmissionConfig.parse({"callers": {"rate": 0.001, "burst": 2}})
    event = {"user_id": "u1", "item_id": "i1", "timestamp": 1_700_000_000}
    state = ProcessState(last=5, max_users=10)
    with service_of(recommender, state, tmp_path, admission) as (client, intake):
        statuses = [client.post("/v1/events", json=event).status_code for _ in range(2)]
        refused = client.post("/v1/events", json=event)
        asked = client.post("/v1/recommend", json={"user_id": "u1"})
        other = client.post("/v1/events", json=event, headers={"X-Caller-Key": "other"})

    assert (statuses, refused.status_code, asked.status_code) == ([200, 200], 429, 429)
    assert int(refused.headers["Retry-After"]) > 0
    assert other.status_code == 200
    assert intake.metrics()["events_taken_total"] == 3


def test_a_message_leaves_its_place_whatever_comes_of_it(recommender, tmp_path):
    admission = AdmissionConfig.parse({"service": {"concurrency": 1}})
    with service_of(recommender, ProcessState(5, 10), tmp_path, admission) as (client, _):
        for _ in range(3):
            assert client.post("/v1/events", content=b"{").status_code == 400
            assert client.post("/v1/events", json={}).status_code == 422
        assert client.post("/v1/events", json=[]).status_code == 200


def test_the_examples_of_settings_are_ones():
    events = EventsConfig.load(CHECKOUT / "configs" / "events.yaml")
    requests = RequestLogConfig.load(CHECKOUT / "configs" / "request_log.yaml")

    assert (events.log.folder, events.store, requests.share) == ("data/samples", "data/events", 0.01)
