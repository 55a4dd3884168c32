"""Pages of others do not reach a service that their visitors' machines do."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.web.browsers import keep_pages_out

JSON = {"content-type": "application/json"}


def client_of(config: ServeConfig) -> TestClient:
    api = FastAPI()

    @api.get("/v1/history")
    @api.post("/v1/events")
    @api.post("/v1/completions")
    def answer() -> str:
        return "answered"

    keep_pages_out(api, config)
    return TestClient(api, base_url="http://127.0.0.1:8000")


@pytest.fixture(scope="module")
def loopback() -> TestClient:
    return client_of(ServeConfig(allowed_hosts=("shop.example",)))


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "a.localhost"])
def test_names_of_this_machine_are_answered(loopback, host):
    assert loopback.get("/v1/history", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.1.1", "[", ""])
def test_a_name_of_somebody_else_is_refused_on_loopback(loopback, host):
    answer = loopback.get("/v1/history", headers={"host": host})

    assert answer.status_code == 403
    assert repr(host) in answer.json()["error"]
    assert "--allowed-host" in answer.json()["error"]


def test_a_name_that_was_allowed_is_answered_with_its_pages(loopback):
    headers = {"host": "Shop.example:443", "origin": "https://shop.example"}
    assert loopback.post("/v1/events", headers=headers | JSON).status_code == 200
    assert loopback.post("/v1/events", headers=JSON | {"origin": "https://shop.example"}).status_code == 200


@pytest.mark.parametrize("config", [ServeConfig(host="0.0.0.0"), ServeConfig(token_sha256="0" * 64)])
def test_where_others_reach_the_service_or_pages_lack_the_token_any_name_is_answered(config):
    assert client_of(config).get("/v1/history", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[::1"}, 403),  # no URL
        ({"origin": "http://[evil]:8000"}, 403),
        ({"origin": "http://127.0.0.1:9000"}, 403),  # another program of this machine
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://127.0.0.1:8000"}, 200),  # TLS in front
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded; charset=utf-8"}, 415),
        ({"content-type": "Multipart/Form-Data"}, 415),
        ({"content-type": "application/octet-stream"}, 200),  # tensors
        ({}, 200),
    ],
)
def test_posts_of_foreign_pages_and_forms_are_refused(loopback, headers, status):
    assert loopback.post("/v1/events", headers=JSON | headers).status_code == status
    assert loopback.post("/v1/completions", headers=JSON | headers).status_code == status


def test_a_link_on_a_page_is_followed(loopback):
    assert loopback.get("/v1/history", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_refusals_have_the_form_of_the_protocol(loopback):
    answer = loopback.post("/v1/completions", headers={"content-type": "text/plain"})

    assert "application/json" in answer.json()["error"]["message"]
