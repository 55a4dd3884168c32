"""The bytes of a vocabulary's tokens: what grammars of texts are about, whatever the tokenizer is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

State = TypeVar("State")

_LONGEST_TOKEN = 64


class TokenBytes:
    """The bytes of a vocabulary's tokens, and how a text is written in few of them."""

    def __init__(self, bytes_V: Sequence[bytes | None], ends: Sequence[int]) -> None:
        """
        Args:
            bytes_V: None for tokens that are no text.
            ends: tokens that end texts.
        """
        self.bytes_V = list(bytes_V)
        self.ends = list(ends)
        self._ids: dict[bytes, int] = {}
        for token, written in enumerate(self.bytes_V):
            if written and token not in ends:
                self._ids.setdefault(written, token)
        self._longest = min(max(map(len, self._ids), default=1), _LONGEST_TOKEN)
        self.single = frozenset(written[0] for written in self._ids if len(written) == 1)
        self.has_control_V = np.array([any(byte < 0x20 for byte in text or b"") for text in self.bytes_V])

    def __len__(self) -> int:
        return len(self.bytes_V)

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokens that write a text whose bytes are all tokens by themselves: the longest one at each
        place."""
        tokens, position = [], 0
        while position < len(text):
            for length in range(min(self._longest, len(text) - position), 0, -1):
                token = self._ids.get(text[position : position + length])
                if token is not None:
                    tokens.append(token)
                    position += length
                    break
            else:
                raise KeyError(text[position])
        return tokens

    def beginning(self, text: bytes, place: int) -> Iterator[tuple[int, int]]:
        """(token, its length) of those that a text goes on with at a place."""
        for length in range(1, min(self._longest, len(text) - place) + 1):
            if (token := self._ids.get(text[place : place + length])) is not None:
                yield token, length

    def sort(self) -> None:
        """Sort the tokens for `along`, which does it otherwise when it is first called."""
        _ = self._sorted

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """Texts of tokens in ascending order, and the tokens."""
        pairs = sorted(
            (written, token)
            for token, written in enumerate(self.bytes_V)
            if written and token not in self.ends and len(written) <= _LONGEST_TOKEN
        )
        return [written for written, _ in pairs], [token for _, token in pairs]

    def along(self, state: State, steps: Callable[[State], Iterator[tuple[int, State]]]) -> Iterator[int]:
        """The tokens that an automaton of bytes reads from a state.

        Args:
            steps: (byte, state behind it) of all that may come next in a state.
        """
        texts, tokens = self._sorted
        waiting = [(state, b"", 0, len(texts))]
        while waiting:
            here, before, low, high = waiting.pop()
            for byte, behind in steps(here):
                written = before + bytes([byte])
                first = bisect_left(texts, written, low, high)
                last = bisect_left(texts, _next_prefix(written), first, high)
                if first == last:
                    continue
                place = first
                while place < last and texts[place] == written:
                    yield tokens[place]
                    place += 1
                if place < last:
                    waiting.append((behind, written, place, last))


def _next_prefix(written: bytes) -> bytes:
    """The first text behind all that begin with this one."""
    kept = written.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\xff" * (_LONGEST_TOKEN + 1)
