"""What became of a request: its answer, put together from chunks or taken whole, and how long it took."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayrec.serve.wire.errors import RequestError

_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


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
    code: str | None = None
    """Of the error: a name that tells nothing of the request."""
    is_over: bool = False

    def add(self, value: Mapping[str, Any]) -> None:
        """A chunk, or a whole answer."""
        for choice in value.get("choices") or ():
            if not isinstance(choice, Mapping):
                continue
            if self.first_s is None:
                self.first_s = time.monotonic() - self.began_at
            index = _whole_number(choice.get("index")) or 0
            self.texts[index] = self.texts.get(index, "") + _text(choice)
            if reason := choice.get("finish_reason"):
                self.reasons[index] = str(reason)
        usage = value.get("usage")
        if isinstance(usage, Mapping):
            prompt, answer = (_whole_number(usage.get(f"{name}_tokens")) for name in ("prompt", "completion"))
            self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
            self.answer_tokens = self.answer_tokens if answer is None else answer

    def end(self, error: BaseException | None) -> None:
        """It has ended; once."""
        if self.is_over:
            return
        self.is_over = True
        self.seconds = time.monotonic() - self.began_at
        if error is not None:
            # Whatever else ends a task was the caller, who has gone.
            status, said, code = (500 if isinstance(error, Exception) else 499), type(error).__name__, None
            if isinstance(error, RequestError):
                status, said, code = error.status, str(error), error.code
            self.status, self.error = status, said
            self.code = code if code and _CODE.fullmatch(code) else type(error).__name__
        for told in self.on_end:
            told(self)

    @property
    def answers(self) -> list[str]:
        """Texts, in the order of the choices."""
        return [self.texts[index] for index in sorted(self.texts)]


def of_characters(found: Any) -> Any:
    """A value of JSON without halves of characters, which cannot be written as UTF-8."""
    if isinstance(found, str):
        return found.encode(errors="replace").decode()
    if isinstance(found, list):
        return [of_characters(one) for one in found]
    if isinstance(found, dict):
        return {of_characters(name): of_characters(value) for name, value in found.items()}
    return found


def _whole_number(value: Any) -> int | None:
    """A count or a place; None: it is none that 64 bits hold."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def _text(choice: Mapping[str, Any]) -> str:
    """What a choice of either route says, whole or a part of it."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    said = choice.get("message") or choice.get("delta")
    if not isinstance(said, Mapping):
        return ""
    text = str(said.get("content") or "")
    calls = said.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            # A stream tells the name once, and arguments in parts.
            name = function.get("name")
            text += ("" if name is None else f"{json.dumps(name)}: ") + str(function.get("arguments") or "")
    return text
