"""Figures of the model and of a CRF, on towns of the training data and on towns that it does not have.

python -m recipes.addresses.evaluate runs/recipes/addresses
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rayrec.pipelines.inference.writer import TextWriter
from rayrec.pipelines.metrics.text_metrics import mean, span_f1
from rayrec.platform.console import log
from rayrec.samples.features.text_features import is_rebuilt, spans_in
from rayrec.samples.text.records import Record, Span, record_of
from recipes.shared import Crf, Figures, better, read_lines

Spans = tuple[Span, ...]


def evaluate(folder: Path, source: str = "") -> None:
    """Judge the run of a folder, print the figures and write them to `figures.json`."""
    crf = _trained_crf(read_records(folder, "train"), folder / "crf.model")
    writer = TextWriter.load(folder / "run")
    figures, said = Figures("Addresses: segments with start, end and label"), []
    for name, title in (("test", "towns as in training"), ("unseen", "towns that training has not")):
        records = read_records(folder, name)
        answers = writer.answers(records)
        right = [record.spans for record in records]
        ours = [spans_in(record.text, answer) or () for record, answer in zip(records, answers, strict=True)]
        theirs = [_spans(crf(record.text)) for record in records]
        rebuilt = [is_rebuilt(record.text, answer) for record, answer in zip(records, answers, strict=True)]
        for model, found in (("model", ours), ("CRF", theirs)):
            exact = mean([a == b for a, b in zip(found, right, strict=True)])
            row = {"span F1": span_f1(found, right), "whole address": exact}
            figures.add(f"{model}, {title}", row | ({"rebuilt": mean(rebuilt)} if model == "model" else {}))
        said.append(f"{title}: {better(_f1(ours, right), _f1(theirs, right), 'the model', 'the CRF')}")
    figures.write(folder / "figures.json", source=source, said=said)
    for sentence in said:
        log.print(sentence, highlight=False)


def read_records(folder: Path, name: str) -> list[Record]:
    return [record_of(values, "spans") for values in read_lines(folder / "text" / f"{name}.jsonl")]


def _trained_crf(records: Sequence[Record], file: Path) -> Crf:
    """It gives each character a label, and says of it whether a segment begins there."""
    labels = []
    for record in records:
        tags = []
        for span in record.spans:
            tags += [f"B-{span.label}"] + [f"I-{span.label}"] * (span.end - span.start - 1)
        labels.append(tags)
    return Crf([record.text for record in records], labels, file)


def _spans(tags: Sequence[str]) -> Spans:
    number, numbers = 0, []
    for place, tag in enumerate(tags):
        starts = tag.startswith("B-") or place == 0 or tag[2:] != tags[place - 1][2:]
        number += starts
        numbers.append(number)
    found = []
    for _, each in groupby(range(len(tags)), key=numbers.__getitem__):
        places = list(each)
        found.append(Span(places[0], places[-1] + 1, tags[places[0]][2:]))
    return tuple(found)


def _f1(found: Sequence[Spans], right: Sequence[Spans]) -> list[float]:
    """Of each record."""
    return [2 * len({*a} & {*b}) / max(len(a) + len(b), 1) for a, b in zip(found, right, strict=True)]


if __name__ == "__main__":
    evaluate(Path(sys.argv[1]))
