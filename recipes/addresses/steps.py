"""Data, tokenizer, training and figures of the recipe, one after the other."""

from __future__ import annotations

from pathlib import Path

from recipes.addresses.data import LABELS, make
from recipes.addresses.evaluate import evaluate
from recipes.shared import rayrec, read_lines, write_tokenizer
from rayrec.platform.console import log

CONFIG = Path(__file__).with_name("run.yaml")


def run(folder: Path, small: bool) -> None:
    source = make(folder / "text", small)
    log.print(source, highlight=False)
    glue = [f'{before}["{label}", "' for before in ("[", '"], ') for label in LABELS]
    texts = [record["text"] for record in read_lines(folder / "text" / "train.jsonl")]
    write_tokenizer(folder / "tokenizer", texts, 4_000, [*glue, '"]]'], characters=True)
    files = [folder / "text" / f"{split}.jsonl" for split in ("train", "valid", "test")]
    rayrec("text", "prepare", *files, "--out", folder / "data", "--kind", "spans", "--set", "split=files")
    here = [f"data.path={folder / 'data'}", f"model.tokenizer={folder / 'tokenizer'}"]
    if small:
        here += ["training.epochs=1", "evaluation.answers=4"]
    options = [word for setting in here for word in ("--set", setting)]
    rayrec("train", CONFIG, "--run", folder / "run", "--local", *options)
    evaluate(folder, source)
