"""The service without Ray answers like the model, and stops clean."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.launch import single_process
from rayrec.serve.launch.launch import serving
from tests.helpers.runs import make_run
from tests.serve.fake_recommender import FakeRecommender, api_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("serve"))


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def asked(url: str, user: str) -> list[str]:
    """Items for a user; never through a proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"{url}/v1/recommend",
        json.dumps({"user_id": user, "k": 3}).encode(),
        {"Content-Type": "application/json"},
    )
    with opener.open(request, timeout=30) as answer:
        return [item["item_id"] for item in json.load(answer)["items"]]


def test_answers_are_those_of_the_model_and_nothing_stays_behind(run, free_port):
    recommender = Recommender.load(run)
    users = [f"u{number}" for number in range(4)]
    queries = [recommender.query_of_user(user) for user in users]
    expected = [[item.item_key for item in found] for found in recommender.recommend(queries, 3)]
    threads_before = {thread.name for thread in threading.enumerate()}

    with serving(run, ServeConfig(port=free_port, single_process=True)) as url:
        assert url == f"http://127.0.0.1:{free_port}"
        assert [asked(url, user) for user in users] == expected
        with (
            pytest.raises(InputError, match="is in use"),
            serving(run, ServeConfig(port=free_port, single_process=True)),
        ):
            raise AssertionError("a second service was started")

    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", free_port)) != 0
    assert "http" not in {thread.name for thread in threading.enumerate()} - threads_before


def test_an_error_inside_the_block_stops_the_service(run, free_port):
    with (
        pytest.raises(KeyError, match="of the caller"),
        serving(run, ServeConfig(port=free_port, single_process=True)),
    ):
        raise KeyError("of the caller")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", free_port)) != 0


def test_several_replicas_are_not_one_process(run, free_port):
    with (
        pytest.raises(InputError, match="2 replicas are several processes"),
        serving(run, ServeConfig(port=free_port, single_process=True, num_replicas=2)),
    ):
        raise AssertionError("the service was started")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with (
        pytest.raises(InputError, match="not a run folder"),
        serving(tmp_path, ServeConfig(single_process=True)),
    ):
        raise AssertionError("the service was started")


def test_calls_over_grpc_end_before_the_logs_are_closed(free_port, monkeypatch):
    """Calls that were answered later were in no log."""
    happened = []

    @asynccontextmanager
    async def answering_calls(service, config):
        happened.append("calls begin")
        yield
        happened.append("calls end")

    monkeypatch.setattr(single_process, "answering_calls", answering_calls)
    service = RecommendationService(FakeRecommender(), max_k=50)
    api = api_of(service, on_close=[lambda: happened.append("closed")])
    config = ServeConfig(port=free_port, grpc_port=1, single_process=True)
    with single_process.answering_here(api, config):
        assert happened == ["calls begin"]
    assert happened == ["calls begin", "calls end", "closed"]
