"""Gateway, features, sparse and dense part as deployments of Ray Serve."""

import time

import pytest
from ray import serve

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.serve.config.events import EventsConfig, LogConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.launch import serving
from rayrec.serve.on_ray.serving import APPLICATION
from tests.helpers.http import fetch
from tests.helpers.runs import make_run

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return [
        make_run(tmp_path_factory.mktemp("main"), item_matrix="sparse", user_embedding=True),
        make_run(tmp_path_factory.mktemp("new"), "generative"),
    ]


def services_of(new):
    cpus = {"cpus": 0.1}
    return {
        "gateway": cpus,
        "features": cpus,
        "sparse": cpus,
        "dense": cpus,
        "targets": {"new": {"run": str(new)}},
        "routing": {"experiment": "e1", "weights": {"main": 0.5, "new": 0.5}},
    }


def top(recommender, user):
    (items,) = recommender.recommend([recommender.query_of_user(user)], 3)
    return [(item.item_key, item.score) for item in items]


@pytest.mark.usefixtures("ray_cluster")
def test_each_target_answers_as_its_model_and_knows_what_users_did_a_moment_ago(runs, tmp_path, free_port):
    recommenders = dict(zip(("main", "new"), map(Recommender.load, runs), strict=True))
    config = ServeConfig.parse(
        {
            "port": free_port,
            "services": services_of(runs[1]),
            "events": EventsConfig(log=LogConfig(folder=str(tmp_path / "log"), roll_s=3600)),
        }
    )
    answered = {}
    with serving(runs[0], config) as url:
        for user in range(12):
            status, answer = fetch(f"{url}/v1/recommend", {"user_id": f"u{user}", "k": 3})
            assert status == 200
            answered[f"u{user}"] = answer
        assert fetch(f"{url}/v1/recommend", {"k": 0})[0] == 422
        assert fetch(f"{url}/openapi.json")[1]["info"]["title"] == "RayRec"
        posted = {"user_id": "somebody new", "item_id": "i3", "timestamp": time.time()}
        taken = fetch(f"{url}/v1/events", posted)
        _, after = fetch(f"{url}/v1/recommend", {"user_id": "somebody new", "k": 3})
        deployed = set(serve.status().applications[APPLICATION].deployments)

    assert {answer["model"]["run"] for answer in answered.values()} == {"run"}
    which = set()
    for user, answer in answered.items():
        found = [(item["item_id"], pytest.approx(item["score"], abs=1e-5)) for item in answer["items"]]
        fits = {name for name, recommender in recommenders.items() if top(recommender, user) == found}
        assert len(fits) == 1, user
        which |= fits
    assert which == {"main", "new"}

    assert taken == (200, {"taken": 1, "repeated": 0, "unknown_items": 0})
    assert after["source"] == "model"
    assert "i3" not in {item["item_id"] for item in after["items"]}
    (logged,) = (tmp_path / "log").rglob("*.parquet")  # what waited was written at the end
    assert logged.stat().st_size > 0
    assert deployed == {"gateway", "features", "sparse", "dense", "sparse.new", "dense.new"}
