"""A service that ranks by recordings (`--graphs`), with a stand-in for a device's graphs."""

from __future__ import annotations

import pytest

from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.serve.config.compile import CompileConfig
from rayrec.serve.engine import compilation
from rayrec.serve.engine.compilation import CompileService
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.recorded_graphs import RecordingGraphs
from tests.helpers.runs import make_run

CONFIG = CompileConfig(max_rows=2, max_length=32, graphs=True)
REQUESTS = [RecommendRequest(user_id=f"u{number}", k=5) for number in range(5)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("recorded"), "generative", beam_width=8)


@pytest.fixture
def graphs(monkeypatch):
    graphs = RecordingGraphs()
    monkeypatch.setattr(compilation, "graphs_of", lambda device: graphs)
    return graphs


@pytest.fixture
def compile_service(run):
    compile_service = CompileService(run, CONFIG, threads=1)
    yield compile_service
    compile_service.close()


def items_of(answers):
    return [[item.item_id for item in answer.items] for answer in answers]


def test_all_shapes_are_recorded_before_requests_and_none_after(run, graphs, compile_service):
    recommender = Recommender.load(run)
    service = RecommendationService(recommender, 100)
    eager = [service.recommend_all(requests) for requests in (REQUESTS[:1], REQUESTS[:2], REQUESTS)]

    service.compile(compile_service)

    ranking = recommender._ranker.compiled
    recorded = ranking.programs.ready
    assert recorded == [Bucket(1, 32, 8), Bucket(2, 32, 8)]
    assert len(graphs.recordings) == len(recorded)
    ranking.answered.clear()
    for requests, expected in zip((REQUESTS[:1], REQUESTS[:2], REQUESTS), eager, strict=True):
        assert items_of(service.recommend_all(requests)) == items_of(expected)
    assert ranking.answered == {"compiled": 2, "eager": 1}
    assert len(graphs.recordings) == len(recorded)


def test_each_version_is_recorded_before_it_answers(run, graphs, compile_service):
    services = [RecommendationService(Recommender.load(run), 100) for _ in range(2)]
    services[0].compile(compile_service)
    before = len(graphs.recordings)

    services[1].compile(compile_service, waits=False)

    assert len(graphs.recordings) == 2 * before


def test_a_device_that_records_nothing_is_refused_by_name(run, compile_service):
    service = RecommendationService(Recommender.load(run), 100)

    with pytest.raises(InputError, match="cpu records no kernels; leave it out, or serve on cuda or npu"):
        service.compile(compile_service)
