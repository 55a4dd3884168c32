"""Several models in one service: each answers by its name, the first what names none."""

from __future__ import annotations

import hashlib
import re
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
import yaml
from fastapi.testclient import TestClient
from tritonclient.utils import InferenceServerException

from rayrec.cli.serving import serve_config
from rayrec.pipelines.inference.answers import Recommendation
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError, MachineError
from rayrec.serve.app import loading
from rayrec.serve.app.loading import load_models
from rayrec.serve.config.models import INHERITED, OF_THE_SERVICE, ModelSettings, ModelsFile
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.launch.launch import serving
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.web.models import together
from tests.helpers import http
from tests.helpers.runs import make_run
from tests.serve.fake_recommender import FakeRecommender, HeldService, api_of, listening
from tests.serve.rpc.answering import answering

TOKEN = "s3cret-of-enough-letters"
ANN = {"user_id": "ann", "k": 2}


class Books(FakeRecommender):
    """Names what it recommends "b0", "b1", ..."""

    run = "books"
    committed_step = 6

    def _answer(self, *asked):
        answer = super()._answer(*asked)
        items = [Recommendation(f"b{place}", None, each.score) for place, each in enumerate(answer.items)]
        return type(answer)(items, answer.num_read, answer.num_unread)


def two_models(films=None, **more):
    """The application of films, which come first, and books, and their meters."""
    services = films or RecommendationService(FakeRecommender(), 50), RecommendationService(Books(), 50)
    return together(
        [
            api_of(service, model_name=name, meters=[PrometheusMeter(name)], **more)
            for service, name in zip(services, ("films", "books"), strict=True)
        ]
    )


@pytest.fixture(scope="module")
def api():
    return two_models()


@pytest.fixture(scope="module")
def client(api):
    with TestClient(api) as client:
        yield client


@pytest.fixture(scope="module")
def addresses(api):
    with answering(two_models()) as addresses:
        yield addresses


@pytest.fixture(params=["http", "grpc"])
def triton(request, addresses):
    module = getattr(tritonclient, request.param)
    client = module.InferenceServerClient(getattr(addresses, request.param))
    as_json = {} if request.param == "http" else {"as_json": True}

    def asked(method, *arguments):
        return getattr(client, method)(*arguments, **as_json)

    yield SimpleNamespace(client=client, module=module, asked=asked)
    client.close()


def items(answer):
    assert answer.status_code == 200, answer.text
    return [item["item_id"] for item in answer.json()["items"]]


def test_each_model_answers_by_its_name_and_the_first_without(client):
    assert items(client.post("/v1/recommend", json=ANN)) == ["m0", "m1"]
    assert items(client.post("/models/films/v1/recommend", json=ANN)) == ["m0", "m1"]
    assert items(client.post("/models/books/v1/recommend", json=ANN)) == ["b0", "b1"]
    assert client.get("/models/books/health/ready").json()["model"]["run"] == "books"
    assert client.get("/health/ready").json()["model"]["run"] == "films"


def test_a_model_that_is_not_there_is_not_found(client):
    for path in ("/models/songs/v1/recommend", "/models/books", "/models/"):
        assert client.post(path, json=ANN).status_code == 404
    answer = client.post("/v2/models/songs/infer", json={"inputs": []})
    assert (answer.status_code, answer.json()) == (
        404,
        {"error": "there is no model 'songs'; those here are films, books"},
    )


def test_a_model_below_its_own_path_is_a_service_of_it_alone(client):
    stats = client.get("/models/books/v2/models/stats").json()["model_stats"]
    assert [each["name"] for each in stats] == ["books"]
    assert client.get("/models/books/v2/models/films").json() == {
        "error": "there is no model 'films'; the one here is 'books'"
    }
    assert [each["name"] for each in client.post("/v2/repository/index").json()] == ["films", "books"]


def test_each_model_has_a_description_of_its_own(client):
    page = client.get("/models/books/docs").text
    assert "'/models/books/openapi.json'" in page
    for path in re.findall(r'(?:src|href)="(/[^"]+\.(?:js|css))"', page):
        assert client.get(path).status_code == 200, path
    assert client.get("/models/books/openapi.json").json()["servers"] == [{"url": "/models/books"}]
    assert "servers" not in client.get("/openapi.json").json()


def test_tritons_client_finds_and_asks_each_model(triton):
    client = triton.client
    index = triton.asked("get_model_repository_index")
    index = index["models"] if isinstance(index, dict) else index
    assert [(each["name"], each["version"], each["state"]) for each in index] == [
        ("films", "100", "READY"),
        ("books", "7", "READY"),
    ]
    assert client.is_model_ready("films")
    assert client.is_model_ready("books", "7")
    assert not client.is_model_ready("books", "100")
    assert not client.is_model_ready("recommend")
    metadata = triton.asked("get_model_metadata", "books")
    assert (metadata["name"], metadata["versions"]) == ("books", ["7"])
    config = triton.asked("get_model_config", "books")
    assert config.get("config", config)["name"] == "books"

    user = triton.module.InferInput("user_id", [1], "BYTES")
    user.set_data_from_numpy(np.array(["ann"], dtype=object))
    for name, version, prefix in (("books", "7", b"b"), ("films", "", b"m"), ("books", "", b"b")):
        answer = client.infer(name, [user], model_version=version)
        assert answer.as_numpy("item_id")[0, 0] == prefix + b"0"
        response = answer.get_response()
        said = response["model_name"] if isinstance(response, dict) else response.model_name
        assert said == name
    with pytest.raises(
        InferenceServerException, match="there is no model 'songs'; those here are films, books"
    ):
        client.infer("songs", [user])

    of_all = triton.asked("get_inference_statistics")["model_stats"]
    assert [each["name"] for each in of_all] == ["films", "books"]
    (of_books,) = triton.asked("get_inference_statistics", "books")["model_stats"]
    assert of_books == of_all[1]
    assert int(of_books["inference_count"]) >= 2 * int(of_all[0]["inference_count"]) > 0


def test_a_model_that_is_full_refuses_and_the_other_answers():
    held = HeldService()
    api = two_models(films=held, max_waiting=1)
    with listening(api) as address, HeldService.asking(address, "/v1/recommend", ANN) as first:
        held.wait_until_asked(address, 1)
        try:
            with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
                assert client.post("/v1/recommend", json=ANN).status_code == 503
                assert client.post("/v2/models/films/infer", json={}).status_code == 503
                assert items(client.post("/models/books/v1/recommend", json=ANN)) == ["b0", "b1"]
        finally:
            held.let.set()
    assert [answer.status_code for answer in first] == [200]


def test_metrics_say_which_model_they_are_of():
    api = two_models()
    with TestClient(api) as client:
        client.post("/v1/recommend", json=ANN)
        for _ in range(2):
            client.post("/models/books/v1/recommend", json=ANN)
        page = client.get("/metrics").text
        own = client.get("/models/books/metrics").text
    counted = 'rayrec_requests_total{model="%s",route="/v1/recommend",status="200"} %.1f'
    assert counted % ("films", 1) in page
    assert counted % ("books", 2) in page
    assert 'rayrec_serving_model_step{model="books"} 7.0' in page
    assert page.count("# TYPE rayrec_requests_total counter") == 1
    assert 'model="films"' not in own
    assert counted % ("books", 2) in own


def test_calls_over_grpc_are_measured_by_model(addresses):
    with tritonclient.grpc.InferenceServerClient(addresses.grpc) as client:
        client.get_model_metadata("books")
    page = httpx.get(f"http://{addresses.http}/metrics", trust_env=False).text
    route = "/inference.GRPCInferenceService/ModelMetadata"
    assert f'rayrec_requests_total{{model="books",route="{route}",status="200"}}' in page


def test_the_token_is_asked_for_whichever_model_is_named():
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    known = {"Authorization": f"Bearer {TOKEN}"}
    with (
        answering(two_models(), token_sha256=digest) as addresses,
        httpx.Client(base_url=f"http://{addresses.http}", trust_env=False) as client,
        tritonclient.grpc.InferenceServerClient(addresses.grpc) as calls,
    ):
        for path in ("/v1/recommend", "/models/books/v1/recommend"):
            assert client.post(path, json=ANN).status_code == 401
            assert client.post(path, json=ANN, headers=known).status_code == 200
        assert client.get("/v2/models/books").status_code == 401
        assert client.get("/models/books/health/live").status_code == 200
        with pytest.raises(InferenceServerException, match="needs its token"):
            calls.get_model_metadata("books")
        assert calls.get_model_metadata("books", headers={"authorization": f"Bearer {TOKEN}"}).name == "books"


def test_all_models_are_closed_when_the_service_stops():
    closed = []
    applications = [
        api_of(
            RecommendationService(FakeRecommender(), 50),
            model_name=name,
            on_close=[lambda name=name: closed.append(name)],
        )
        for name in ("films", "books")
    ]
    with TestClient(together(applications)):
        assert closed == []
    assert closed == ["books", "films"]


def settings(*beside, **more):
    return ServeConfig.parse({"models": list(beside), **more})


@pytest.mark.parametrize(
    ("beside", "more", "sentence"),
    [
        (
            [{"name": "recommend", "run": "r"}],
            {},
            "called 'recommend'; give each a name of its own",
        ),
        ([{"name": "a", "run": "r"}, {"name": "a", "run": "s"}], {}, "two of them are called 'a'"),
        ([{"name": "a/b", "run": "r"}], {}, "1 to 64 letters, digits, .* got 'a/b'"),
        ([{"name": "", "run": "r"}], {}, "1 to 64 letters, digits, .* got ''"),
        ([{"name": "stats", "run": "r"}], {}, "'stats' is a path of the service itself"),
        ([{"run": "r"}], {}, r"the setting 'models\.0\.name' is missing"),
        (
            [{"name": "a", "run": "r", "port": 1}],
            {},
            "models: port of 'a' is of the whole service, and not of one",
        ),
        ([{"name": "a", "run": "r"}], {"services": {}}, "leave out --models, or --services"),
        (
            [{"name": "a", "run": "r"}],
            {"max_replicas": 2},
            "by the load of one model; leave out",
        ),
        (
            [{"name": "a", "run": "r", "prefix_cache_mib": 1, "compile": {}}],
            {},
            "models: a: compiled programs read whole histories",
        ),
        (
            [{"name": "a", "run": "r", "request_log": {"folder": "log"}}],
            {"request_log": {"folder": "log"}},
            "two of them write to 'log'; give each a folder of its own",
        ),
        (
            [{"name": "a", "run": "r", "warm_start": {"folder": "./log/"}}],
            {"request_log": {"folder": "log"}},
            "two of them write to 'log'; give each a folder of its own",
        ),
        (
            [{"name": "a", "run": "r", "request_log": {"folder": "s3://bucket/log/"}}],
            {"request_log": {"folder": "s3://bucket/log"}},
            "two of them write to 's3://bucket/log'; give each a folder of its own",
        ),
    ],
)
def test_what_cannot_be_of_several_models_is_refused(beside, more, sentence):
    with pytest.raises(InputError, match=sentence):
        settings(*beside, **more)


def test_a_model_has_the_settings_of_the_first_that_do_not_depend_on_its_data():
    config = settings(
        {"name": "a", "run": "r", "threads": 3, "max_waiting": 5},
        {"name": "b", "run": "s", "snapshot": "last"},
        threads=2,
        max_k=7,
        max_waiting=4,
        snapshot="previous",
        token_sha256="0" * 64,
        request_log={"folder": "log"},
    )
    a, b = config.beside["a"], config.beside["b"]
    assert (a.name, a.threads, a.max_k, a.max_waiting, a.snapshot) == ("a", 3, 7, 5, "best")
    assert (b.threads, b.max_waiting, b.snapshot, b.request_log) == (2, 4, "last", None)
    assert a.token_sha256 == b.token_sha256 == "0" * 64
    assert (config.num_threads, config.max_in_flight) == (7, 13)


def test_each_setting_is_of_a_model_or_of_the_service():
    assert set(OF_THE_SERVICE) == ServeConfig.model_fields.keys() - ModelSettings.model_fields.keys()
    assert set(INHERITED) < ModelSettings.model_fields.keys()


def test_the_command_reads_the_models_from_a_file(tmp_path):
    import typer

    from rayrec.cli.app import app

    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"name": "films", "models": [{"name": "books", "run": "runs/books"}]}))
    command = typer.main.get_command(app).commands["serve"]
    given = command.make_context("serve", ["runs/films", "--models", str(file)]).params
    config = serve_config(given)
    assert (config.name, [(each.name, each.run) for each in config.models]) == (
        "films",
        [("books", "runs/books")],
    )
    with pytest.raises(InputError, match="models"):
        ModelsFile.parse({"name": "films", "models": []})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {
        name: make_run(tmp_path_factory.mktemp(name), model)
        for name, model in (("films", "sasrec"), ("books", "hstu"))
    }


def expected_of(run):
    recommender = Recommender.load(run)
    (found,) = recommender.recommend([recommender.query_of_user("u1")], 3)
    return [item.item_key for item in found]


def test_two_runs_answer_in_one_process_each_with_its_threads_and_log(runs, tmp_path, free_port):
    config = ServeConfig.parse(
        {
            "port": free_port,
            "single_process": True,
            "name": "films",
            "request_log": {"folder": str(tmp_path / "films"), "share": 1.0},
            "models": [
                {
                    "name": "books",
                    "run": str(runs["books"]),
                    "threads": 2,
                    "request_log": {"folder": str(tmp_path / "books"), "share": 1.0},
                }
            ],
        }
    )
    before, threads = threading.active_count(), torch.get_num_threads()
    try:
        with serving(runs["films"], config) as url, httpx.Client(base_url=url, trust_env=False) as client:
            for name in ("films", "books"):
                answer = client.post(f"/models/{name}/v1/recommend", json={"user_id": "u1", "k": 3})
                assert items(answer) == expected_of(runs[name])
            assert 'rayrec_batch_requests_count{model="books"} 1.0' in client.get("/metrics").text
    finally:
        torch.set_num_threads(threads)
    for name in ("films", "books"):
        table = pq.read_table(tmp_path / name)
        assert table.column("model").to_pylist() == [name]
        assert table.column("recommended").to_pylist() == [expected_of(runs[name])]
    assert threading.active_count() <= before + 2, "batchers stay, as of one model"


def test_a_model_that_does_not_exist_is_refused_by_name(runs, tmp_path):
    config = settings({"name": "books", "run": str(tmp_path)}, single_process=True)
    with pytest.raises(InputError, match=f"models: books: {re.escape(str(tmp_path))}.*run"):
        load_models(runs["films"], config, lambda run, name: PrometheusMeter(name))


def test_what_a_machine_lacks_for_one_model_is_no_wrong_input(runs, monkeypatch):
    def lacks(run, config):
        raise MachineError("no such device here")

    monkeypatch.setattr(loading, "device_of", lacks)
    config = settings({"name": "books", "run": str(runs["films"])}, single_process=True)
    with pytest.raises(MachineError, match="models: books: no such device here"):
        load_models(runs["films"], config, lambda run, name: PrometheusMeter(name))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_replicas_of_ray_serve_hold_all_models(runs, free_port):
    grpc_port = http.free_port()
    config = ServeConfig.parse(
        {
            "port": free_port,
            "grpc_port": grpc_port,
            "name": "films",
            "models": [{"name": "books", "run": str(runs["books"])}],
        }
    )
    user = tritonclient.grpc.InferInput("user_id", [1], "BYTES")
    user.set_data_from_numpy(np.array(["u1"], dtype=object))
    with (
        serving(runs["films"], config) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=30) as client,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as calls,
    ):
        for name in ("films", "books"):
            answer = client.post(f"/models/{name}/v1/recommend", json={"user_id": "u1", "k": 3})
            assert items(answer) == expected_of(runs[name])
            found = calls.infer(name, [user], parameters={"k": 3}).as_numpy("item_id")
            assert [item.decode() for item in found[0]] == expected_of(runs[name])
        index = client.post("/v2/repository/index").json()
        assert [each["name"] for each in index] == ["films", "books"]
        assert [each.name for each in calls.get_model_repository_index().models] == ["films", "books"]
        assert client.get("/models/books/health/ready").json()["status"] == "ready"
