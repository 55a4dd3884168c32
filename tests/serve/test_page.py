"""The page to look at: what it asks for, who may see it, and that a browser shows it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi.testclient import TestClient

from rayrec.platform.errors import UnavailableError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.user_state import ProcessState
from rayrec.serve.web.api import ANSWERING_ROUTES, build_api
from rayrec.serve.web.pages import SECONDS, NearlineStatus, RecentActivity
from tests.serve.fake_recommender import FakeRecommender, api_of, listening

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def page_api(state=None, **more):
    service = RecommendationService(FakeRecommender(), max_k=50)
    service.user_state = state
    recent = RecentActivity(ANSWERING_ROUTES)
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 4, on_batch=recent.batch)
    return build_api(service, batcher, 10.0, meters=[recent], **more)


class AwayState(ProcessState):
    """Its store does not answer."""

    def __init__(self):
        super().__init__(last=5, max_users=5)

    def histories(self, user_ids):
        raise UnavailableError("the store", 1, "it is away")


@pytest.fixture
def client():
    return TestClient(page_api())


def test_users_can_be_found_by_how_their_id_begins(client):
    assert client.get("/v1/users").json() == {"users": ["42", "ann"]}
    assert client.get("/v1/users?like=a").json() == {"users": ["ann"]}
    assert client.get("/v1/users?like=b").json() == {"users": []}
    assert client.get("/v1/users?limit=1").json() == {"users": ["42"]}


def test_looking_for_users_holds_nobody_up():
    """The first time all are sorted, which takes seconds of millions."""
    service = RecommendationService(FakeRecommender(), max_k=50)
    asked, let = threading.Event(), threading.Event()

    class Slow(type(service._recommender.dataset)):
        @property
        def sorted_user_keys(self):
            asked.set()
            assert let.wait(20)
            return ["ann"]

    service._recommender.dataset = Slow()
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 4)
    api = build_api(service, batcher, 10.0, meters=[RecentActivity(ANSWERING_ROUTES)])
    with listening(api) as address, ThreadPoolExecutor(1) as pool:
        users = pool.submit(httpx.get, f"http://{address}/v1/users", trust_env=False, timeout=20)
        try:
            assert asked.wait(20)
            live = httpx.get(f"http://{address}/v2/health/live", trust_env=False, timeout=20)
            assert live.json() == {"live": True}
        finally:
            let.set()
        assert users.result().json() == {"users": ["ann"]}


def test_a_history_is_shown_newest_first_with_titles(client):
    answer = client.get("/v1/history?user_id=ann").json()

    assert answer["num_events"] == 2
    assert answer["events"] == [
        {"item_id": "7", "title": None, "new": False},
        {"item_id": "alien", "title": "Alien", "new": False},
    ]
    assert answer["lacks_events"] is False
    assert client.get("/v1/history?user_id=ann&limit=1").json()["events"] == answer["events"][:1]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/v1/history?user_id=nobody", 404, "no user of the run's data is 'nobody'"),
        ("/v1/history", 422, "user_id: field required"),
        ("/v1/users?limit=0", 422, "limit: input should be greater than or equal to 1"),
    ],
)
def test_what_is_not_there_is_said(client, path, status, sentence):
    answer = client.get(path)

    assert answer.status_code == status
    assert sentence in answer.json()["error"]


def test_the_status_tells_what_was_done_and_looking_is_no_work(client):
    for _ in range(3):
        client.post("/v1/recommend", json={"user_id": "ann"})
    client.post("/v1/recommend", json={"k": 0})
    client.get("/v1/users")

    status = client.get("/v1/status").json()

    assert status["recent"]["requests_per_s"] == pytest.approx(4 / SECONDS)
    assert status["recent"]["failed"] == 1
    assert 0 < status["recent"]["p50_ms"] <= status["recent"]["p99_ms"]
    assert (status["recent"]["mean_batch"], status["recent"]["largest_batch"]) == (1.0, 1)
    assert status["model"] == {"run": "films", "step": 100, "version": None}
    assert status["degraded"] == []
    assert (status["price"], status["nearline"]) == (None, None)


def test_the_status_tells_of_near_line_products_what_a_page_has_room_for():
    metrics = {
        "nearline_summaries_hits_total": 6,
        "nearline_summaries_missing_total": 1,
        "nearline_candidates_stale_total": 1,
        "nearline_summaries_age_seconds": 9.0,
        "nearline_unusable_down_total": 5,
        "nearline_coverage": 0.5,
        "nearline_user_seconds": 0.004,
    }
    shown = NearlineStatus.of(metrics)
    assert (shown.hit_share, shown.coverage, shown.user_seconds) == (0.75, 0.5, 0.004)
    assert NearlineStatus.of({}) == NearlineStatus(hit_share=None, coverage=None, user_seconds=None)


def test_a_state_that_cannot_be_read_leaves_the_history_of_the_data():
    answer = TestClient(page_api(AwayState())).get("/v1/history?user_id=ann").json()

    assert (answer["num_events"], answer["lacks_events"]) == (2, True)


def test_the_status_tells_how_old_a_published_version_is(client):
    metrics = {
        "serving_version_age_s": 90.5,
        "serving_version_wanted": 7,
        "serving_version_not_loaded": False,
    }
    following = TestClient(page_api(version_metrics=lambda: metrics))

    assert following.get("/v1/status").json()["version"] == {"age_s": 90.5, "wanted": None}
    metrics |= {"serving_version_wanted": 3, "serving_version_not_loaded": True}
    assert following.get("/v1/status").json()["version"] == {"age_s": 90.5, "wanted": 3}
    assert client.get("/v1/status").json()["version"] is None


def test_what_is_older_than_the_window_is_forgotten():
    now = [0.0]
    recent = RecentActivity(["/ask"], clock=lambda: now[0])
    recent.request("/ask", 200, 0.5)
    recent.batch(8, 0.4)
    now[0] = SECONDS - 1.0
    recent.request("/ask", 503, 0.1)
    assert recent.metrics().requests_per_s == pytest.approx(2 / SECONDS)
    assert recent.metrics().p50_ms == pytest.approx(300)

    now[0] = SECONDS + 1.0

    metrics = recent.metrics()
    assert (metrics.requests_per_s, metrics.failed) == (pytest.approx(1 / SECONDS), 1)
    assert (metrics.mean_batch, metrics.largest_batch) == (None, None)


@pytest.mark.parametrize(
    ("settings", "shows"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "recommender.example"}, False),
        ({"host": "0.0.0.0", "page": True}, True),
        ({"page": False}, False),
    ],
)
def test_histories_are_shown_only_where_nobody_else_sees_them(settings, shows):
    assert ServeConfig(**settings).shows_page is shows


def test_without_the_page_no_history_is_told():
    client = TestClient(api_of(RecommendationService(FakeRecommender(), max_k=50)))

    assert [client.get(path).status_code for path in ("/", "/v1/users", "/v1/history?user_id=ann")] == [
        404
    ] * 3


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium; make packages installs it where it may")
def test_a_browser_shows_a_user_and_recommendations(tmp_path):
    metrics = {
        "serving_version_age_s": 300.0,
        "serving_version_wanted": 9,
        "serving_version_not_loaded": True,
    }
    with listening(page_api(AwayState(), version_metrics=lambda: metrics)) as address:
        shown = subprocess.run(
            [
                str(BROWSER),
                "--headless",
                "--no-sandbox",  # containers forbid it
                "--disable-gpu",
                "--no-proxy-server",
                f"--user-data-dir={tmp_path}",
                "--virtual-time-budget=3000",
                "--dump-dom",
                f"http://{address}/",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    history = shown[shown.index('id="history"') : shown.index('id="items"')]
    items = shown[shown.index('id="items"') : shown.index("<script>")]
    assert "brazil" in history, "of the first user, 42"
    assert items.count("<li>") == 3, "as many as there are films"
    assert "Film 0" in items
    assert "films, step 100" in shown
    assert "5 min, 9 is wanted" in shown
    assert "the newest cannot be read" in shown
    assert '<p id="problem" role="alert"></p>' in shown
