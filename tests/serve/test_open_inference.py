"""The Open Inference Protocol, spoken by Triton's own client over HTTP."""

import gzip
import json
import zlib

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from rayrec.platform.errors import UnavailableError
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.engine.batching import DEFAULT_PRIORITY, Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.protocols.open_inference import OUTPUTS
from rayrec.serve.protocols.tensor_codec import HEADER_LENGTH
from rayrec.serve.wire.request_body import MAX_BODY_BYTES
from tests.helpers.examples import examples
from tests.serve.fake_recommender import FakeRecommender, HeldService, api_of, listening

INFER = "/v2/models/recommend/infer"
LOWEST = float(np.finfo(np.float32).min)


@pytest.fixture(scope="module")
def recommender():
    return FakeRecommender()


@pytest.fixture(scope="module")
def address(recommender):
    with listening(api_of(RecommendationService(recommender, max_k=50), max_waiting=8)) as address:
        yield address


@pytest.fixture
def triton(address):
    client = InferenceServerClient(address)
    yield client
    client.close()


@pytest.fixture
def client(address):
    with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
        yield client


def tensor(name, values, datatype="BYTES", binary=True):
    values = np.array(values, dtype=object if datatype == "BYTES" else np.dtype(datatype.lower()))
    given = InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values, binary_data=binary)
    return given


def wanted(name, binary):
    return InferRequestedOutput(name, binary_data=binary)


def json_input(name, data, shape, datatype="BYTES", **more):
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **more}


HISTORY = json_input("history", ["alien"], [1, 1])


def refused(client, body, status=400, **headers):
    """The sentence of an answer in the protocol's form."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(INFER, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    return answer.json()["error"]


def test_health_and_metadata_are_what_clients_ask_for(triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("recommend")
    assert triton.is_model_ready("recommend", "100")
    assert not triton.is_model_ready("other")
    assert triton.get_server_metadata()["extensions"] == [
        "binary_tensor_data",
        "model_configuration",
        "statistics",
    ]
    model = triton.get_model_metadata("recommend", "100")
    assert (model["name"], model["versions"]) == ("recommend", ["100"])
    assert [each["name"] for each in model["inputs"]] == [
        "history",
        "history_length",
        "user_id",
        "timestamps",
        "candidates",
    ]
    assert model["outputs"][0] == {"name": "item_id", "datatype": "BYTES", "shape": [-1, -1]}


@pytest.mark.parametrize("binary", [True, False])
def test_rows_are_answered_as_requests_are(triton, recommender, binary):
    recommender.asked.clear()
    recommender.times.clear()
    inputs = [
        tensor("history", [["alien", "7"], ["brazil", ""]], binary=binary),
        tensor("user_id", [["ann"], [""]], binary=binary),
        tensor("timestamps", [[5, 6], [7, 0]], "INT64", binary=binary),
    ]
    names = ("item_id", "score", "num_items", "source")

    answer = triton.infer(
        "recommend",
        inputs,
        request_id="r1",
        parameters={"k": 2, "exclude_seen": False},
        outputs=[wanted(name, binary) for name in names],
    )

    assert recommender.asked == [([11, 12], 0, 2, False), ([13], None, 2, False)]
    assert recommender.times == [[5, 6], [7]]
    texts = (lambda rows: np.vectorize(bytes.decode, otypes=[object])(rows)) if binary else np.asarray
    assert texts(answer.as_numpy("item_id")).tolist() == [["m0", "m1"]] * 2
    assert answer.as_numpy("score").tolist() == [[-0.5, -1.5]] * 2
    assert answer.as_numpy("num_items").tolist() == [2, 2]
    assert texts(answer.as_numpy("source")).tolist() == ["model", "model"]
    head = answer.get_response()
    assert (head["model_name"], head["model_version"], head["id"]) == ("recommend", "100", "r1")
    assert ("data" in head["outputs"][0]) != binary


def test_without_named_outputs_all_come_as_the_request_says(triton, client):
    """Triton's client asks for binary then; others get JSON."""
    answer = triton.infer("recommend", [tensor("user_id", ["ann"])], model_version="100")
    assert answer.as_numpy("item_id").shape == (1, 10)
    plain = client.post(INFER, json={"inputs": [json_input("user_id", ["ann"], [1])]})
    assert HEADER_LENGTH not in plain.headers
    assert [each["name"] for each in plain.json()["outputs"]] == list(OUTPUTS)


@pytest.mark.parametrize("binary", [True, False])
def test_places_without_an_item_are_filled_up(triton, binary):
    """The catalog has three items."""
    answer = triton.infer(
        "recommend",
        [tensor("user_id", ["ann", "zoe"])],
        parameters={"k": 5},
        outputs=[wanted(name, binary) for name in ("score", "num_items", "item_id", "source")],
    )
    assert answer.as_numpy("num_items").tolist() == [3, 3]
    assert answer.as_numpy("score").tolist() == [
        [-0.5, -1.5, -2.5, LOWEST, LOWEST],
        [9.0, 8.0, 7.0, LOWEST, LOWEST],
    ]
    assert [len(item) for item in answer.as_numpy("item_id")[1]] == [2, 2, 2, 0, 0]
    assert [bytes(s) if binary else s.encode() for s in answer.as_numpy("source")] == [b"model", b"popular"]


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_lengths_say_where_a_history_ends(triton, recommender, datatype):
    recommender.asked.clear()
    inputs = [
        tensor("history", [["alien", "7", "x"], ["brazil", "x", "x"]]),
        tensor("history_length", [2, 0], datatype),
        tensor("user_id", ["zoe", "ann"]),
    ]
    answer = triton.infer("recommend", inputs, parameters={"k": 1})
    assert recommender.asked == [([11, 12], None, 1, True)]
    assert answer.as_numpy("source").tolist() == [b"model", b"popular"]


@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT64"])
def test_ids_may_be_integers(triton, recommender, datatype):
    recommender.asked.clear()
    inputs = [
        tensor("history", [[7, 7], [7, 0]], datatype),
        tensor("history_length", [2, 1], "INT32"),
        tensor("user_id", [5, 6], datatype),
    ]
    answer = triton.infer("recommend", inputs, parameters={"k": 1})
    assert answer.as_numpy("num_items").tolist() == [1, 1]
    texts = [tensor("history", [["7", "7"], ["7", ""]])]
    as_texts = triton.infer("recommend", texts, parameters={"k": 1})
    assert answer.as_numpy("item_id").tolist() == as_texts.as_numpy("item_id").tolist()


def test_tritons_timeout_and_priority_count(triton, client, monkeypatch):
    inputs = [tensor("user_id", ["ann"])]
    answer = triton.infer("recommend", inputs, timeout=60_000_000, priority=3)
    assert answer.as_numpy("num_items").tolist() == [3]
    body = {"inputs": [json_input("user_id", ["ann"], [1])]}
    seen, submit = [], Batcher.submit

    def noted(batcher, *asked, **told):
        seen.append(asked[-1])
        return submit(batcher, *asked, **told)

    monkeypatch.setattr(Batcher, "submit", noted)
    for parameters in ({"priority": 1}, {"priority": 0}, {}):
        client.post("/v2/models/recommend/infer", json={**body, "parameters": parameters}).raise_for_status()
    assert seen == [1, DEFAULT_PRIORITY, DEFAULT_PRIORITY]
    late = client.post("/v2/models/recommend/infer", json={**body, "parameters": {"timeout": 1}})
    assert late.status_code == 503
    assert late.headers["retry-after"] == "1"
    for wrong in (-1, 0.5, "1", True):
        refusal = client.post("/v2/models/recommend/infer", json={**body, "parameters": {"timeout": wrong}})
        assert refusal.status_code == 400
        assert "timeout: expected a whole number" in refusal.json()["error"]


@pytest.mark.parametrize("packing", ["gzip", "deflate"])
def test_packed_bodies_are_read_and_packed_answers_not_needed(triton, packing):
    answer = triton.infer(
        "recommend",
        [tensor("user_id", ["ann"])],
        request_compression_algorithm=packing,
        response_compression_algorithm=packing,
    )
    assert answer.as_numpy("num_items").tolist() == [3]


def test_packed_bodies_are_refused_where_they_are_too_large_or_none(client):
    bomb = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
    assert len(bomb) < 2000
    encoding = "Content-Encoding"
    assert "larger than 1048576 bytes unpacked" in refused(client, bomb, 413, **{encoding: "gzip"})
    assert "not what its Content-Encoding" in refused(client, b"{}", **{encoding: "deflate"})
    assert "cut off" in refused(client, gzip.compress(b"{}")[:-1], **{encoding: "gzip"})
    assert "more after its end" in refused(client, zlib.compress(b"{}") + b"x", **{encoding: "deflate"})
    assert "known are gzip, deflate" in refused(client, b"{}", 415, **{encoding: "br"})
    assert "larger than 1048576 bytes; send less" in refused(client, b" " * (MAX_BODY_BYTES + 1), 413)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"inputs": []}, "neither history nor user_id is there"),
        ({"inputs": [json_input("history", [], [0, 3])]}, "0 rows in one request; send from 1 to 8"),
        ({"inputs": [json_input("history", [], [10**9, 0])]}, "1000000000 rows in one request"),
        ({"inputs": [json_input("user_id", ["a"] * 9, [9])]}, "9 rows in one request; send from 1 to 8"),
        ({"inputs": [json_input("user_id", ["a"], [1]), HISTORY, HISTORY]}, "'history' stands there twice"),
        ({"inputs": [json_input("items", ["a"], [1])]}, "inputs: there is no 'items'; known are history,"),
        ({"inputs": [json_input("history", [1.0], [1, 1], "FP32")]}, "history: is FP32; expected BYTES"),
        (
            {"inputs": [json_input("history", ["a"], [1])]},
            "history: has the shape [1]; expected 2 dimensions",
        ),
        (
            {"inputs": [json_input("user_id", ["a", "b"], [1, 2])]},
            "user_id: has the shape [1, 2]; expected 1",
        ),
        (
            {"inputs": [HISTORY, json_input("user_id", ["a", "b"], [2])]},
            "user_id: has 2 rows, where others have 1",
        ),
        (
            {"inputs": [HISTORY, json_input("timestamps", [1, 2], [1, 2], "INT64")]},
            "timestamps: have the shape [1, 2], and the history [1, 1]",
        ),
        (
            {"inputs": [json_input("user_id", ["a"], [1]), json_input("history_length", [1], [1], "INT32")]},
            "history_length: is there without a history",
        ),
        (
            {"inputs": [HISTORY, json_input("history_length", [2], [1], "INT32")]},
            "row 0: history_length is 2; expected from 0 to 1",
        ),
        (
            {"inputs": [json_input("history", ["a", "b", "", "c"], [2, 2])]},
            'row 1: history.0 is "" and items follow; fill rows up on the right',
        ),
        (
            {
                "inputs": [
                    json_input("history", ["a", "b"], [1, 2]),
                    json_input("timestamps", [2, 1], [1, 2], "INT64"),
                ]
            },
            "row 0: timestamps: 1 is before 2",
        ),
        (
            {"inputs": [HISTORY, json_input("timestamps", [10**12], [1, 1], "INT64")]},
            "row 0: timestamps.0: input should be less than or equal to",
        ),
        (
            {"inputs": [HISTORY], "parameters": {"k": 0}},
            "row 0: k: input should be greater than or equal to 1",
        ),
        ({"inputs": [HISTORY], "parameters": {"k": 51}}, "row 0: k: 51 items are more than the 50"),
        (
            {"inputs": [HISTORY], "parameters": {"rank": True}},
            "row 0: rank: this service has no ranking stage",
        ),
        (
            {"inputs": [HISTORY], "parameters": {"sequence_id": 1}},
            "'sequence_id' is not known; known are k, exclude_seen",
        ),
        (
            {"inputs": [HISTORY], "outputs": [{"name": "title"}]},
            "outputs: there is no 'title'; known are item_id",
        ),
        (
            {"inputs": [HISTORY], "outputs": [{"name": "score", "parameters": {"classification": 3}}]},
            '"classification" is not known here; known are binary_data',
        ),
        (
            {"inputs": [HISTORY], "model_name": "other"},
            'model_name: is "other", and the path names "recommend"',
        ),
        (b'{"inputs": [', "the body is not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(client, body, sentence):
    assert sentence in refused(client, body)


def test_headers_that_cannot_be_used_are_400_as_all_that_is_wrong_here(client):
    sentence = refused(client, {"inputs": [HISTORY]}, **{"X-Request-Timeout-Ms": "0"})
    assert sentence.startswith("X-Request-Timeout-Ms: expected a whole number of milliseconds")


def test_what_was_degraded_of_the_answers_is_a_parameter():
    steps = [{"do": "shorter_history", "to": 1, "enter": 0.01, "leave": 0.005}]
    admission = AdmissionConfig.parse({"degrade": {"steps": steps}})
    service = RecommendationService(FakeRecommender(), max_k=50)

    class Down:
        behaviors = None

        def histories(self, user_ids):
            raise UnavailableError("redis://events", 2, "refused")

    client = TestClient(api_of(service, admission=admission))
    short = json_input("history", ["alien"], [1, 1])
    assert "parameters" not in client.post(INFER, json={"inputs": [short]}).json()
    long = json_input("history", ["alien", "7", "7", ""], [2, 2])
    assert client.post(INFER, json={"inputs": [long]}).json()["parameters"] == {"degraded": "shorter_history"}
    service.user_state = Down()
    of_users = {"inputs": [json_input("user_id", ["ann", "42"], [2])]}
    degraded = client.post(INFER, json=of_users).json()["parameters"]["degraded"]
    assert degraded == "shorter_history,no_recent_events"


def test_one_row_that_cannot_be_answered_is_named(client):
    body = {"inputs": [json_input("history", ["7"] * 3 * 10_001, [3, 10_001]),
                       json_input("history_length", [1, 10_001, 1], [3], "INT32")]}  # fmt: skip
    assert refused(client, body).startswith("row 1: history: list should have at most 10000 items")


def test_ids_that_are_no_text_are_refused(triton):
    with pytest.raises(InferenceServerException, match="row 1: an id is not UTF-8") as error:
        triton.infer("recommend", [tensor("user_id", [b"ann", b"\xff"])])
    assert error.value.status() == "400"


def test_other_models_versions_and_extensions_are_not_there(triton):
    for ask, sentence in (
        (
            lambda: triton.infer("other", [tensor("user_id", ["a"])]),
            "there is no model 'other'; the one here is",
        ),
        (lambda: triton.get_model_metadata("recommend", "7"), "there is no version '7' of 'recommend'"),
        (lambda: triton.load_model("other"), "there is no POST /v2/repository/models/other/load"),
        (lambda: triton.get_system_shared_memory_status(), "there is no GET /v2/systemsharedmemory/status"),
    ):
        with pytest.raises(InferenceServerException, match=sentence) as error:
            ask()
        assert error.value.status() == "404"


def test_a_store_that_is_down_is_no_failure_of_ours():
    class Down(RecommendationService):
        def recommend_all(self, requests):
            down = UnavailableError("redis://clicks", 2, "refused")
            return [down if each.user_id == "bob" else self.recommend_one(each) for each in requests]

        def recommend_one(self, request):
            return super().recommend_all([request])[0]

    client = TestClient(api_of(Down(FakeRecommender(), max_k=50)))
    answer = client.post(INFER, json={"inputs": [json_input("user_id", ["ann", "bob"], [2])]})
    assert answer.status_code == 503
    assert answer.json()["error"].startswith("row 1: a service that it needs does not answer: redis://clicks")


def infer_body(num_rows):
    return {"inputs": [json_input("user_id", ["ann"] * num_rows, [num_rows])]}


def test_rows_and_other_requests_are_computed_together():
    service = HeldService()
    with (
        listening(api_of(service, max_waiting=8, max_batch=8)) as address,
        HeldService.asking(address, INFER, infer_body(1)) as first,
    ):
        assert service.begun.wait(timeout=20)
        with (
            HeldService.asking(address, INFER, infer_body(3)) as second,
            HeldService.asking(address, "/v1/recommend", {}) as third,
        ):
            service.wait_until_asked(address, times=5)
            service.let.set()
    assert service.batches == [1, 4]
    assert [answer.status_code for (answer,) in (first, second, third)] == [200, 200, 200]


def test_rows_for_which_there_is_no_place_are_refused_together():
    service = HeldService()
    with (
        listening(api_of(service, max_waiting=3)) as address,
        HeldService.asking(address, INFER, infer_body(1)) as first,
    ):
        assert service.begun.wait(timeout=20)
        try:
            too_many = httpx.post(f"http://{address}{INFER}", json=infer_body(3), trust_env=False)
        finally:
            service.let.set()
    assert (too_many.status_code, too_many.headers["retry-after"]) == (503, "1")
    sentence = "1 requests are waiting already, and 3 of one message come; try again in a second"
    assert too_many.json() == {"error": sentence}
    assert first[0].status_code == 200
    assert service.batches == [1]


def test_a_message_that_no_limit_would_ever_admit_is_not_told_to_come_again():
    admission = AdmissionConfig.parse({"callers": {"rate": 0.001, "burst": 4, "concurrency": 8}})
    client = TestClient(api_of(RecommendationService(FakeRecommender(), max_k=50), 64, admission=admission))

    too_large = client.post(INFER, json=infer_body(5))
    answered = client.post(INFER, json=infer_body(4))  # all of its tokens, of which nothing was taken
    too_early = client.post(INFER, json=infer_body(2))

    assert (too_large.status_code, "retry-after" in too_large.headers) == (400, False)
    assert too_large.json() == {"error": "5 rows in one request; send from 1 to 4"}
    assert answered.status_code == 200
    assert too_early.status_code == 429


def test_a_failure_is_no_stack_trace():
    class Broken(RecommendationService):
        def recommend_all(self, requests):
            raise ZeroDivisionError("secrets")

    client = TestClient(api_of(Broken(FakeRecommender(), max_k=50)))
    answer = client.post(INFER, json={"inputs": [HISTORY]})
    assert answer.status_code == 500
    assert set(answer.json()) == {"error", "error_id"}
    assert "secrets" not in answer.text


IN_PROCESS = TestClient(api_of(RecommendationService(FakeRecommender(), max_k=50)))
NAMES = st.sampled_from(["history", "history_length", "user_id", "timestamps", "more", "\ud800"])
SOME_INPUTS = st.lists(
    st.fixed_dictionaries(
        {
            "name": NAMES,
            "datatype": st.sampled_from(["BYTES", "INT32", "INT64", "FP32"]),
            "shape": st.lists(st.integers(0, 2), min_size=1, max_size=2),
            "data": st.lists(st.integers(-1, 3) | st.sampled_from(["alien", "", "\ud800"]), max_size=4),
        }
    ),
    max_size=3,
)


@examples(200)
@given(SOME_INPUTS, st.dictionaries(st.sampled_from(["k", "rank", "\ud800"]), st.integers(-1, 4), max_size=1))
def test_whatever_comes_the_answer_is_tensors_or_a_sentence(inputs, parameters):
    answer = IN_PROCESS.post(INFER, content=json.dumps({"inputs": inputs, "parameters": parameters}))
    if answer.status_code == 200:
        assert len(answer.json()["outputs"]) == 4
    else:
        assert answer.status_code == 400
        assert isinstance(answer.json()["error"], str)
