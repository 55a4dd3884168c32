"""Answers to requests, of a run, a store of versions or a folder in this process, or of a service by HTTP.

For a request that cannot be answered, there is a `Failed` with the reason, which a comparison counts.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from rayrec.models.base.compute import Precision
from rayrec.pipelines.inference.text_answers import TextAnswers, TextRequest
from rayrec.pipelines.metrics.agreement import Failed
from rayrec.platform.devices import HOST, autocast
from rayrec.platform.errors import InputError, MachineError
from rayrec.samples.features.text_features import said
from rayrec.serve.app.asked import Asked
from rayrec.serve.app.loading import load_service
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest

AT_ONCE = 32
"""Requests computed together, or asked at the same time."""
TIMEOUT_S = 60.0

Output = tuple[str, ...] | Failed
"""Ids of the items of a request, best first; or its text alone."""
Answers = Callable[[Sequence[Asked]], list[Output]]


@dataclass(frozen=True)
class Side:
    """What answers, and how."""

    what: str
    """A run's folder, a store of published versions, a folder with a language model, or the URL of a
    service."""
    device: str | None = None
    """To compute on, of what is computed here; None: the run's."""
    precision: Precision | None = None
    """Of products of matrices, of what is computed here; None: float32."""
    token: str | None = None
    """Of a service, if it asks for one."""
    model: str | None = None
    """Of a service with several language models."""
    max_tokens: int = 128
    """Of a text, where its request does not say."""

    @property
    def is_service(self) -> bool:
        return self.what.startswith(("http://", "https://"))


def answers_of(side: Side, of_texts: bool) -> Answers:
    """What answers.

    Args:
        of_texts: rather than of recommendations.

    Raises:
        InputError: there is no such run, version or service, or it has no such answers.
    """
    if side.is_service:
        for name in ("device", "precision"):
            if getattr(side, name) is not None:
                raise InputError(
                    f"{side.what}: a service computes where and as it was started; leave out its {name}"
                )
        url = side.what.rstrip("/")
        if not of_texts:
            return partial(_by_http, partial(_recommended, url, side.token))
        model = side.model or _only_model(url, side.token)
        return partial(_by_http, partial(_written, url, side.token, model, side.max_tokens))
    if side.model is not None:
        raise InputError(f"{side.what}: is one model, and no service with several; leave out its name")
    if of_texts:
        return partial(_texts_here, side)
    return partial(_recommended_here, side)


def _texts_here(side: Side, asked: Sequence[Asked]) -> list[Output]:
    precision = side.precision or "float32"
    if (Path(side.what) / "run.json").is_file():
        answers = TextAnswers.of_run(side.what, side.device, precision)
    else:
        answers = TextAnswers.of_folder(side.what, side.device or HOST.kind, precision)
    try:
        found = answers.answer([cast(TextRequest, one.request) for one in asked], side.max_tokens)
    finally:
        answers.close()
    return _unless_all_failed(asked, [one if isinstance(one, Failed) else (one,) for one in found], side.what)


def _recommended_here(side: Side, asked: Sequence[Asked]) -> list[Output]:
    service = load_service(side.what, ServeConfig(), side.device)
    found: list[Output] = []
    for start in range(0, len(asked), AT_ONCE):
        part = [cast(RecommendRequest, one.request) for one in asked[start : start + AT_ONCE]]
        with autocast(service.device, enabled=side.precision == "bfloat16"):
            answers = service.recommend_all(part)
        found += [
            Failed(str(answer)) if isinstance(answer, Exception) else _items(answer) for answer in answers
        ]
    return _unless_all_failed(asked, found, side.what)


def _by_http(ask: Callable[[Asked], Output], asked: Sequence[Asked]) -> list[Output]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        # A service that answers none of the first has nothing to compare, and may take a minute for each.
        found = _unless_all_failed(asked, list(threads.map(ask, asked[:AT_ONCE])), "")
        return found + list(threads.map(ask, asked[AT_ONCE:]))


def _unless_all_failed(asked: Sequence[Asked], found: list[Output], what: str) -> list[Output]:
    """The answers.

    Raises:
        InputError: there is none among them; says why the first request has none.
        MachineError: likewise, and it may have one later.
    """
    if isinstance(found[0], Failed) and all(isinstance(one, Failed) for one in found):
        source = f"{what}: " if what else ""
        kind = MachineError if found[0].may_pass else InputError
        raise kind(f"{asked[0].where}: {source}{found[0].reason}")
    return found


def _recommended(url: str, token: str | None, asked: Asked) -> Output:
    body = cast(RecommendRequest, asked.request).model_dump_json(exclude_unset=True).encode()
    try:
        return _items(RecommendAnswer.model_validate(_call(f"{url}/v1/recommend", token, body)))
    except (_CallError, ValueError) as error:  # what is no answer at all is a ValueError
        return _failed(url, error)


def _written(url: str, token: str | None, model: str, max_tokens: int, asked: Asked) -> Output:
    request = cast(TextRequest, asked.request)
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": request.max_tokens or max_tokens,
    }
    if request.messages:
        path = "chat/completions"
        body["messages"] = [{"role": one.role, "content": one.content} for one in request.messages]
    else:
        path, body["prompt"] = "completions", request.prompt
    try:
        answer = _call(f"{url}/v1/{path}", token, json.dumps(body).encode())
        choice = answer["choices"][0]
        return (said((choice["message"]["content"] if request.messages else choice["text"]) or ""),)
    except (_CallError, ValueError) as error:
        return _failed(url, error)
    except (KeyError, IndexError, TypeError):
        return Failed(f"{url} answers with no choice of OpenAI's API")


def _only_model(url: str, token: str | None) -> str:
    """The name of a service's language model.

    Raises:
        InputError: it answers otherwise, or has several.
        MachineError: it does not answer, or fails.
    """
    try:
        names = [str(one["id"]) for one in _call(f"{url}/v1/models", token, None)["data"]]
    except (_CallError, ValueError) as error:
        kind = MachineError if isinstance(error, _NoAnswerError) else InputError
        raise kind(_told(url, error)) from error
    except (KeyError, TypeError):
        raise InputError(f"{url} answers with no list of models of OpenAI's API") from None
    if len(names) != 1:
        shown = ", ".join(names) or "none"
        raise InputError(f"{url}: has the models {shown}; name one (--model-a, --model-b)")
    return names[0]


class _CallError(Exception):
    """A service did not answer with success; the message is a clause."""


class _NoAnswerError(_CallError):
    """It may do so later."""


def _call(url: str, token: str | None, body: bytes | None) -> Any:
    """What a service answers to a POST, or to a GET without a body.

    Raises:
        _CallError: nothing, or no success.
        ValueError: no JSON.
    """
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, body, headers)
    # Not through a proxy of the environment, nor to where an answer sends: the token is for this service.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        told = error.read(500).decode(errors="replace")
        kind = _NoAnswerError if error.code >= 500 else _CallError
        raise kind(f"answers with status {error.code}: {told}") from error
    except OSError as error:
        raise _NoAnswerError(f"does not answer: {error}") from error


def _failed(url: str, error: Exception) -> Failed:
    return Failed(_told(url, error), may_pass=isinstance(error, _NoAnswerError))


def _told(url: str, error: Exception) -> str:
    return f"{url} {error}" if isinstance(error, _CallError) else f"{url} does not answer: {error}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """No other place is asked: the answer counts as an error."""


def _items(answer: RecommendAnswer) -> tuple[str, ...]:
    return tuple(item.item_id for item in answer.items)
