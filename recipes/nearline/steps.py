"""Data, both models and figures of the recipe, one after the other."""

from __future__ import annotations

from pathlib import Path

from recipes.nearline.data import SCHEMA, make
from recipes.nearline.evaluate import evaluate
from recipes.shared import rayrec, read_lines, train_on_text, write_tokenizer

HERE = Path(__file__).parent


def run(folder: Path, small: bool) -> None:
    make(folder, small)
    rayrec("prepare", folder / "log", folder / "data", "--allow", "cold-items")
    rayrec("tokenize", folder / "data", *(("--codebook-size", 16) if small else ()))
    settings = [f"data.path={folder / 'data'}"]
    settings += ["training.epochs=1", "evaluation.every_epochs=1"] if small else []
    options = [word for setting in settings for word in ("--set", setting)]
    rayrec("train", HERE / "run.yaml", "--run", folder / "run", "--local", *options)

    language = folder / "language"
    texts = [record["prompt"] for record in read_lines(language / "text" / "train.jsonl")]
    answers = [f'{{"scenario": "{theme}"}}' for theme in SCHEMA["properties"]["scenario"]["enum"]]
    write_tokenizer(language / "tokenizer", texts, 600, answers)
    train_on_text(language, HERE / "language.yaml", "prompt", small)
    evaluate(folder)
