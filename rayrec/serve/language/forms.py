"""Answers of an embedded engine in the forms of OpenAI's routes, whole and in chunks.

Log-probabilities are those of the model alone, whatever the temperature or a schema made of them.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayrec.models.generation.sampler import Chosen
from rayrec.serve.language.requests import ChatRequest, TextRequest, Tool
from rayrec.serve.language.served import Values
from rayrec.serve.language.tools import CallReader
from rayrec.serve.language.writing import Piece, Reason

Pieces = AsyncGenerator[tuple[int, Piece], None]
"""(number of the choice, what is added to it)."""
TextOf = Callable[[int], str]
"""Of a token."""


@dataclass
class Answer:
    """One choice, whole."""

    text: str = ""
    tokens: list[Chosen] = field(default_factory=list)
    reason: Reason = "stop"

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        if piece.reason is not None:
            self.reason = piece.reason


class _Form:
    """Answers to one request."""

    whole_kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self, request: ChatRequest | TextRequest, name: str, text_of: TextOf, num_prompt_tokens: int
    ) -> None:
        self._request, self._text_of, self._num_prompt_tokens = request, text_of, num_prompt_tokens
        created = int(time.time())
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": created, "model": name}

    def _whole(self, choices: list[Any], count: int) -> dict[str, Any]:
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": self._usage(count)}

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


class ChatForm(_Form):
    """Of `POST /v1/chat/completions`."""

    whole_kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, request: ChatRequest, name: str, text_of: TextOf, num_prompt_tokens: int, tools: Sequence[Tool]
    ) -> None:
        super().__init__(request, name, text_of, num_prompt_tokens)
        self._tools, self._many = tools, request.parallel_tool_calls is not False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            text, calls = CallReader(self._tools, self._many).whole(answer.text)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.tokens),
                    "finish_reason": "tool_calls" if calls else answer.reason,
                }
            )
        return self._whole(choices, sum(len(answer.tokens) for answer in answers))

    async def chunks(self, pieces: Pieces, num_choices: int) -> Values:
        """The answer as it comes; what may be a call is held back until that is known."""
        readers = [CallReader(self._tools, self._many) for _ in range(num_choices)]
        unsent: list[list[Chosen]] = [[] for _ in range(num_choices)]
        begun = [False] * num_choices
        count = 0
        async with aclosing(pieces):
            async for index, piece in pieces:
                count += len(piece.tokens)
                unsent[index] += piece.tokens
                reader = readers[index]
                before = reader.num_calls
                text, calls = reader.add(piece.text, piece.reason is not None)
                if text or calls or piece.reason is not None:
                    delta: dict[str, Any] = {} if begun[index] else {"role": "assistant"}
                    if calls:
                        delta["tool_calls"] = [
                            {"index": before + place, **call} for place, call in enumerate(calls)
                        ]
                    if text or not calls:
                        delta["content"] = text
                    logprobs = self._logprobs(unsent[index])
                    yield self._chunk(
                        [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]
                    )
                    begun[index], unsent[index] = True, []
                if piece.reason is not None:
                    reason = "tool_calls" if reader.num_calls else piece.reason
                    yield self._chunk(
                        [{"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}]
                    )
        if self._request.include_usage:
            yield self._chunk([], self._usage(count))

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


class TextForm(_Form):
    """Of `POST /v1/completions`."""

    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [
            self._choice(index, answer.text, answer.tokens, answer.reason, Counter())
            for index, answer in enumerate(answers)
        ]
        return self._whole(choices, sum(len(answer.tokens) for answer in answers))

    async def chunks(self, pieces: Pieces, num_choices: int) -> Values:
        """The answer as it comes."""
        count, ends = 0, Counter[int]()
        async with aclosing(pieces):
            async for index, piece in pieces:
                count += len(piece.tokens)
                yield self._chunk([self._choice(index, piece.text, piece.tokens, piece.reason, ends)])
        if self._request.include_usage:
            yield self._chunk([], self._usage(count))

    def _choice(
        self, index: int, text: str, tokens: Sequence[Chosen], reason: str | None, ends: Counter[int]
    ) -> dict[str, Any]:
        """
        Args:
            ends: of what was told of each choice, in characters; this is added to it.
        """
        logprobs = None
        if self._request.num_top is not None:
            texts = [self._text_of(one.token) for one in tokens]
            *offsets, ends[index] = np.cumsum([ends[index], *map(len, texts)]).tolist()
            logprobs = {
                "tokens": texts,
                "token_logprobs": [one.logprob for one in tokens],
                "top_logprobs": [{self._text_of(token): value for token, value in one.top} for one in tokens],
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
