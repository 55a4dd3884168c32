"""Whatever comes, the service says in a sentence what is wrong, and goes on."""

import logging
import socket

import httpx
import pytest
from fastapi.testclient import TestClient

from benchmarks.bad_requests import BadRequest, from_openapi, made_by_hand, why_wrong
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.events import EventsConfig, LogConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.web.api import ANSWERING_ROUTES, build_api
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.web.pages import RecentActivity
from tests.helpers.examples import share_of
from tests.helpers.runs import make_run
from tests.serve.fake_recommender import listening

COUNT = 400
"""Of each source, and in `make test` a quarter of it that the schemas forbid; `rayrec bench serve-fuzz` sends
ten thousand."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """An application with everything on, listening; the recommender behind it."""
    folder = tmp_path_factory.mktemp("bad")
    recommender = Recommender.load(make_run(folder, "generative"))
    intake = EventIntake.open(
        EventsConfig(log=LogConfig(folder=str(folder / "log"))), lambda: recommender.dataset
    )
    answering = RecommendationService(recommender, max_k=50)
    answering.user_state = intake.state
    batcher = Batcher(answering.recommend_all, BatchCosts({1: 1e-6, 8: 1e-6}), 64)
    meters = [PrometheusMeter(), RecentActivity(ANSWERING_ROUTES)]
    admission = AdmissionConfig.parse({"callers": {"rate": 1_000_000}})
    api = build_api(answering, batcher, 20.0, admission, meters, intake)
    with listening(api) as address:
        yield f"http://{address}", api


@pytest.fixture
def ask(service):
    """Sends a request, and collects what is wrong with its answer."""
    url, _ = service
    wrong, statuses = [], set()
    with httpx.Client(trust_env=False, timeout=20) as client:

        def asked(request: BadRequest) -> None:
            headers = {name: value.encode("latin-1") for name, value in request.headers.items()}
            try:
                answer = client.request(
                    request.method, url + request.path, content=request.body, headers=headers
                )
            except (httpx.InvalidURL, httpx.LocalProtocolError, httpx.RemoteProtocolError):
                return  # not HTTP: the client or the server's parser refuses it
            statuses.add(answer.status_code)
            if why := why_wrong(answer.status_code, dict(answer.headers), answer.text):
                wrong.append((why, request, answer.text[:500]))

        good = {"user_id": "u3", "k": 4}
        before = client.post(f"{url}/v1/recommend", json=good).json()
        yield asked, statuses
        assert wrong == []
        assert client.post(f"{url}/v1/recommend", json=good).json() == before


@pytest.mark.slow
def test_requests_made_by_hand_get_a_sentence(ask):
    asked, statuses = ask
    for request in made_by_hand(COUNT):
        asked(request)

    assert {400, 404, 413, 415, 422} <= statuses


@pytest.mark.slow
def test_requests_that_the_schemas_forbid_get_a_sentence(ask, service):
    asked, statuses = ask
    url, _ = service
    page = httpx.get(f"{url}/openapi.json", trust_env=False).json()

    count = share_of(COUNT)
    assert from_openapi(page, count, asked) >= count
    assert {400, 422} <= statuses


def test_a_connection_that_ends_within_a_body_is_no_failure_of_the_service(service, caplog):
    """It was logged with a stack trace, and counted with status 500."""
    url, _ = service
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v2/models/recommend/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 500\r\n\r\n{"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1000):
            pass
    # The event loop answers this when it is done with that.
    assert httpx.get(f"{url}/v2/health/live", trust_env=False).json() == {"live": True}
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_what_is_wrong_with_an_answer_is_seen():
    assert why_wrong(500, {}, '{"error": "it failed"}') == "status 500"
    assert why_wrong(503, {}, "busy") == "status 503"
    assert why_wrong(503, {"retry-after": "1"}, "busy") is None
    assert why_wrong(400, {}, "Traceback (most recent call last):") == "a stack trace"
    assert why_wrong(400, {}, '{"error": "File \\"x.py\\", line 3"}') == "a stack trace"
    assert why_wrong(404, {}, '{"error": "there is no model \'harness.py\'"}') is None
    assert why_wrong(422, {}, '{"error": "k: input should be greater than or equal to 1"}') is None


BODIES = {
    "/v2/models/{name}/infer": {
        "id": "7",
        "parameters": {"k": 2, "exclude_seen": False},
        "inputs": [
            {"name": "history", "datatype": "BYTES", "shape": [1, 2], "data": ["i1", "i2"]},
            {"name": "timestamps", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]},
        ],
        "outputs": [{"name": "item_id"}, {"name": "score", "parameters": {"binary_data": False}}],
    },
    "/v1/completions": {"model": "recommend", "prompt": "i1 i2", "n": 2, "logprobs": 1},
}


@pytest.mark.parametrize("route", BODIES)
def test_the_page_describes_bodies_that_are_answered(service, route):
    import jsonschema

    _, api = service
    client = TestClient(api)
    described = client.get("/openapi.json").json()["paths"][route]["post"]["requestBody"]
    schema = described["content"]["application/json"]["schema"]

    jsonschema.validate(BODIES[route], schema)
    assert client.post(route.format(name="recommend"), json=BODIES[route]).status_code == 200
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**BODIES[route], "unknown": 1}, schema)
    assert (
        client.post(route.format(name="recommend"), json={**BODIES[route], "unknown": 1}).status_code == 400
    )
