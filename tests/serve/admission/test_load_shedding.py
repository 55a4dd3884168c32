"""Whether there is room is asked before anything of a request is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from rayrec.serve.admission import request_info
from rayrec.serve.admission.limits import Limit
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.web.api import build_api
from tests.serve.fake_recommender import WIDTH, HeldService, listening

NOT_JSON = b"{"
INFER = "/v2/models/recommend/infer"
ROUTES = ("/v1/recommend", "/v1/completions", INFER)


@pytest.fixture
def service():
    held = HeldService()
    yield held
    held.let.set()


def api_of(service: HeldService, admission: dict[str, Any], max_waiting: int = 4, cost_s: float = 1e-6):
    batcher = Batcher(service.recommend_all, BatchCosts({1: cost_s}, WIDTH), max_waiting)
    return build_api(service, batcher, 10.0, AdmissionConfig.parse(admission))


def post(address: str, path: str, **headers: str) -> httpx.Response:
    headers["Content-Type"] = "application/json"
    return httpx.post(
        f"http://{address}{path}", content=NOT_JSON, headers=headers, trust_env=False, timeout=20
    )


@pytest.mark.parametrize(
    ("admission", "max_waiting", "status", "why"),
    [
        ({"service": {"concurrency": 1}}, 4, 503, "of all callers, 1 requests are in flight already"),
        ({"callers": {"concurrency": 1}}, 4, 429, "of this caller, 1 requests are in flight already"),
        ({}, 1, 503, "1 requests are waiting already"),
    ],
)
def test_who_finds_no_room_is_told_whatever_the_body(service, admission, max_waiting, status, why):
    with (
        listening(api_of(service, admission, max_waiting)) as address,
        service.asking(address, "/v1/recommend", {"user_id": "ann", "k": 1}) as answers,
    ):
        service.wait_until_asked(address, 1)
        for path in ROUTES:
            refused = post(address, path)
            assert (refused.status_code, why in refused.text) == (status, True), path
            assert refused.headers["Retry-After"] == "1"
        # Others than those that compute are not asked for.
        assert post(address, "/v1/events").status_code == 404
        assert post(address, "/v1/recommend/").status_code in (404, 307)
        service.let.set()
    assert [answer.status_code for answer in answers] == [200]


def test_who_would_be_too_late_is_told_before_the_body_is_read(service):
    with (
        listening(api_of(service, {}, cost_s=2.0)) as address,
        service.asking(address, "/v1/recommend", {"user_id": "ann", "k": 1}),
    ):
        service.wait_until_asked(address, 1)
        late = post(address, "/v1/recommend", **{"X-Request-Timeout-Ms": "1000"})
        in_time = post(address, "/v1/recommend")
        service.let.set()
    assert (late.status_code, "answered in time" in late.text) == (503, True)
    assert (in_time.status_code, in_time.json()) == (400, {"error": "the body is not valid JSON"})


def test_a_refusal_before_the_body_takes_nothing_and_is_counted(service):
    api = api_of(service, {"callers": {"rate": 1e-6, "burst": 1}})
    with listening(api) as address:
        service.let.set()
        assert post(address, "/v1/recommend").status_code == 400  # room, but not understood
        url, body = f"http://{address}/v1/recommend", {"user_id": "ann", "k": 1}
        statuses = [httpx.post(url, json=body, trust_env=False).status_code for _ in range(3)]
    assert statuses == [200, 429, 429]


@pytest.mark.parametrize("path", [*ROUTES, "/v1/events"])
def test_limits_and_headers_are_looked_at_once_for_each_request(service, path, monkeypatch):
    looked, read = [], []
    refusal, timeout_of = Limit.refusal, request_info.timeout_of
    monkeypatch.setattr(Limit, "refusal", lambda *args: looked.append(args) or refusal(*args))
    monkeypatch.setattr(request_info, "timeout_of", lambda *args: read.append(args) or timeout_of(*args))
    service.let.set()
    bodies = {
        "/v1/recommend": {"user_id": "ann", "k": 1},
        INFER: {"inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["ann"]}]},
    }
    with TestClient(api_of(service, {"service": {"concurrency": 4}})) as client:
        answer = client.post(path, json=bodies.get(path, {}))
    assert answer.status_code == (200 if path in bodies else answer.status_code)
    assert (len(looked), len(read)) == (path != "/v1/events", 1)


def test_a_connection_is_of_use_after_a_refusal(service):
    """The body that nobody read is not taken for the next request."""

    async def scenario(address: str) -> list[int]:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        statuses = []
        for path, body in (("/v1/recommend", b"x" * 100_000), ("/v1/recommend", NOT_JSON)):
            head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert "error" in json.loads(await reader.readexactly(length))
            statuses.append(int(answer[9:12]))
        writer.close()
        return statuses

    with (
        listening(api_of(service, {"service": {"concurrency": 1}})) as address,
        service.asking(address, "/v1/recommend", {"user_id": "ann", "k": 1}),
    ):
        service.wait_until_asked(address, 1)
        statuses = asyncio.run(asyncio.wait_for(scenario(address), timeout=20))
        service.let.set()
    assert statuses == [503, 503]
