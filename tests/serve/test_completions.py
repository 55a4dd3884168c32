"""Completions, asked for by OpenAI's own client over HTTP."""

import json

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.tokenizers.code_tokens import CodeTexts
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.wire.request_body import MAX_BODY_BYTES
from tests.helpers.examples import examples
from tests.helpers.runs import make_run
from tests.serve.fake_ranking import FakeStage
from tests.serve.fake_recommender import FakeRecommender, HeldService, api_of, listening

CODES = [[1, 0, 0], [1, 0, 1], [12, 3, 0]]
"""Of "alien", "7" and "brazil"; the first two share a tuple, and the last level tells them apart."""
ALIEN, SEVEN, BRAZIL = "<a_1><b_0><c_0>", "<a_1><b_0><c_1>", "<a_12><b_3><c_0>"
WANTED = {"model": "recommend", "prompt": ALIEN}


@pytest.fixture(scope="module")
def recommender():
    return FakeRecommender(CODES)


@pytest.fixture(scope="module")
def address(recommender):
    with listening(api_of(RecommendationService(recommender, max_k=50), max_waiting=4)) as address:
        yield address


def openai_client(address):
    import openai

    # Without retries, of errors too, so that a test sees the first answer.
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture
def client(address):
    with openai_client(address) as client:
        yield client


@pytest.fixture
def plain(address):
    with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
        yield client


def error_of(name):
    """One of the client's classes, whose import takes long."""
    import openai

    return getattr(openai, name)


def refused(client, kind="BadRequestError", **fields):
    """What the client makes of the error."""
    with pytest.raises(error_of(kind)) as error:
        client.completions.create(**{**WANTED, **fields})
    assert set(error.value.body) == {"message", "type", "param", "code"}
    return error.value


def test_models_are_listed_and_found(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("recommend", "model", "rayrec")
    assert client.models.retrieve("recommend") == model
    with pytest.raises(error_of("NotFoundError")) as error:
        client.models.retrieve("gpt")
    assert error.value.body["message"] == "there is no model 'gpt'; the one here is 'recommend'"
    assert error.value.code == "model_not_found"


def test_choices_are_the_best_items_as_tokens(client, recommender):
    recommender.asked.clear()
    answer = client.completions.create(model="recommend", prompt=BRAZIL + ALIEN, n=2, logprobs=0)

    assert recommender.asked == [([13, 11], None, 2, True)]
    (choice,) = answer.choices  # the others are in the prompt
    assert (choice.text, choice.index, choice.finish_reason) == (SEVEN, 0, "stop")
    assert choice.model_extra == {"item_id": "7"}
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == ([SEVEN], [-0.5])
    assert (choice.logprobs.text_offset, choice.logprobs.top_logprobs) == ([0], None)
    assert (answer.object, answer.model) == ("text_completion", "recommend")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 3, 9)


@pytest.mark.parametrize("stop", [["><b", "<a_1>"], ["<a_1>", "><b"], ["?", "<a_1>"], "<"])
def test_a_text_ends_before_the_first_stop_text_in_it_whatever_their_order(client, stop):
    (choice,) = client.completions.create(model="recommend", prompt=BRAZIL, stop=stop).choices
    assert (choice.text, choice.model_extra) == ("", {"item_id": "alien"})


def test_more_items_are_searched_than_answered(client, recommender):
    recommender.asked.clear()
    answer = client.completions.create(
        **WANTED, n=1, best_of=3, logprobs=2, extra_body={"exclude_seen": False}
    )
    assert recommender.asked == [([11], None, 3, False)]
    (choice,) = answer.choices
    assert choice.text == ALIEN
    assert choice.logprobs.top_logprobs == [{ALIEN: -0.5, SEVEN: -1.5}]


def test_alternatives_are_searched_where_they_are_more_than_choices(client, recommender):
    recommender.asked.clear()
    client.completions.create(**WANTED, logprobs=5)
    assert recommender.asked == [([11], None, 3, True)]  # all that the catalog has


def test_prompts_may_be_ids_and_several(client, recommender):
    recommender.asked.clear()
    answer = client.completions.create(model="recommend", prompt=["7 brazil", f" {SEVEN}\n{BRAZIL} "], n=1)
    assert recommender.asked == [([12, 13], None, 1, True)] * 2
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, ALIEN), (1, ALIEN)]
    assert answer.model_extra == {"unread_events": [0, 0], "degraded": [[], []]}
    assert answer.system_fingerprint == "100"  # steps; a published version has a number
    assert answer.choices[0].logprobs is None


def test_events_that_are_too_old_for_the_model_are_counted(client):
    answer = client.completions.create(model="recommend", prompt=ALIEN * 5)
    assert answer.model_extra["unread_events"] == [2]


def test_a_choice_says_which_prompt_it_is_of_where_one_has_fewer(client):
    answer = client.completions.create(model="recommend", prompt=["alien 7", "alien", "7 brazil"], n=2)
    # Items of a prompt are not recommended to it.
    assert [(choice.index // 2, choice.text) for choice in answer.choices] == [
        *((0, BRAZIL), (1, SEVEN), (1, BRAZIL), (2, ALIEN)),
    ]


def degraded_by(*steps, codes=CODES):
    """A service in which these steps are always in force."""
    always = [{"enter": 0.01, "leave": 0.005, **step} for step in steps]
    admission = AdmissionConfig.parse({"degrade": {"steps": always}})
    return TestClient(api_of(RecommendationService(FakeRecommender(codes), max_k=50), admission=admission))


def test_what_was_degraded_of_an_answer_is_said():
    client = degraded_by({"do": "fewer_beams", "to": 3}, {"do": "shorter_history", "to": 1})
    answer = client.post("/v1/completions", json={**WANTED, "prompt": ["alien 7", "alien"]}).json()
    assert answer["degraded"] == [["fewer_beams", "shorter_history"], ["fewer_beams"]]


def test_while_popular_items_answer_there_are_no_completions_and_that_is_nobodys_fault():
    answer = degraded_by({"do": "popular_items"}).post("/v1/completions", json=WANTED)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    error = answer.json()["error"]
    assert error["message"] == "prompt: the service has too much to do to ask the model; try again"
    assert error["type"] == "server_error"


def test_values_that_change_nothing_are_taken(client):
    client.completions.create(
        **WANTED,
        temperature=1.0,  # which clients send where nobody has said anything
        top_p=1.0,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        stop=None,
        echo=False,
        stream=False,
        suffix="",
        seed=7,
        user="someone",
        max_tokens=3,
    )


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        (
            {"temperature": 0.7},
            "temperature",
            "temperature: the most probable items are found and none is drawn; ",
        ),
        ({"temperature": False}, "temperature", "temperature: "),
        ({"top_p": 0.9}, "top_p", "leave it out, or give 1"),
        ({"presence_penalty": 1}, "presence_penalty", "leave it out, or give 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "leave it out, or give {}"),
        ({"stop": ["x"] * 5}, "stop", "stop: "),
        ({"echo": True}, "echo", "leave it out, or give false"),
        ({"stream": True}, "stream", "stream: all items are found at once; leave it out, or give false"),
        ({"extra_body": {"tools": []}}, "tools", "tools: unknown field; known are model, prompt, n,"),
        ({"n": 0}, "n", "n: input should be greater than or equal to 1"),
        ({"n": 51}, "n", "n: 51 items are more than the 50 of one answer"),
        ({"best_of": 51}, "best_of", "best_of: 51 items are more than the 50 of one answer"),
        ({"n": 3, "best_of": 2}, "best_of", "best_of: 2 items are fewer than the n = 3 wanted of them"),
        ({"logprobs": 6}, "logprobs", "logprobs: input should be less than or equal to 5"),
        ({"max_tokens": 2}, "max_tokens", "max_tokens: an item has 3 tokens, and none is given in part"),
        ({"prompt": ""}, "prompt", "prompt: it has no item, and the model nothing to go by"),
        ({"prompt": []}, "prompt", "prompt: 0 prompts in one request; send from 1 to 4"),
        ({"prompt": [ALIEN] * 5}, "prompt", "prompt: 5 prompts in one request; send from 1 to 4"),
        (
            {"prompt": [1, 2]},
            "prompt",
            "expected a text, or an array of texts; numbers of tokens are not known",
        ),
        (
            {"prompt": [ALIEN, "nosuch"]},
            "prompt",
            "prompt.1: the catalog has no item 'nosuch'; give tokens",
        ),
        ({"prompt": "<a_1><b_0>"}, "prompt", "prompt: the last item has 2 of 3 tokens"),
        ({"prompt": "<a_1><c_0><b_0>"}, "prompt", "token 1 is '<c_0>'; expected one of level 2 of 3"),
        ({"prompt": ALIEN + " 7"}, "prompt", "token 3 is '7'; expected one of level 1 of 3, such as <a_0>"),
        (
            {"prompt": ALIEN + "<a_12><b_0><c_0>"},
            "prompt",
            "no item has the codes <a_12><b_0><c_0>, those of item 1",
        ),
        ({"prompt": ALIEN * 10_001}, "prompt", "prompt: history: list should have at most 10000 items"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, fields, param, sentence):
    error = refused(client, **fields)
    assert sentence in error.body["message"]
    assert (error.param, error.type) == (param, "invalid_request_error")


def test_errors_of_every_kind_have_the_form_of_the_protocol(plain):
    path, json_type = "/v1/completions", {"Content-Type": "application/json"}
    for answer, status, sentence in (
        (plain.post(path, content=b"{", headers=json_type), 400, "the body is not valid JSON"),
        (plain.post(path, content=b"[]", headers=json_type), 400, "expected a JSON object"),
        (plain.post(path, json={"model": "recommend"}), 400, "prompt: field required"),
        (plain.post(path, json={**WANTED, "model": "x"}), 404, "there is no model 'x'"),
        (plain.post(path, content=b" " * (MAX_BODY_BYTES + 1)), 413, "the body is larger than"),
        (plain.post(path, json=WANTED, headers={"X-Request-Timeout-Ms": "0"}), 400, "X-Request-Timeout-Ms: "),
        (plain.get(path), 405, "there is no GET /v1/completions"),
        (plain.post("/v1/chat/completions", json={}), 404, "there is no POST /v1/chat/completions"),
    ):
        assert answer.status_code == status
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"].startswith(sentence)


def test_a_model_without_semantic_ids_is_no_model_here():
    with (
        listening(api_of(RecommendationService(FakeRecommender(), max_k=50))) as address,
        openai_client(address) as client,
    ):
        assert client.models.list().data == []
        with pytest.raises(error_of("NotFoundError"), match="no semantic IDs"):
            client.models.retrieve("recommend")
        error = refused(client, "NotFoundError")
    assert error.body["message"].endswith("ask POST /v1/recommend")


def test_histories_of_which_operations_leave_nothing_have_no_completion():
    recommender = FakeRecommender(CODES)
    recommender.leaves_nothing = True
    client = TestClient(api_of(RecommendationService(recommender, max_k=50)))
    answer = client.post("/v1/completions", json={**WANTED, "prompt": ["alien", "7"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt.1: the run's operations leave nothing")


def test_a_ranking_stage_does_not_reorder_completions():
    recommender = FakeRecommender(CODES)
    service = RecommendationService(recommender, max_k=50, stage=FakeStage(recommender))
    client = TestClient(api_of(service))
    answer = client.post("/v1/completions", json={**WANTED, "n": 2, "logprobs": 0})
    assert [choice["logprobs"]["token_logprobs"] for choice in answer.json()["choices"]] == [[-0.5], [-1.5]]


def test_completions_and_other_requests_are_computed_together():
    service = HeldService(FakeRecommender(CODES))
    with (
        listening(api_of(service, max_waiting=8, max_batch=8)) as address,
        HeldService.asking(address, "/v1/recommend", {"k": 1}) as first,
    ):
        assert service.begun.wait(timeout=20)
        completion = {**WANTED, "prompt": ["alien", "7"]}
        with (
            HeldService.asking(address, "/v1/completions", completion) as second,
            HeldService.asking(address, "/v1/recommend", {"history": ["7"], "k": 1}) as third,
        ):
            service.wait_until_asked(address, times=4)
            service.let.set()
    assert service.batches == [1, 3]
    assert [answer.status_code for (answer,) in (first, second, third)] == [200, 200, 200]


def test_a_full_service_says_so_in_the_form_of_the_protocol():
    service = HeldService(FakeRecommender(CODES))
    with (
        listening(api_of(service, max_waiting=1)) as address,
        HeldService.asking(address, "/v1/recommend", {}),
        openai_client(address) as client,
    ):
        assert service.begun.wait(timeout=20)
        try:
            error = refused(client, "InternalServerError")
        finally:
            service.let.set()
    assert (error.status_code, error.type) == (503, "server_error")
    assert error.body["message"] == "1 requests are waiting already; try again in a second"
    assert error.response.headers["retry-after"] == "1"


def test_a_failure_is_no_stack_trace():
    class Broken(RecommendationService):
        def recommend_all(self, requests):
            raise ZeroDivisionError("secrets")

    client = TestClient(api_of(Broken(FakeRecommender(CODES), max_k=50)))
    answer = client.post("/v1/completions", json=WANTED)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith(
        "something failed in the service; its log says what under"
    )
    assert "secrets" not in answer.text


@st.composite
def catalogs(draw):
    num_levels = draw(st.integers(1, 4))
    codes = st.sampled_from([0, 1, 255, 256, 65_536, 999_999_999])
    rows = st.lists(st.tuples(*[codes] * num_levels), min_size=1, max_size=20, unique=True)
    return np.array(draw(rows))


@given(catalogs(), st.data())
def test_texts_of_items_are_read_as_these_items(codes_IL, data):
    texts = CodeTexts(codes_IL)
    items = data.draw(st.lists(st.integers(0, len(codes_IL) - 1), max_size=5))
    assert texts.items("".join(map(texts.text, items))) == items
    assert len({texts.text(item) for item in range(len(codes_IL))}) == len(codes_IL)


IN_PROCESS = TestClient(api_of(RecommendationService(FakeRecommender(CODES), max_k=50)))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from([ALIEN, "\ud800"])
)
VALUES = st.recursive(LEAVES, lambda some: st.lists(some, max_size=3), max_leaves=5)
NAMES = st.sampled_from(
    ["prompt", "n", "best_of", "logprobs", "stop", "temperature", "seed", "\ud800", "user"]
)


@examples(200)
@given(st.dictionaries(NAMES, VALUES | st.integers(0, 3), max_size=3))
def test_whatever_comes_the_answer_is_choices_or_a_sentence(fields):
    answer = IN_PROCESS.post("/v1/completions", content=json.dumps({**WANTED, **fields}))
    if answer.status_code == 200:
        assert answer.json()["choices"]
    else:
        assert answer.status_code == 400
        assert isinstance(answer.json()["error"]["message"], str)


@pytest.mark.parametrize("policy", ["extra_digit", "share"])
def test_completions_of_a_trained_model_are_its_items_with_their_probabilities(tmp_path, policy):
    recommender = Recommender.load(make_run(tmp_path, "generative", collision_policy=policy))
    history = [recommender.dataset.items.keys[0].as_py()] * 2
    service = RecommendationService(recommender, max_k=50)
    client = TestClient(api_of(service))

    asked = {"model": "recommend", "n": 5, "logprobs": 0}
    by_id = client.post("/v1/completions", json={**asked, "prompt": " ".join(history)}).json()
    tokens = "".join(service.item_texts.texts_of(history))
    by_tokens = client.post("/v1/completions", json={**asked, "prompt": tokens}).json()
    plain = client.post("/v1/recommend", json={"history": history, "k": 5}).json()

    assert by_id["choices"] == by_tokens["choices"]
    assert [choice["item_id"] for choice in by_id["choices"]] == [item["item_id"] for item in plain["items"]]
    for choice, item in zip(by_id["choices"], plain["items"], strict=True):
        assert choice["logprobs"]["token_logprobs"] == [item["score"]]
        assert service.item_texts.keys_in(choice["text"]) == [item["item_id"]]
