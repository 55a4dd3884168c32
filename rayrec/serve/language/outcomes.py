"""What became of a request: its answer, put together from chunks or taken whole, and how long it took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayrec.serve.wire.errors import RequestError


@dataclass
class Outcome:
    """Of one request to one model; on one event loop."""

    on_end: list[Callable[[Outcome], None]] = field(default_factory=list)
    """Told of the answer when it has ended, whole or not."""
    began_at: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    """To the first chunk of a stream."""
    seconds: float = 0.0
    texts: dict[int, str] = field(default_factory=dict)
    """By number of the choice; calls of tools are JSON."""
    reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    status: int = 200
    error: str | None = None
    is_over: bool = False

    def add(self, value: Mapping[str, Any]) -> None:
        """A chunk, or a whole answer."""
        for choice in value.get("choices") or ():
            if not isinstance(choice, Mapping):
                continue
            if self.first_s is None:
                self.first_s = time.monotonic() - self.began_at
            index = int(choice.get("index") or 0)
            self.texts[index] = self.texts.get(index, "") + _text(choice)
            if reason := choice.get("finish_reason"):
                self.reasons[index] = str(reason)
        usage = value.get("usage")
        if isinstance(usage, Mapping):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.answer_tokens = usage.get("completion_tokens", self.answer_tokens)

    def end(self, error: BaseException | None) -> None:
        """It has ended; once."""
        if self.is_over:
            return
        self.is_over = True
        self.seconds = time.monotonic() - self.began_at
        if error is not None:
            is_known = isinstance(error, RequestError)
            # Whatever else ends a task was the caller, who has gone.
            self.status = error.status if is_known else 500 if isinstance(error, Exception) else 499
            self.error = str(error) if is_known else type(error).__name__
        for told in self.on_end:
            told(self)

    @property
    def answers(self) -> list[str]:
        """Texts, in the order of the choices."""
        return [self.texts[index] for index in sorted(self.texts)]


def _text(choice: Mapping[str, Any]) -> str:
    """What a choice of either route says, whole or a part of it."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    said = choice.get("message") or choice.get("delta")
    if not isinstance(said, Mapping):
        return ""
    text = str(said.get("content") or "")
    for call in said.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            # A stream tells the name once, and arguments in parts.
            name = function.get("name")
            text += ("" if name is None else f"{json.dumps(name)}: ") + str(function.get("arguments") or "")
    return text
