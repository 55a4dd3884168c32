"""Records of text: what kinds there are, how one is checked, and the columns that it becomes.

    kind        fields of a record                          what a model learns of it
    text        text                                        all of the text
    messages    messages: [{role, content}, ...]            what the assistant says
    prompt      prompt, completion                          the completion
    spans       text, spans: [{start, end, label}, ...]     which parts of the text have which label
    choice      text, options: [...], choice                which of the options is right

A file says the kind in a column `kind`, or its fields do. In text files, whose columns are all texts, lists
are written as JSON. `start` and `end` count Unicode characters; `end` is the first one after the span.

All kinds have the same columns, null where a kind has no such field, so that one data set may mix them and
every reader and operation of rows takes them. Messages and spans are parallel lists, as events are in a data
set of histories: operations and requests have no type for lists of records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import pyarrow as pa
import xxhash

Kind = Literal["text", "messages", "prompt", "spans", "choice"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FIELDS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "spans": ("text", "spans"),
    "choice": ("text", "options", "choice"),
    "text": ("text",),
}
"""In the order in which a record without `kind` is tried: those with more fields before those with fewer."""

SCHEMA = pa.schema(
    {
        "record_id": pa.int64(),
        "kind": pa.string(),
        "text": pa.string(),
        "roles": pa.list_(pa.string()),
        "contents": pa.list_(pa.string()),
        "completion": pa.string(),
        "span_starts": pa.list_(pa.int64()),
        "span_ends": pa.list_(pa.int64()),
        "span_labels": pa.list_(pa.string()),
        "options": pa.list_(pa.string()),
        "choice": pa.int64(),
    }
)
"""Columns of a data set of text: `text` is the prompt of kind `prompt`; `choice` an index in `options`;
`record_id` a hash of all the rest."""

_AFTER: dict[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Which roles may follow one; nothing comes before the first."""


class BadRecordError(ValueError):
    """A row that is no record; the message is a clause that says what is wrong with it."""

    def __init__(self, reason: str, clause: str) -> None:
        """
        Args:
            reason: what kind of mistake it is, for counts.
        """
        super().__init__(clause)
        self.reason = reason


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Span:
    """A labeled part of a text, in characters."""

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Record:
    """One record that was checked."""

    kind: Kind
    text: str = ""
    """Of kinds `text`, `spans` and `choice`; of `prompt`, the prompt."""
    messages: tuple[Message, ...] = ()
    completion: str = ""
    spans: tuple[Span, ...] = ()
    options: tuple[str, ...] = ()
    choice: int = -1
    key: bytes = field(init=False, compare=False)
    """16 bytes, a hash of all fields: the order of records that no file decides."""

    def __post_init__(self) -> None:
        fields = [self.kind, self.text, self.completion, self.choice, self.options]
        fields += [[[one.role, one.content] for one in self.messages]]
        fields += [[[one.start, one.end, one.label] for one in self.spans]]
        digest = xxhash.xxh3_128_digest(json.dumps(fields, ensure_ascii=False).encode())
        object.__setattr__(self, "key", digest)

    @property
    def asked(self) -> str:
        """What a model is given: all that it does not learn to say."""
        if self.kind == "messages":
            return "\n".join(one.content for one in self.messages[:-1])
        return "\n".join([self.text, *self.options])

    @property
    def answer(self) -> str:
        """What a model learns to say of `asked`, as one text; nothing of kind `text`."""
        if self.kind == "messages":
            return self.messages[-1].content
        if self.kind == "choice":
            return self.options[self.choice]
        if self.kind == "spans":
            return json.dumps([[one.start, one.end, one.label] for one in self.spans], ensure_ascii=False)
        return self.completion

    @property
    def compared(self) -> str:
        """The text by which records are compared. System messages say nothing of a record: many have one."""
        if self.kind == "messages":
            return "\n".join(one.content for one in self.messages if one.role != "system")
        return self.text if self.kind in ("text", "spans") else f"{self.text}\n{self.answer}"

    def row(self) -> dict[str, Any]:
        """Values of the columns of `SCHEMA`."""
        chat, spans, choice = self.kind == "messages", self.kind == "spans", self.kind == "choice"
        return {
            "record_id": int.from_bytes(self.key[:8], "big", signed=True),
            "kind": self.kind,
            "text": None if chat else self.text,
            "roles": [one.role for one in self.messages] if chat else None,
            "contents": [one.content for one in self.messages] if chat else None,
            "completion": self.completion if self.kind == "prompt" else None,
            "span_starts": [one.start for one in self.spans] if spans else None,
            "span_ends": [one.end for one in self.spans] if spans else None,
            "span_labels": [one.label for one in self.spans] if spans else None,
            "options": list(self.options) if choice else None,
            "choice": self.choice if choice else None,
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Record:
        """The record of a row of a data set."""
        turns = zip(row["roles"] or (), row["contents"] or (), strict=True)
        spans = zip(row["span_starts"] or (), row["span_ends"] or (), row["span_labels"] or (), strict=True)
        return cls(
            kind=row["kind"],
            text=row["text"] or "",
            messages=tuple(Message(role, content) for role, content in turns),
            completion=row["completion"] or "",
            spans=tuple(Span(start, end, label) for start, end, label in spans),
            options=tuple(row["options"] or ()),
            choice=-1 if row["choice"] is None else row["choice"],
        )


def record_of(values: Mapping[str, Any], kind: Kind | None = None) -> Record:
    """Check the fields of a row.

    Args:
        values: by name; others than those of its kind are not looked at.
        kind: None: the row says it, by its field `kind` or by what fields it has.

    Raises:
        BadRecordError: the row is no record.
    """
    kind = kind or _kind_of(values)
    missing = [name for name in FIELDS[kind] if values.get(name) is None]
    if missing:
        raise BadRecordError(
            "missing fields", f"a record of kind {kind} needs {missing[0]}, which is missing"
        )
    return _READERS[kind](values)


def _kind_of(values: Mapping[str, Any]) -> Kind:
    named = values.get("kind")
    if named is not None:
        if named not in KINDS:
            raise BadRecordError("unknown kind", f"the kind {named!r} is none of {', '.join(KINDS)}")
        kind: Kind = named
        return kind
    for kind, fields in FIELDS.items():
        if all(values.get(name) is not None for name in fields):
            return kind
    there = ", ".join(name for name, value in values.items() if value is not None) or "none of ours"
    forms = "; ".join(" and ".join(fields) for fields in FIELDS.values())
    raise BadRecordError(
        "unknown kind",
        f"no kind of record has the fields {there}; expected {forms} (the setting columns renames them)",
    )


def _text(value: Any, name: str, is_answer: bool = False) -> str:
    if not isinstance(value, str):
        raise BadRecordError("wrong types", f"{name} is {_shown(value)}, expected a text")
    if not value.strip():
        raise BadRecordError(
            "empty completions" if is_answer else "empty texts",
            f"{name} is empty" + (": there is nothing to learn" if is_answer else ""),
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecordError(
            "wrong types", f"{name} has half a surrogate pair, which is no Unicode"
        ) from None
    return value


def _list(value: Any, name: str) -> list[Any]:
    """A list; in text files, its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRecordError(
                "wrong types", f"{name} is {_shown(value)}, expected a list as JSON"
            ) from None
    if not isinstance(value, list | tuple):
        raise BadRecordError("wrong types", f"{name} is {_shown(value)}, expected a list")
    return list(value)


def _keyed(value: Any, name: str, fields: tuple[str, ...]) -> list[Any]:
    """The fields of one element; null ones of others are what Parquet has where a field is not there."""
    given = {key for key, one in value.items() if one is not None} if isinstance(value, dict) else None
    if given != set(fields):
        found = _shown(value) if given is None else f"has {', '.join(sorted(given)) or 'nothing'}"
        raise BadRecordError(
            "wrong types", f"{name} {'is ' if given is None else ''}{found}, expected {_and(fields)}"
        )
    return [value[key] for key in fields]


def _text_record(values: Mapping[str, Any]) -> Record:
    return Record("text", text=_text(values["text"], "text"))


def _prompt_record(values: Mapping[str, Any]) -> Record:
    prompt = _text(values["prompt"], "prompt")
    return Record("prompt", text=prompt, completion=_text(values["completion"], "completion", True))


def _messages_record(values: Mapping[str, Any]) -> Record:
    messages: list[Message] = []
    before = ""
    for number, one in enumerate(_list(values["messages"], "messages"), 1):
        role, content = _keyed(one, f"message {number}", ("role", "content"))
        if not isinstance(role, str) or role not in _AFTER or not role:
            raise BadRecordError(
                "wrong types",
                f"message {number} has the role {_shown(role)}; known are {_and(list(_AFTER)[1:])}",
            )
        if role not in _AFTER[before]:
            behind = f"after {before}" if before else "first"
            raise BadRecordError(
                "roles out of order",
                f"message {number} is of {role}; {behind} comes {' or '.join(_AFTER[before])}",
            )
        messages.append(Message(role, _text(content, f"message {number} ({role})", role == "assistant")))
        before = role
    if before != "assistant":
        last = f"the last message is of {before}" if before else "there are no messages"
        raise BadRecordError("roles out of order", f"{last}; expected one of assistant, which is learned")
    return Record("messages", messages=tuple(messages))


def _spans_record(values: Mapping[str, Any]) -> Record:
    text = _text(values["text"], "text")
    spans: list[Span] = []
    for number, one in enumerate(_list(values["spans"], "spans"), 1):
        start, end, label = _keyed(one, f"span {number}", ("start", "end", "label"))
        if not (_is_integer(start) and _is_integer(end)):
            raise BadRecordError(
                "wrong types", f"span {number} is from {_shown(start)} to {_shown(end)}, expected integers"
            )
        if not 0 <= start < end <= len(text):
            raise BadRecordError(
                "spans outside of texts",
                f"span {number} is from {start} to {end} of a text of {len(text)} characters",
            )
        spans.append(Span(start, end, _text(label, f"the label of span {number}")))
    spans.sort(key=lambda one: (one.start, one.end))
    for one, other in pairwise(spans):
        if other.start < one.end:
            raise BadRecordError(
                "overlapping spans",
                f"the spans from {one.start} to {one.end} and from {other.start} to {other.end} overlap",
            )
    return Record("spans", text=text, spans=tuple(spans))


def _choice_record(values: Mapping[str, Any]) -> Record:
    text = _text(values["text"], "text")
    options = [
        _text(one, f"option {number}") for number, one in enumerate(_list(values["options"], "options"), 1)
    ]
    if len(set(options)) < len(options) or len(options) < 2:
        raise BadRecordError(
            "wrong types", f"the options are {_shown(options)}, expected two or more different ones"
        )
    choice = _text(values["choice"], "choice", is_answer=True)
    if choice not in options:
        raise BadRecordError(
            "unknown choices", f"the choice {_shown(choice)} is none of the options {_shown(options)}"
        )
    return Record("choice", text=text, options=tuple(options), choice=options.index(choice))


_READERS: dict[Kind, Callable[[Mapping[str, Any]], Record]] = {
    "text": _text_record,
    "messages": _messages_record,
    "prompt": _prompt_record,
    "spans": _spans_record,
    "choice": _choice_record,
}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _and(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)


def _shown(value: Any) -> str:
    """A value in a message: its beginning."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
