"""Candidates, quotas and diversity as requests ask for them, over HTTP and gRPC, of a generative model."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from tritonclient.grpc import service_pb2

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.events import RequestLogConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.rpc.calls import Call
from rayrec.serve.rpc.service import RpcService
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.runs import make_run

MAX_K = 20


def category(*numbers: int) -> dict[str, list[str]]:
    """Items by their titles, which are a column of the catalog."""
    return {"title": [f"Title of i{number}" for number in numbers]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "generative", beam_width=4)


@pytest.fixture(scope="module")
def client(run):
    with TestClient(load_api(run, ServeConfig(page=False, max_k=MAX_K), PrometheusMeter())) as client:
        yield client


@pytest.fixture(scope="module")
def best(client):
    """The user's best items, by their numbers, as far as an answer goes."""
    answer = client.post("/v1/recommend", json={"user_id": "u3", "k": MAX_K}).json()
    assert answer["control"] is None
    return [int(item["item_id"][1:]) for item in answer["items"]]


def asked(client, status=200, **fields):
    answer = client.post("/v1/recommend", json={"user_id": "u3", **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


def numbers_of(answer):
    return [int(item["item_id"][1:]) for item in answer["items"]]


def test_candidates_are_scored_exactly_and_ranked(client, run):
    recommender = Recommender.load(run)
    candidates = [f"i{number}" for number in range(12)]
    answer = asked(client, candidates=[*candidates, "nobody"], k=12, exclude_seen=False)
    assert answer["control"] == {
        "candidates": "exact",
        "quotas": None,
        "diversity": None,
        "unmet_quotas": [],
    }
    assert (answer["allowed_items"], answer["unknown_filter_items"]) == (12, 1)
    positions = np.array([recommender.dataset.position_by_key(key) for key in candidates])
    exact = recommender.item_log_probs([recommender.query_of_user("u3")], positions[None])[0]
    order = np.argsort(-exact, kind="stable")
    assert [item["item_id"] for item in answer["items"]] == [candidates[place] for place in order]
    assert [item["score"] for item in answer["items"]] == pytest.approx(exact[order].tolist(), abs=1e-4)


def test_quotas_change_what_has_to_change(client, best):
    first, second, last = best[0], best[1], best[-1]
    answer = asked(
        client,
        k=3,
        quotas=[
            {"where": category(first, second), "at_most": 1},
            {"where": category(last), "at_least": 1},
        ],
    )
    assert numbers_of(answer) == [first, best[2], last]
    assert answer["control"]["quotas"] == "exact"


def test_diversity_is_reranking(client, best):
    answer = asked(client, k=4, diversity=0.7)
    assert answer["control"]["diversity"] == "reranked"
    assert numbers_of(answer)[0] == best[0]
    assert len(set(numbers_of(answer))) == 4
    everything = asked(client, k=MAX_K, diversity=0.7, exclude_seen=False)
    assert len(set(numbers_of(everything))) == MAX_K
    assert everything["control"]["diversity"] == "exact", "all of the catalog was chosen among"


def test_without_a_history_popular_items_keep_to_quotas(client):
    popular = client.post("/v1/recommend", json={"k": 3}).json()
    first = numbers_of(popular)[0]
    answer = client.post(
        "/v1/recommend", json={"k": 3, "quotas": [{"where": category(first), "at_most": 0}]}
    ).json()
    assert answer["source"] == "popular"
    assert first not in numbers_of(answer)
    assert answer["control"]["quotas"] == "exact"


def test_the_request_log_has_what_was_asked_for(run, tmp_path):
    settings = ServeConfig(
        page=False, max_k=MAX_K, request_log=RequestLogConfig(folder=str(tmp_path), share=1.0)
    )
    quotas = [{"where": category(1), "at_most": 0}]
    with TestClient(load_api(run, settings, PrometheusMeter())) as logged:
        asked(logged, k=2)
        answer = asked(logged, k=2, candidates=["i1", "i2"], quotas=quotas, diversity=0.5)
    (file,) = tmp_path.rglob("*.parquet")
    plain, controlled = pq.ParquetFile(file).read(["control"])["control"].to_pylist()
    assert plain is None
    assert json.loads(controlled) == {
        "candidates": ["i1", "i2"],
        "quotas": quotas,
        "diversity": 0.5,
        "answer": answer["control"],
    }


def test_rows_with_candidates_of_their_own_have_numbers_of_their_own(client):
    rows = {"name": "candidates", "datatype": "BYTES", "shape": [2, 3]}
    message = {
        "inputs": [
            {"name": "user_id", "datatype": "BYTES", "shape": [2], "data": ["u1", "u2"]},
            rows | {"data": ["i1", "", "", "i1", "i2", "nobody"]},
        ]
    }
    said = client.post("/v2/models/recommend/infer", json=message).json()["parameters"]
    assert json.loads(said["allowed_items"]) == [1, 2]
    assert json.loads(said["unknown_filter_items"]) == [0, 1]
    message["inputs"][1] = rows | {"data": ["i1", "i2", "", "i1", "i3", ""]}
    said = client.post("/v2/models/recommend/infer", json=message).json()["parameters"]
    assert (said["allowed_items"], said["unknown_filter_items"]) == (2, 0)


def test_what_leaves_nothing_is_an_empty_list_that_says_so(client):
    answer = asked(client, candidates=["nobody"])
    assert (answer["items"], answer["source"]) == ([], "none")
    assert (answer["allowed_items"], answer["unknown_filter_items"]) == (0, 1)
    answer = asked(client, filter={"allow": []}, quotas=[{"where": category(1), "at_least": 1}])
    assert (answer["items"], answer["allowed_items"]) == ([], 0)
    assert answer["control"]["unmet_quotas"] == [0]


BAD = [
    ({"quotas": [{"where": category(1)}]}, "quotas.0: says neither at_least nor at_most"),
    (
        {"quotas": [{"where": category(1), "at_least": 3, "at_most": 1}]},
        "quotas.0: at_least 3 items are more than at_most 1",
    ),
    ({"quotas": [{"at_most": 1}]}, "quotas.0.where: field required"),
    ({"quotas": [{"where": {}, "at_most": 1}]}, "quotas.0.where: "),
    (
        {"quotas": [{"where": category(1), "most": 1}]},
        "quotas.0.most: unknown field; known are where, at_least, at_most",
    ),
    (
        {"k": 2, "quotas": [{"where": category(1), "at_least": 3}]},
        "quotas: at least 3 items in all are more than the k = 2 of the list",
    ),
    ({"quotas": [{"where": {"color": "red"}, "at_most": 1}]}, "quotas.0: where: the catalog has no column"),
    (
        {"candidates": [f"i{number}" for number in range(MAX_K + 1)]},
        f"candidates: {MAX_K + 1} items are more than the {MAX_K} of one answer",
    ),
    ({"diversity": 1.5}, "diversity: "),
    ({"beams": 0}, "beams: 0 beams find no item; give at least 1"),
    ({"beams": []}, "beams: 0 numbers; give one for each code of an item"),
    ({"beams": "wide"}, "beams: expected an integer or a list of integers"),
    ({"beams": [8, "wide"]}, "beams: expected an integer or a list of integers"),
    ({"beams": [32] * 9}, "beams: 9 numbers, and an item of this model has "),
    ({"k": 10, "beams": [64, 8]}, "beams: 8 after the last code find no 10 items (k); give at least as many"),
    ({"beam_margin": 0}, "beam_margin: input should be greater than 0"),
    ({"beams": 8, "k": 3, "candidates": ["i1"]}, "beams: candidates are scored exactly"),
]


@pytest.mark.parametrize(("fields", "sentence"), BAD)
def test_bad_control_gets_one_sentence(client, fields, sentence):
    assert sentence in asked(client, status=422, **fields)["error"]


def test_beams_of_a_request_find_what_a_model_with_as_many_finds(client, best):
    # The model has 4 beams, and twenty items are found with 32 of them.
    assert numbers_of(asked(client, k=2, beams=32)) == best[:2]
    assert numbers_of(asked(client, k=2, beams=[32, 32])) == best[:2]
    assert numbers_of(asked(client, k=2, beams=4)) == numbers_of(asked(client, k=2))
    # More than there are items are as many as there are items.
    assert numbers_of(asked(client, k=2, beams=10**9)) == best[:2]


def test_a_margin_leaves_out_what_is_far_less_probable(client, best):
    found = numbers_of(asked(client, k=MAX_K, beams=64, beam_margin=1e-6))
    # What is left are items below the most probable prefix.
    assert 0 < len(found) < MAX_K
    assert found == [item for item in best if item in found]
    assert numbers_of(asked(client, k=MAX_K, beams=64, beam_margin=1e6)) == best


def test_requests_of_different_beams_are_answered_together_as_alone(client, run):
    service = RecommendationService(Recommender.load(run), MAX_K)
    requests = [
        RecommendRequest(user_id=f"u{number}", **fields)
        for number, fields in enumerate(
            ({}, {"beams": 32, "k": 12}, {"beams": [2, 8, 6], "k": 5}, {"beam_margin": 0.7, "k": 7}, {"k": 3})
        )
    ]
    together = service.recommend_all(requests)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = service.recommend_all([request])
        assert [item.item_id for item in answer.items] == [item.item_id for item in alone.items]
        scores, expected = ([item.score for item in each.items] for each in (answer, alone))
        assert scores == pytest.approx(expected, abs=1e-5)
    assert len({service.group_of(request) for request in requests}) == 1


def test_beams_of_a_model_that_has_none_are_refused(tmp_path):
    with TestClient(load_api(make_run(tmp_path), ServeConfig(page=False), PrometheusMeter())) as client:
        for fields in ({"beams": 8, "k": 2}, {"beam_margin": 1.0}):
            sentence = asked(client, status=422, **fields)["error"]
            assert sentence.startswith(f"{next(iter(fields))}: this service's model scores every item")


def test_diversity_without_semantic_ids_is_refused(tmp_path):
    with TestClient(load_api(make_run(tmp_path), ServeConfig(page=False), PrometheusMeter())) as client:
        sentence = asked(client, status=422, diversity=0.5)["error"]
    assert sentence.startswith("diversity: this service's model has no semantic IDs")


class TestTensors:
    def infer(self, client, candidates=None, **parameters):
        message = service_pb2.ModelInferRequest(model_name="recommend")
        message.inputs.add(name="user_id", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"u3")
        if candidates is not None:
            given = message.inputs.add(name="candidates", datatype="BYTES", shape=[1, len(candidates)])
            given.contents.bytes_contents.extend(candidates)
        for name, value in parameters.items():
            field = {int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
            setattr(message.parameters[name], field, value)
        service = RpcService.of(client.app, ServeConfig(grpc_port=1))
        call = service.answer("ModelInfer", message.SerializeToString(), Call({}, "127.0.0.1"))
        reply = asyncio.run(call)
        if reply.code is not grpc.StatusCode.OK:
            return reply.details
        answer = service_pb2.ModelInferResponse.FromString(reply.content)
        outputs = {each.name: each.contents for each in answer.outputs}
        items = [item.decode() for item in outputs["item_id"].bytes_contents]
        if "control" not in answer.parameters:
            return items
        return items, json.loads(answer.parameters["control"].string_param)

    def test_candidates_are_an_input(self, client):
        items, (control,) = self.infer(client, [b"i1", b"i2", b"i5", b""], k=3)
        by_http = asked(client, candidates=["i1", "i2", "i5"], k=3)
        assert items[: len(by_http["items"])] == [item["item_id"] for item in by_http["items"]]
        assert control == by_http["control"]

    def test_quotas_and_diversity_are_parameters(self, client, best):
        quotas = [{"where": category(best[0]), "at_most": 0}]
        items, (control,) = self.infer(client, k=2, quotas=json.dumps(quotas))
        assert items == [f"i{best[1]}", f"i{best[2]}"]
        assert control["quotas"] == "exact"
        _, (control,) = self.infer(client, k=2, diversity=0.5)
        assert control["diversity"] == "reranked"

    def test_beams_are_parameters(self, client, best):
        for beams in (32, "[32, 24]"):
            items = self.infer(client, k=2, beams=beams, diversity=0.0, beam_margin=30.0)
            assert items == [f"i{number}" for number in best[:2]]
        assert "row 0: beams: 0 beams find no item" in self.infer(client, beams=0)
        assert "parameters: beams: " in self.infer(client, beams="[1,")

    def test_quotas_that_are_none_are_refused(self, client):
        assert self.infer(client, quotas="[{") == "parameters: quotas: the body is not valid JSON"
        assert "row 0: quotas.0: says neither" in self.infer(
            client, quotas=json.dumps([{"where": {"title": "x"}}])
        )
