import asyncio
import gzip
import json
import logging
import re
import threading

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.http_util import RequestIdMiddleware

from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.request_log import REQUEST_ID
from rayrec.serve.web.api import MAX_BODY_BYTES
from rayrec.serve.web.guards import WithoutHeader
from rayrec.serve.wire.schemas import MAX_HISTORY
from tests.helpers.examples import examples
from tests.serve.fake_recommender import FakeRecommender, api_of

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client():
    service = RecommendationService(FakeRecommender(), max_k=50)
    return TestClient(api_of(service))


def test_answer_is_what_the_page_promises(client):
    answer = client.post("/v1/recommend", json={"history": ["alien", "nosuch"], "k": 1})
    assert answer.status_code == 200
    assert answer.json() == {
        "items": [{"item_id": "m0", "title": "Film 0", "score": -0.5, "source": "model", "ranking": None}],
        "source": "model",
        "ignored_items": ["nosuch"],
        "unread_events": 0,
        "model": {"run": "films", "step": 100, "version": None},
        "allowed_items": None,
        "unknown_filter_items": None,
        "control": None,
        "ranker": None,
        "degraded": [],
    }


def test_health_says_which_model_is_ready(client):
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {
        "status": "ready",
        "model": {"run": "films", "step": 100, "version": None},
    }


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"k": 0}, "k: input should be greater than or equal to 1"),
        ({"k": 51}, "k: 51 items are more than the 50 of one answer"),
        ({"k": True}, "k: input should be a valid integer"),
        ({"k": "3"}, "k: input should be a valid integer"),
        ({"user_id": 1.5}, "user_id: expected a string or an integer"),
        ({"user_id": "\ud800"}, "user_id: expected text that UTF-8 can encode"),
        ({"history": "alien"}, "history: input should be a valid list"),
        ({"history": ["alien", None]}, "history.1: expected a string or an integer"),
        ({"history": ["alien", "\ud800"]}, "history.1: expected text that UTF-8 can encode"),
        (
            {"histroy": []},
            "histroy: unknown field; known are user_id, history, timestamps, row, instruction, k, "
            "exclude_seen, filter, candidates, quotas, diversity, beams, beam_margin, rank",
        ),
        (
            {"instruction": {"mood": "x"}},
            "instruction.mood: unknown field; known are scenario, behavior, trigger_item",
        ),
        (
            {"user_id": "ann", "instruction": {"behavior": "HATE"}},
            "instruction: no event has 'HATE'; those that occur: LIKE, VIEW",
        ),
        ({"instruction": {"behavior": 3}}, "instruction.behavior: input should be a valid string"),
        ({"history": ["alien"], "timestamps": [0.5]}, "timestamps.0: input should be a valid integer"),
        ({"row": [1]}, "row: input should be a valid dictionary"),
        ({"row": {"price": 1}}, "row: there is no field 'price'"),
        ({"row": {}, "user_id": 7}, "row: stands for user_id and history; give it without them"),
        ([], "expected a JSON object, sent with the header 'Content-Type: application/json'"),
    ],
)
def test_wrong_fields_are_named(client, body, sentence):
    answer = client.post("/v1/recommend", content=json.dumps(body), headers=JSON)
    assert (answer.status_code, answer.json()) == (422, {"error": sentence})


def test_a_store_that_is_down_is_no_failure_of_ours(client):
    answer = client.post("/v1/recommend", json={"row": {"user": 999}})
    assert answer.status_code == 503
    assert "redis://clicks: no answer in 2 attempts" in answer.json()["error"]


def test_overlong_history_is_refused(client):
    allowed = {"history": ["alien"] * MAX_HISTORY, "k": 1}
    assert client.post("/v1/recommend", json=allowed).status_code == 200
    answer = client.post("/v1/recommend", json={"history": ["alien"] * (MAX_HISTORY + 1)})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("history: list should have at most 10000 items")


def test_a_body_that_is_not_announced_as_json_says_so(client):
    answer = client.post("/v1/recommend", content=b'{"k": 1}')
    assert answer.status_code == 422
    assert "Content-Type: application/json" in answer.json()["error"]


@pytest.mark.parametrize("body", [b'{"k": 1', b"\xff\xfe{}", b"[" * 200_000], ids=["cut", "bytes", "deep"])
def test_a_body_that_is_no_json_is_refused(client, body):
    answer = client.post("/v1/recommend", content=body, headers=JSON)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_refused_before_it_is_read_whole(announced, client):
    whole = b" " * (MAX_BODY_BYTES + 1)
    body = whole if announced else (whole[start : start + 65_536] for start in range(0, len(whole), 65_536))
    answer = client.post("/v1/recommend", content=body, headers=JSON)
    assert answer.status_code == 413
    assert answer.json() == {"error": "the body is larger than 1048576 bytes; send less"}


def test_unknown_paths_and_methods_get_json(client):
    missing, wrong = client.get("/v1/recommendations"), client.get("/v1/recommend")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json() == {"error": "there is no GET /v1/recommendations; /docs lists what there is"}
    assert wrong.headers["allow"] == "POST"


KEYS = st.text() | st.integers()
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | KEYS, lambda some: st.lists(some, max_size=4), max_leaves=6
)
NEAR_MISSES = st.fixed_dictionaries(
    {},
    optional={
        "user_id": KEYS | VALUES,
        "history": st.lists(KEYS, max_size=5) | VALUES,
        "row": st.fixed_dictionaries({}, optional={"user": st.integers(0, 9), "more": VALUES}) | VALUES,
        "k": st.integers(-2, 60) | VALUES,
        "exclude_seen": VALUES,
        "more": VALUES,
    },
)


@examples(150)
@given(body=NEAR_MISSES | VALUES)
def test_whatever_json_comes_the_answer_is_items_or_a_sentence(client, body):
    answer = client.post("/v1/recommend", content=json.dumps(body), headers=JSON)
    if answer.status_code == 200:
        assert len(answer.json()["items"]) == min(body.get("k", 10), 3)
    else:
        assert answer.status_code in (400, 422)
        assert isinstance(answer.json()["error"], str)


def test_a_failure_is_logged_under_the_id_that_is_answered(caplog):
    class Broken(RecommendationService):
        def recommend_all(self, requests):
            raise ZeroDivisionError("division of secrets")

    client = TestClient(api_of(Broken(FakeRecommender(), max_k=50)))
    with caplog.at_level(logging.ERROR):
        answer = client.post("/v1/recommend", json={})

    assert answer.status_code == 500
    assert answer.json()["error"] == "something failed in the service; its log says what"
    assert "secrets" not in answer.text
    (record,) = [record for record in caplog.records if record.name == "rayrec.serve.web.guards"]
    assert answer.json()["error_id"] in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


class SlowService(RecommendationService):
    """Computes one batch at a time, each for as long as it is not released."""

    def __init__(self):
        super().__init__(FakeRecommender(), max_k=50)
        self.begun, self.release = threading.Semaphore(0), threading.Semaphore(0)
        self.batches = []

    def recommend_all(self, requests):
        self.batches.append(len(requests))
        self.begun.release()
        self.release.acquire()
        return super().recommend_all(requests)

    async def computing(self):
        await asyncio.to_thread(self.begun.acquire)


def in_a_busy_service(service, scenario, **settings):
    """What `scenario(client, first request)` gives, which begins when that request is being computed."""

    async def run():
        transport = httpx.ASGITransport(api_of(service, **settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            first = asyncio.create_task(client.post("/v1/recommend", json={}))
            await service.computing()
            return await scenario(client, first)

    return asyncio.run(asyncio.wait_for(run(), timeout=20))


def test_health_answers_and_more_requests_are_refused_while_the_model_computes():
    service = SlowService()

    async def scenario(client, first):
        others = [asyncio.create_task(client.post("/v1/recommend", json={})) for _ in range(2)]
        (refused,), (waiting,) = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        live = await client.get("/health/live")
        service.release.release(2)
        return await first, await waiting, live, await refused

    first, waiting, live, refused = in_a_busy_service(service, scenario, max_waiting=2)
    assert (first.status_code, waiting.status_code, live.status_code) == (200, 200, 200)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json() == {"error": "2 requests are waiting already; try again in a second"}


def test_requests_that_wait_are_computed_together_and_each_gets_its_own_answer():
    service = SlowService()
    bodies = [{"user_id": "ann"}, {"k": 999}, {"history": ["brazil"]}, {"user_id": "ann", "k": 1}]

    async def scenario(client, first):
        answers = [asyncio.create_task(client.post("/v1/recommend", json=body)) for body in bodies]
        await asyncio.sleep(0.1)
        service.release.release(9)
        return await asyncio.gather(first, *answers)

    _, ann, refused, brazil, one = in_a_busy_service(service, scenario, max_waiting=9, max_batch=8)

    alone = TestClient(api_of(RecommendationService(FakeRecommender(), max_k=50)))
    assert ann.json() == alone.post("/v1/recommend", json=bodies[0]).json()
    assert brazil.json() == alone.post("/v1/recommend", json=bodies[2]).json()
    assert len(one.json()["items"]) == 1
    assert (refused.status_code, refused.json()["error"]) == (
        422,
        "k: 999 items are more than the 50 of one answer",
    )
    assert sorted(service.batches) == [1, 4]


def test_a_request_that_would_be_answered_too_late_is_refused():
    service = SlowService()

    async def scenario(client, first):
        late = asyncio.create_task(client.post("/v1/recommend", json={}))
        await asyncio.sleep(0.2)
        service.release.release(2)
        return await late

    late = in_a_busy_service(service, scenario, timeout_s=0.1)

    assert late.status_code == 503
    assert late.headers["retry-after"] == "1"
    assert late.json()["error"].startswith("the time in which the answer was wanted is over")


def test_a_caller_that_leaves_keeps_its_place_until_the_model_is_done():
    service = SlowService()

    async def scenario(client, first):
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        refused = await client.post("/v1/recommend", json={})
        service.release.release(9)
        while True:  # the place is free soon after the model is done
            answer = await client.post("/v1/recommend", json={})
            if answer.status_code == 200:
                return refused, answer
            await asyncio.sleep(0)

    refused, answer = in_a_busy_service(service, scenario, max_waiting=1)

    assert refused.status_code == 503
    assert answer.json()["source"] == "popular"


def client_with(**admission):
    service = RecommendationService(FakeRecommender(), max_k=50)
    return TestClient(api_of(service, admission=AdmissionConfig.parse(admission)))


def test_a_caller_that_asks_too_much_gets_429_and_when_to_come_again():
    client = client_with(callers={"rate": 0.01, "burst": 1})
    ann, bob = {"X-Caller-Key": "ann"}, {"x-caller-key": "bob"}
    first, second, other = (client.post("/v1/recommend", json={}, headers=who) for who in (ann, ann, bob))

    assert (first.status_code, second.status_code, other.status_code) == (200, 429, 200)
    assert 90 <= int(second.headers["retry-after"]) <= 100
    assert second.json()["error"].startswith(
        "of this caller, more than 0.01 requests a second have come; try again in "
    )


def test_a_service_that_is_asked_too_much_gives_503_and_when_to_come_again():
    client = client_with(service={"rate": 0.01, "burst": 1})
    first, second = client.post("/v1/recommend", json={}), client.post("/v1/recommend", json={})

    assert (first.status_code, second.status_code) == (200, 503)
    assert 90 <= int(second.headers["retry-after"]) <= 100
    assert second.json()["error"].startswith("of all callers, more than 0.01 requests a second have come")
    assert client.get("/health/live").status_code == 200


def test_a_degraded_answer_says_so():
    step = {"do": "shorter_history", "to": 1, "enter": 0.2, "leave": 0.1}
    client = client_with(degrade={"steps": [step]})

    cut = client.post("/v1/recommend", json={"history": ["alien", "brazil"]})
    whole = client.post("/v1/recommend", json={"history": ["alien"]})

    assert cut.json()["degraded"] == ["shorter_history"]
    assert whole.json()["degraded"] == []


@pytest.mark.parametrize("said", ["soon", "-1", "0", "1.5"])
def test_a_timeout_that_is_none_is_refused(client, said):
    answer = client.post("/v1/recommend", json={}, headers={"X-Request-Timeout-Ms": said})
    assert answer.status_code == 422
    assert answer.json() == {
        "error": f"X-Request-Timeout-Ms: expected a whole number of milliseconds above 0, got '{said}'"
    }


def test_a_request_may_say_that_it_does_not_wait_so_long():
    service = SlowService()

    async def scenario(client, first):
        soon = {"X-Request-Timeout-Ms": "50"}
        late = asyncio.create_task(client.post("/v1/recommend", json={}, headers=soon))
        patient = asyncio.create_task(client.post("/v1/recommend", json={}))
        await asyncio.sleep(0.2)
        service.release.release(3)
        return await late, await patient

    late, patient = in_a_busy_service(service, scenario)

    assert (late.status_code, patient.status_code) == (503, 200)
    assert late.json()["error"].startswith("the time in which the answer was wanted is over")


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_pages_of_calls_need_no_other_host(client, path):
    page = client.get(path)

    parts = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    assert len(parts) >= 2
    for part in parts:
        assert part.startswith("/")
        assert client.get(part).status_code == 200, part


def test_page_describes_fields_and_errors(client):
    page = client.get("/openapi.json").json()
    schemas = page["components"]["schemas"]
    described = page["paths"]["/v1/recommend"]["post"]["responses"]
    assert "oldest first" in schemas["RecommendRequest"]["properties"]["history"]["description"]
    assert set(described) == {"200", "400", "408", "413", "415", "422", "429", "500", "503"}
    assert described["422"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
    assert set(described["429"]["headers"]) == {"Retry-After"}
    assert set(described["200"]["headers"]) == {"X-Request-Id"}
    headers = {each["name"] for each in page["paths"]["/v1/recommend"]["post"]["parameters"]}
    assert headers == {"X-Request-Id", "X-Request-Timeout-Ms", "X-User-Id"}
    openai = page["paths"]["/v1/completions"]["post"]["responses"]
    assert openai["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/OpenAIError")
    assert "422" not in openai


def test_page_says_where_a_token_is_needed(client):
    assert "securitySchemes" not in client.get("/openapi.json").json()["components"]
    api = api_of(RecommendationService(FakeRecommender(), max_k=50))
    api.state.has_token = True
    page = api.openapi()
    assert page["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert page["paths"]["/v1/recommend"]["post"]["security"] == [{"token": []}]
    assert "401" in page["paths"]["/v1/recommend"]["post"]["responses"]
    assert "security" not in page["paths"]["/health/live"]["get"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"])
def test_head_is_answered_as_get_without_a_body(client, path):
    found, asked = client.head(path), client.get(path)
    assert (found.status_code, found.content) == (200, b"")
    assert found.headers["content-length"] == asked.headers["content-length"]
    assert client.head("/v1/recommend").status_code == 405


def test_packed_bodies_are_read_and_wrong_ones_refused(client):
    body = gzip.compress(json.dumps({"history": ["alien"], "k": 1}).encode())
    packed = {**JSON, "Content-Encoding": "gzip"}
    assert client.post("/v1/recommend", content=body, headers=packed).status_code == 200
    assert client.post("/v1/recommend", content=body[:-1], headers=packed).status_code == 400
    other = client.post("/v1/recommend", content=body, headers={**JSON, "Content-Encoding": "br"})
    assert (other.status_code, "known are gzip, deflate" in other.json()["error"]) == (415, True)


def test_a_key_that_stands_in_a_body_twice_is_refused(client):
    twice = client.post("/v1/recommend", content=b'{"k": 1, "k": 2}', headers=JSON)
    assert (twice.status_code, twice.json()["error"]) == (
        400,
        "the key 'k' stands in one object twice; which is meant?",
    )


def test_large_answers_are_packed_for_those_that_take_it(client):
    small = client.get("/health/live", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in small.headers
    packed = client.get("/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    plain = client.get("/openapi.json", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert packed.json() == plain.json()


def test_an_answer_behind_ray_serve_has_one_request_id():
    api = api_of(RecommendationService(FakeRecommender(), max_k=50))
    api.add_middleware(WithoutHeader, name=REQUEST_ID)
    behind = TestClient(RequestIdMiddleware(api))
    for headers in ({"X-Request-Id": "mine"}, {}):
        answer = behind.post("/v1/recommend", json={"history": ["alien"]}, headers=headers)
        ids = answer.headers.get_list("x-request-id")
        assert len(ids) == 1
        assert ids[0] == headers.get("X-Request-Id", ids[0])
