"""Data, tokenizer, training and figures of the recipe, one after the other."""

from __future__ import annotations

from pathlib import Path

from recipes.routing.data import SCHEMA, make
from recipes.routing.evaluate import evaluate
from recipes.shared import read_lines, train_on_text, write_tokenizer

CONFIG = Path(__file__).with_name("run.yaml")


def run(folder: Path, small: bool) -> None:
    make(folder / "text", small)
    texts = [record["prompt"] for record in read_lines(folder / "text" / "train.jsonl")]
    tools = [f'{{"tool_name": "{tool}", "query": "' for tool in SCHEMA["properties"]["tool_name"]["enum"]]
    write_tokenizer(folder / "tokenizer", texts, 1_000, [*tools, '"}'])
    train_on_text(folder, CONFIG, "prompt", small)
    evaluate(folder)
