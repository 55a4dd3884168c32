"""A log whose notes say in words what users plan, and whose products follow from it.

    session of a user:  note, note, product, product    all of one theme, which is the scenario of the events
    at the end:         note, note                      held out; then a product that no file of the log has

Every note is an item of its own that nobody else has met: a recommender that reads ids alone cannot know what
the last two mean. A language model reads their titles.

    log/interactions.parquet, log/items.csv    for `rayrec prepare`
    language/text/*.jsonl                      notes and their theme: of training, and the last two of users
    future.jsonl                               of each user: the theme, and the next product
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd

from recipes.shared import write_lines

THEMES: dict[str, tuple[str, ...]] = {
    "camping": ("tent", "sleep under the stars", "campfire", "hiking boots", "forest weekend", "camp stove"),
    "baking": ("sourdough", "birthday cake", "muffin tin", "oven", "rolling pin", "cookies for school"),
    "garden": ("tomato seeds", "raised bed", "compost", "watering can", "roses", "hedge"),
    "baby": ("stroller", "first tooth", "crib", "diapers", "pacifier", "baby monitor"),
    "music": (
        "guitar strings",
        "practice piano",
        "band rehearsal",
        "microphone",
        "drum sticks",
        "sheet music",
    ),
    "office": ("desk", "standing chair", "video calls", "ergonomic mouse", "second screen", "filing"),
    "fitness": ("marathon", "dumbbells", "yoga", "push ups", "protein", "running plan"),
    "painting": ("watercolor", "easel", "oil paint", "sketchbook", "canvas", "brushes"),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"scenario": {"enum": list(THEMES)}},
    "required": ["scenario"],
    "additionalProperties": False,
}
"""Of what the language model writes."""
SEPARATOR = "; "
_WORDINGS = (
    "planning: {words}",
    "ideas about {words}",
    "need {words}",
    "{words} for next month",
    "looking into {words}",
    "list: {words}",
    "{words}?",
    "remember {words}",
    "how to start with {words}",
    "{words} again",
    "new {words}",
)
_FILLERS = ("for my sister", "before friday", "cheap", "as a present", "for two", "like last year", "at home")
_PER_THEME, _START_S = 15, 1_767_225_600


def make(folder: Path, small: bool, seed: int = 0) -> None:
    """Write the files."""
    world = _World(seed)
    for user in range(60 if small else 800):
        world.add_user(f"u{user}")
    (folder / "log").mkdir(parents=True)
    pd.DataFrame(world.events).to_parquet(folder / "log" / "interactions.parquet", index=False)
    pd.DataFrame(world.items).to_csv(folder / "log" / "items.csv", index=False)
    pd.DataFrame(world.future).to_json(folder / "future.jsonl", orient="records", lines=True)
    cut = len(world.texts) // 10
    for name, records in (
        ("train", world.texts[cut:]),
        ("valid", world.texts[:cut]),
        ("test", world.last_texts),
    ):
        write_lines(folder / "language" / "text" / f"{name}.jsonl", records)


class _World:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.events: list[dict[str, Any]] = []
        self.items = [
            {"item_id": f"{theme}-{place}", "title": f"{theme} article {place}"}
            for theme in THEMES
            for place in range(_PER_THEME)
        ]
        self.texts: list[dict[str, str]] = []
        self.last_texts: list[dict[str, str]] = []
        self.future: list[dict[str, Any]] = []
        self._products = {theme: [f"{theme}-{place}" for place in range(_PER_THEME)] for theme in THEMES}
        # A few articles of each theme sell best.
        self._weights = [1 / (1 + place) for place in range(_PER_THEME)]

    def add_user(self, user: str) -> None:
        draw = self._draw
        time_s = _START_S + draw.randrange(10 * 86_400)
        bought: set[str] = set()
        for _ in range(draw.randint(3, 5)):
            theme = draw.choice(sorted(THEMES))
            time_s = self._session(user, theme, time_s, self.texts)
            for _ in range(2):
                bought.add(product := self._next_product(theme, bought))
                time_s = self._happens(user, product, theme, time_s)
        theme = draw.choice(sorted(THEMES))
        self._session(user, theme, time_s, self.last_texts)
        self.future.append({"user_id": user, "theme": theme, "item_id": self._next_product(theme, bought)})

    def _session(self, user: str, theme: str, time_s: int, texts: list[dict[str, str]]) -> int:
        titles = [self._title(theme) for _ in range(2)]
        for title in titles:
            self.items.append({"item_id": f"note-{len(self.items)}", "title": title})
            time_s = self._happens(user, self.items[-1]["item_id"], theme, time_s)
        texts.append({"prompt": SEPARATOR.join(titles), "completion": json.dumps({"scenario": theme})})
        return time_s

    def _happens(self, user: str, item: str, theme: str, time_s: int) -> int:
        event = {"user_id": user, "item_id": item, "timestamp": time_s, "scenario": theme}
        self.events.append(event)
        return time_s + self._draw.randint(30, 3_600)

    def _next_product(self, theme: str, bought: set[str]) -> str:
        while True:
            (product,) = self._draw.choices(self._products[theme], self._weights)
            if product not in bought:
                return product

    def _title(self, theme: str) -> str:
        words = self._draw.choice(THEMES[theme])
        if self._draw.random() < 0.5:
            words = f"{words} {self._draw.choice(_FILLERS)}"
        return self._draw.choice(_WORDINGS).format(words=words)
