"""A text divided into labeled segments that rebuild it: at each step the text goes on, or a label comes.

    Rosenweg 7, Bern   ─►   [["street", "Rosenweg "], ["number", "7"], ["other", ", "], ["city", "Bern"]]

The answer is JSON: pairs of a label and a segment, in the order of the text. Segments have at least one
character and follow each other without a gap, so that they are the text again when they are joined, whatever
the model prefers. What belongs to nothing is given a label for that, such as `other`.

    glue before the first ─► a segment ─► glue between ─► a segment ... ─► glue behind the last
       [["LABEL", "          characters     "], ["LABEL", "                      "]]

It is an automaton of bytes: a token may cross from a segment into the glue, and part of a character may be a
token. The glue is a trie over the labels. Where it and the text could go on, their bytes differ: a segment
begins with no quotation mark, which JSON escapes.

Axes: N bytes of the text as JSON writes it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayrec.models.generation.token_bytes import TokenBytes
from rayrec.platform.arrays import BoolArray
from rayrec.platform.errors import InputError

MOST_BYTES = 16 * 1024
"""Of a text, which is read token by token before an answer begins."""
MOST_LABEL_CHARACTERS = 4 * 1024
"""Of all labels together."""
_NEVER = 1 << 40


class _Way(NamedTuple):
    """A whole piece of glue, and how tokens write the rest of it from each byte."""

    text: bytes
    counts: list[int]
    """Fewest tokens from there to the end."""
    first: list[int]


class _Glue:
    """A node of the trie of glue."""

    def __init__(self, way: _Way, at: int) -> None:
        self.next: dict[int, _Glue] = {}
        self.is_end = False
        self.way, self.at = way, at
        """The shortest way to its end, of equally short ones the first, and how far it is."""

    @property
    def num_tokens(self) -> int:
        """That write the rest; `_NEVER` if the tokenizer has none."""
        return self.way.counts[self.at]

    def tokens(self, tokens: TokenBytes) -> list[int]:
        """Those, if there are such."""
        return _written(self.way.first, self.at, tokens) if self.num_tokens < _NEVER else []


def _glue(texts: Sequence[str], tokens: TokenBytes) -> _Glue:
    """The trie of some texts, none of which is the beginning of another."""
    ways = [_Way(text, *_shortest(text, tokens)) for text in map(_bytes, texts)]
    root = _Glue(min(ways, key=lambda way: len(way.text)), 0)
    for way in ways:
        node = root
        for at, byte in enumerate(way.text, start=1):
            node = node.next.setdefault(byte, _Glue(way, at))
            if len(way.text) < len(node.way.text):
                node.way = way
        node.is_end = True
    if root.num_tokens >= _NEVER:
        raise InputError("labels: this tokenizer cannot write them")
    return root


class _Place(NamedTuple):
    """Where an answer is."""

    copied: int
    """Bytes of the text that stand in segments."""
    glue: _Glue | None = None
    """None: in a segment."""
    is_fresh: bool = False
    """Whether the segment has nothing yet."""
    is_done: bool = False


class CopyLabels:
    """Labels for one tokenizer; begins an answer for each text. Thread-safe."""

    def __init__(self, labels: Sequence[str], tokens: TokenBytes) -> None:
        """
        Raises:
            InputError: there is no label, one stands twice, they are too long, or the tokenizer cannot write
                one.
        """
        if not labels or len(set(labels)) < len(labels) or not all(labels):
            raise InputError(f"labels: expected one or more different ones, got {list(labels)!r:.100}")
        if sum(map(len, labels)) > MOST_LABEL_CHARACTERS:
            raise InputError(f"labels: together longer than {MOST_LABEL_CHARACTERS:,} characters")
        self.tokens = tokens
        tokens.sort()  # here, and not while others wait for a token
        written = [json.dumps(label, ensure_ascii=False) for label in labels]
        self.before = _glue([f'[[{label}, "' for label in written], tokens)
        self.between = _glue([f'"], [{label}, "' for label in written], tokens)
        self.behind = _glue(['"]]'], tokens)

    def begin(self, text: str) -> CopyGrammar:
        """
        Raises:
            InputError: there is no text, or the tokenizer cannot write it.
        """
        return CopyGrammar(self, text)


class CopyGrammar:
    """A `TokenGrammar` of the segments of one text."""

    def __init__(self, labels: CopyLabels, text: str) -> None:
        if not text:
            raise InputError("the text is empty; there is nothing to label")
        self._labels, self._tokens = labels, labels.tokens
        self._text = _bytes(json.dumps(text, ensure_ascii=False)[1:-1])
        if len(self._text) > MOST_BYTES:
            raise InputError(f"the text is larger than {MOST_BYTES:,} bytes; give a smaller one")
        self._starts = _starts(text)
        """Bytes at which a character begins."""
        self._counts, self._first = _shortest(self._text, self._tokens)
        if self._counts[0] >= _NEVER:
            raise InputError("this tokenizer cannot write the text")
        self._place = _Place(0, labels.before)
        self._allowed_V: BoolArray | None = None

    def fresh(self) -> CopyGrammar:
        """One of the same text at its beginning, which shares what was computed of the text."""
        other = copy.copy(self)
        other._place, other._allowed_V = _Place(0, self._labels.before), None
        return other

    @property
    def is_complete(self) -> bool:
        return self._place.is_done

    @property
    def is_over(self) -> bool:
        return self._place.is_done

    @property
    def ending(self) -> Sequence[int]:
        place = self._place
        if place.is_done:
            return []
        tokens = [] if place.glue is None else place.glue.tokens(self._tokens)
        if place.glue is not None and self._closes(place):
            return tokens
        rest = _written(self._first, place.copied, self._tokens)
        return [*tokens, *rest, *self._labels.behind.tokens(self._tokens)]

    def allowed_V(self) -> BoolArray:
        if self._allowed_V is None:
            allowed_V = np.zeros(len(self._tokens), dtype=bool)
            allowed_V[list(self._tokens.along(self._place, self._steps))] = True
            self._allowed_V = allowed_V
        return self._allowed_V

    def fits(self, token: int, left: int) -> bool:
        place = self._behind_token(token)
        return place is not None and self._needed(place) <= left

    def advance(self, token: int) -> None:
        place = self._behind_token(token)
        if place is None:
            raise ValueError(f"token {token} is not allowed")
        self._place, self._allowed_V = place, None

    def _steps(self, place: _Place) -> Iterator[tuple[int, _Place]]:
        """(byte, place behind it) of all that may come next."""
        if place.is_done:
            return
        if place.glue is None:
            at, size = place.copied, len(self._text)
            if at < size:
                yield self._text[at], _Place(at + 1)
            if not place.is_fresh and at in self._starts:
                yield from self._of_glue(at, self._labels.between if at < size else self._labels.behind)
        else:
            yield from self._of_glue(place.copied, place.glue)

    def _of_glue(self, at: int, glue: _Glue) -> Iterator[tuple[int, _Place]]:
        for byte, node in glue.next.items():
            if not node.is_end:
                yield byte, _Place(at, node)
            elif at < len(self._text):
                yield byte, _Place(at, is_fresh=True)
            else:
                yield byte, _Place(at, is_done=True)

    def _behind_token(self, token: int) -> _Place | None:
        written = self._tokens.bytes_V[token]
        if not written or token in self._tokens.ends:
            return None
        place: _Place | None = self._place
        for byte in written:
            assert place is not None
            place = dict(self._steps(place)).get(byte)
            if place is None:
                return None
        return place

    def _needed(self, place: _Place) -> int:
        """Tokens of the ending that is known from a place."""
        if place.is_done:
            return 0
        glue = 0 if place.glue is None else place.glue.num_tokens
        if place.glue is not None and self._closes(place):
            return glue
        return glue + self._counts[place.copied] + self._labels.behind.num_tokens

    def _closes(self, place: _Place) -> bool:
        """Whether the glue is that behind the last segment."""
        return place.copied == len(self._text)


def _shortest(text: bytes, tokens: TokenBytes) -> tuple[list[int], list[int]]:
    """Of each place in a text: the fewest tokens that write the rest of it, and the first of them."""
    counts, first = [_NEVER] * len(text) + [0], [-1] * len(text)
    for place in range(len(text) - 1, -1, -1):
        for token, length in tokens.beginning(text, place):
            if 1 + counts[place + length] < counts[place]:
                counts[place], first[place] = 1 + counts[place + length], token
    return counts, first


def _written(first: Sequence[int], at: int, tokens: TokenBytes) -> list[int]:
    """The tokens that write a text from a place on, by what `_shortest` says of it."""
    found = []
    while at < len(first):
        found.append(first[at])
        at += len(tokens.bytes_V[first[at]] or b"")
    return found


def _starts(text: str) -> frozenset[int]:
    """Bytes of a text as JSON at which a character of the text begins, and where it ends."""
    starts, at = [0], 0
    for character in text:
        at += len(_bytes(json.dumps(character, ensure_ascii=False))) - 2
        starts.append(at)
    return frozenset(starts)


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InputError("the text has half a surrogate pair, which is no Unicode") from None
