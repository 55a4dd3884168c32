"""What stands before the embedded engine: limits come first, work has threads, deadlines and room."""

import asyncio
import re
import threading
import time

import httpx
import pytest

pytest.importorskip("transformers", reason="the embedded engine is that of transformers")
torch = pytest.importorskip("torch")

from rayrec.models.generation.sampler import Chosen  # noqa: E402
from rayrec.samples.text.tokens import TextTokenizer  # noqa: E402
from rayrec.serve.admission.limits import ServiceLimitError  # noqa: E402
from rayrec.serve.engine.batching import DeadlineError  # noqa: E402
from rayrec.serve.language.api import build_language_api  # noqa: E402
from rayrec.serve.language.config import EmbeddedModel  # noqa: E402
from rayrec.serve.language.embedded import EmbeddedService  # noqa: E402
from rayrec.serve.language.forms import TextForm  # noqa: E402
from rayrec.serve.language.loading import load_model  # noqa: E402
from rayrec.serve.language.memory import plan_model  # noqa: E402
from rayrec.serve.language.requests import TextRequest  # noqa: E402
from rayrec.serve.language.writing import Piece  # noqa: E402
from rayrec.serve.wire.errors import RequestError  # noqa: E402
from tests.helpers.text_tokenizers import semantic_ids, tokenizer_folder  # noqa: E402
from tests.serve.language.conftest import TINY  # noqa: E402

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "You?"}], "max_tokens": 4}


def soon(seconds=60.0):
    return time.monotonic() + seconds


@pytest.fixture
def service(model):
    made = EmbeddedService(model)
    yield made
    made._preparing.shutdown()
    made._embedding.shutdown()


async def over_http(services, *requests):
    """Answers of an application without a network; its engines run already."""
    transport = httpx.ASGITransport(build_language_api(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as http:
        return [await http.post(path, json=body) for path, body in requests]


def test_offsets_of_tokens_go_on_over_the_chunks_of_an_answer():
    texts = {1: "Par", 2: "is", 3: " is", 4: "I"}
    pieces = [
        (0, Piece("Paris", (Chosen(1, -0.5, ()), Chosen(2, -0.5, ())))),
        (1, Piece("I", (Chosen(4, -0.5, ()),))),
        (0, Piece(" is", (Chosen(3, -0.5, ()),), "stop")),
        (1, Piece(" is", (Chosen(3, -0.5, ()),), "stop")),
    ]
    form = TextForm(TextRequest(model="tiny", prompt="x", logprobs=0, n=2), "tiny", texts.__getitem__, 1)

    async def come():
        for each in pieces:
            yield each

    async def chunks():
        return [chunk["choices"][0] async for chunk in form.chunks(come(), 2)]

    offsets = [(each["index"], each["logprobs"]["text_offset"]) for each in asyncio.run(chunks())]
    assert offsets == [(0, [0, 3]), (1, [0]), (0, [5]), (1, [1])]


def test_a_caller_beyond_its_limit_renders_no_template_and_compiles_no_grammar(model, monkeypatch):
    rendered = []
    limits = model.settings.model_copy(update={"callers": model.settings.callers.parse({"rate": 0.001})})
    service = EmbeddedService(model)
    monkeypatch.setattr(EmbeddedService, "settings", limits)
    opened = model.template.opened
    monkeypatch.setattr(model.template, "opened", lambda *args: rendered.append(args) or opened(*args))
    first, second = asyncio.run(over_http([service], *[("/v1/chat/completions", HELLO)] * 2))

    assert (first.status_code, second.status_code) == (200, 429)
    assert len(rendered) == 1


def test_a_prompt_that_is_not_made_in_time_is_not_waited_for(service, model, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(model.template, "opened", lambda *args: go_on.wait(30) and "")

    async def late():
        call = service.read("chat", HELLO)
        with pytest.raises(DeadlineError):
            await call.whole(soon(0.05))
        assert service._num_preparing == 0

    asyncio.run(late())
    go_on.set()


def test_answers_whose_prompts_are_being_made_take_room(service, model, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(model.template, "opened", lambda *args: go_on.wait(30) and "You")

    async def crowd():
        calls = [service.read("chat", HELLO | {"n": 5}) for _ in range(3)]
        begun = [asyncio.create_task(call.whole(soon())) for call in calls[:2]]
        await asyncio.sleep(0)
        with pytest.raises(ServiceLimitError):
            calls[2].check_room()
        go_on.set()
        await asyncio.gather(*begun)
        calls[2].check_room()

    asyncio.run(crowd())


def test_embeddings_wait_for_each_other_in_bounds_and_in_time(service, model, monkeypatch):
    go_on, embed = threading.Event(), model.embed
    monkeypatch.setattr(type(model), "embed", lambda self, text: go_on.wait(30) and embed(text))

    async def crowd():
        read = lambda texts: service.read("embedding", {"model": "tiny", "input": texts})  # noqa: E731
        first = asyncio.create_task(read(["You"] * 5).whole(soon()))
        while not service._num_texts:
            await asyncio.sleep(0.01)
        with pytest.raises(ServiceLimitError, match="5 texts for tiny are being embedded"):
            read(["You"] * 5).check_room()
        with pytest.raises(DeadlineError):
            await read(["You"]).whole(soon(0.05))
        go_on.set()
        answer = await first
        assert len(answer["data"]) == 5
        assert service._num_texts == 0

    asyncio.run(crowd())


def test_a_plan_counts_what_a_text_takes_that_is_embedded(model):
    settings = model.settings
    without = plan_model(settings.model_copy(update={"embeddings": False})).work

    assert plan_model(settings).work - without >= settings.context_length * 3 * 48 * 4


@pytest.mark.slow
def test_a_form_that_takes_more_and_more_time_ends_its_own_answer_alone(service, model):
    pytest.importorskip("xgrammar")
    schema = {"type": "string", "pattern": "((a|a)*(a|a)*)*b"}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    letter = model.text.encode("a")[0]
    body = {"model": "tiny", "prompt": "You", "temperature": 0}
    costly = body | {"response_format": wanted, "max_tokens": 900, "logit_bias": {str(letter): 100}}

    async def both():
        calls = [service.read("text", costly).whole(soon()), service.read("text", body).whole(soon())]
        return await asyncio.gather(*calls, return_exceptions=True)

    failed, sound = asyncio.run(both())
    assert isinstance(failed, RequestError)
    assert failed.status == 400
    assert "too many ways" in str(failed)
    assert sound["choices"][0]["text"]


def test_items_are_answered_over_http(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    registry = semantic_ids([10, 11, 12, 13, 14])
    registry.save(tmp_path / "ids")
    source = tokenizer_folder(tmp_path / "base")
    text = TextTokenizer.extended(source, registry.level_sizes, semantic_ids_version=registry.version)
    text.save(tmp_path / "model")
    torch.manual_seed(0)
    ends = text.info.ends[0]
    config = LlamaConfig(vocab_size=text.info.num_tokens, bos_token_id=0, eos_token_id=ends, **TINY)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    values = {"folder": str(tmp_path / "model"), "semantic_ids": str(tmp_path / "ids"), "context_length": 256}
    loaded = load_model(EmbeddedModel.parse({"name": "tiny", **values}))
    loaded.engine.start()
    try:
        wanted = {"type": "items", "least": 2, "most": 3}
        body = HELLO | {"response_format": wanted, "max_tokens": 12, "temperature": 1, "seed": 1}
        alone, in_text, few = asyncio.run(
            over_http(
                [EmbeddedService(loaded)],
                ("/v1/chat/completions", body),
                ("/v1/chat/completions", body | {"response_format": wanted | {"in_text": True}}),
                ("/v1/chat/completions", body | {"max_tokens": 3}),
            )
        )
    finally:
        loaded.engine.stop()
    said = alone.json()["choices"][0]
    items = re.findall(r"<a_(\d)><b_(\d)>", said["message"]["content"])
    assert re.fullmatch(r"(<a_\d><b_\d>){2,3}", said["message"]["content"])
    assert len(set(items)) == len(items)
    assert {int(first) * 8 + int(second) for first, second in items} <= set(range(5))
    assert said["finish_reason"] == "stop"
    assert 2 <= len(re.findall(r"<a_\d><b_\d>", in_text.json()["choices"][0]["message"]["content"])) <= 3
    assert few.status_code == 400
    assert "4 tokens" in few.json()["error"]["message"]
