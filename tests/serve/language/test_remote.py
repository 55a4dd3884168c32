"""A model of another service: what it says passes through, and whatever goes wrong there is one sentence."""

import asyncio
import json
import logging
import time

import pytest
from aiohttp import web

from rayrec.platform.errors import InputError, MachineError
from rayrec.serve.language.api import build_language_api
from rayrec.serve.language.config import ModelsConfig, RemoteModel
from rayrec.serve.language.remote import RemoteService, check_remote
from rayrec.serve.wire.errors import RequestError

TOKEN = "secret-token-of-the-other-side"
HELLO = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}


def chunk(text, reason=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'id': '1', 'model': 'there', 'choices': [choice]})}\n\n".encode()


class Upstream:
    """A service that does what a test says."""

    def __init__(self, answer):
        self.answer, self.asked, self.is_gone = answer, [], asyncio.Event()

    async def __call__(self, request):
        self.asked.append((dict(request.headers), await request.json()))
        try:
            return await self.answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.is_gone.set()
            raise


def run(answer, use, models=("there",), **settings):
    """Use a model that answers so."""

    async def all_of_it():
        upstream = Upstream(answer)
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            app.router.add_post(path, upstream)
        listed = {"data": [{"id": name} for name in models]}
        app.router.add_get("/v1/models", answered(listed))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        values = {"name": "chat", "model": "there", "url": f"http://127.0.0.1:{port}/v1/", "engine": "remote"}
        service = RemoteService(RemoteModel.parse(values | settings))
        await service.start()
        try:
            return await asyncio.wait_for(use(service, upstream), 20)
        finally:
            await service.stop()
            await runner.cleanup()

    return asyncio.run(all_of_it())


def answered(value, status=200, content_type="application/json"):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()

    async def answer(request):
        return web.Response(body=body, status=status, content_type=content_type)

    return answer


def streamed(*pieces, wait=None, cut=False):
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if wait is not None:
            await wait()
        if cut:
            request.transport.close()
        return response

    return answer


def soon(seconds=15.0):
    return time.monotonic() + seconds


async def whole(service, upstream=None, body=HELLO, kind="chat", expires_at=None):
    return await service.read(kind, body).whole(expires_at or soon())


async def stream(service, upstream=None, body=HELLO):
    return [value async for value in await service.read("chat", body | {"stream": True}).stream(soon())]


def test_a_request_goes_there_with_its_own_name_and_token_and_the_answer_comes_back(tmp_path, caplog):
    (tmp_path / "token").write_text(TOKEN + "\n")
    caplog.set_level(logging.DEBUG)
    said = {"choices": [{"index": 0, "text": "!"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}

    async def use(service, upstream):
        answer = await whole(service, body=HELLO | {"min_p": 0.1, "n": 2})
        return answer, upstream.asked, service.measures, repr(service.settings)

    answer, ((headers, body),), measures, shown = run(answered(said), use, token_file=str(tmp_path / "token"))
    assert answer == said
    assert body == {**HELLO, "model": "there", "min_p": 0.1, "n": 2}
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert (measures.num_prompt_tokens, measures.num_answer_tokens) == (3, 2)
    assert TOKEN not in caplog.text + shown


def test_events_pass_on_as_they_come_however_they_are_cut():
    events = chunk("One, ") + b": a comment\n\n" + chunk("two").replace(b"\n", b"\r\n") + chunk("", "stop")
    pieces = [events[place : place + 7] for place in range(0, len(events), 7)]

    values = run(streamed(*pieces, b"data: [DONE]\n\n"), stream)

    assert [value["choices"][0]["delta"]["content"] for value in values] == ["One, ", "two", ""]


def test_the_first_event_is_there_before_the_last_one_is_written():
    async def use(service, upstream):
        upstream.answer = streamed(chunk("One"), wait=go_on.wait)
        values = await service.read("chat", HELLO | {"stream": True}).stream(soon())
        first = await anext(values)
        assert service.measures.numbers()["running"] == 1
        go_on.set()
        with pytest.raises(RequestError, match="before the answer was whole"):
            await anext(values)
        return first, service

    go_on = asyncio.Event()
    first, service = run(None, use)
    assert first["choices"][0]["delta"]["content"] == "One"
    assert service.measures.numbers()["running"] == 0


def test_a_caller_that_leaves_ends_the_answer_there():
    async def use(service, upstream):
        upstream.answer = streamed(chunk("One"), wait=asyncio.Event().wait)
        values = await service.read("chat", HELLO | {"stream": True}).stream(soon())
        await anext(values)
        await values.aclose()
        await asyncio.wait_for(upstream.is_gone.wait(), 10)
        upstream.is_gone.clear()

        async def silent(request):
            await asyncio.Event().wait()

        upstream.answer = silent
        waiting = asyncio.create_task(whole(service))
        while len(upstream.asked) < 2:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait_for(upstream.is_gone.wait(), 10)
        return service.measures.num_left, service._num_running

    assert run(None, use) == (1, 0)


async def stream_two(service, upstream=None):
    return await stream(service, body=HELLO | {"n": 2})


async def whole_text(service, upstream=None):
    return await whole(service, body={"model": "chat", "prompt": "x"}, kind="text")


def test_a_stream_without_its_last_line_is_whole_when_all_its_choices_are():
    def finished(index):
        return chunk("One", "stop").replace(b'"index": 0', b'"index": %d' % index)

    assert len(run(streamed(finished(0), finished(1)), stream_two)) == 2


def test_half_a_character_is_replaced_and_a_whole_one_stays():
    said = rb'{"choices": [{"index": 0, "\udc00": "a\ud800b \ud83d\ude00"}], "x": "\\ud800"}'
    assert run(answered(said), whole) == {"choices": [{"index": 0, "?": "a?b \U0001f600"}], "x": "\\ud800"}
    said = b'{"choices": [{"index": 0, "text": "\xed\xa0\x80"}]}'
    assert json.dumps(run(answered(said), whole), ensure_ascii=False).encode()


def test_a_choice_without_an_index_has_that_of_its_place():
    said = {"choices": [{"text": "a"}, {"text": "b"}]}
    assert [one["index"] for one in run(answered(said), whole_text)["choices"]] == [0, 1]


def test_a_whole_answer_in_many_pieces_is_joined_once(monkeypatch):
    pieces = [b'{"choices": [], "x": "', *[b"y" * 9] * 1000, b'"}', b""]
    service = RemoteService(RemoteModel.parse({"name": "chat", "url": "http://host/v1", "engine": "remote"}))

    class Piece(bytes):
        def __radd__(self, other):
            raise AssertionError("what was there is copied for each piece")

    class Answer:
        def close(self):
            pass

    async def begun(*arguments):
        return Answer()

    async def piece(answer, expires_at):
        return Piece(pieces.pop(0))

    monkeypatch.setattr(service, "_begun", begun)
    monkeypatch.setattr(service, "_piece", piece)
    assert len(asyncio.run(service._asked("POST", "/", {}, soon()))["x"]) == 9000


def test_a_role_and_an_end_are_no_tokens():
    role = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'

    async def use(service, upstream):
        await stream(service)
        return service.measures.num_answer_tokens

    pieces = role, chunk("One"), chunk(" two"), chunk("", "stop"), b"data: [DONE]\n\n"
    assert run(streamed(*pieces), use) == 2


@pytest.mark.parametrize(("is_kept", "times"), [(False, 1), (True, 3)])
def test_only_what_went_over_a_kept_connection_is_asked_again(is_kept, times):
    async def use(service, upstream):
        upstream.answer = answered({"choices": []})
        if is_kept:
            await whole(service)
        upstream.answer = hang_up
        with pytest.raises(RequestError, match="ended the connection"):
            await whole(service)
        return len(upstream.asked)

    assert run(None, use) == times


async def silence(request):
    await asyncio.Event().wait()


async def hang_up(request):
    request.transport.close()
    return web.Response()


GARBAGE = [
    (answered(b"<html>", content_type="text/html"), whole, 502, "says what is no JSON"),
    (answered([1, 2]), whole, 502, "no answer"),
    (answered({"object": "x"}), whole, 502, "it has no choices"),
    (answered({"choices": []}), stream, 502, "streams application/json"),
    (answered({"error": {"message": "boom"}}, 500), whole, 502, "status 500: boom"),
    (
        answered({"error": {"message": "wrong key: abc"}}, 401),
        whole,
        502,
        r"refuses our token \(status 401\)",
    ),
    (answered({"error": {"message": "busy"}}, 429), whole, 503, r"has no room now \(busy\)"),
    (answered(b"", 503), whole, 503, "has no room now"),
    (answered(b"", 302), whole, 502, "status 302"),
    (answered({"error": {"message": "too long", "code": "c", "param": "p"}}, 400), whole, 400, "^too long$"),
    (answered({"detail": "no \ud800 field"}, 422), stream, 422, r"^no \? field$"),
    (answered({"detail": "no such field"}, 422), stream, 422, "^no such field$"),
    (hang_up, whole, 502, "ended the connection"),
    (streamed(b"data: nonsense\n\n"), stream, 502, "no JSON"),
    (streamed(b'data: {"error": {"message": "out of memory"}}\n\n'), stream, 502, "fails: out of memory"),
    (streamed(b'data: {"a": 1}\n\n'), stream, 502, "no choices"),
    (streamed(chunk("One"), cut=True), stream, 502, "ended the connection"),
    (streamed(chunk("One", "stop")), stream_two, 502, "before the answer was whole"),
    (answered({"choices": [{"index": "a", "text": ""}]}), whole, 502, "index of a choice"),
    (answered({"choices": ["x"]}), whole, 502, "a choice is no object"),
    (answered({"choices": [{"index": 0}]}), whole_text, 502, "a choice has no text"),
    (answered(b'{"choices": [], "x": NaN}'), whole, 502, "no JSON"),
    (answered(b'{"choices": [], "x": 1e999}'), whole, 502, "no JSON"),
    (streamed(b'data: {"choices": [{"index": -1}]}\n\n'), stream, 502, "index of a choice"),
    (streamed(b"data: " + b"x" * 5_000_000), stream, 502, "more than 4,194,304 bytes"),
]


@pytest.mark.parametrize(("answer", "use", "status", "said"), GARBAGE)
def test_what_is_no_answer_is_said_in_a_sentence(answer, use, status, said):
    with pytest.raises(RequestError, match=said) as error:
        run(answer, use)
    assert error.value.status == status
    if status == 400:
        assert (error.value.param, error.value.code) == ("p", "c")


@pytest.mark.parametrize("answer", [silence, streamed(chunk("One"), wait=asyncio.Event().wait)])
def test_a_silent_service_is_not_waited_for(answer):
    with pytest.raises(RequestError, match=r"silent for 0\.05 s") as error:
        run(answer, stream, silence_s=0.05)
    assert error.value.status == 504


def test_a_request_ends_with_its_time():
    with pytest.raises(RequestError, match="has not answered in time") as error:
        run(silence, lambda service, upstream: whole(service, expires_at=soon(0.05)))
    assert error.value.status == 504


def test_a_service_that_is_not_there_is_said():
    settings = RemoteModel.parse({"name": "chat", "url": "http://127.0.0.1:9/v1", "engine": "remote"})

    async def ask():
        service = RemoteService(settings)
        await service.start()
        try:
            with pytest.raises(RequestError, match="cannot be reached") as error:
                await whole(service)
            assert error.value.status == 502
            assert "cannot be reached" in await service.why_not()
        finally:
            await service.stop()

    asyncio.run(ask())
    with pytest.raises(MachineError, match="cannot be reached"):
        asyncio.run(check_remote(settings))


def test_a_start_needs_the_model_there():
    async def check(service, upstream):
        await check_remote(service.settings)

    run(silence, check)
    with pytest.raises(InputError, match=r"has no model 'there'; it has 'a', 'b'"):
        run(silence, check, models=("a", "b"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "host:8000"}, "expected something like"),
        ({"url": "http://user:word@host/v1"}, "a password does not belong"),
        ({"url": "http://host/v1", "token_file": "a", "token_variable": "B"}, "not both"),
        ({"url": "http://host/v1", "folder": "x"}, "folder"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        ModelsConfig.parse({"models": [{"name": "chat", "engine": "remote"} | settings]})


@pytest.mark.parametrize("settings", [{"token_file": "nowhere"}, {"token_variable": "RAYREC_NO_SUCH_TOKEN"}])
def test_a_token_that_is_not_there_is_said(settings):
    values = {"name": "chat", "engine": "remote", "url": "http://host/v1"}
    with pytest.raises(InputError, match="token"):
        RemoteService(RemoteModel.parse(values | settings))


def test_answers_are_counted_for_limits():
    settings = RemoteModel.parse({"name": "chat", "url": "http://host/v1", "engine": "remote"})
    service = RemoteService(settings)

    assert service.read("chat", HELLO | {"n": 3}).count == 3
    assert service.read("text", {"prompt": ["a", "b"], "n": 2}).count == 4
    assert service.read("text", {"prompt": ["a", "b"], "n": 2, "best_of": 5}).count == 10
    assert service.read("text", {"prompt": [1, 2, 3]}).count == 1
    assert service.read("embedding", {"input": ["a", "b", "c"]}).count == 3
    for wrong in ({"n": 0}, {"n": "2"}, {"best_of": 0}, {"best_of": 10_000}, {"stream": "yes"}):
        with pytest.raises(RequestError):
            service.read("chat", HELLO | wrong)
    build_language_api([service])  # which has an engine that needs no package
