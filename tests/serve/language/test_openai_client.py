"""The client that OpenAI ships: chat, streams, tools, schemas, log-probabilities, errors.

A tiny model is embedded, or that of another service, which is to make no difference. With
RAYREC_VLLM_DASHBOARD, the URL of a Ray cluster with vLLM, and RAYREC_VLLM_MODEL, the folder of an instruct
model, the same is asked of vLLM behind our gateway (`-m slow -k vllm`); what only our engine holds is not.
RAYREC_VLLM_SERVE says where the cluster's Ray Serve is to listen.
"""

import asyncio
import itertools
import json
import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the embedded engine is that of transformers")
pytest.importorskip("xgrammar", reason="grammars are xgrammar's")
import httpx
import uvicorn

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.language.api import build_language_api
from rayrec.serve.language.config import EmbeddedModel, ModelsConfig, RemoteModel
from rayrec.serve.language.embedded import EmbeddedService
from rayrec.serve.language.loading import load_model
from rayrec.serve.language.remote import RemoteService
from rayrec.serve.launch.language import serving_models
from rayrec.serve.web.address import wait_until_ready
from tests.helpers.examples import cases
from tests.helpers.http import free_port
from tests.helpers.optional import skip_without

skip_without("openai")  # the client that OpenAI ships

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Says something.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]


VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.slow,
        pytest.mark.timeout(1800),
        pytest.mark.skipif(
            not {"RAYREC_VLLM_DASHBOARD", "RAYREC_VLLM_MODEL"} <= set(os.environ),
            reason="RAYREC_VLLM_DASHBOARD and RAYREC_VLLM_MODEL name no cluster with vLLM and no model",
        ),
    ],
)
OUR_SERVICES = cases(["embedded", "remote"], ["embedded"])
OURS = pytest.mark.parametrize("service", OUR_SERVICES, indirect=True)
"""What is promised of our engine alone."""


@contextmanager
def answering(model):
    """The URL of an application that serves a model."""
    server = uvicorn.Server(uvicorn.Config(build_language_api([model]), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    wait_until_ready(url)
    yield url
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def embedded(settings):
    model = load_model(settings)
    with answering(EmbeddedService(model)) as url:
        yield url, model


@contextmanager
def vllm_behind_the_gateway():
    """The URL, and the same weights here, to compare with."""
    folder = os.environ["RAYREC_VLLM_MODEL"]
    engine = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4}
    engine |= {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    model = {
        "name": "tiny",
        "engine": "ray_llm",
        "folder": folder,
        "accelerator": "cpu",
        "context_length": 1024,
        "engine_kwargs": engine,
        "timeout_s": 600,
    }
    ray = {name: os.environ.get(f"RAYREC_VLLM_{name.upper()}") for name in ("dashboard", "serve")}
    with serving_models(
        ModelsConfig.parse({"models": [model], "ray": ray}),
        ServeConfig.parse({"single_process": True, "port": free_port()}),
    ) as url:
        yield url, load_model(EmbeddedModel.parse({"name": "here", "folder": folder, "context_length": 1024}))


@pytest.fixture(scope="module", params=[*OUR_SERVICES, VLLM])
def service(request):
    """A service, and the model that answers at last: of its own process, or of another service."""
    if request.param == "vllm":
        with vllm_behind_the_gateway() as found:
            yield found
        return
    embedded = request.getfixturevalue("embedded")
    url, model = embedded
    if request.param == "embedded":
        yield embedded
        return
    values = {"name": "tiny", "engine": "remote", "url": f"{url}/v1"}
    with answering(RemoteService(RemoteModel.parse(values))) as gateway:
        yield gateway, model


@pytest.fixture
def url(service):
    return service[0]


@pytest.fixture
def client(url):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def ask(client, **more):
    settings = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0} | more
    return client.chat.completions.create(**settings)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_chat_is_what_generate_says_of_its_template(client, service):
    torch = pytest.importorskip("torch")
    model = service[1]
    found = ask(client)
    tokens = model.text.encode(model.template.opened(HELLO))
    with torch.inference_mode():
        expected = model.network.generate(
            torch.tensor([tokens]), do_sample=False, max_new_tokens=24, pad_token_id=0
        )[0, len(tokens) :]
    ends = model.text.info.ends
    said = list(itertools.takewhile(lambda token: token not in ends, expected.tolist()))
    silent = {0, 1, 2}

    assert found.choices[0].message.content == model.text.decode([one for one in said if one not in silent])
    assert found.usage.prompt_tokens == len(tokens)
    # vLLM counts the end of an answer as one of its tokens.
    assert found.usage.completion_tokens - len(said) in (0, 1)


def test_a_stream_says_the_same_in_pieces_and_its_usage(client):
    whole = ask(client, seed=4, temperature=1)
    chunks = list(ask(client, seed=4, temperature=1, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]

    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_a_seed_and_n_give_the_same_answers_again(client):
    first = [each.message.content for each in ask(client, n=3, seed=1, temperature=1).choices]

    assert first == [each.message.content for each in ask(client, n=3, seed=1, temperature=1).choices]
    assert len(set(first)) == 3


def test_an_answer_stops_where_it_is_told(client):
    text = ask(client).choices[0].message.content
    stopped = ask(client, stop=[text[3:5], "never to be seen"]).choices[0]

    assert stopped.message.content == text[: text.index(text[3:5])]
    assert stopped.finish_reason == "stop"


def test_log_probabilities_come_with_the_best_alternatives(client):
    content = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content

    assert all(one.logprob <= 0 for one in content)
    assert all(one.top_logprobs[0].logprob == pytest.approx(one.logprob, abs=1e-4) for one in content)


@OURS
@pytest.mark.parametrize("limit", [17, 40])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_held_within_any_limit(client, limit, stream):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    found = ask(client, response_format=wanted, max_tokens=limit, temperature=1.5, seed=3, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)
    else:
        text = found.choices[0].message.content
        assert found.choices[0].finish_reason == "stop"

    assert set(json.loads(text)) == {"a", "b"}


def test_a_schema_is_held_where_there_is_room(client):
    schema = {"type": "object", "properties": {"tool": {"enum": ["order", "refund"]}}, "required": ["tool"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "tool", "schema": schema}}
    found = ask(client, response_format=wanted, max_tokens=200)

    assert json.loads(found.choices[0].message.content)["tool"] in ("order", "refund")


@OURS
def test_json_objects_and_expressions_are_held(client):
    found = ask(client, response_format={"type": "json_object"}, temperature=1)
    assert isinstance(json.loads(found.choices[0].message.content), dict)

    found = ask(client, response_format={"type": "regex", "regex": "(yes|no)!"}, temperature=1)
    assert found.choices[0].message.content in ("yes!", "no!")


@OURS
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_text_is_divided_into_labeled_segments_that_rebuild_it(client, temperature):
    text = 'Rosenweg 7, "Bern" 東京'
    form = {"type": "copy", "text": text, "labels": ["street", "city"]}

    found = ask(client, response_format=form, temperature=temperature, max_tokens=120)

    pairs = json.loads(found.choices[0].message.content)
    assert "".join(segment for _, segment in pairs) == text
    assert {label for label, _ in pairs} <= {"street", "city"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "time"}}, {"time"})],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_has_to_be_called_is(client, choice, names, stream, request):
    if "vllm" in request.node.callspec.id:
        mark = pytest.mark.xfail(
            reason="vLLM 0.32 does not hold arguments to a schema, and ends a call by name with stop"
        )
        request.applymarker(mark)
    found = ask(client, tools=TOOLS, tool_choice=choice, max_tokens=60, temperature=1, seed=2, stream=stream)
    if stream:
        chunks = list(found)
        pieces = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        name, arguments = (
            "".join(filter(None, parts))
            for parts in zip(*[(f.name, f.arguments) for f in pieces], strict=True)
        )
        reason = chunks[-1].choices[0].finish_reason
    else:
        (call,), reason = found.choices[0].message.tool_calls, found.choices[0].finish_reason
        name, arguments = call.function.name, call.function.arguments
        assert not found.choices[0].message.content

    assert name in names
    assert set(json.loads(arguments)) == {"city"}
    assert reason == "tool_calls"


@OURS
def test_schemas_of_tools_refer_to_their_own_definitions(client):
    def tool(name, values):
        refers = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}}, "required": ["kind"]}
        parameters = {**refers, "additionalProperties": False, "$defs": {"Kind": {"enum": values}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    for seed in range(3):
        tools = [tool("paint", ["red", "blue"]), tool("count", [1, 2])]
        found = ask(client, tools=tools, tool_choice="required", max_tokens=60, temperature=1, seed=seed)
        (call,) = found.choices[0].message.tool_calls
        allowed = {"paint": ("red", "blue"), "count": (1, 2)}[call.function.name]
        assert json.loads(call.function.arguments)["kind"] in allowed


@OURS
def test_more_prompts_than_are_ever_taken_are_refused_before_anything_is_made_of_them(client):
    import openai

    with pytest.raises(
        openai.BadRequestError, match=r"160,000 answers in one request; tiny takes \d+ at most"
    ):
        client.completions.create(model="tiny", prompt=["a"] * 10_000, n=16)
    with pytest.raises(openai.BadRequestError, match="expected a text or more"):
        client.completions.create(model="tiny", prompt=[])
    with pytest.raises(openai.BadRequestError, match="3,000 texts; at most 2,048"):
        client.embeddings.create(model="tiny", input=["a"] * 3000)


@OURS
def test_arguments_nested_beyond_measure_are_refused(client):
    import openai

    calls = [{"id": "1", "type": "function", "function": {"name": "time", "arguments": "[" * 100_000}}]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]
    with pytest.raises(openai.BadRequestError, match="arguments as JSON"):
        ask(client, messages=messages, tools=TOOLS)


@OURS
def test_a_tool_may_be_called_and_need_not(client):
    called = '{"name": "weather", "arguments": {"city": "Paris"}}'
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    answer = {"role": "tool", "tool_call_id": "1", "content": "Rain."}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, answer]
    assert ask(client, messages=messages, tools=TOOLS, max_tokens=4).choices[0].message.content is not None

    expression = {"type": "regex", "regex": called.replace("{", r"\{").replace("}", r"\}")}
    found = ask(client, tools=TOOLS, response_format=expression, max_tokens=90).choices[0]
    assert found.message.tool_calls[0].function.name == "weather"


def test_completions_go_on_texts_and_tokens(client, service):
    tokens = service[1].text.encode("Paris, of")
    settings = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    texts = client.completions.create(prompt=["Paris, of", "You"], logprobs=2, **settings)
    alone = client.completions.create(prompt=tokens, **settings)
    stream = client.completions.create(prompt="Paris, of", stream=True, **settings)

    assert [choice.index for choice in texts.choices] == [0, 1]
    assert texts.choices[0].text == alone.choices[0].text
    assert len(texts.choices[0].logprobs.tokens) == 6
    assert "".join(chunk.choices[0].text for chunk in stream) == alone.choices[0].text


@OURS
def test_an_embedding_is_the_mean_of_the_last_hidden_states(client, service):
    torch = pytest.importorskip("torch")
    model = service[1]
    found = client.embeddings.create(
        model="tiny", input=["Paris", "You are helpful."]
    )  # in base64, by default
    with torch.inference_mode():
        ids = torch.tensor([model.text.encode("Paris")])
        expected = model.network.base_model(ids).last_hidden_state[0].mean(0).numpy()

    assert np.allclose(found.data[0].embedding, expected, atol=1e-5)
    assert len(found.data) == 2


@OURS
@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ({"model": "other"}, "NotFoundError", "there is no model 'other'"),
        ({"max_tokens": 5000}, "BadRequestError", "takes 1024 together"),
        ({"temperature": 3}, "BadRequestError", "temperature"),
        ({"extra_body": {"magic": 1}}, "BadRequestError", "magic: unknown field"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "BadRequestError", "'wizard' is not known"),
        ({"tool_choice": "required"}, "BadRequestError", "there are no tools"),
        ({"logit_bias": {"99999": 1}}, "BadRequestError", "no token of tiny"),
        ({"logit_bias": {"9" * 5000: 1}}, "BadRequestError", "no token of tiny"),
        ({"response_format": {"type": "regex", "regex": "(a"}}, "BadRequestError", "does not compile"),
        ({"response_format": {"type": "copy", "text": "x"}}, "BadRequestError", "labels are missing"),
        ({"response_format": {"type": "items"}}, "BadRequestError", "knows no items"),
        ({"response_format": {"type": "text", "regex": "a"}}, "BadRequestError", "regex is of another"),
        (
            {"response_format": {"type": "regex", "regex": "a", "most": 3}},
            "BadRequestError",
            "response_format: most is of another type than 'regex'",
        ),
        ({"top_logprobs": 3}, "BadRequestError", "top_logprobs: are told with log-probabilities"),
        ({"stream_options": {"include_usage": True}}, "BadRequestError", "stream_options: are of"),
        (
            {"response_format": {"type": "regex", "regex": "a{60}"}, "max_tokens": 8},
            "BadRequestError",
            "the shortest answer of that form has",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_in_openais_form(client, more, kind, said):
    import openai

    with pytest.raises(getattr(openai, kind), match=said) as refused:
        ask(client, **more)
    assert refused.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"model": "other"}, "NotFoundError"),
        ({"max_tokens": 5000}, "BadRequestError"),
        ({"temperature": -1}, "BadRequestError"),
        ({"n": 0}, "BadRequestError"),
        ({"tool_choice": "required"}, "BadRequestError"),
    ],
)
def test_whoever_answers_refuses_with_the_same_status(client, more, kind):
    import openai

    with pytest.raises(getattr(openai, kind)) as refused:
        ask(client, **more)
    assert refused.value.body["message"]


@OURS
def test_a_caller_that_leaves_a_stream_frees_its_slot(url, service):
    engine = service[1].engine

    async def leave():
        body = {
            "model": "tiny",
            "messages": HELLO,
            "max_tokens": 90,
            "stream": True,
            "logit_bias": {"2": -100},
        }
        async with httpx.AsyncClient(timeout=60) as http:
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    break
            while engine.num_free < 4:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 30))


def test_tensors_and_generate_say_what_completions_say(client, url):
    settings = {"temperature": 0, "max_tokens": 6}
    text = client.completions.create(model="tiny", prompt="Paris, of", **settings).choices[0].text
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Paris, of"]}
    told = {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": [json.dumps(settings)]}
    inferred = httpx.post(f"{url}/v2/models/tiny/infer", json={"inputs": [tensor, told]}, timeout=60).json()
    body = {"text_input": "Paris, of", "parameters": settings}
    generated = httpx.post(f"{url}/v2/models/tiny/generate", json=body, timeout=60).json()
    stream = httpx.post(f"{url}/v2/models/tiny/generate_stream", json=body, timeout=60).text
    pieces = [
        json.loads(line[6:])["text_output"] for line in stream.splitlines() if line.startswith("data: ")
    ]

    assert inferred["outputs"][0]["data"] == [text]
    assert generated["text_output"] == text
    assert "".join(pieces) == text


@OURS
def test_metrics_say_what_tokens_take(url):
    page = httpx.get(f"{url}/metrics").text

    assert 'rayrec_language_first_token_seconds_bucket{le="0.01",model="tiny"}' in page
    assert 'rayrec_language_prefix_tokens_total{model="tiny"}' in page
    assert 'rayrec_requests_total{route="/v1/chat/completions",status="200"}' in page
