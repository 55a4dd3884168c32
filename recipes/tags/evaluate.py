"""Figures of the model and of logistic regression over words and the very vectors of the pictures.

python -m recipes.tags.evaluate runs/recipes/tags
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rayrec.pipelines.inference.writer import TextWriter
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.text_metrics import is_json, mean, ratio
from rayrec.platform.console import log
from rayrec.samples.text.records import Record, record_of
from recipes.shared import Figures, better, logistic_regressions_of_tags, read_lines
from recipes.tags.data import TAGS


def evaluate(folder: Path) -> None:
    """Judge the run of a folder, print the figures and write them to `figures.json`."""
    train, valid, test = (read_records(folder, name) for name in ("train", "valid", "test"))
    vectors_ID = np.load(folder / "vectors.npy")
    first = len(train) + len(valid)
    writer = TextWriter.load(folder / "run")
    answers = writer.answers(test)
    right = [frozenset(json.loads(record.completion)) for record in test]
    ours = [frozenset(json.loads(answer)) if is_json(answer) else frozenset() for answer in answers]
    figures, said = Figures("Tags of items"), []
    figures.add(
        "model, title and picture", _row(ours, right) | {"valid JSON": mean([*map(is_json, answers)])}
    )
    baselines = {
        "logistic regression, title and picture": vectors_ID,
        "logistic regression, title alone": np.zeros((len(vectors_ID), 1), dtype=np.float32),
    }
    for name, of_items in baselines.items():
        predict = logistic_regressions_of_tags(
            [_title(one) for one in train],
            of_items[: len(train)],
            [json.loads(one.completion) for one in train],
        )
        theirs = predict([_title(one) for one in test], of_items[first:])
        figures.add(name, _row(theirs, right))
        said.append(better(_f1(ours, right), _f1(theirs, right), "the model", name))
    figures.write(folder / "figures.json", said=said)
    for sentence in said:
        log.print(sentence, highlight=False)


def read_records(folder: Path, name: str) -> list[Record]:
    return [record_of(values, "prompt") for values in read_lines(folder / "text" / f"{name}.jsonl")]


def _title(record: Record) -> str:
    """Without the codes: the baseline has the vectors themselves."""
    return record.text.partition("<")[0]


def _row(found: Sequence[frozenset[str]], right: Sequence[frozenset[str]]) -> dict[str, Estimate]:
    both_R = np.array([len(a & b) for a, b in zip(found, right, strict=True)], dtype=np.float64)
    of_R = np.array([len(a) + len(b) for a, b in zip(found, right, strict=True)], dtype=np.float64)
    invalid = sum(len(tags - {*TAGS}) for tags in found)
    return {
        "micro-F1": ratio(2 * both_R, of_R),
        "all tags right": mean([a == b for a, b in zip(found, right, strict=True)]),
        "invalid tags": Estimate(invalid, invalid, invalid),
    }


def _f1(found: Sequence[frozenset[str]], right: Sequence[frozenset[str]]) -> list[float]:
    """Of each item."""
    return [2 * len(a & b) / max(len(a) + len(b), 1) for a, b in zip(found, right, strict=True)]


if __name__ == "__main__":
    evaluate(Path(sys.argv[1]))
