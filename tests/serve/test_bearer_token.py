"""Who has the token is answered, and nobody else."""

from __future__ import annotations

import hashlib
import logging

import pytest
from fastapi.testclient import TestClient

from rayrec.platform.errors import InputError
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.bearer_token import VARIABLE, token_digest
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.web.api import build_api
from rayrec.serve.web.bearer_token import OPEN_PATHS, require_token
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.web.pages import RecentActivity
from tests.serve.fake_recommender import FakeRecommender, api_of

TOKEN = "s3cret-of-enough-letters"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()


@pytest.fixture
def client() -> TestClient:
    service = RecommendationService(FakeRecommender(), max_k=50)
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 4)
    api = build_api(service, batcher, 10.0, meters=[PrometheusMeter(), RecentActivity(["/v1/recommend"])])
    require_token(api, DIGEST)
    return TestClient(api, raise_server_exceptions=False)


def test_with_the_token_requests_are_answered(client):
    for scheme in ("Bearer", "bearer"):
        answer = client.post(
            "/v1/recommend", json={"user_id": "ann"}, headers={"Authorization": f"{scheme} {TOKEN}"}
        )
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "header", [f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", f"Basic {TOKEN}", TOKEN, "Bearer \u00e9"]
)
def test_with_anything_else_they_are_not(client, header):
    answer = client.post(
        "/v1/recommend", json={"user_id": "ann"}, headers={"Authorization": header.encode("latin-1")}
    )
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="rayrec", error="invalid_token"'
    assert "Authorization: Bearer" in answer.json()["error"]


def test_every_route_but_probes_needs_it(client):
    paths = [route for route in client.app.openapi()["paths"] if route not in OPEN_PATHS]
    assert {"/metrics", "/v1/history", "/v1/completions"} <= set(paths)
    for path in [*paths, "/", "/docs", "/openapi.json", "/nowhere", "/health/ready/", "//health/ready"]:
        answer = client.get(path, follow_redirects=False)
        assert (path, answer.status_code) == (path, 401)
        assert answer.headers["www-authenticate"] == 'Bearer realm="rayrec"'


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_are_answered_to_anybody(client, path):
    assert client.get(path).status_code == 200


def test_errors_have_the_form_of_the_protocol(client):
    assert client.post("/v1/completions", json={}).json()["error"]["type"] == "invalid_request_error"


def test_requests_without_it_are_counted(client):
    client.post("/v1/recommend", json={})
    page = client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    assert 'rayrec_requests_total{route="none",status="401"} 1.0' in page


def test_who_lacks_it_neither_uses_up_nor_displaces_what_callers_have():
    limits = AdmissionConfig.parse({"callers": {"rate": 0.001, "burst": 1, "most_kept": 2}})
    api = api_of(RecommendationService(FakeRecommender(), max_k=50), admission=limits)
    require_token(api, DIGEST)
    client = TestClient(api)
    mine = {"Authorization": f"Bearer {TOKEN}", "X-Caller-Key": "me"}

    def statuses(headers: dict[str, str], times: int) -> list[int]:
        return [client.post("/v1/recommend", json={}, headers=headers).status_code for _ in range(times)]

    assert statuses(mine, 2) == [200, 429]
    for stranger in ("me", "s1", "s2", "s3"):
        assert statuses({"X-Caller-Key": stranger}, 2) == [401, 401]
    assert statuses(mine, 1) == [429]  # still remembered


def test_a_token_comes_of_a_file_or_the_environment_which_then_lacks_it(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    environment = {VARIABLE: TOKEN, "HOME": "/"}
    assert token_digest(file, {}) == DIGEST
    assert token_digest(None, environment) == DIGEST
    assert environment == {"HOME": "/"}
    assert token_digest(None, {}) is None
    with pytest.raises(InputError, match="give the token once"):
        token_digest(file, {VARIABLE: TOKEN})


@pytest.mark.parametrize("content", ["", "short", "with spaces in it, though long", "gr\u00fc\u00dfe" * 5])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path, content):
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(InputError, match="expected a token of") as refused:
        token_digest(file, {})
    assert not content or content not in str(refused.value)


def test_a_token_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        token_digest(tmp_path / "nowhere", {})


def test_a_file_that_others_may_read_is_told_of(tmp_path, caplog):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING, logger="rayrec"):
        token_digest(file, {})
    assert "others may read" in caplog.text
    assert TOKEN not in caplog.text
