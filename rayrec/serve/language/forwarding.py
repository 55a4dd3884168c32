"""Requests that somebody else understands: another service, or a replica of ours.

Here is read only what limits and routes need: how many answers, whether as a stream, for whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rayrec.serve.language.served import Kind, Values
from rayrec.serve.wire.errors import RequestError

MOST_CHOICES = 128
"""As OpenAI's API has it."""


class Forwards(Protocol):
    """Sends a request to the service or replica that answers it."""

    async def whole(self, kind: Kind, body: Mapping[str, Any], expires_at: float) -> dict[str, Any]:
        """As `Call.whole`."""

    def values(self, kind: Kind, body: Mapping[str, Any], expires_at: float) -> Values:
        """Chunks of a streamed answer; the first value is one of no meaning, when it has begun."""


def num_choices(kind: Kind, body: Mapping[str, Any]) -> int:
    """Answers that a request asks for: `n` to each of its texts."""
    return _num_texts(kind, body) * (body.get("n") or 1)


def _num_texts(kind: Kind, body: Mapping[str, Any]) -> int:
    given = body.get("prompt" if kind == "text" else "input") if kind != "chat" else None
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


class ForwardedCall:
    """Implements `Call`."""

    def __init__(self, to: Forwards, kind: Kind, body: Mapping[str, Any]) -> None:
        """
        Raises:
            RequestError: what is read of it is not of its type.
        """
        self._to, self._kind, self._body = to, kind, body
        stream, user = body.get("stream"), body.get("user")
        counts = {name: body[name] for name in ("n", "best_of") if body.get(name) is not None}
        for name, count in counts.items():
            if type(count) is not int or not 1 <= count <= MOST_CHOICES:
                raise RequestError(f"{name}: expected a number from 1 to {MOST_CHOICES}", param=name)
        if stream is not None and type(stream) is not bool:
            raise RequestError("stream: expected true or false", param="stream")
        # All that are generated, of which the other side may give the best.
        self.count = _num_texts(kind, body) * max([1, *counts.values()])
        self.is_stream = bool(stream) and kind != "embedding"
        self.user = user if isinstance(user, str) else None

    def check_room(self) -> None:
        """Nothing to check here: the other side says whether it has room."""

    async def whole(self, expires_at: float) -> dict[str, Any]:
        return await self._to.whole(self._kind, self._body, expires_at)

    async def stream(self, expires_at: float) -> Values:
        values = self._to.values(self._kind, self._body, expires_at)
        try:
            await anext(values)
        except BaseException:
            await values.aclose()
            raise
        return values
