"""An application asked by a message answers as it does over HTTP."""

import asyncio

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.on_ray.http_messages import HttpAnswer, HttpRequest, answered_by
from tests.serve.fake_recommender import FakeRecommender, api_of


def forwarding(app) -> FastAPI:
    """Every request goes to the application as a message."""
    api = FastAPI(openapi_url=None)

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "HEAD"])
    async def forward(path: str, http: Request) -> Response:
        return (await answered_by(app, await HttpRequest.of(http))).as_response()

    return api


def test_messages_are_answered_as_requests_are():
    api = api_of(RecommendationService(FakeRecommender(), max_k=50))
    with TestClient(api) as direct, TestClient(forwarding(api)) as forwarded:
        asked = [
            ("POST", "/v1/recommend", {"json": {"user_id": "ann", "k": 2}}),
            ("POST", "/v1/recommend", {"json": {"k": 0}}),
            ("POST", "/v1/recommend", {"content": b"{"}),
            ("POST", "/v1/recommend", {"json": {"user_id": "ann"}, "headers": {"X-Request-Timeout-Ms": "-"}}),
            ("GET", "/health/ready", {}),
            ("GET", "/v1/users?like=a&limit=3", {}),
            ("GET", "/there/is/nothing", {}),
            ("GET", "/v1/models/a%3Fb%2Fc%20%C3%A4", {}),
            ("GET", "/openapi.json", {}),
        ]
        for method, path, more in asked:
            expected, found = direct.request(method, path, **more), forwarded.request(method, path, **more)
            assert (found.status_code, found.content) == (expected.status_code, expected.content), path
            assert found.headers["content-type"] == expected.headers["content-type"]


def test_an_answer_keeps_headers_that_come_twice_and_gets_the_length_of_its_body():
    answer = HttpAnswer(200, ((b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"content-length", b"9")), b"ok")

    response = answer.with_header("X-Target", "main").as_response()

    assert response.headers.getlist("set-cookie") == ["a", "b"]
    assert response.headers["content-length"] == "2"
    assert response.headers["x-target"] == "main"


def test_what_is_about_a_connection_goes_no_further():
    async def app(scope, receive, send):
        request = Request(scope, receive)
        await Response(",".join(sorted(request.headers)).encode())(scope, receive, send)

    with TestClient(forwarding(app)) as client:
        told = client.get("/", headers={"connection": "close", "x-own": "1"}).text.split(",")

    assert "x-own" in told
    assert "connection" not in told


def test_an_application_that_fails_raises():
    async def app(scope, receive, send):
        raise RuntimeError("broken")

    request = HttpRequest("GET", "/", b"", (), b"", None)
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(answered_by(app, request))
