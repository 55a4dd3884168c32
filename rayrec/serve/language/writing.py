"""One answer while it is written: tokens become text, which ends where it was asked to end.

token ─► end of text? ─► text, as far as characters are whole ─► stop text in it? ─► piece
                                         └ held back while it may be the beginning of a stop text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from rayrec.models.generation.sampler import Chosen

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Reason = Literal["stop", "length"]
"""Why an answer ends, as OpenAI's API says it."""


class Piece(NamedTuple):
    """What is added to an answer."""

    text: str
    tokens: tuple[Chosen, ...]
    reason: Reason | None = None
    """Of the last piece."""


@dataclass
class Writing:
    """The text of one answer; not thread-safe."""

    tokenizer: Tokenizer
    ends: frozenset[int]
    silent: frozenset[int]
    """Tokens that are no text."""
    stops: Sequence[str] = ()
    _held: str = ""
    """Text that may be the beginning of a stop text."""
    _tokens: list[Chosen] = field(default_factory=list)

    def __post_init__(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=False)

    def add(self, chosen: Chosen, is_last: bool) -> Piece | None:
        """The piece that a token adds, if it adds one.

        Args:
            is_last: no token comes behind it, whatever it is.
        """
        reason: Reason | None = "length" if is_last else None
        if chosen.token in self.ends:
            return self._last("stop")
        self._tokens.append(chosen)
        if chosen.token not in self.silent:
            self._held += self._stream.step(self.tokenizer, chosen.token) or ""
        found = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            return self._last("stop")
        if reason is not None:
            return self._last(reason)
        cut = len(self._held) - self._suspected()
        text, self._held = self._held[:cut], self._held[cut:]
        if not text:
            return None
        tokens, self._tokens = tuple(self._tokens), []
        return Piece(text, tokens)

    def finish(self, reason: Reason) -> Piece:
        """The last piece, of an answer that is complete without another token."""
        return self._last(reason)

    def _last(self, reason: Reason) -> Piece:
        text, tokens = self._held, tuple(self._tokens)
        self._held, self._tokens = "", []
        return Piece(text, tokens, reason)

    def _suspected(self) -> int:
        """Characters at the end that a stop text may begin with."""
        for count in range(min(max(map(len, self.stops), default=1) - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self.stops):
                return count
        return 0
