"""Chat completions, completions, models and embeddings, as OpenAI's API has them.

Embeddings are the mean of the last hidden states of a text's tokens, as float32. Log-probabilities are those
of the model alone, whatever the temperature or a schema made of them.

Source: the reference of OpenAI's API, platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from rayrec.models.generation.sampler import Chosen
from rayrec.platform.errors import InputError
from rayrec.serve.language.answering import (
    Admitted,
    Answer,
    LanguageModels,
    events,
    read_request,
    unless_gone,
)
from rayrec.serve.language.loading import LanguageModelHere
from rayrec.serve.language.requests import (
    ChatRequest,
    EmbeddingRequest,
    TextRequest,
    Tool,
    grammar_of,
    prompts_of,
)
from rayrec.serve.language.tools import (
    call_format,
    call_in,
    is_held,
    may_become_call,
    messages_of,
    wanted_tools,
)
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.request_body import beside_the_loop

MOST_TEXTS = 2048
"""In one request for embeddings, as OpenAI has it."""


def openai_router(models: LanguageModels) -> APIRouter:
    """Routes below `/v1`."""
    router = APIRouter(prefix="/v1", tags=["Language models"])
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "rayrec"}

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """All models."""
        return {"object": "list", "data": [described(name) for name in models.models]}

    @router.get("/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        """A model."""
        return described(models.model(name).name)

    @router.post("/chat/completions", response_model=None)
    async def chat(http: Request) -> Response:
        """The next message of a conversation, at once or as it is written."""
        request = await read_request(http, ChatRequest)
        model = models.model(request.model)
        template = model.template
        if template is None:
            raise RequestError(f"{model.name} has no chat template; ask POST /v1/completions", param="model")
        tools = wanted_tools(request)
        held = bool(tools) and is_held(request)
        if held and request.response_format is not None and request.response_format.type != "text":
            raise RequestError(
                "response_format: a call of a tool has a form of its own", param="response_format"
            )
        messages = messages_of(request, tools, template)
        wanted = call_format(tools) if held else request.response_format

        def prepared() -> tuple[list[int], Any]:
            try:
                text = template.opened(
                    messages, [tool.model_dump(exclude_none=True) for tool in tools] or None
                )
            except InputError as error:
                raise RequestError(str(error), param="messages") from error
            return model.text.encode(text), grammar_of(wanted, model)

        tokens, grammar = await asyncio.to_thread(prepared)
        prompts = prompts_of(request, tokens, grammar, model, models.expires_at(http, model))
        writer = _Chat(request, model, tools, held, len(tokens))
        return await answered(http, models.admit(http, model, prompts), writer, request.stream)

    @router.post("/completions", response_model=None)
    async def completions(http: Request) -> Response:
        """How texts go on."""
        request = await read_request(http, TextRequest)
        model = models.model(request.model)
        if request.best_of not in (None, request.n):
            raise RequestError("best_of: all answers are given; leave it out", param="best_of")
        if not request.num_prompts:
            raise RequestError("prompt: expected a text or more", param="prompt")
        models.check_room(model, request.num_prompts * request.n)  # before anything is made of each
        given, grammar = await beside_the_loop(
            request.is_work, lambda: (request.prompts(model), grammar_of(request.response_format, model))
        )
        if any(not 0 <= token < model.engine.num_tokens for tokens in given for token in tokens):
            raise RequestError(f"prompt: a token is none of {model.name}", param="prompt")
        expires_at = models.expires_at(http, model)
        prompts = [one for tokens in given for one in prompts_of(request, tokens, grammar, model, expires_at)]
        writer = _Text(request, model, sum(map(len, given)))
        return await answered(http, models.admit(http, model, prompts), writer, request.stream)

    @router.post("/embeddings", response_model=None)
    async def embeddings(http: Request) -> Response:
        """A vector for each text."""
        request = await read_request(http, EmbeddingRequest)
        model = models.model(request.model)
        if not model.settings.embeddings:
            raise RequestError(
                f"{model.name} gives no embeddings", 404, param="model", code="model_not_found"
            )
        asked = TextRequest.model_validate({"model": request.model, "prompt": request.input})
        if asked.num_prompts > MOST_TEXTS:
            raise RequestError(f"input: {asked.num_prompts:,} texts; at most {MOST_TEXTS:,}", param="input")
        given = await asyncio.to_thread(asked.prompts, model)
        context = model.settings.context_length
        if not given or any(not 0 < len(tokens) <= context for tokens in given):
            raise RequestError(f"input: expected texts of 1 to {context} tokens", param="input")
        if any(not 0 <= token < model.engine.num_tokens for tokens in given for token in tokens):
            raise RequestError(f"input: a token is none of {model.name}", param="input")
        admitted = models.admit(http, model, [])
        try:
            vectors = [await asyncio.to_thread(model.embed, tokens) for tokens in given]
        finally:
            admitted.release()
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        count = sum(map(len, given))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})

    return router


async def answered(
    http: Request, admitted: Admitted, writer: _Chat | _Text, is_stream: bool | None
) -> Response:
    """The answer of admitted prompts, whole or as events."""
    if is_stream:
        return events(http, admitted, writer.chunks(admitted), "[DONE]")
    return JSONResponse(writer.whole(await unless_gone(http, admitted.answers())))


def _written(vector: list[float], encoding: str) -> Any:
    if encoding == "float":
        return vector
    return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode()


class _Writer:
    """Answers in the form of one of the routes."""

    whole_kind: str
    chunk_kind: str

    def __init__(
        self, request: ChatRequest | TextRequest, model: LanguageModelHere, num_prompt_tokens: int
    ) -> None:
        self._request, self._model, self._num_prompt_tokens = request, model, num_prompt_tokens
        prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

    def _chunk(self, choices: list[Any], usage: dict[str, int] | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = usage
        return chunk

    def _usage(self, count: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": count,
            "total_tokens": self._num_prompt_tokens + count,
        }

    def _text_of(self, token: int) -> str:
        return self._model.text.decode([token])


class _Chat(_Writer):
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        model: LanguageModelHere,
        tools: Sequence[Tool],
        held: bool,
        num_tokens: int,
    ) -> None:
        super().__init__(request, model, num_tokens)
        self._tools, self._held = tools, held

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            call = self._call(answer)
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            if call is not None:
                message |= {"content": None, "tool_calls": [call]}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.tokens),
                    "finish_reason": "tool_calls" if call is not None else answer.reason,
                }
            )
        usage = self._usage(sum(len(answer.tokens) for answer in answers))
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": usage}

    async def chunks(self, admitted: Admitted) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as it comes; what may be a call is held back until that is known."""
        unsent = [Answer() for _ in admitted.prompts]
        is_text = [not self._tools for _ in admitted.prompts]
        count = 0
        async with aclosing(admitted.pieces()) as pieces:
            async for index, piece in pieces:
                count += len(piece.tokens)
                answer = unsent[index]
                answer.add(piece)
                is_first = not is_text[index] or answer.is_first
                if not is_text[index]:
                    if piece.reason is None and (self._held or may_become_call(answer.text)):
                        continue
                    call = self._call(answer) if piece.reason is not None else None
                    is_text[index] = call is None
                else:
                    call = None
                delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
                if call is not None:
                    delta["tool_calls"] = [{"index": 0, **call}]
                else:
                    delta["content"] = answer.text
                logprobs = self._logprobs(answer.tokens)
                yield self._chunk(
                    [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]
                )
                if piece.reason is not None:
                    reason = "tool_calls" if call is not None else piece.reason
                    yield self._chunk(
                        [{"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}]
                    )
                unsent[index] = Answer(is_first=False)
        if self._request.include_usage:
            yield self._chunk([], self._usage(count))

    def _call(self, answer: Answer) -> dict[str, Any] | None:
        return call_in(answer.text, self._tools) if self._tools else None

    def _logprobs(self, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
        if self._request.num_top is None:
            return None
        return {
            "content": [
                {
                    **self._logprob(one.token, one.logprob or 0.0),
                    "top_logprobs": [self._logprob(token, value) for token, value in one.top],
                }
                for one in tokens
            ],
            "refusal": None,
        }

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        text = self._text_of(token)
        # A token may be a part of a character, whose bytes no text has.
        written = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": value, "bytes": written}


class _Text(_Writer):
    whole_kind = chunk_kind = "text_completion"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [
            self._choice(index, answer.text, answer.tokens, answer.reason)
            for index, answer in enumerate(answers)
        ]
        usage = self._usage(sum(len(answer.tokens) for answer in answers))
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": usage}

    async def chunks(self, admitted: Admitted) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as it comes."""
        count = 0
        async with aclosing(admitted.pieces()) as pieces:
            async for index, piece in pieces:
                count += len(piece.tokens)
                yield self._chunk([self._choice(index, piece.text, piece.tokens, piece.reason)])
        if self._request.include_usage:
            yield self._chunk([], self._usage(count))

    def _choice(self, index: int, text: str, tokens: Sequence[Chosen], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._request.num_top is not None:
            texts = [self._text_of(one.token) for one in tokens]
            offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
            logprobs = {
                "tokens": texts,
                "token_logprobs": [one.logprob for one in tokens],
                "top_logprobs": [{self._text_of(token): value for token, value in one.top} for one in tokens],
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
