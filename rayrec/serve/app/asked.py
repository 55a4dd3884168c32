"""A file of requests, of recommendations or of texts, with what would be right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayrec.pipelines.inference.text_answers import TextRequest
from rayrec.platform.errors import InputError
from rayrec.samples.features.text_features import said
from rayrec.samples.text.records import Message
from rayrec.serve.wire.errors import explain
from rayrec.serve.wire.schemas import RecommendRequest

_OF_TEXTS = ("messages", "prompt")
"""Fields by which a request for a text is known."""
_KNOWN = ("messages", "prompt", "completion", "expected", "max_tokens")


@dataclass(frozen=True)
class Asked:
    """A request of a file."""

    where: str
    """For messages."""
    request: RecommendRequest | TextRequest
    expected: frozenset[str]
    """Items or texts that would be right; empty where that is not known."""


def read_asked(path: Path) -> list[Asked]:
    """Read requests: a line of JSON each, and what would be right where that is known.

    Of recommendations: the fields of `POST /v1/recommend`, and `expected`, an item or several. Of texts:
    `messages`, whose last one is the right answer if it is of an assistant, or `prompt`, a text or messages,
    with `completion`; or `expected`, a text or several, and `max_tokens`.

    Raises:
        InputError: a line is none; names it. Or there are none, or both kinds.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--requests {path}: cannot be read: {error}") from error
    asked = [_asked(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not asked:
        raise InputError(f"--requests {path}: there is no request in it")
    kinds = {type(one.request) for one in asked}
    if len(kinds) > 1:
        other = next(one for one in asked if type(one.request) is not type(asked[0].request))
        raise InputError(
            f"{other.where}: some requests are for recommendations and some for texts; give two files"
        )
    return asked


def _asked(where: str, line: str) -> Asked:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: expected an object with the fields of a request, got {line[:40]}")
    if any(name in fields for name in _OF_TEXTS):
        return _asked_text(where, fields)
    expected = _expected(where, fields.pop("expected", None), "the id of an item, as text")
    try:
        request = RecommendRequest.model_validate(fields)
    except ValidationError as error:
        told = explain(error.errors(), RecommendRequest.model_fields)
        raise InputError(f"{where}: {told}") from error
    return Asked(where, request, expected)


def _expected(where: str, value: Any, what: str) -> frozenset[str]:
    several = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in several):
        raise InputError(f"{where}: expected: must be {what}, or a list of them")
    return frozenset(several)


def _asked_text(where: str, fields: dict[str, Any]) -> Asked:
    if unknown := [name for name in fields if name not in _KNOWN]:
        raise InputError(f"{where}: {unknown[0]}: unknown field; known are {', '.join(_KNOWN)}")
    if all(name in fields for name in _OF_TEXTS):
        raise InputError(f"{where}: has messages and a prompt; give one of them")
    most = fields.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise InputError(f"{where}: max_tokens: expected an integer from 1, got {most!r}")
    right = _expected(where, fields.get("expected"), "a text")
    completion = fields.get("completion")
    prompt = ""
    if isinstance(fields.get("prompt"), str):
        messages: tuple[Message, ...] = ()
        prompt = fields["prompt"]
        if completion is not None and not isinstance(completion, str):
            raise InputError(f"{where}: completion: expected a text, as the prompt is one")
        answers = [] if completion is None else [completion]
    else:
        name = "messages" if "messages" in fields else "prompt"
        messages = _messages(where, name, fields[name])
        answers = []
        if completion is not None:
            answers = [one.content for one in _messages(where, "completion", completion)]
        elif messages[-1].role == "assistant":
            *before, last = messages
            messages, answers = tuple(before), [last.content]
    if not (messages or prompt):
        raise InputError(f"{where}: nothing is asked")
    # Answers are compared without thoughts and blanks around them; right ones, too.
    expected = frozenset(said(one) for one in [*right, *answers])
    return Asked(where, TextRequest(messages, prompt, most), expected)


def _messages(where: str, name: str, value: Any) -> tuple[Message, ...]:
    found = []
    for one in value if isinstance(value, list) else [None]:
        content = one.get("content") if isinstance(one, dict) else None
        role = one.get("role") if isinstance(one, dict) else None
        if not (isinstance(role, str) and isinstance(content, str)):
            raise InputError(f"{where}: {name}: expected a list of messages, each with a role and a content")
        found.append(Message(role, content))
    if not found:
        raise InputError(f"{where}: {name}: there is no message")
    return tuple(found)
