"""Names that several models answer to, shadows whose answers are compared, and the log of requests."""

import asyncio
import json
import re

import httpx
import pyarrow.dataset as dataset
import pytest
from fastapi import Request

from rayrec.platform.errors import InputError
from rayrec.serve.events.request_log import is_of_share
from rayrec.serve.language.answering import LanguageModels, events
from rayrec.serve.language.api import build_language_api
from rayrec.serve.language.config import ChatLogConfig, ModelsConfig, SharedNameConfig
from rayrec.serve.language.outcomes import Outcome
from rayrec.serve.language.request_log import ChatLog
from rayrec.serve.wire.errors import RequestError
from tests.serve.language.fake_model import FakeCall, FakeModel

ROUTING = {"experiment": "x", "weights": {"a": 1}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def shared(shadow=None, **weights):
    routing = {"experiment": "test", "weights": weights or {"a": 0.5, "b": 0.5}}
    return SharedNameConfig.parse({"name": "answers", "routing": routing, "shadow": shadow})


def run(use, models, *names, log=None):
    """Use an application of these models, from its start to its end."""
    api = build_language_api(models, names, log)

    async def all_of_it():
        async with api.router.lifespan_context(api):
            transport = httpx.ASGITransport(api)
            async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=20) as http:
                return await asyncio.wait_for(use(http), 30)

    return asyncio.run(all_of_it())


def body(**more):
    return {"model": "answers", "messages": [{"role": "user", "content": "Is it?"}], **more}


def counts(page, name):
    """Values of one metric, by its label beside the name."""
    lines = [line for line in page.splitlines() if line.startswith(f"rayrec_language_{name}_total{{")]
    return {re.findall(r'(?:model|outcome)="(.*?)"', one)[0]: float(one.rsplit(" ", 1)[1]) for one in lines}


def test_a_user_keeps_a_model_and_shares_are_those_of_the_weights():
    models = [FakeModel("a", "from a"), FakeModel("b", "from b")]

    async def use(http):
        by_user = {}
        for round_ in range(2):
            for user in range(60):
                headers = {"X-User-Id": str(user)} if user % 2 else {}
                said = {} if user % 2 else {"user": str(user)}
                answer = await http.post(CHAT, json=body(**said), headers=headers)
                target, value = answer.headers["x-target"], answer.json()
                assert value["choices"][0]["message"]["content"] == f"from {target}"
                assert value["model"] == "answers"
                assert by_user.setdefault(user, target) == target, round_
        return by_user, (await http.get("/metrics")).text

    by_user, page = run(use, models, shared(a=0.8, b=0.2))
    num_a = sum(target == "a" for target in by_user.values())
    assert 40 <= num_a <= 56
    assert counts(page, "routed") == {"a": 2 * num_a, "b": 2 * (60 - num_a)}


def test_shared_names_are_listed_stream_and_answer_over_every_route():
    models = [FakeModel("a"), FakeModel("b")]

    async def use(http):
        listed = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
        one = (await http.get("/v1/models/answers")).json()["id"]
        stream = (await http.post(TEXT, json={"model": "answers", "prompt": "x", "stream": True})).text
        triton = (await http.post("/v2/models/answers/generate", json={"text_input": "x"})).json()
        ready = (await http.get("/v2/models/answers/ready")).status_code
        return listed, one, stream, triton, ready

    listed, one, stream, triton, ready = run(use, models, shared())
    assert (listed, one, ready) == (["a", "b", "answers"], "answers", 200)
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"answers"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "yes it is"
    assert triton == {"model_name": "answers", "model_version": "1", "text_output": "yes it is"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "outcome"), [("yes it is", "same"), ("no", "different"), (None, "failed")])
def test_a_shadow_is_asked_beside_and_compared(stream, text, outcome):
    shadow = FakeModel("b", text or "", error=None if text else "broken")

    async def use(http):
        answer = await http.post(CHAT, json=body(stream=stream))
        for _ in range(200):
            page = (await http.get("/metrics")).text
            if counts(page, "shadow")[outcome]:
                return answer, counts(page, "shadow")
            await asyncio.sleep(0.01)
        raise AssertionError(page)

    names = shared({"target": "b", "share": 1.0}, a=1.0)
    answer, found = run(use, [FakeModel("a"), shadow], names)

    assert answer.status_code == 200
    assert answer.headers["x-target"] == "a"
    assert found["sent"] == 1
    assert found["answered"] == (0 if text is None else 1)
    assert found["same"] + found["different"] == found["answered"]
    assert shadow.asked[0]["messages"] == body()["messages"]
    assert "stream" not in shadow.asked[0]


@pytest.mark.parametrize(("text", "outcome"), [("yes it is", "same"), ("no", "different")])
def test_a_shadow_that_has_answered_waits_for_nobody_and_is_compared_later(text, outcome):
    shown = FakeModel("a")

    async def use(http):
        shown.go_on = asyncio.Event()
        asked = asyncio.create_task(http.post(CHAT, json=body(stream=True)))
        for _ in range(200):
            found = counts((await http.get("/metrics")).text, "shadow")
            if found["answered"] + found["failed"]:
                break
            await asyncio.sleep(0.01)
        shown.go_on.set()
        await asked
        return found, counts((await http.get("/metrics")).text, "shadow")

    names = shared({"target": "b", "share": 1.0, "timeout_s": 0.1}, a=1.0)
    before, after = run(use, [shown, FakeModel("b", text)], names)

    assert (before["answered"], before["failed"]) == (1, 0)
    assert before["same"] + before["different"] == 0
    assert after == before | {outcome: 1}


def test_nobody_waits_for_a_shadow():
    shadow = FakeModel("b")

    async def use(http):
        shadow.go_on = asyncio.Event()
        answers = [await http.post(CHAT, json=body()) for _ in range(3)]
        return answers, counts((await http.get("/metrics")).text, "shadow")

    names = shared({"target": "b", "share": 1.0, "max_in_flight": 2}, a=1.0)
    answers, found = run(use, [FakeModel("a"), shadow], names)

    assert [answer.status_code for answer in answers] == [200] * 3
    assert (found["sent"], found["dropped"], found["answered"]) == (2, 1, 0)


def test_a_stream_passes_on_each_chunk_before_the_next_one_is_there():
    model = FakeModel("a")

    async def use(http):
        model.go_on = asyncio.Event()
        # Over ASGI itself: the client of the tests waits for whole answers.
        sent, received = asyncio.Queue(), asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": json.dumps(body(stream=True)).encode()})
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
        scope |= {"http_version": "1.1", "client": ("here", 1), "server": ("here", 1), "scheme": "http"}
        scope |= {"root_path": "", "raw_path": CHAT.encode()}
        task = asyncio.create_task(http._transport.app(scope, received.get, sent.put))
        start, first = await sent.get(), await sent.get()
        assert model.num_open == 1
        received.put_nowait({"type": "http.disconnect"})
        await task
        assert model.num_open == 0
        return start, first

    start, first = run(use, [model], shared(a=1.0))
    assert start["status"] == 200
    assert json.loads(first["body"][6:])["choices"][0]["delta"]["content"] == "yes"


def test_a_stream_whose_caller_leaves_before_the_first_chunk_is_ended():
    model = FakeModel("a")

    async def use(http):
        served = LanguageModels([model])
        request = Request({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive=never)
        admitted = served.admit(request, "chat", body(stream=True) | {"model": "a"})
        values = await admitted.values(request)
        inner = admitted._begun[0]
        await anext(inner)
        assert model.num_open == 1
        response = events(request, admitted, values, "[DONE]")

        async def gone(message):
            raise OSError("gone")

        with pytest.raises(BaseException):  # noqa: B017, PT011
            await response(request.scope, never, gone)
        assert model.num_open == 0
        assert admitted.outcome.status == 499

    async def never():
        await asyncio.Event().wait()

    run(use, [FakeModel("b")])


def rows(folder):
    return dataset.dataset(folder, partitioning="hive").to_table().to_pylist()


@pytest.mark.parametrize("texts", [False, True])
def test_requests_are_taken_down_with_texts_only_where_that_is_said(tmp_path, texts):
    log = ChatLog(ChatLogConfig.parse({"folder": str(tmp_path), "share": 1.0, "texts": texts}))
    secret = "my secret is 4711"

    async def use(http):
        messages = [{"role": "user", "content": secret}]
        await http.post(CHAT, json=body(messages=messages, user="7"), headers={"X-Request-Id": "one"})
        await http.post(CHAT, json=body(stream=True, messages=messages), headers={"X-Request-Id": "two"})
        failed = await http.post(CHAT, json=body() | {"model": "c"}, headers={"X-Request-Id": "three"})
        for _ in range(200):
            if counts((await http.get("/metrics")).text, "shadow")["different"] == 2:
                break
            await asyncio.sleep(0.01)
        return failed

    models = [FakeModel("a"), FakeModel("b", "no"), FakeModel("c", error="its disk is full")]
    failed = run(use, models, shared({"target": "b", "share": 1.0}, a=1.0), log=log)
    found = {(row["request_id"], row["model"]): row for row in rows(tmp_path)}

    assert failed.status_code == 502
    assert set(found) == {("one", "a"), ("one", "b"), ("two", "a"), ("two", "b"), ("three", "c")}
    one, two, three = found["one", "a"], found["two", "a"], found["three", "c"]
    assert (one["name"], one["user_key"], one["kind"], one["status"]) == ("answers", "7", "chat", 200)
    assert (one["prompt_tokens"], one["answer_tokens"], one["finish_reasons"]) == (3, 3, ["stop"])
    assert [found[key]["is_shadow"] for key in found if key[1] == "b"] == [True, True]
    assert (two["is_stream"], one["is_stream"]) == (True, False)
    assert 0 <= two["first_ms"] <= two["latency_ms"]
    assert (three["status"], three["error"]) == (502, "its disk is full" if texts else "RequestError")
    if texts:
        assert one["answers"] == two["answers"] == ["yes it is"]
        assert found["one", "b"]["answers"] == ["no"]
        assert json.loads(one["request"])["messages"][0]["content"] == secret
    else:
        assert not any(row["answers"] or row["request"] for row in found.values())
        assert not any(secret.encode() in file.read_bytes() for file in tmp_path.rglob("*.parquet"))


def test_texts_of_half_characters_are_taken_down(tmp_path):
    log = ChatLog(ChatLogConfig.parse({"folder": str(tmp_path), "share": 1.0, "texts": True}))

    async def use(http):
        await http.post(CHAT, content=json.dumps(body(user="\ud800")))

    run(use, [FakeModel("a", "no \ud800", error=None), FakeModel("b")], shared(b=1.0), log=log)
    (row,) = rows(tmp_path)
    assert (row["user_key"], json.loads(row["request"])["user"]) == ("?", "?")


def test_counts_that_are_none_are_not_taken_down():
    outcome = Outcome()
    outcome.add({"choices": [{"index": 0, "message": {"tool_calls": 3}}], "usage": {"prompt_tokens": "x"}})
    outcome.add({"usage": {"completion_tokens": 2**70}})
    outcome.end(RequestError("you said 4711", 400, code="you said 4711"))
    assert (outcome.prompt_tokens, outcome.answer_tokens, outcome.code) == (None, None, "RequestError")


def test_a_share_of_the_requests_is_taken_down_by_their_ids(tmp_path):
    log = ChatLog(ChatLogConfig.parse({"folder": str(tmp_path), "share": 0.3}))

    async def use(http):
        for number in range(40):
            await http.post(CHAT, json=body(), headers={"X-Request-Id": str(number)})

    run(use, [FakeModel("a")], shared(a=1.0), log=log)
    expected = {str(number) for number in range(40) if is_of_share(str(number), 0.3)}

    assert {row["request_id"] for row in rows(tmp_path)} == expected
    assert 0 < len(expected) < 40


def test_an_answer_that_breaks_off_is_taken_down_as_that(tmp_path):
    log = ChatLog(ChatLogConfig.parse({"folder": str(tmp_path), "share": 1.0, "texts": True}))

    async def use(http):
        return (await http.post(CHAT, json=body(stream=True))).text

    text = run(use, [FakeModel("a", error="the line is cut")], shared(a=1.0), log=log)
    (row,) = rows(tmp_path)

    assert "could not be ended: the line is cut" in text
    assert "[DONE]" not in text
    assert (row["status"], row["error"], row["answers"]) == (502, "the line is cut", ["yes it is"])


def test_a_failure_within_a_stream_is_in_the_log_under_the_id_that_the_caller_is_told(caplog):
    class Broken(FakeCall):
        async def chunks(self):
            yield {"model": "inner", "choices": [self.choice("yes", None, "delta")]}
            raise KeyError("of ours")

    class BrokenModel(FakeModel):
        def read(self, kind, body):
            return Broken(self, kind, body)

    async def use(http):
        return (await http.post(CHAT, json=body(stream=True))).text

    *_, last = run(use, [BrokenModel("a")], shared(a=1.0)).strip().split("\n\n")
    message = json.loads(last.removeprefix("data: "))["error"]["message"]

    assert "of ours" not in message
    (record,) = (each for each in caplog.records if each.exc_info is not None)
    assert record.exc_info[0] is KeyError
    assert message.endswith(f"its log says what under {record.getMessage().rpartition(' ')[2]}")


def test_limits_are_those_of_the_model_that_answers():
    limited = FakeModel("a", service={"rate": 0.001, "burst": 1})

    async def use(http):
        statuses = [(await http.post(CHAT, json=body())).status_code for _ in range(2)]
        return [*statuses, (await http.post(CHAT, json=body() | {"model": "b"})).status_code]

    assert run(use, [limited, FakeModel("b")], shared(a=1.0)) == [200, 503, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_ends_no_answer(stream):
    async def use(http):
        content = json.dumps(body(stream=stream, user="\ud800"))
        return (await http.post(CHAT, content=content)).text

    text = "yes \ud800" if stream else "yes"
    found = run(use, [FakeModel("a", text)], shared(a=1.0))

    assert "yes" in found
    assert ("[DONE]" in found) == stream


def test_who_asks_whether_it_is_ready_gets_names_alone():
    class Away(FakeModel):
        async def why_not(self):
            return "Cannot connect to host 10.0.0.9:8000"

    async def use(http):
        return (await http.get("/health/ready")).json()

    found = run(use, [FakeModel("a"), Away("b")])
    assert found == {"status": "ready", "models": ["a"], "unavailable": ["b"]}


def test_an_answer_with_a_text_too_few_is_said_over_tensors():
    async def use(http):
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["x", "y"]}
        return await http.post("/v2/models/a/infer", json={"inputs": [tensor]})

    answer = run(use, [FakeModel("a")])
    assert answer.status_code == 502
    assert "no text for prompt 1" in answer.text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([{"name": "a", "routing": {"experiment": "x", "weights": {"a": 1}}}], "'a' stands twice"),
        ([{"name": "s", "routing": {"experiment": "x", "weights": {"c": 1}}}], "asks 'c'"),
        ([{"name": "s", "routing": ROUTING, "shadow": {"target": "z", "share": 1}}], "asks 'z'"),
    ],
)  # fmt: skip
def test_names_that_nobody_would_answer_to_are_refused(names, said):
    models = [{"name": "a", "engine": "remote", "url": "http://here/v1"}]
    with pytest.raises(InputError, match=said):
        ModelsConfig.parse({"models": models, "shared_names": names})
