"""Completions as OpenAI's API has them, for models of semantic IDs: the next item is the text that goes on.

    prompt: <a_12><b_3><c_77><a_4><b_0><c_2> ─► history ─► the batcher ─► choices: <a_9><b_3><c_1>, ...

A prompt is a history, oldest first, as tokens of semantic IDs or as ids of items; each choice is one item, as
tokens, and all choices are different items, the most probable first. Items of the prompt are left out,
unless `exclude_seen` is false. Nothing is drawn: an item's probability is exact, and which items are found is
for the model's beam. So what only makes sense for drawing is refused, and not passed over.

The log-probability that `logprobs` asks for is that of the whole item, which is one entry of `tokens` there.
Items that share a tuple of codes have one more token, which tells them apart; where the collision policy is
`share` they are equally probable, and an item's probability is its tuple's, divided by their number.

Choice i is of prompt i // n: where one has fewer items than n, numbers are left out. `system_fingerprint` is
the version that answers. What the API does not have, and answers do: `item_id` of each choice, and of each
prompt `unread_events` and what was lowered of its answer (`degraded`), as in `/v1/recommend`. Popular items
have no probability: while the service answers with these alone, completions are refused with status 503.

Source: the reference of OpenAI's API, platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.request_info import info_of
from rayrec.serve.config.models import MODEL_NAME
from rayrec.serve.engine.current import Service
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.request_log import REQUEST_ID, request_id_of
from rayrec.serve.protocols.rows import answers_of_all
from rayrec.serve.wire.errors import RequestError, explain
from rayrec.serve.wire.item_texts import ItemTexts
from rayrec.serve.wire.request_body import (
    LARGE_BYTES,
    LARGE_ITEMS,
    beside_the_loop,
    json_object,
    unpacked_body,
)
from rayrec.serve.wire.schemas import Filter, RecommendAnswer, RecommendedItem, RecommendRequest

MAX_LOGPROBS = 5
"""As in OpenAI's API."""
MAX_STOPS = 4
"""As in OpenAI's API."""

_NO_DRAWING = "the most probable items are found and none is drawn"
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    # 1 is the API's own default, which clients send without meaning anything by it.
    "temperature": ((0, 1), _NO_DRAWING),
    "top_p": ((1,), _NO_DRAWING),
    "presence_penalty": ((0,), _NO_DRAWING),
    "frequency_penalty": ((0,), _NO_DRAWING),
    "logit_bias": (({},), "items have the probabilities of the model"),
    "suffix": (("",), "the model reads no text after what it writes"),
    "echo": ((False,), "a choice is the item alone"),
    "stream": ((False,), "all items are found at once"),
    "stream_options": ((), "all items are found at once"),
}
"""Parameters of OpenAI's that can be given only with the values that change nothing, and why."""


class CompletionRequest(BaseModel):
    """What is read of a request; `_ONLY` are looked at before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: StrictStr
    prompt: StrictStr | Annotated[list[StrictStr], Field(fail_fast=True)]
    n: StrictInt = Field(1, ge=1)
    best_of: StrictInt | None = Field(None, ge=1)
    """How many items are looked for; the n best of them are answered."""
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """How many of the most probable items are listed with each choice."""
    max_tokens: StrictInt | None = Field(None, ge=0)
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MAX_STOPS)] | None = None
    """A text ends before the first of these that it has; `item_id` names the item all the same."""
    seed: StrictInt | None = None
    """Changes nothing: equal requests have equal answers."""
    user: StrictStr | None = None
    """For whom it is, which changes no item; where several models answer, it says which of them does."""
    exclude_seen: StrictBool = True
    """Not of OpenAI's: whether items of the prompt are left out."""

    filter: Filter | None = None
    """Not of OpenAI's: which items may be recommended, as in `/v1/recommend`."""

    @property
    def num_searched(self) -> int:
        """Items that the model is asked for."""
        return max(self.best_of or self.n, self.logprobs or 0)


_BODY = {
    "required": True,
    "content": {"application/json": {"schema": CompletionRequest.model_json_schema()}},
}


def completions_router(
    service: Service, admission: AdmissionControl, model_name: str = MODEL_NAME
) -> APIRouter:
    """Routes of OpenAI's API; errors are in its form. For models without semantic IDs, there is no model."""
    router = APIRouter(prefix="/v1", tags=["Completions"])
    described = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "rayrec"}

    def texts_of(name: str, of: Service) -> ItemTexts:
        if (texts := of.item_texts) is None:
            raise RequestError(
                "this service's model has no semantic IDs, which completions are made of; ask POST "
                "/v1/recommend",
                404,
                param="model",
                code="model_not_found",
            )
        if name != model_name:
            raise RequestError(
                f"there is no model {name!r}; the one here is {model_name!r}",
                404,
                param="model",
                code="model_not_found",
            )
        return texts

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The model, if it has semantic IDs."""
        return {"object": "list", "data": [] if service.item_texts is None else [described]}

    @router.get("/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        texts_of(name, service)
        return described

    @router.post("/completions", openapi_extra={"requestBody": _BODY}, response_model=None)
    async def completions(request: Request) -> JSONResponse:
        """The items that the model expects next, as tokens of their semantic IDs."""
        body = await unpacked_body(request)
        info = info_of(request)

        def read() -> tuple[CompletionRequest, RecommendationService, ItemTexts, list[RecommendRequest]]:
            asked = read_request(json_object(body))
            # Whose semantic IDs the prompts are read by.
            pinned = admission.draw([asked.user], info)
            texts = texts_of(asked.model, pinned)
            _check_numbers(asked, texts, service.max_k)
            has_ranker = pinned.ranker is not None
            return asked, pinned, texts, requests_of(asked, texts, has_ranker, admission.most_at_once)

        asked, pinned, texts, requests = await beside_the_loop(len(body) > LARGE_BYTES, read)

        def error_of(position: int, sentence: str, status: int = 400) -> RequestError:
            return _of_prompt(position, len(requests), sentence, status)

        request_id = request_id_of(request.headers.get(REQUEST_ID))
        answers = await answers_of_all(admission, pinned, requests, info, error_of, request_id)
        headers = {REQUEST_ID: request_id}
        for position, answer in enumerate(answers):
            if "popular_items" in answer.degraded:  # which have no probability
                raise error_of(position, "the service has too much to do to ask the model; try again", 503)
            # Where a filter leaves nothing, there is no choice; `allowed_items` says so.
            if answer.source not in ("model", "none"):
                raise error_of(position, "the run's operations leave nothing of it for the model")
        is_large = sum(len(answer.items) for answer in answers) > LARGE_ITEMS
        # An answer that is done: the framework would check a mapping item by item, on the event loop.
        return await beside_the_loop(
            is_large, lambda: JSONResponse(_completion(asked, requests, answers, texts), headers=headers)
        )

    return router


def read_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Check a completion request and drop the parameters that change nothing.

    Raises:
        RequestError: a parameter is unknown, wrong, or asks for what cannot be done; names it.
    """
    fields = dict(body)
    known = [*CompletionRequest.model_fields, *_ONLY]
    if unknown := next((name for name in fields if name not in known), None):
        raise RequestError(f"{unknown}: unknown field; known are {', '.join(known)}", param=unknown)
    for name, (harmless, reason) in _ONLY.items():
        value = fields.pop(name, None)
        if value is None or any(value == each and _same_kind(value, each) for each in harmless):
            continue
        allowed = f", or give {harmless[0]!r}".lower() if harmless else ""
        raise RequestError(f"{name}: {reason}; leave it out{allowed}", param=name)
    try:
        return CompletionRequest.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        if name == "prompt" and "prompt" in fields:
            raise RequestError(
                "prompt: expected a text, or an array of texts; numbers of tokens are not known here",
                param=name,
            ) from error
        raise RequestError(explain([problem], known), param=name) from error


def requests_of(
    asked: CompletionRequest, texts: ItemTexts, has_ranker: bool, max_prompts: int
) -> list[RecommendRequest]:
    """A request for each prompt.

    Raises:
        RequestError: a prompt is no history, or there are too many; says which.
    """
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if not 1 <= len(prompts) <= max_prompts:
        raise RequestError(
            f"prompt: {len(prompts)} prompts in one request; send from 1 to {max_prompts}", param="prompt"
        )
    # A ranking stage would order items by something else than their probability. Where there is none, it is
    # not mentioned, so that these requests and others are computed together.
    rank = False if has_ranker else None
    requests = []
    for position, prompt in enumerate(prompts):
        try:
            history = texts.keys_in(prompt)
            if not history:
                raise ValueError("it has no item, and the model nothing to go by")
            requests.append(
                RecommendRequest(
                    history=history,
                    k=asked.num_searched,
                    exclude_seen=asked.exclude_seen,
                    rank=rank,
                    filter=asked.filter,
                )
            )
        except ValidationError as error:  # is a ValueError too
            sentence = explain(error.errors(), RecommendRequest.model_fields)
            raise _of_prompt(position, len(prompts), sentence) from error
        except ValueError as error:
            raise _of_prompt(position, len(prompts), str(error)) from error
    return requests


def _check_numbers(asked: CompletionRequest, texts: ItemTexts, max_k: int) -> None:
    if asked.best_of is not None and asked.best_of < asked.n:
        raise RequestError(
            f"best_of: {asked.best_of} items are fewer than the n = {asked.n} wanted of them", param="best_of"
        )
    if asked.num_searched > max_k:
        name = "n" if asked.best_of is None else "best_of"
        raise RequestError(
            f"{name}: {asked.num_searched} items are more than the {max_k} of one answer", param=name
        )
    if asked.max_tokens is not None and asked.max_tokens < texts.num_tokens:
        raise RequestError(
            f"max_tokens: an item has {texts.num_tokens} tokens, and none is given in part; leave it out, or "
            f"give {texts.num_tokens}",
            param="max_tokens",
        )


def _completion(
    asked: CompletionRequest,
    requests: Sequence[RecommendRequest],
    answers: Sequence[RecommendAnswer],
    texts: ItemTexts,
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    num_shown = max(asked.n, asked.logprobs or 0)
    keys = dict.fromkeys(item.item_id for answer in answers for item in answer.items[:num_shown])
    text_of = dict(zip(keys, texts.texts_of(list(keys)), strict=True))
    for position, answer in enumerate(answers):
        top = {text_of[item.item_id]: item.score for item in answer.items[: asked.logprobs or 0]}
        for rank, item in enumerate(answer.items[: asked.n]):
            text = text_of[item.item_id]
            choices.append(
                {
                    "text": _stopped(text, asked.stop),
                    # By which clients find the prompt of a choice: index // n.
                    "index": position * asked.n + rank,
                    "logprobs": None if asked.logprobs is None else _logprobs(item, text, top),
                    "finish_reason": "stop",
                    "item_id": item.item_id,
                }
            )
    num_read = texts.num_tokens * sum(len(request.history or ()) for request in requests)
    num_written = texts.num_tokens * len(choices)
    filtered = {}
    if asked.filter is not None:  # the same of all prompts
        filtered["allowed_items"] = answers[0].allowed_items
        filtered["unknown_filter_items"] = answers[0].unknown_filter_items
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_read,
            "completion_tokens": num_written,
            "total_tokens": num_read + num_written,
        },
        "system_fingerprint": answers[0].model.label,
        "unread_events": [answer.unread_events for answer in answers],
        "degraded": [answer.degraded for answer in answers],
        **filtered,
    }


def _stopped(text: str, stop: str | list[str] | None) -> str:
    """The text, up to the first of what ends it."""
    stops = [stop] if isinstance(stop, str) else stop or ()
    # All of them in the whole text: cut at one, it may end in the middle of another that begins before.
    places = [text.find(each) for each in stops if each]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def _logprobs(item: RecommendedItem, text: str, top: Mapping[str, float]) -> dict[str, Any]:
    """The whole item as one token: the model's own steps are not kept."""
    return {
        "tokens": [text],
        "token_logprobs": [item.score],
        "top_logprobs": [dict(top)] if top else None,
        "text_offset": [0],
    }


def _of_prompt(position: int, num_prompts: int, sentence: str, status: int = 400) -> RequestError:
    where = "prompt" if num_prompts == 1 else f"prompt.{position}"
    return RequestError(f"{where}: {sentence}", status, param="prompt")


def _same_kind(value: Any, other: Any) -> bool:
    """0 is not False."""
    return isinstance(value, bool) == isinstance(other, bool)
