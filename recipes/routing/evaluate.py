"""Figures of the model and of TF-IDF with logistic regression, on wordings of the training data and others.

python -m recipes.routing.evaluate runs/recipes/routing
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from rayrec.pipelines.inference.writer import TextWriter
from rayrec.pipelines.metrics.text_metrics import is_json, mean
from rayrec.platform.console import log
from rayrec.samples.text.records import Record, record_of
from recipes.routing.questions import NONE
from recipes.shared import Figures, better, logistic_regression_of_texts, read_lines


def evaluate(folder: Path) -> None:
    """Judge the run of a folder, print the figures and write them to `figures.json`."""
    train = read_records(folder, "train")
    baseline = logistic_regression_of_texts([one.text for one in train], [_answer(one)[0] for one in train])
    writer = TextWriter.load(folder / "run")
    figures, said = Figures("Routing: which tool, and what it is asked for"), []
    for name, title in (("test", "wordings as in training"), ("unseen", "wordings that training has not")):
        records = read_records(folder, name)
        right = [_answer(record) for record in records]
        answers = writer.answers(records)
        # JSON that is no answer is no tool at all.
        ours = [_read(answer) for answer in answers]
        theirs = baseline([record.text for record in records])
        is_right = [a[0] == b[0] for a, b in zip(ours, right, strict=True)]
        theirs_right = [a == b[0] for a, b in zip(theirs, right, strict=True)]
        is_asked = [b[0] != NONE for b in right]
        row = _row(is_right, is_asked)
        row["tool and query"] = mean([a == b for a, b in zip(ours, right, strict=True)])
        row["valid JSON"] = mean([is_json(answer) for answer in answers])
        figures.add(f"model, {title}", row)
        figures.add(f"TF-IDF, {title}", _row(theirs_right, is_asked))
        said.append(
            f"{title}: {better(is_right, theirs_right, 'the model', 'TF-IDF with logistic regression')}"
        )
    figures.write(folder / "figures.json", said=said)
    for sentence in said:
        log.print(sentence, highlight=False)


def read_records(folder: Path, name: str) -> list[Record]:
    return [record_of(values, "prompt") for values in read_lines(folder / "text" / f"{name}.jsonl")]


def _row(is_right: list[bool], is_asked: list[bool]) -> dict:
    right, asked = np.array(is_right, dtype=np.float64), np.array(is_asked)
    return {
        "accuracy": mean(right),
        "in scope": mean(right[asked]),
        "out-of-scope recall": mean(right[~asked]),
    }


def _answer(record: Record) -> tuple[str, str]:
    return _read(record.completion)


def _read(answer: str) -> tuple[str, str]:
    """(tool, query) of an answer."""
    if not is_json(answer):
        return "", ""
    value = json.loads(answer)
    if not isinstance(value, dict):
        return "", ""
    return str(value.get("tool_name", "")), str(value.get("query", ""))


if __name__ == "__main__":
    evaluate(Path(sys.argv[1]))
