"""Data, tokenizer, training and figures of the recipe, one after the other."""

from __future__ import annotations

from pathlib import Path

from rayrec.platform.console import log
from recipes.addresses.data import LABELS, make
from recipes.addresses.evaluate import evaluate
from recipes.shared import read_lines, train_on_text, write_tokenizer

CONFIG = Path(__file__).with_name("run.yaml")


def run(folder: Path, small: bool) -> None:
    source = make(folder / "text", small)
    log.print(source, highlight=False)
    glue = [f'{before}["{label}", "' for before in ("[", '"], ') for label in LABELS]
    texts = [record["text"] for record in read_lines(folder / "text" / "train.jsonl")]
    write_tokenizer(folder / "tokenizer", texts, 2_000, [*glue, '"]]'], characters=True)
    train_on_text(folder, CONFIG, "spans", small)
    evaluate(folder, source)
