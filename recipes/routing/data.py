"""Questions with the tool that answers them and what it is asked for: records of kind `prompt`.

train.jsonl, valid.jsonl, test.jsonl    of the same wordings, with names of their own in the test
unseen.jsonl                            of wordings that no other file has
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.routing import questions
from recipes.routing.questions import KEEP_LAST, NONE, OTHERS, OTHERS_TESTED, TOOLS
from recipes.shared import write_lines

MOST_QUERY = 40
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tool_name": {"enum": [*TOOLS, NONE]},
        "query": {"type": "string", "maxLength": MOST_QUERY},
    },
    "required": ["tool_name", "query"],
    "additionalProperties": False,
}
"""Of answers. The same stands in run.yaml."""
_OTHERS = 0.2
"""Share of questions that no tool is for."""


def make(folder: Path, small: bool, seed: int = 0) -> None:
    """Write the files."""
    sizes = (300, 40, 40, 40) if small else (8_000, 200, 600, 600)
    draw = random.Random(seed)
    known: set[str] = set()
    for name, count in zip(("train", "valid", "test", "unseen"), sizes, strict=True):
        records = asked(draw, known, new_names=name in ("test", "unseen"), new_words=name == "unseen")
        write_lines(folder / f"{name}.jsonl", (next(records) for _ in range(count)))


def asked(draw: random.Random, known: set[str], new_names: bool, new_words: bool) -> Iterator[dict[str, Any]]:
    """Records that are not known yet, without end.

    Args:
        new_names: of products and cities that training does not have.
        new_words: wordings that training does not have.
    """
    cut = slice(-KEEP_LAST, None) if new_words else slice(0, -KEEP_LAST)
    others = OTHERS_TESTED if new_words else OTHERS
    while True:
        tool = NONE if draw.random() < _OTHERS else draw.choice(sorted(TOOLS))
        wording = draw.choice(others if tool == NONE else TOOLS[tool][cut])
        slots = _slots(draw, new_names)
        query = next((value for name, value in slots.items() if f"{{{name}}}" in wording), "")
        text = _framed(wording.format(**slots), query, draw)
        if text in known:
            continue
        known.add(text)
        answer = {"tool_name": tool, "query": "" if tool == NONE else query}
        yield {"prompt": text, "completion": json.dumps(answer, ensure_ascii=False)}


def _slots(draw: random.Random, new_names: bool) -> Mapping[str, str]:
    number = draw.randint(10_000, 99_999)
    order = draw.choice((f"order {number}", f"order number {number}", f"my order {number}", f"#{number}"))
    letters = "".join(draw.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=4))
    products: Sequence[str] = questions.PRODUCTS_TESTED if new_names else questions.PRODUCTS
    cities: Sequence[str] = questions.CITIES_TESTED if new_names else questions.CITIES
    return {
        "order": order,
        "product": draw.choice(products),
        "city": draw.choice(cities),
        "coupon": f"{letters}{draw.randint(5, 50)}",
    }


def _framed(text: str, query: str, draw: random.Random) -> str:
    """With what people say around it, and a slip of the pen outside of what is asked for."""
    words = text.split(" ")
    if draw.random() < 0.25:
        place = draw.randrange(len(words))
        word = words[place]
        if len(word) > 3 and word not in query:
            at = draw.randrange(1, len(word) - 1)
            words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    before = draw.choice(questions.BEFORE) if draw.random() < 0.4 else ""
    return before + " ".join(words) + (draw.choice(questions.AFTER) if draw.random() < 0.5 else "")
