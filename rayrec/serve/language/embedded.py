"""The embedded engine as a served model: requests become prompts, and pieces of text become answers.

    read: checked against OpenAI's form ─► limits ─► beside the event loop: template, tokens, grammar
       ─► prompts ─► engine ─► pieces ─► the route's form

Templates, tokens and grammars of a model are made by `PREPARE_THREADS` threads of its own, so that those of
one model hold up no other, and nothing else of the service. Embeddings have one thread, and as many texts
wait for it as answers do for the engine.

Embeddings are the mean of the last hidden states of a text's tokens, as float32.
"""

from __future__ import annotations

import asyncio
import base64
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ValidationError

from rayrec.models.generation.endings import TooAmbiguousError
from rayrec.platform.errors import InputError
from rayrec.serve.admission.limits import ServiceLimitError
from rayrec.serve.engine.batching import DeadlineError
from rayrec.serve.language.config import EmbeddedModel
from rayrec.serve.language.engine import EngineStoppedError, Prompt
from rayrec.serve.language.forms import Answer, ChatForm, Pieces, TextForm
from rayrec.serve.language.loading import LanguageModelHere
from rayrec.serve.language.measures import EngineMeasures
from rayrec.serve.language.requests import (
    ChatRequest,
    EmbeddingRequest,
    TextRequest,
    grammar_of,
    prompts_of,
)
from rayrec.serve.language.served import Call, Kind, Values
from rayrec.serve.language.tools import call_format, is_held, messages_of, wanted_tools
from rayrec.serve.language.writing import Piece
from rayrec.serve.wire.errors import RequestError, explain

PREPARE_THREADS = 2
MOST_TEXTS = 2048
"""In one request for embeddings, as OpenAI has it."""

Wanted = TypeVar("Wanted", bound=BaseModel)
Result = TypeVar("Result")


class EmbeddedService:
    """Implements `ServedModel` over a model of this process."""

    is_here = True

    def __init__(self, model: LanguageModelHere) -> None:
        self.model = model
        self._preparing = ThreadPoolExecutor(PREPARE_THREADS, f"prepare {model.name}")
        self._embedding = ThreadPoolExecutor(1, f"embed {model.name}")
        self._num_preparing = 0
        """Answers whose prompts are being made: the engine does not know of them yet."""
        self._num_texts = 0
        """That are embedded, or wait for it."""

    @property
    def settings(self) -> EmbeddedModel:
        return self.model.settings

    @property
    def measures(self) -> EngineMeasures:
        return self.model.engine.measures

    async def start(self) -> None:
        self.model.engine.start()

    async def stop(self) -> None:
        await run_in_threadpool(self.model.engine.stop)
        for threads in (self._preparing, self._embedding):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.model.template is not None:
            self.model.template.close()

    async def why_not(self) -> str | None:
        if self.model.engine.is_alive:
            return None
        return f"the engine of {self.model.name} has stopped; its log says why"

    def read(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        if kind == "chat":
            return _ChatCall(self, checked(body, ChatRequest))
        if kind == "text":
            return _TextCall(self, checked(body, TextRequest))
        return _EmbeddingCall(self, checked(body, EmbeddingRequest))

    def check_answers(self, count: int) -> None:
        """`Call.check_room` for answers of the engine."""
        model = self.model
        if count > (most := model.engine.most_at_once):
            raise RequestError(f"{count:,} answers in one request; {model.name} takes {most:,} at most")
        try:
            model.engine.check_room(count + self._num_preparing)
        except EngineStoppedError as error:
            raise RequestError(str(error), 503) from error

    async def prepared(self, count: int, expires_at: float, make: Callable[[], Result]) -> Result:
        """What a thread makes for so many answers, if it is there in time."""
        self._num_preparing += count
        try:
            return await self._beside(self._preparing, expires_at, make)
        except TooAmbiguousError as error:
            raise _refused(error) from error
        finally:
            self._num_preparing -= count

    async def embedded(self, texts: Sequence[Sequence[int]], expires_at: float) -> list[list[float]]:
        """A vector for each."""
        self.check_texts(len(texts))
        self._num_texts += len(texts)
        try:
            return [
                await self._beside(self._embedding, expires_at, partial(self.model.embed, text))
                for text in texts
            ]
        finally:
            self._num_texts -= len(texts)

    def check_texts(self, count: int) -> None:
        """`Call.check_room` for embeddings: a request may have many texts, but not wait behind many."""
        if self._num_texts and self._num_texts + count > self.settings.max_waiting + 1:
            raise ServiceLimitError(f"{self._num_texts} texts for {self.model.name} are being embedded", 1.0)

    async def _beside(
        self, threads: ThreadPoolExecutor, expires_at: float, make: Callable[[], Result]
    ) -> Result:
        try:
            async with asyncio.timeout(max(expires_at - time.monotonic(), 0)):
                # What has not begun when it is cancelled never does.
                return await asyncio.get_running_loop().run_in_executor(threads, make)
        except TimeoutError:
            raise DeadlineError(f"{self.model.name} has not begun an answer in time") from None


class _GeneratedCall(ABC):
    """A request for answers of the engine."""

    def __init__(self, service: EmbeddedService, request: ChatRequest | TextRequest, count: int) -> None:
        self._service, self._request, self.count = service, request, count

    @property
    def is_stream(self) -> bool:
        return self._request.stream

    @property
    def user(self) -> str | None:
        return self._request.user

    def check_room(self) -> None:
        self._service.check_answers(self.count)

    async def whole(self, expires_at: float) -> dict[str, Any]:
        prompts, form = await self._prepared(expires_at)
        answers = [Answer() for _ in prompts]
        async with aclosing(self._pieces(prompts)) as pieces:
            async for index, piece in pieces:
                answers[index].add(piece)
        return form.whole(answers)

    async def stream(self, expires_at: float) -> Values:
        prompts, form = await self._prepared(expires_at)
        self._service.check_answers(len(prompts))
        return form.chunks(self._pieces(prompts), len(prompts))

    @abstractmethod
    async def _prepared(self, expires_at: float) -> tuple[Sequence[Prompt], ChatForm | TextForm]:
        """What the engine is asked, and the form of the answer."""

    async def _pieces(self, prompts: Sequence[Prompt]) -> Pieces:
        """Pieces of all choices as they come, with the number of the choice; closing the generator ends all
        of them."""
        streams = [self._service.model.engine.submit(prompt) for prompt in prompts]
        # One alone needs no tasks: each step of the loop is one that the engine's thread may delay.
        pieces = _numbered(streams[0]) if len(streams) == 1 else _merged(streams)
        try:
            async with aclosing(pieces):
                async for each in pieces:
                    yield each
        except EngineStoppedError as error:
            raise RequestError(str(error), 503) from error
        except TooAmbiguousError as error:
            raise _refused(error) from error


async def _numbered(stream: AsyncGenerator[Piece, None]) -> Pieces:
    async with aclosing(stream):
        async for piece in stream:
            yield 0, piece


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> Pieces:
    """Pieces of several answers as they come, with the number of the answer."""
    found: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

    async def one(index: int, stream: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    found.put_nowait((index, piece))
            found.put_nowait(None)
        except Exception as error:
            found.put_nowait(error)

    tasks = [asyncio.create_task(one(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            each = await found.get()
            if isinstance(each, Exception):
                raise each
            if each is None:
                left -= 1
            else:
                yield each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _ChatCall(_GeneratedCall):
    def __init__(self, service: EmbeddedService, request: ChatRequest) -> None:
        super().__init__(service, request, request.n)
        self._chat = request
        model = service.model
        if model.template is None:
            raise RequestError(f"{model.name} has no chat template; ask POST /v1/completions", param="model")
        self._template = model.template
        self._tools = wanted_tools(request)
        held = bool(self._tools) and is_held(request)
        if held and request.response_format is not None and request.response_format.type != "text":
            raise RequestError(
                "response_format: a call of a tool has a form of its own", param="response_format"
            )
        self._messages = messages_of(request, self._tools, self._template)
        self._wanted = call_format(self._tools) if held else request.response_format

    async def _prepared(self, expires_at: float) -> tuple[Sequence[Prompt], ChatForm]:
        model, tools = self._service.model, self._tools

        def make() -> tuple[list[int], list[Prompt]]:
            try:
                text = self._template.opened(
                    self._messages, [tool.model_dump(exclude_none=True) for tool in tools] or None
                )
            except InputError as error:
                raise RequestError(str(error), param="messages") from error
            tokens = model.text.encode(text)
            grammar = grammar_of(self._wanted, model)
            return tokens, prompts_of(self._chat, tokens, grammar, model, expires_at)

        tokens, prompts = await self._service.prepared(self.count, expires_at, make)
        form = ChatForm(self._chat, model.name, lambda token: model.text.decode([token]), len(tokens), tools)
        return prompts, form


class _TextCall(_GeneratedCall):
    def __init__(self, service: EmbeddedService, request: TextRequest) -> None:
        super().__init__(service, request, request.num_prompts * request.n)
        self._text = request
        if request.best_of not in (None, request.n):
            raise RequestError("best_of: all answers are given; leave it out", param="best_of")
        if not request.num_prompts:
            raise RequestError("prompt: expected a text or more", param="prompt")

    async def _prepared(self, expires_at: float) -> tuple[Sequence[Prompt], TextForm]:
        model, request = self._service.model, self._text

        def make() -> tuple[int, list[Prompt]]:
            given = _known(request.prompts(model), model, "prompt")
            grammar = grammar_of(request.response_format, model)
            prompts = [
                one for tokens in given for one in prompts_of(request, tokens, grammar, model, expires_at)
            ]
            return sum(map(len, given)), prompts

        if request.is_work:
            count, prompts = await self._service.prepared(self.count, expires_at, make)
        else:
            count, prompts = make()
        form = TextForm(request, model.name, lambda token: model.text.decode([token]), count)
        return prompts, form


class _EmbeddingCall:
    is_stream = False

    def __init__(self, service: EmbeddedService, request: EmbeddingRequest) -> None:
        self._service, self._request = service, request
        model = service.model
        if not model.settings.embeddings:
            raise RequestError(
                f"{model.name} gives no embeddings", 404, param="model", code="model_not_found"
            )
        self._texts = TextRequest.model_validate({"model": request.model, "prompt": request.input})
        self.count = self._texts.num_prompts
        if self.count > MOST_TEXTS:
            raise RequestError(f"input: {self.count:,} texts; at most {MOST_TEXTS:,}", param="input")
        if not self.count:
            raise RequestError("input: expected a text or more", param="input")

    @property
    def user(self) -> str | None:
        return self._request.user

    def check_room(self) -> None:
        self._service.check_texts(self.count)

    async def whole(self, expires_at: float) -> dict[str, Any]:
        model, context = self._service.model, self._service.settings.context_length

        def make() -> list[list[int]]:
            given = _known(self._texts.prompts(model), model, "input")
            if any(not 0 < len(tokens) <= context for tokens in given):
                raise RequestError(f"input: expected texts of 1 to {context} tokens", param="input")
            return given

        given = await self._service.prepared(0, expires_at, make)
        vectors = await self._service.embedded(given, expires_at)
        encoding, count = self._request.encoding_format, sum(map(len, given))
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, encoding)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    async def stream(self, expires_at: float) -> Values:
        raise AssertionError("vectors are not streamed, as `is_stream` says")


def checked(body: Mapping[str, Any], kind: type[Wanted]) -> Wanted:
    """A request of a kind.

    Raises:
        RequestError: it says what is not known or not of its type; names the first.
    """
    try:
        # What clients send for "as ever".
        return kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        problems = error.errors()
        known = [field.alias or name for name, field in kind.model_fields.items()]
        raise RequestError(
            explain(problems, known), param=str(problems[0]["loc"][0]) if problems[0]["loc"] else None
        ) from error


def _known(given: list[list[int]], model: LanguageModelHere, name: str) -> list[list[int]]:
    if any(not 0 <= token < model.engine.num_tokens for tokens in given for token in tokens):
        raise RequestError(f"{name}: a token is none of {model.name}", param=name)
    return given


def _refused(error: TooAmbiguousError) -> RequestError:
    return RequestError(f"response_format: {error}", param="response_format")


def _written(vector: list[float], encoding: str) -> Any:
    if encoding == "float":
        return vector
    return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode()
