"""Answers to a file of requests, of a run or a store of versions in this process, or of a service by HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import load_service
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.wire.errors import explain
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest

AT_ONCE = 32
"""Requests computed together, or asked at the same time."""
TIMEOUT_S = 60.0

Answers = Callable[[Sequence["Asked"]], list[tuple[str, ...]]]
"""Ids of the items of each request, best first."""


@dataclass(frozen=True)
class Asked:
    """A request of a file."""

    where: str
    """For messages."""
    request: RecommendRequest
    expected: frozenset[str]
    """Items that would be right; empty where that is not known."""


def read_asked(path: Path) -> list[Asked]:
    """Read requests: a line of JSON each, with the fields of `POST /v1/recommend`, and `expected`, an item or
    several that would be right, where that is known.

    Raises:
        InputError: a line is none; names it. Or there are none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--requests {path}: cannot be read: {error}") from error
    asked = [_asked(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not asked:
        raise InputError(f"--requests {path}: there is no request in it")
    return asked


def _asked(where: str, line: str) -> Asked:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: expected an object with the fields of a request, got {line[:40]}")
    expected = fields.pop("expected", None)
    several = [] if expected is None else expected if isinstance(expected, list) else [expected]
    if not all(isinstance(one, str) for one in several):
        raise InputError(f"{where}: expected: must be the id of an item, as text, or a list of them")
    try:
        request = RecommendRequest.model_validate(fields)
    except ValidationError as error:
        said = explain(error.errors(), RecommendRequest.model_fields)
        raise InputError(f"{where}: {said}") from error
    return Asked(where, request, frozenset(several))


def answers_of(side: str, device: str | None, token: str | None) -> Answers:
    """What answers.

    Args:
        side: a run's folder, a store of published versions, or the URL of a service.
        device: to compute on, of a run or version; None: the run's.
        token: of the service, if it asks for one.

    Raises:
        InputError: there is no such run or version.
    """
    if side.startswith(("http://", "https://")):
        if device is not None:
            raise InputError(f"{side}: a service computes where it was started; leave out its device")
        return partial(_by_http, side.rstrip("/"), token)
    service = load_service(side, ServeConfig(), device)

    def here(asked: Sequence[Asked]) -> list[tuple[str, ...]]:
        found = []
        for start in range(0, len(asked), AT_ONCE):
            part = asked[start : start + AT_ONCE]
            for one, answer in zip(part, service.recommend_all([one.request for one in part]), strict=True):
                if isinstance(answer, Exception):
                    raise InputError(f"{one.where}: {side}: {answer}") from answer
                found.append(_items(answer))
        return found

    return here


def _by_http(url: str, token: str | None, asked: Sequence[Asked]) -> list[tuple[str, ...]]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(partial(_ask, url, token), asked))


def _ask(url: str, token: str | None, asked: Asked) -> tuple[str, ...]:
    body = asked.request.model_dump_json(exclude_unset=True).encode()
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{url}/v1/recommend", body, headers)
    # Not through a proxy of the environment, nor to where an answer sends: the token is for this service.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            answer: Any = json.load(response)
        return _items(RecommendAnswer.model_validate(answer))
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise InputError(f"{asked.where}: {url} answers with status {error.code}: {said}") from error
    except (OSError, ValueError) as error:  # what is no answer at all is a ValueError
        raise InputError(f"{asked.where}: {url} does not answer: {error}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """No other place is asked: the answer counts as an error."""


def _items(answer: RecommendAnswer) -> tuple[str, ...]:
    return tuple(item.item_id for item in answer.items)
