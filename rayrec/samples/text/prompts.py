"""Prompts of many rows at once: templates, items and histories become tokens.

    before │ event  event  event │ after │ answer
           └ the oldest are cut off, as whole items, where a row has too many tokens

A text is encoded in pieces: what stands before a history, each event of it, what stands behind, and the
answer. A piece about an item has the same tokens in every prompt, so it is encoded once and kept; within a
piece, text is encoded together as far as no code or row of a table stands between. Codes are tokens of their
own and go in by number.

Axes: R rows, N tokens of all rows, E events of all histories, O pieces of all rows, M items, P places that
stand for rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.prompt_template import CODES, ROW_OF_ITEM, ROW_OF_USER, PromptTemplate, Slot, Template
from rayrec.samples.base.jagged import concatenated_ranges, offsets_from_lengths
from rayrec.samples.text.item_facts import ItemFacts
from rayrec.samples.text.tokens import TextTokenizer

_MARKS = {ROW_OF_ITEM: -1, ROW_OF_USER: -2}
"""What stands for the row of a table until all tokens are there."""


@dataclass(frozen=True)
class Prompted:
    """Rows of tokens."""

    tokens_N: Int64Array
    offsets_R1: Int64Array
    is_answer_N: BoolArray
    is_event_N: BoolArray
    """Whether a token is of an event that is not the row's first."""
    num_events_R: Int64Array
    """The newest of each history, which are in the prompt."""
    is_too_long_R: BoolArray
    """Rows that are too long without any history; they have no tokens."""
    places_P: dict[str, Int64Array]
    """By table, which tokens stand for a row of it, ascending."""
    ids_P: dict[str, Int64Array]
    """By table, the rows that those stand for."""


class _Pool:
    """Tokens of pieces, one behind the other."""

    def __init__(self) -> None:
        self._tokens = np.zeros(1024, dtype=np.int64)
        self._used = 0

    def add(self, pieces: Sequence[Int64Array]) -> tuple[Int64Array, Int64Array]:
        """(Where each piece begins, its length)."""
        lengths_M = np.array([len(piece) for piece in pieces], dtype=np.int64)
        offsets_M1 = self._used + offsets_from_lengths(lengths_M)
        if (needed := int(offsets_M1[-1])) > len(self._tokens):
            grown = np.zeros(max(2 * len(self._tokens), needed), dtype=np.int64)
            grown[: self._used] = self._tokens[: self._used]
            self._tokens = grown
        if pieces:
            self._tokens[self._used : needed] = np.concatenate(pieces)
        self._used = needed
        return offsets_M1[:-1], lengths_M

    def at(self, places_N: Int64Array) -> Int64Array:
        return self._tokens[places_N]


class _Piece:
    """The tokens of a template for each item; of one without slots of items, the same for all."""

    def __init__(self, template: Template, writer: PromptWriter, ends: bool = False) -> None:
        """
        Args:
            ends: whether a text ends with the token that ends texts.
        """
        self._writer, self._ends = writer, ends
        self._runs = _runs(template)
        self._is_about_item = template.is_about_item
        size = len(writer.items.ids_I) if self._is_about_item else 1
        self._starts_I = np.full(size, -1, dtype=np.int64)
        self._lengths_I = np.zeros(size, dtype=np.int64)

    def find(self, items_M: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(Where the pool has the tokens of each item, how many there are)."""
        if not self._is_about_item:
            items_M = np.zeros_like(items_M)
        missing = np.unique(items_M[self._starts_I[items_M] < 0])
        if len(missing):
            self._starts_I[missing], self._lengths_I[missing] = self._writer.pool.add(self._encoded(missing))
        return self._starts_I[items_M], self._lengths_I[items_M]

    def _encoded(self, items_M: Int64Array) -> list[Int64Array]:
        parts: list[list[Int64Array]] = [[] for _ in items_M]
        for run in self._runs:
            for place, tokens in enumerate(self._tokens_of(run, items_M)):
                parts[place].append(tokens)
        if self._ends and self._runs and not isinstance(self._runs[-1], Slot):
            end = np.array(self._writer.tokenizer.info.ends[:1], dtype=np.int64)
            for each in parts:
                each.append(end)
        return [np.concatenate(each) if each else np.zeros(0, dtype=np.int64) for each in parts]

    def _tokens_of(self, run: Slot | tuple[str | Slot, ...], items_M: Int64Array) -> Sequence[Int64Array]:
        """Of each item."""
        items, tokenizer = self._writer.items, self._writer.tokenizer
        if isinstance(run, Slot):
            if run.name == CODES:
                assert items.codes_IL is not None, "checked before"
                return list(tokenizer.code_ids(items.codes_IL[items_M]))
            return [np.array([_MARKS[run.name]], dtype=np.int64)] * len(items_M)
        texts = [""] * len(items_M)
        for part in run:
            if isinstance(part, Slot):
                said = items.texts[part.name].take(items_M).to_pylist()
                most = self._writer.title_characters
                said = [tokenizer.plain(text or "")[:most] for text in said]
            else:
                said = [part] * len(items_M)
            texts = [text + more for text, more in zip(texts, said, strict=True)]
        return [np.array(ids, dtype=np.int64) for ids in tokenizer.encode_all(texts)]


class PromptWriter:
    """Writes the prompts of one template."""

    def __init__(
        self,
        template: PromptTemplate,
        tokenizer: TextTokenizer,
        items: ItemFacts,
        max_tokens: int,
        title_characters: int | None = None,
    ) -> None:
        """
        Args:
            tokenizer: with a token for each code, if the template has codes.
            max_tokens: of a row.
            title_characters: of a title or category that is written out; None: all.
        """
        self.template, self.tokenizer, self.items = template, tokenizer, items
        self.max_tokens, self.title_characters = max_tokens, title_characters
        self.pool = _Pool()
        self._before, self._after = (_Piece(each, self) for each in (template.before, template.after))
        self._event = None if template.event is None else _Piece(template.event, self)
        self._answer = _Piece(template.answer, self, ends=True)
        self._without_answer = _Piece(Template("", ()), self)

    def __call__(
        self,
        users_R: Int64Array,
        history_E: Int64Array,
        offsets_R1: Int64Array,
        items_R: Int64Array | None = None,
        reserved: int | None = None,
    ) -> Prompted:
        """Write a prompt for each row.

        Args:
            users_R: ids.
            history_E: positions of the items of all histories, oldest first.
            items_R: position of the item that a row is about; None: the template has no slot that needs one.
            reserved: tokens that are left free for an answer; None: it is written, too.
        """
        num_rows = len(users_R)
        about_R = np.zeros(num_rows, dtype=np.int64) if items_R is None else items_R
        answer = self._answer if reserved is None else self._without_answer
        fixed = [piece.find(about_R) for piece in (self._before, self._after, answer)]
        room_R: Int64Array = (
            self.max_tokens - (reserved or 0) - np.sum([lengths_R for _, lengths_R in fixed], axis=0)
        )
        is_too_long_R: BoolArray = room_R < 0
        event_E, num_events_R, starts_E, lengths_E = self._fitting(history_E, offsets_R1, room_R)

        # Pieces of a row in the order in which they are read: before, events, after, answer.
        first_R1 = offsets_from_lengths(num_events_R + 3)
        first_R, num_pieces = first_R1[:-1], int(first_R1[-1])
        starts_O, lengths_O, item_O = (np.zeros(num_pieces, dtype=np.int64) for _ in range(3))
        kind_O = np.zeros(num_pieces, dtype=np.int8)
        behind_R = first_R + 1 + num_events_R
        for at_R, (starts_R, lengths_R), kind in zip(
            (first_R, behind_R, behind_R + 1), fixed, (_GIVEN, _GIVEN, _ANSWER), strict=True
        ):
            starts_O[at_R], lengths_O[at_R] = starts_R, np.where(is_too_long_R, 0, lengths_R)
            item_O[at_R], kind_O[at_R] = about_R, kind
        at_E = concatenated_ranges(first_R + 1, num_events_R)
        starts_O[at_E], lengths_O[at_E], item_O[at_E], kind_O[at_E] = starts_E, lengths_E, event_E, _EVENT
        kind_O[(first_R + 1)[num_events_R > 0]] = _GIVEN  # nothing was before the first

        tokens_N = self.pool.at(concatenated_ranges(starts_O, lengths_O))
        ends_O1 = offsets_from_lengths(lengths_O)
        piece_N = np.repeat(np.arange(num_pieces), lengths_O)
        row_O = np.repeat(np.arange(num_rows), num_events_R + 3)
        places, ids = self._rows_of_tables(tokens_N, users_R[row_O], item_O, piece_N)
        kind_N = kind_O[piece_N]
        return Prompted(
            np.where(tokens_N < 0, self.tokenizer.info.pad, tokens_N),
            ends_O1[first_R1],
            kind_N == _ANSWER,
            kind_N == _EVENT,
            num_events_R,
            is_too_long_R,
            places,
            ids,
        )

    def _fitting(
        self, history_E: Int64Array, offsets_R1: Int64Array, room_R: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """The newest events for which there is room: (their items, how many each row has, where their tokens
        are, how many these are)."""
        if self._event is None:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, np.zeros(len(room_R), dtype=np.int64), nothing, nothing
        starts_E, lengths_E = self._event.find(history_E)
        before_E1 = offsets_from_lengths(lengths_E)
        row_E = np.repeat(np.arange(len(room_R)), np.diff(offsets_R1))
        to_end_E = before_E1[offsets_R1[1:]][row_E] - before_E1[:-1]
        fits_E = to_end_E <= room_R[row_E]
        num_R = np.bincount(row_E[fits_E], minlength=len(room_R)).astype(np.int64)
        return history_E[fits_E], num_R, starts_E[fits_E], lengths_E[fits_E]

    def _rows_of_tables(
        self, tokens_N: Int64Array, users_O: Int64Array, item_O: Int64Array, piece_N: Int64Array
    ) -> tuple[dict[str, Int64Array], dict[str, Int64Array]]:
        places, ids = {}, {}
        for table in self.template.tables:
            places[table] = np.flatnonzero(tokens_N == _MARKS[f"table:{table}"])
            piece_P = piece_N[places[table]]
            ids[table] = users_O[piece_P] if table == "user" else self.items.ids_I[item_O[piece_P]]
        return places, ids


_GIVEN, _EVENT, _ANSWER = range(3)


def _runs(template: Template) -> list[Slot | tuple[str | Slot, ...]]:
    """Slots of codes and tables, and what stands between them, to be encoded together."""
    runs: list[Slot | tuple[str | Slot, ...]] = []
    text: list[str | Slot] = []
    for part in template.parts:
        if isinstance(part, str) or part.name in ("title", "category"):
            text.append(part)
            continue
        if text:
            runs.append(tuple(text))
            text = []
        runs.append(part)
    if text:
        runs.append(tuple(text))
    return runs
