"""Writes a small synthetic behavior log that the tutorials use: users with a taste, items with a category.

    python examples/make_log.py FOLDER [--users 600] [--items 200]

FOLDER gets interactions.parquet (user_id, item_id, timestamp, behavior), items.csv (item_id, title, category)
and clicks.parquet, which has impressions with a label for ranking models. Users mostly stay in one category
and move on to its next items, so there is something to learn. The result depends on the seed alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

CATEGORIES = ("books", "garden", "kitchen", "music", "sports", "toys", "tools", "travel")
NUM_IMPRESSIONS = 20_000
START_S = 1_767_225_600  # 2026-01-01


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--users", type=int, default=600)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    events = pd.DataFrame(_events(rng, arguments.users, arguments.items))
    category_of = np.arange(arguments.items) % len(CATEGORIES)
    items = pd.DataFrame(
        {
            "item_id": [f"i{item}" for item in range(arguments.items)],
            "title": [f"{CATEGORIES[c]} no. {item}" for item, c in enumerate(category_of)],
            "category": [CATEGORIES[c] for c in category_of],
        }
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    events.to_parquet(arguments.folder / "interactions.parquet", index=False)
    items.to_csv(arguments.folder / "items.csv", index=False)
    clicks = _clicks(rng, events, items)
    clicks.to_parquet(arguments.folder / "clicks.parquet", index=False)
    print(f"{arguments.folder}: {len(events):,} events, {len(items):,} items, {len(clicks):,} impressions")


def _events(rng: np.random.Generator, num_users: int, num_items: int) -> dict[str, list]:
    columns: dict[str, list] = {"user_id": [], "item_id": [], "timestamp": [], "behavior": []}
    for user in range(num_users):
        time_s = START_S + int(rng.integers(20 * 86_400))
        item = int(rng.integers(num_items))
        for _ in range(int(rng.integers(8, 30))):
            columns["user_id"].append(f"u{user}")
            columns["item_id"].append(f"i{item}")
            columns["timestamp"].append(time_s)
            columns["behavior"].append("LIKE" if rng.random() < 0.2 else "VIEW")
            time_s += int(rng.integers(60, 12 * 3600))
            step = (
                len(CATEGORIES) * int(rng.integers(1, 4))
                if rng.random() < 0.8
                else int(rng.integers(num_items))
            )
            item = (item + step) % num_items
    return columns


def _clicks(rng: np.random.Generator, events: pd.DataFrame, items: pd.DataFrame) -> pd.DataFrame:
    """Impressions: users click more often on the category that they see most, and on cheap items."""
    category = items.set_index("item_id")["category"]
    seen = events.assign(category=events["item_id"].map(category)).groupby("user_id")["category"]
    favorite = seen.agg(lambda values: values.mode().iloc[0])
    shown = pd.DataFrame(
        {
            "user": rng.choice(events["user_id"].unique(), NUM_IMPRESSIONS),
            "item": rng.choice(items["item_id"], NUM_IMPRESSIONS),
            "price": np.round(rng.lognormal(2.5, 0.7, NUM_IMPRESSIONS), 2),
        }
    )
    shown["category"] = shown["item"].map(category)
    shown["favorite"] = shown["user"].map(favorite)
    likes = shown["category"] == shown["favorite"]
    probability = 1 / (1 + np.exp(1.5 - 3.0 * likes + 0.05 * (shown["price"] - 15)))
    shown["click"] = (rng.random(len(shown)) < probability).astype(int)
    shown["time"] = START_S + rng.integers(0, 30 * 86_400, len(shown))
    return shown


if __name__ == "__main__":
    main()
