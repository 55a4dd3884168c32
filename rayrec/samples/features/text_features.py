"""Feature computation of records of text: what is asked and answered, as tokens of the base model.

    record ─► prompt and answer ─► chat template, or plain text ─► tokens, those of answers marked ─► rows

A record of kind `text` is learned as a whole. Of all others, what is asked is given and the answer learned:
the completion, the turns of the assistant, the option that is right, or the labeled parts of the text as JSON
(`[["street", "Main St"], ["number", "7"]]`), which can be found in it again.

Axes: as in `batches`; L tokens of a row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.shares import balanced_bounds
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.text.batches import TextBatch
from rayrec.samples.text.chat import ChatTemplate, Learn
from rayrec.samples.text.records import Message, Record, Span
from rayrec.samples.text.tokens import TextTokenizer

LongRows = Literal["refuse", "cut", "drop"]
"""What becomes of a row of more tokens than the model reads: an error, the beginning of what is given cut
off, or no row. An answer that is too long by itself is dropped where it is cut."""
TOO_LONG, NO_TARGET = "rows_too_long", "rows_without_target"
CUT, PROMPTS_CUT = "rows_cut", "prompts_cut"


@dataclass(frozen=True)
class TextRules:
    """How records become rows."""

    max_length: int
    long_rows: LongRows = "refuse"
    learn: Learn = "all"
    """Which turns of an assistant."""
    answer_tokens: int = 0
    """Room that prompts leave for an answer: the model knows no places behind `max_length`."""


@dataclass(frozen=True)
class Tokens:
    """A row."""

    ids_L: Int64Array
    is_target_L: BoolArray
    is_cut: bool = False
    """Whether its beginning is missing, for it would be too long."""


class TextFeatures:
    """RowBatch -> one TextBatch per trainer, of about as many tokens each."""

    def __init__(
        self,
        program: FeatureProgram,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        rules: TextRules,
        *,
        seed: int = 0,
        num_trainers: int = 1,
        is_prepared: bool = False,
    ) -> None:
        """
        Args:
            program: makes the columns of records of those there are.
            template: of the base; None: prompts and answers stand one after the other.
            seed: of the run, for the program's random numbers.
            is_prepared: training rows have been through the program already when they were read.
        """
        self._program = program
        self.tokenizer = tokenizer
        self.template = template
        self._rules = rules
        self._seed = seed
        self._num_trainers = num_trainers
        self._is_prepared = is_prepared

    def training(self, step: int, rows: RowBatch) -> list[TextBatch]:
        """Trainer r gets the r-th contiguous share of the rows.

        Raises:
            InputError: an operation refuses a row, the template a conversation, or a row is too long.
        """
        records = _records_of(rows.rows) if self._is_prepared else self.records(step, rows)
        made, keys_B, counts = self._rows(rows, records)
        lengths_B = np.array([len(row.ids_L) for row in made], dtype=np.int64)
        bounds = balanced_bounds(lengths_B, self._num_trainers)
        num_targets = sum(int(row.is_target_L.sum()) for row in made)
        shares = [
            text_batch(step, keys_B[low:high], made[low:high], num_targets) for low, high in pairwise(bounds)
        ]
        if counts:
            shares[0].counts.update(counts)  # of the global batch, once
        return shares

    def judged(self, step: int, rows: RowBatch) -> TextBatch:
        """The rows with their answers, whose likelihood is to be known; those that are too long are empty."""
        made = self.tokens(self.records(step, rows))
        return text_batch(step, rows.row_keys_B, _or_nothing(made), counts=_counts(made))

    def options(self, step: int, rows: RowBatch) -> TextBatch:
        """Every option of records of kind `choice` as a row, record by record."""
        records = self.records(step, rows)
        each = [replace(record, choice=choice) for record in records for choice in range(len(record.options))]
        keys_B = np.repeat(rows.row_keys_B, [len(record.options) for record in records])
        return text_batch(step, keys_B, _or_nothing(self.tokens(each)))

    def prompts(self, step: int, rows: RowBatch) -> TextBatch:
        """What is asked alone, to be answered."""
        records = self.records(step, rows)
        made = self.asked(records)
        num_cut = sum(row.is_cut for row in made)
        counts = {PROMPTS_CUT: num_cut} if num_cut else {}
        given = tuple(chat_of(record)[-2].content for record in records)
        return replace(text_batch(step, rows.row_keys_B, made, counts=counts), given=given)

    def records(self, step: int, rows: RowBatch) -> list[Record]:
        """What the run's operations make of rows as they are in the data set.

        Raises:
            InputError: an operation refuses a row.
        """
        return _records_of(self._program(rows.rows, RowContext(rows.row_keys_B, self._seed, step)))

    def asked(self, records: Sequence[Record]) -> list[Tokens]:
        """The tokens of what is asked, with the opening of the answer; their last ones, where an answer would
        have no room behind them.

        Raises:
            InputError: the template refuses a conversation.
        """
        most = self._rules.max_length - self._rules.answer_tokens
        found = []
        for text in self._opened(records):
            ids = self.tokenizer.encode(text)
            ids_L = np.array(ids[-most:], dtype=np.int64)
            found.append(Tokens(ids_L, np.zeros(len(ids_L), dtype=bool), is_cut=len(ids) > most))
        return found

    def _rows(
        self, rows: RowBatch, records: Sequence[Record]
    ) -> tuple[list[Tokens], Int64Array, dict[str, int]]:
        """(Rows, their keys, how many are left out by reason)."""
        made = self.tokens(records)
        kept = [place for place, row in enumerate(made) if isinstance(row, Tokens)]
        found = [row for row in made if isinstance(row, Tokens)]
        return found, rows.row_keys_B[kept], _counts(made)

    def tokens(self, records: Sequence[Record]) -> list[Tokens | str]:
        """A row of each record; of those that are left out, why.

        Raises:
            InputError: the template refuses a conversation, or a row is too long.
        """
        chats = [chat_of(record) for record in records if record.kind != "text"]
        if self.template is None:
            marked = iter([_plain(chat, self._rules.learn) for chat in chats])
        else:
            rendered = self.template.rendered(chats, self._rules.learn)
            marked = iter([(each.text, each.completions) for each in rendered])
        found: list[Tokens | str] = []
        completions: tuple[tuple[int, int], ...]
        for record in records:
            if record.kind == "text":
                text, completions, ends = record.text, ((0, len(record.text)),), True
            else:
                (text, completions), ends = next(marked), self.template is None
            tokens = self.tokenizer.marked(text, completions)
            ids_L, is_target_L = tokens.ids_T, tokens.is_completion_T
            if ends:  # a template writes how a turn ends
                ids_L = np.append(ids_L, self.tokenizer.info.ends[0])
                is_target_L = np.append(is_target_L, True)
            is_target_L[:1] = False
            found.append(self._fitting(Tokens(ids_L, is_target_L), record))
        return found

    def _fitting(self, row: Tokens, record: Record) -> Tokens | str:
        most, length = self._rules.max_length, len(row.ids_L)
        if length <= most:
            return row if row.is_target_L.any() else NO_TARGET
        if self._rules.long_rows == "refuse":
            raise InputError(
                f"a record of kind {record.kind} has {length:,} tokens, and the model reads {most:,} "
                f"(model.max_length); it begins with {record.asked[:60]!r}; raise that, or set "
                "model.long_rows to cut or drop"
            )
        given = int(row.is_target_L.argmax())
        if self._rules.long_rows == "drop" or length - given >= most:
            return TOO_LONG
        return Tokens(row.ids_L[-most:], row.is_target_L[-most:], is_cut=True)

    def _opened(self, records: Sequence[Record]) -> list[str]:
        """What is asked, up to where the answer begins."""
        chats = [chat_of(record)[:-1] for record in records]
        if self.template is None:
            return [_joined(chat) + SEPARATOR for chat in chats]
        return self.template.render(chats, open_turn=True)


def _records_of(rows: pa.RecordBatch) -> list[Record]:
    return [Record.of_row(row) for row in rows.to_pylist()]


def end_of_turn(template: ChatTemplate, tokenizer: TextTokenizer) -> int:
    """The special token that a template writes behind what an assistant says.

    Raises:
        InputError: it writes none.
    """
    answer = "yes"
    (rendered,) = template.rendered([(Message("user", "no"), Message("assistant", answer))])
    ((start, stop),) = rendered.completions
    special = tokenizer.tokenizer.get_added_tokens_decoder()
    behind = rendered.text.rfind(answer, start, stop) + len(answer)
    for token in tokenizer.encode(rendered.text[behind:stop]):
        if token in special:
            return int(token)
    raise InputError(
        f"{template.where} writes no special token behind an answer, so no answer would ever end; take "
        "another template, or set model.template to plain"
    )


def answers_expected(
    records: Sequence[Record], template: ChatTemplate | None, tokenizer: TextTokenizer, ends: Sequence[int]
) -> list[str]:
    """What a model says of each record if all is as it was learned, treated as `said` treats it.

    A template may write more into an answer than the record has, such as an empty block of thoughts, and a
    tokenizer may change a text, so that what is generated is compared with what went through both as well.

    Raises:
        InputError: the template refuses a conversation.
    """
    chats = [chat_of(record) for record in records]
    if template is None:
        answers = [chat[-1].content for chat in chats]
    else:
        each = template.rendered(chats, "last")
        answers = [one.text[slice(*one.completions[-1])] for one in each]
    found = []
    for answer in answers:
        ids = tokenizer.encode(answer)
        stop = next((place for place, token in enumerate(ids) if token in ends), len(ids))
        found.append(said(tokenizer.decode(ids[:stop])))
    return found


def said(text: str) -> str:
    """A text without the thoughts before it, and without blanks around it."""
    return text.rpartition(THOUGHTS_END)[2].strip()


THOUGHTS_END = "</think>"
"""How templates of models that think before they answer mark that they have."""

SEPARATOR = "\n"
"""Between what is asked and answered, where there is no template."""


def chat_of(record: Record) -> tuple[Message, ...]:
    """A record as a conversation, whose last turn is the answer."""
    if record.kind == "messages":
        return record.messages
    return Message("user", record.asked), Message("assistant", answer_of(record))


def answer_of(record: Record) -> str:
    """What a model learns to say of what is asked."""
    if record.kind == "spans":
        parts = [[one.label, record.text[one.start : one.end]] for one in record.spans]
        return json.dumps(parts, ensure_ascii=False)
    return record.answer


def spans_in(text: str, answer: str) -> tuple[Span, ...] | None:
    """The labeled parts that an answer names, found in the text from left to right.

    Returns:
        None where the answer is not of that form. A part that is not in the text behind the one before it is
        left out.
    """
    parts = _parts_of(answer)
    if parts is None:
        return None
    found, behind = [], 0
    for label, segment in parts:
        start = text.find(segment, behind)
        if start < 0 or not segment:
            continue
        behind = start + len(segment)
        found.append(Span(start, behind, label))
    return tuple(found)


def is_rebuilt(text: str, answer: str) -> bool:
    """Whether the labeled parts that an answer names are the text when they are joined."""
    parts = _parts_of(answer)
    return parts is not None and "".join(segment for _, segment in parts) == text


def _parts_of(answer: str) -> list[tuple[str, str]] | None:
    """(label, part of the text) of each; None where the answer is not of that form."""
    try:
        parts = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parts, list):
        return None
    found = []
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2 and all(isinstance(one, str) for one in part)):
            return None
        found.append((part[0], part[1]))
    return found


def _plain(chat: Sequence[Message], learn: Learn) -> tuple[str, tuple[tuple[int, int], ...]]:
    """A conversation without a template: turns one after the other."""
    text, completions = "", []
    last = len(chat) - 1
    for place, turn in enumerate(chat):
        start = len(text)
        text += turn.content
        if turn.role == "assistant" and (learn == "all" or place == last):
            completions.append((start, len(text)))
        if place != last:
            text += SEPARATOR
    return text, tuple(completions)


def _joined(chat: Sequence[Message]) -> str:
    return SEPARATOR.join(turn.content for turn in chat)


def _or_nothing(rows: Sequence[Tokens | str]) -> list[Tokens]:
    """With empty rows in the place of those that are left out."""
    nothing = Tokens(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    return [row if isinstance(row, Tokens) else nothing for row in rows]


def _counts(rows: Sequence[Tokens | str]) -> dict[str, int]:
    """Rows that are left out or cut, by which."""
    return dict(
        Counter(row if isinstance(row, str) else CUT for row in rows if isinstance(row, str) or row.is_cut)
    )


def text_batch(
    step: int,
    keys_B: Int64Array,
    rows: Sequence[Tokens],
    num_targets: int | None = None,
    counts: Mapping[str, int] | None = None,
) -> TextBatch:
    """Rows of tokens as a batch.

    Args:
        num_targets: of all trainers; None: these rows are all.
        counts: what was dropped or cut.
    """
    lengths_B = [len(row.ids_L) for row in rows]
    tokens_N = np.concatenate([row.ids_L for row in rows]) if rows else np.zeros(0, dtype=np.int64)
    is_target_N = np.concatenate([row.is_target_L for row in rows]) if rows else np.zeros(0, dtype=bool)
    return TextBatch(
        step=step,
        row_keys_B=keys_B,
        tokens_N=tokens_N,
        is_target_N=is_target_N,
        offsets_B1=np.concatenate([[0], np.cumsum(lengths_B, dtype=np.int64)]),
        num_targets=int(is_target_N.sum()) if num_targets is None else num_targets,
        counts=dict(counts or {}),
    )
