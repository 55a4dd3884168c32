"""Templates of prompts: text with slots in braces, which something is put in for each row.

    The user bought {history.codes} and next {codes}
    Which item is called {title}?

Braces that are meant as such are doubled. What may stand in a slot:

    {title} {category} {codes}          of the item that a prompt is about
    {table:item} {table:user}           a row of an embedding table in the place of a word
    {history}                           the events of a history, each as the template of events says
    {history.codes} {history.titles} {history.categories}   shorthands for usual templates of events
"""

from __future__ import annotations

import difflib
import string
from dataclasses import dataclass

TITLE, CATEGORY, CODES = "title", "category", "codes"
ROW_OF_ITEM, ROW_OF_USER = "table:item", "table:user"
ITEM_SLOTS = (TITLE, CATEGORY, CODES, ROW_OF_ITEM)
"""Of one item: that of a prompt, or of an event."""
HISTORY = "history"
EVENTS = {
    "history.codes": "{codes}",
    "history.titles": "{title}\n",
    "history.categories": "{category}\n",
}
"""Shorthands to what they write of an event."""
PROMPT_SLOTS = (*ITEM_SLOTS, ROW_OF_USER, HISTORY, *EVENTS)
ANSWER_SLOTS = (TITLE, CATEGORY, CODES)
"""What can be said, or compared with what is said."""


@dataclass(frozen=True)
class Slot:
    name: str


@dataclass(frozen=True)
class Template:
    """Literal texts and slots, in order."""

    source: str
    parts: tuple[str | Slot, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts if isinstance(part, Slot))

    @property
    def is_about_item(self) -> bool:
        return any(name in ITEM_SLOTS for name in self.slots)

    def has(self, *names: str) -> bool:
        return any(name in names for name in self.slots)


@dataclass(frozen=True)
class PromptTemplate:
    """What is given, and what is to be said."""

    before: Template
    """Up to the history; all of it where there is none."""
    event: Template | None
    """What is written of each event of the history; None: the prompt has no history."""
    after: Template
    answer: Template

    @classmethod
    def parse(cls, prompt: str, answer: str, event: str = "{codes}") -> PromptTemplate:
        """Read the templates of a prompt, of its answer and of the events of its history.

        Raises:
            ValueError: braces do not match, a slot does not exist or cannot stand where it does, or there are
                two histories.
        """
        given = parse_template(prompt, PROMPT_SLOTS, "prompt")
        histories = [
            place
            for place, part in enumerate(given.parts)
            if isinstance(part, Slot) and (part.name == HISTORY or part.name in EVENTS)
        ]
        if len(histories) > 1:
            raise ValueError(
                f"the prompt {prompt!r} has {len(histories)} histories; name one, {{history}}, and write all "
                "that is to be said of an event into the template of events"
            )
        said = parse_template(answer, ANSWER_SLOTS, "completion")
        if not histories:
            return cls(given, None, Template("", ()), said)
        (place,) = histories
        name = given.parts[place].name  # type: ignore[union-attr]
        of_event = parse_template(EVENTS.get(name, event), ITEM_SLOTS, "template of events")
        if not of_event.parts:
            raise ValueError("the template of events is empty; a history would say nothing")
        before, after = given.parts[:place], given.parts[place + 1 :]
        return cls(Template(prompt, before), of_event, Template(prompt, after), said)

    @property
    def given(self) -> tuple[str, ...]:
        """Slots outside of events that are filled before anything is said."""
        return (*self.before.slots, *self.after.slots)

    @property
    def of_item(self) -> tuple[str, ...]:
        """Slots that need an item that the prompt is about."""
        return tuple(name for name in (*self.given, *self.answer.slots) if name in ITEM_SLOTS)

    @property
    def slots(self) -> tuple[str, ...]:
        """All, those of events included."""
        of_event = () if self.event is None else self.event.slots
        return (*self.given, *of_event, *self.answer.slots)

    @property
    def tables(self) -> tuple[str, ...]:
        """Embedding tables of which rows are read."""
        found = {name.removeprefix("table:") for name in self.slots if name.startswith("table:")}
        return tuple(sorted(found))


def parse_template(text: str, known: tuple[str, ...], what: str) -> Template:
    """Read a template.

    Args:
        known: slots that it may have.
        what: it is, for messages.

    Raises:
        ValueError: as `PromptTemplate.parse`.
    """
    parts: list[str | Slot] = []
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"the {what} {text!r}: {error}; double braces that are meant as such") from error
    for literal, name, more, conversion in fields:
        if literal:
            parts.append(literal)
        if name is None:
            continue
        slot = name + (f"!{conversion}" if conversion else "") + (f":{more}" if more else "")
        if slot not in known:
            close = difflib.get_close_matches(slot, known, n=1)
            hint = f"did you mean {{{close[0]}}}?" if close else "there are"
            names = "" if close else " " + ", ".join(f"{{{each}}}" for each in known)
            raise ValueError(f"the {what} {text!r} has no slot {{{slot}}}; {hint}{names}")
        parts.append(Slot(slot))
    return Template(text, tuple(parts))
