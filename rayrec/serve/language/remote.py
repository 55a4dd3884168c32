"""A model that another service answers for, which speaks OpenAI's API.

    call ─► POST url/chat/completions, with the name there ─► whole answer, checked to be one
                                                           └► events, each passed on as it comes

What a request says beyond `model`, `n` and `stream` is the other service's to understand or refuse: its 4xx
come back as they are. Everything else that goes wrong there is one sentence:

    502    it cannot be reached, refuses our token, fails, or says what is no answer
    503    it has no room (429, 503 there)
    504    it was silent for `silence_s`, or not done in the time that the request has

A caller that leaves closes the connection, by which the other service knows. The token is in a header and
nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from rayrec.platform.errors import InputError, MachineError
from rayrec.serve.language.config import RemoteModel
from rayrec.serve.language.event_stream import EventReader, EventTooLargeError
from rayrec.serve.language.forwarding import ForwardedCall, num_choices
from rayrec.serve.language.measures import EngineMeasures
from rayrec.serve.language.outcomes import of_characters
from rayrec.serve.language.served import Call, Kind, Values
from rayrec.serve.wire.errors import RequestError

Result = TypeVar("Result")

PATHS: Mapping[Kind, str] = {
    "chat": "/chat/completions",
    "text": "/completions",
    "embedding": "/embeddings",
}
MOST_BYTES = 64 * 1024 * 1024
"""Of a whole answer: a vector for each of 2,048 texts takes most of it."""
MOST_OF_ERROR = 64 * 1024
CHECK_TIMEOUT_S = 5.0
CHECK_EVERY_S = 5.0
"""Whether it answers is asked no more often than that."""
_PARTS: Mapping[Kind, str] = {"chat": "choices", "text": "choices", "embedding": "data"}


def token_of(settings: RemoteModel) -> str | None:
    """The token that the other service wants.

    Raises:
        InputError: it is not where the settings say.
    """
    if settings.token_file is not None:
        try:
            token = Path(settings.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{settings.name}: token_file {settings.token_file} cannot be read") from error
        source = f"token_file {settings.token_file}"
    elif settings.token_variable is not None:
        token, source = os.environ.get(settings.token_variable, "").strip(), settings.token_variable
    else:
        return None
    # Never the token itself in a message: it goes to logs.
    if not token or not token.isprintable() or not token.isascii():
        raise InputError(f"{settings.name}: {source} has no token of printable characters")
    return token


class RemoteService:
    """Implements `ServedModel`; requests go over connections that it keeps."""

    is_here = False

    def __init__(self, settings: RemoteModel) -> None:
        """
        Raises:
            InputError: the token, or the authority's certificate, cannot be read.
        """
        self._settings = settings
        self.measures = EngineMeasures()
        self._headers = {"Accept": "application/json, text/event-stream", "Accept-Encoding": "identity"}
        if (token := token_of(settings)) is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = _tls(settings)
        self._session: aiohttp.ClientSession | None = None
        self._num_running = 0
        self.measures.watch(lambda: 0.0, lambda: self._num_running, lambda: 0)
        self._checked_at = -float("inf")
        self._unanswered: str | None = None

    @property
    def settings(self) -> RemoteModel:
        return self._settings

    async def start(self) -> None:
        settings = self._settings
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=settings.max_connections, ssl=self._tls),
            trace_configs=[_noting_kept_connections()],
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.silence_s
            ),
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def why_not(self) -> str | None:
        if time.monotonic() - self._checked_at > CHECK_EVERY_S:
            self._checked_at = time.monotonic()
            try:
                await self.names_there()
            except RequestError as error:
                self._unanswered = str(error)
            else:
                self._unanswered = None
        return self._unanswered

    async def names_there(self) -> list[str]:
        """Names of the models that the other service has.

        Raises:
            RequestError: it does not say.
        """
        found = await self._asked("GET", "/models", None, time.monotonic() + CHECK_TIMEOUT_S)
        models = found.get("data")
        if not isinstance(models, list):
            raise self._no_answer("says what is no list of models")
        return [str(one["id"]) for one in models if isinstance(one, Mapping) and "id" in one]

    def read(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        return ForwardedCall(self, kind, body)

    async def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, expires_at: float
    ) -> dict[str, Any]:
        """A whole answer."""
        answer = await self._begun(method, path, body, expires_at)
        try:
            # Joined once: adding each piece to what was there copies all of it, on the event loop.
            pieces, size = [], 0
            while piece := await self._piece(answer, expires_at):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_BYTES:
                    raise self._no_answer(f"says more than {MOST_BYTES:,} bytes")
            return self.parsed(b"".join(pieces))
        finally:
            answer.close()

    async def _begun(
        self, method: str, path: str, body: Mapping[str, Any] | None, expires_at: float
    ) -> aiohttp.ClientResponse:
        """An answer whose beginning is there, and says that it is one; to be closed."""
        assert self._session is not None, "the application starts it"
        url = self._settings.url + path
        for is_last in (False, True):
            with self._explained():
                kept: dict[str, bool] = {}
                request = self._session.request(
                    method, url, json=body, allow_redirects=False, trace_request_ctx=kept
                )
                try:
                    answer = await _in_time(request, expires_at)
                    break
                except aiohttp.ServerDisconnectedError:
                    # Only where the other side may have ended a kept connection before it saw the request:
                    # on a new one it has seen it, and may have begun to answer.
                    if is_last or not kept:
                        raise
        if answer.status != 200:
            try:
                raise await self._refused(answer, expires_at)
            finally:
                answer.close()
        return answer

    async def _piece(self, answer: aiohttp.ClientResponse, expires_at: float) -> bytes:
        """What has come of an answer since; nothing at its end."""
        with self._explained():
            return await _in_time(answer.content.readany(), expires_at)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the network as answers."""
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            raise self._no_answer(f"cannot be reached ({_said(error)})") from error
        except aiohttp.ConnectionTimeoutError as error:
            wait_s = self._settings.connect_timeout_s
            raise self._no_answer(f"cannot be reached in {wait_s:g} s") from error
        except aiohttp.ServerTimeoutError as error:
            raise self._no_answer(f"has been silent for {self._settings.silence_s:g} s", 504) from error
        except TimeoutError as error:
            raise self._no_answer("has not answered in time", 504) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._no_answer(f"ended the connection ({_said(error)})") from error

    def parsed(self, content: bytes | str) -> dict[str, Any]:
        """An object of JSON that it has said; what is no character in it is replaced.

        Raises:
            RequestError: it is none, or an error.
        """
        try:
            text = content if isinstance(content, str) else content.decode("utf-8-sig", errors="replace")
            found = json.loads(text, parse_constant=_finite, parse_float=_finite)
            if "\\ud" in text or "\\uD" in text:
                found = of_characters(found)
        except (ValueError, RecursionError) as error:
            raise self._no_answer("says what is no JSON") from error
        if not isinstance(found, dict):
            raise self._no_answer("says what is no answer")
        if found.get("error"):
            raise self._no_answer(f"fails: {_message(found)}")
        return found

    async def whole(self, kind: Kind, body: Mapping[str, Any], expires_at: float) -> dict[str, Any]:
        """`Call.whole`."""
        with self._counted():
            found = await self._asked("POST", PATHS[kind], self._there(body), expires_at)
        if not isinstance(found.get(_PARTS[kind]), list):
            raise self._no_answer(f"says what is no answer: it has no {_PARTS[kind]}")
        if kind != "embedding":
            self._check_choices(kind, found["choices"])
        usage = found.get("usage")
        self.measures.count_tokens(_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))
        return found

    async def values(self, kind: Kind, body: Mapping[str, Any], expires_at: float) -> Values:
        """Chunks of a streamed answer; the first value is one of no meaning, when it has begun."""
        began = time.monotonic()
        last_at: float | None = None
        unfinished, reader = set(range(num_choices(kind, body))), EventReader()
        with self._counted():
            answer = await self._begun("POST", PATHS[kind], self._there(body), expires_at)
            try:
                if answer.content_type != "text/event-stream":
                    raise self._no_answer(f"streams {answer.content_type}, which is no event stream")
                yield {}
                while piece := await self._piece(answer, expires_at):
                    for data in self._events(reader, piece):
                        if data.strip() == "[DONE]":
                            return
                        chunk = self.parsed(data)
                        if not isinstance(chunk.get("choices"), list):
                            raise self._no_answer("says what is no answer: it has no choices")
                        self._check_choices(kind, chunk["choices"])
                        if any(map(_says_something, chunk["choices"])):
                            now = time.monotonic()
                            if last_at is None:
                                self.measures.count_first(now - began, 0)
                            else:
                                self.measures.count_next(now - last_at)
                            last_at = now
                        if not chunk["choices"]:
                            self.measures.count_tokens(_count(chunk.get("usage"), "prompt_tokens"), 0)
                        unfinished -= {one["index"] for one in chunk["choices"] if one.get("finish_reason")}
                        yield chunk
            except GeneratorExit:
                self.measures.count_left()
                raise
            finally:
                answer.close()
        if unfinished:
            raise self._no_answer("ended the connection before the answer was whole")

    def _check_choices(self, kind: Kind, choices: list[Any]) -> None:
        """Check choices for what others read of them; one without an index gets its place."""
        for place, choice in enumerate(choices):
            if not isinstance(choice, dict):
                raise self._no_answer("says what is no answer: a choice is no object")
            if choice.get("index") is None:
                choice["index"] = place
            if type(choice["index"]) is not int or choice["index"] < 0:
                raise self._no_answer("says what is no answer: the index of a choice is no number")
            if kind == "text" and not isinstance(choice.get("text"), str):
                raise self._no_answer("says what is no answer: a choice has no text")

    def _there(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**body, "model": self._settings.name_there}

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def _events(self, reader: EventReader, piece: bytes) -> list[str]:
        try:
            return reader.feed(piece)
        except EventTooLargeError as error:
            raise self._no_answer(f"says what is no answer: {error}") from error

    async def _refused(self, answer: aiohttp.ClientResponse, expires_at: float) -> RequestError:
        """What is to be said of an answer that is none."""
        status, said = answer.status, b""
        while len(said) < MOST_OF_ERROR and (piece := await self._piece(answer, expires_at)):
            said += piece
        try:
            found = of_characters(json.loads(said))
        except (ValueError, RecursionError):
            found = {}
        inner = found.get("error") if isinstance(found, dict) else None
        message = _message(found) if isinstance(found, dict) else ""
        if status in (401, 403):
            return self._no_answer(f"refuses our token (status {status})")
        if status in (429, 503):
            return self._no_answer(f"has no room now ({message or f'status {status}'})", 503)
        if 400 <= status < 500 and message:
            param, code = (inner.get("param"), inner.get("code")) if isinstance(inner, dict) else (None, None)
            return RequestError(
                message,
                status,
                param=param if isinstance(param, str) else None,
                code=code if isinstance(code, str) else None,
            )
        return self._no_answer(f"answers with status {status}" + (f": {message}" if message else ""))

    def _no_answer(self, what: str, status: int = 502) -> RequestError:
        return RequestError(f"the service that answers for {self._settings.name} {what}", status)


async def check_remote(settings: RemoteModel) -> None:
    """Check that the other service answers, and has the model.

    Raises:
        InputError: it has no such model, refuses the token, or is no such service.
        MachineError: it does not answer.
    """
    service = RemoteService(settings)
    await service.start()
    try:
        names = await service.names_there()
    except RequestError as error:
        is_away = error.status in (503, 504) or isinstance(error.__cause__, (aiohttp.ClientError, OSError))
        kind = MachineError if is_away else InputError
        raise kind(f"{settings.name}: {settings.url}/models: {error}") from error
    finally:
        await service.stop()
    if settings.name_there not in names:
        raise InputError(
            f"{settings.name}: {settings.url} has no model {settings.name_there!r}; it has "
            f"{', '.join(map(repr, names[:20])) or 'none'}"
        )


def _tls(settings: RemoteModel) -> ssl.SSLContext | bool:
    if settings.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"{settings.name}: ca_file {settings.ca_file} has no certificate") from error


async def _in_time(work: Awaitable[Result], expires_at: float) -> Result:
    # Around each step, since a stream goes on in another task than it began in.
    async with asyncio.timeout(max(expires_at - time.monotonic(), 0)):
        return await work


def _noting_kept_connections() -> aiohttp.TraceConfig:
    """Tells each request, in its own context, whether its connection was one that was kept."""

    async def note(session: aiohttp.ClientSession, context: Any, parameters: Any) -> None:
        context.trace_request_ctx["is_kept"] = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(note)
    return tracing


def _finite(text: str) -> float:
    """A number of JSON; NaN and infinities are none, however they are written."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number of JSON")
    return value


def _says_something(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk's choice has a part of the answer, and not only a role or an end."""
    delta = choice.get("delta")
    if isinstance(delta, Mapping):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


def _message(found: Mapping[str, Any]) -> str:
    """The sentence of an error, whichever form it has."""
    said = found.get("error")
    if isinstance(said, Mapping):
        said = said.get("message")
    for other in ("message", "detail"):
        said = said if isinstance(said, str) else found.get(other)
    return " ".join(said.split())[:500] if isinstance(said, str) else ""


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if type(value) is int and value >= 0 else 0


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
