"""A service that ranks by recordings (`--graphs`), with a stand-in for a device's graphs."""

from __future__ import annotations

import pytest

from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.errors import InputError
from rayrec.serve.app import loading
from rayrec.serve.app.loading import check_service, load_api
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.compile import CompileConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine import compilation
from rayrec.serve.engine.compilation import CompileService
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.web.pages import RecentActivity
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.recorded_graphs import RecordingGraphs
from tests.helpers.runs import make_run, trained

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
    # 10 items, the default, take 16 beams here, where the model has 8.
    assert recorded == [Bucket(rows, 32, width) for rows in (1, 2) for width in (8, 16)]
    assert len(graphs.recordings) == len(recorded)
    ranking.answered.clear()
    for requests, expected in zip((REQUESTS[:1], REQUESTS[:2], REQUESTS), eager, strict=True):
        assert items_of(service.recommend_all(requests)) == items_of(expected)
    assert ranking.answered == {"compiled": 2, "eager": 1}
    assert len(graphs.recordings) == len(recorded)


def test_each_version_is_recorded_before_it_answers_and_replays_its_own_weights(
    run, graphs, compile_service, tmp_path
):
    other = trained(RunFolder.open(run).config.model_copy(update={"seed": 7}), tmp_path / "other")
    services = [RecommendationService(Recommender.load(each), 100) for each in (run, other)]
    eager = [items_of(service.recommend_all(REQUESTS[:2])) for service in services]
    assert eager[0] != eager[1]
    services[0].compile(compile_service)
    before = len(graphs.recordings)

    services[1].compile(compile_service, waits=False)

    assert len(graphs.recordings) == 2 * before
    for version in (0, 1, 0, 1):
        assert items_of(services[version].recommend_all(REQUESTS[:2])) == eager[version]
    for service in services:
        assert service.recommender._ranker.compiled.answered["compiled"] >= 2


@pytest.mark.parametrize(
    "load", [check_service, lambda run, config: load_api(run, config, RecentActivity(()))]
)
def test_a_device_that_records_nothing_is_refused_by_name_before_anything_is_loaded(run, load, monkeypatch):
    monkeypatch.setattr(loading, "_open", lambda *arguments, **more: pytest.fail("it was loaded"))

    with pytest.raises(InputError, match="cpu records no kernels; leave it out, or serve on cuda or npu"):
        load(run, ServeConfig(compile=CONFIG))


def test_widths_of_defaults_of_declared_items_and_of_fewer_beams_are_recorded(run, graphs):
    recommender = Recommender.load(run)
    service = RecommendationService(recommender, 100)
    config = CONFIG.model_copy(update={"ks": (20,)})
    compile_service = CompileService(run, config, threads=1, fewer_beams=(6, 3))
    asked = {k: [RecommendRequest(user_id="u1", k=k)] for k in (5, 12, 20)}
    eager = {k: items_of(service.recommend_all(requests)) for k, requests in asked.items()}
    ranking = compile_service.give(recommender)
    service.warm_up()

    compile_service.warm_up(ranking, (5,))
    compile_service.close()

    widths = [32, 8, 6, 5]  # of 5 items there are 5 beams at least
    assert ranking.programs.ready == sorted(Bucket(rows, 32, width) for rows in (1, 2) for width in widths)
    for k, is_recorded in ((20, True), (12, False), (5, True)):
        ranking.answered.clear()
        assert items_of(service.recommend_all(asked[k])) == eager[k]
        assert ranking.answered == ({"compiled": 1} if is_recorded else {"eager": 1})


def test_beams_under_load_are_those_of_the_steps_and_actions():
    steps = [{"do": "fewer_beams", "to": 20, "enter": 0.5, "leave": 0.4}]
    steps += [{"do": "no_ranking", "enter": 0.6, "leave": 0.5}]
    assert AdmissionConfig.parse({"degrade": {"steps": steps}}).fewer_beams == (20,)
    actions = [{"name": "full"}, {"name": "few", "max_beams": 10}, {"name": "popular", "popular": True}]
    assert AdmissionConfig.parse({"allocate": {"curves": "curves.json", "actions": actions}}).fewer_beams == (
        10,
    )
    with pytest.raises(InputError, match="numbers of items are at least 1"):
        CompileConfig.parse({"ks": [0]})


def test_recorded_shapes_that_batches_had_are_left_to_the_next_replica(run, graphs, compile_service):
    recommender = Recommender.load(run)
    service = RecommendationService(recommender, 100)
    service.compile(compile_service)

    service.recommend_all(REQUESTS[:2])

    ((fingerprint, asked),) = compile_service.asked.items()
    assert fingerprint == recommender.ranking_model.fingerprint
    assert Bucket(2, 32, 8) in asked
    assert asked.keys() <= {Bucket(1, 32, 8), Bucket(2, 32, 8)}
