"""Pictures, data, tokenizer, training and figures of the recipe, one after the other."""

from __future__ import annotations

from pathlib import Path

from recipes.shared import train_on_text
from recipes.tags.data import make
from recipes.tags.evaluate import evaluate

CONFIG = Path(__file__).with_name("run.yaml")


def run(folder: Path, small: bool) -> None:
    make(folder, small)
    train_on_text(folder, CONFIG, "prompt", small)
    evaluate(folder)
