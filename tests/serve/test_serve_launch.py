import os
import socket

import numpy as np
import pytest
from ray import serve
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError, MachineError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.launch import serving
from rayrec.serve.on_ray.ray_ingress import RunningServe, of_session, sticky_routing
from rayrec.serve.on_ray.serving import joined
from tests.helpers import http
from tests.helpers.http import fetch
from tests.helpers.ranking import prepared_clicks, ranker_run
from tests.helpers.runs import make_run
from tests.models.keras.programs import needs_tensorflow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("serve"))


def start(run, **settings):
    with serving(run, ServeConfig(**settings)):
        raise AssertionError("the service was started")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        start(tmp_path)


def test_a_changed_snapshot_is_refused(tmp_path, free_port):
    run = make_run(tmp_path)
    (weights,) = run.glob("snapshots/*/dense.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(InputError, match=r"dense\.safetensors: its checksum differs"):
        start(run, port=free_port)


def test_a_port_in_use_is_refused(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            MachineError, match=f"port {port} on 127.0.0.1 is in use; choose another with --port"
        ):
            start(run, port=port)


def test_a_host_that_is_not_of_this_machine_is_refused(run, free_port):
    with pytest.raises(InputError, match=f"cannot listen on port {free_port} of 192.0.2.1: "):
        start(run, host="192.0.2.1", port=free_port)


def test_a_ranking_model_that_cannot_rank_is_refused(run, tmp_path):
    ranker = ranker_run(prepared_clicks(tmp_path / "clicks", origins={}), tmp_path / "ranker")
    with pytest.raises(InputError, match="nothing says what its columns are"):
        start(run, ranking=RankingConfig(run=str(ranker), objective={"click": 1}))


def test_an_unknown_device_is_refused():
    with pytest.raises(InputError, match="there is no device 'abacus'"):
        ServeConfig.parse({"device": "abacus"})


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_service_answers_like_the_model_and_leaves_nothing_behind(run, free_port):
    recommender = Recommender.load(run)
    dataset = recommender.dataset
    query = Query(dataset.history_of("u3"), dataset.user_by_key("u3"))
    (expected,) = recommender.recommend([query], 3)

    grpc_port = http.free_port()
    with serving(run, ServeConfig(port=free_port, grpc_port=grpc_port)) as url:
        assert url == f"http://127.0.0.1:{free_port}"
        with InferenceServerClient(f"127.0.0.1:{grpc_port}") as calls:
            given = InferInput("user_id", [1], "BYTES")
            given.set_data_from_numpy(np.array(["u3"], dtype=object))
            called = calls.infer("recommend", [given], request_id="7", parameters={"k": 3})
            with pytest.raises(InferenceServerException, match="there is no model 'other'") as no_model:
                calls.infer("other", [given])
            assert calls.get_inference_statistics().model_stats[0].inference_count >= 1
        ready, health = fetch(f"{url}/health/ready")
        status, answer = fetch(f"{url}/v1/recommend", {"user_id": "u3", "k": 3})
        refused, error = fetch(f"{url}/v1/recommend", {"k": 0})
        with pytest.raises(InputError, match="serves an application 'rayrec' already"):
            start(run, port=free_port + 1)

    assert (ready, health["status"], health["model"]) == (
        200,
        "ready",
        {"run": "run", "step": 3, "version": None},
    )
    assert (status, answer["source"]) == (200, "model")
    assert called.as_numpy("item_id").tolist() == [[item.item_key.encode() for item in expected]]
    assert called.get_response().id == "7"
    assert no_model.value.status() == "StatusCode.NOT_FOUND"
    assert [item["item_id"] for item in answer["items"]] == [item.item_key for item in expected]
    assert [item["title"] for item in answer["items"]] == [item.title for item in expected]
    assert [item["score"] for item in answer["items"]] == pytest.approx([item.score for item in expected])
    assert (refused, error) == (422, {"error": "k: input should be greater than or equal to 1"})
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", free_port)) != 0


def test_a_serve_that_runs_has_no_calls_set_up():
    running = RunningServe("127.0.0.1", 8000, False, {})
    with pytest.raises(InputError, match="what it answers over gRPC is set when it starts"):
        joined(ServeConfig(grpc_port=8001), running)


def test_calls_need_a_port_of_their_own_and_messages_of_their_own():
    with pytest.raises(InputError, match="gRPC needs one of its own"):
        ServeConfig.parse({"port": 8000, "grpc_port": 8000})
    with pytest.raises(InputError, match="the gateway of --services forwards messages of HTTP"):
        ServeConfig.parse({"grpc_port": 8001, "services": {}})


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_serve_that_runs_is_joined_and_left_as_it_was(run, free_port, caplog):
    """Whose other application sends calls of a session to one replica, as ours do."""

    class Other:  # not of this module, which workers cannot import
        async def __call__(self, request):
            return "other"

        def process(self):
            return os.getpid()

    serve.start(http_options={"host": "127.0.0.1", "port": free_port})
    try:
        options = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}, **sticky_routing()}
        other = serve.deployment(Other, **options).bind()
        handle = serve.run(other, name="other", route_prefix="/other")
        with serving(run, ServeConfig(port=free_port + 1)) as url:
            status, answer = fetch(f"{url}/v1/recommend", {"user_id": "u3", "k": 3})
        left = serve.status().applications
        asked = [
            [of_session(handle, f"session {number}").process.remote().result() for number in range(20)]
            for _ in range(2)
        ]
        serve.run(other, name="other", route_prefix="/")
        with pytest.raises(InputError, match="its application 'other' has all routes"):
            start(run, port=free_port)
    finally:
        serve.shutdown()

    assert url == f"http://127.0.0.1:{free_port}"
    assert (status, len(answer["items"])) == (200, 3)
    assert f"not in force: --port {free_port + 1}" in caplog.text
    assert list(left) == ["other"]
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 2


def test_a_serve_that_runs_has_to_have_the_tls_that_is_wanted():
    running = RunningServe("0.0.0.0", 8000, has_tls=False, routes={})
    wanted = ServeConfig(tls={"certificate": "chain.pem", "key": "key.pem"})

    with pytest.raises(InputError, match=r"at 0\.0\.0\.0:8000, without TLS"):
        joined(wanted, running)

    there = joined(ServeConfig(), running)
    assert (there.host, there.shows_page) == ("0.0.0.0", False), "whoever reaches it would see histories"


KERAS = {"name": "keras", "builder": "tests.models.keras.networks:mlp", "dim": 4}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("model", [None, pytest.param(KERAS, marks=needs_tensorflow, id="keras")])
def test_a_service_with_a_ranking_stage_answers_like_the_stage(run, tmp_path, free_port, model):
    """The stage's model may be of the other framework than the recommender."""
    origins = {"user": "user", "item": "item", "sex": "item.title", "history": "history"}
    ranker = ranker_run(prepared_clicks(tmp_path / "clicks", origins=origins), tmp_path / "ranker", model)
    ranking = RankingConfig(run=str(ranker), objective={"click": 1, "like": 0.5}, candidates=20)
    recommender = Recommender.load(run)
    stage = RankingStage.load(recommender, ranking)
    (expected,) = stage.answer([recommender.query_of_user("u3")], 3)

    with serving(run, ServeConfig(port=free_port, ranking=ranking)) as url:
        status, answer = fetch(f"{url}/v1/recommend", {"user_id": "u3", "k": 3})
        _, plain = fetch(f"{url}/v1/recommend", {"user_id": "u3", "k": 3, "rank": False})

    assert status == 200
    assert [item["item_id"] for item in answer["items"]] == [item.item_key for item in expected.items]
    for item, own in zip(answer["items"], expected.items, strict=True):
        assert item["score"] == pytest.approx(own.score)
        assert item["ranking"]["score"] == pytest.approx(own.ranking.score)
        assert item["ranking"]["probabilities"] == pytest.approx(own.ranking.probabilities)
    assert plain["ranker"] is None
