"""Positions beside the records of the quality page, and what they say of rows in pairs.

A record names a file of positions with the list that the page shows: about a byte for each user. From them
rows are compared in pairs, over users and, where a row has several, over seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.compare import ALL_USERS, Evaluated, compare
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport
from rayrec.pipelines.metrics.positions import SUFFIX, Positions
from rayrec.platform.errors import InputError

METRIC = "recall@10"
FOLDER = "positions"
"""Beside the records."""
_KEY = "positions"
_TOKENIZED = ("vectors", "tokenizer", "max_codebook_size", "words")
"""What a record says of semantic IDs and words, beside the settings of the run."""
_AT_FIRST = {"tokenizer": "rq_kmeans", "max_codebook_size": 256}
"""What records that do not say it were made with."""


class Line(NamedTuple):
    """One row of a table with positions."""

    title: str
    seeds: Sequence[Evaluated]

    @property
    def mean(self) -> float:
        return float(np.mean([one.scores(METRIC).mean() for one in self.seeds]))


def ranking_details(report: EvaluationReport, shown: str) -> dict[str, Any]:
    """What a record has of a report besides the results: all lists, and the slices of the list that is
    shown."""
    assert report.ranking is not None, "it is of a recommender"
    details = report.ranking.to_json()
    for each in details["slices"].values():
        each["results"] = {shown: each["results"][shown]}
    return details


def keep_positions(record: Path, report: EvaluationReport, shown: Sequence[str]) -> dict[str, str]:
    """Write the positions of some lists beside a record; what the record says of them.

    Args:
        shown: names of the lists that the page shows.
    """
    assert report.ranking is not None, "it is of a recommender"
    name = f"{FOLDER}/{record.stem}{SUFFIX}"
    report.ranking.positions.only(*shown).write(record.parent / name)
    return {_KEY: name}


def line(title: str, records: Sequence[Mapping[str, Any]], folder: Path, shown: str) -> Iterator[Line]:
    """The row of these records, one of each seed; none where a seed has no positions.

    Args:
        records: of one recipe (`are_of_one_recipe`).
        folder: of the records.
        shown: name of the list that the page shows.
    """
    if records and all(_KEY in record for record in records):
        files = {str(record[_KEY]): Positions.read(folder / str(record[_KEY])) for record in records}
        # Files say by a hash whether settings are alike, and that has a setting which came between seeds.
        method = next(iter(files.values())).header.method
        for name, each in files.items():
            files[name] = replace(each, header=each.header.model_copy(update={"method": method}))
        yield Line(title, [Evaluated(name, shown, each) for name, each in files.items()])


def are_of_one_recipe(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records say the same of all that both say; earlier ones say less."""
    ours, theirs = (_AT_FIRST | each.get("made_of", {}) for each in (one, other))
    if any(ours[name] != theirs[name] for name in _TOKENIZED if name in ours and name in theirs):
        return False
    teachers = [each["teacher"] for each in (ours, theirs) if each.get("teacher")]
    if len(teachers) == 1 or (teachers and not are_of_one_recipe(*({"made_of": each} for each in teachers))):
        return False
    config, another = _recorded_config(one), _recorded_config(other)
    if config is None or another is None:
        return False
    if any("sparse" not in each["settings"] for each in (ours, theirs)):
        another = another.model_copy(update={"sparse": config.sparse})
    return config == another


def _recorded_config(record: Mapping[str, Any]) -> RunConfig | None:
    """Settings of the run of a record; those that came later have their defaults. None: it has none that this
    version knows."""
    written = record.get("made_of", {}).get("settings", {})
    try:
        return RunConfig.parse(written | {"data": {"path": "data"} | written.get("data", {})})
    except InputError:
        return None


def pairs_table(lines: Sequence[Line], baseline: Line | None = None) -> str:
    """Rows in the order of their recall, each against the next better one and against the baseline; nothing
    where fewer than two have positions.

    Args:
        baseline: one of the rows.
    """
    if len(lines) < 2:
        return ""
    ranked = sorted(lines, key=lambda line: line.mean, reverse=True)
    references = [] if baseline is None else [baseline]
    columns = [f"mean {METRIC}", "against the row above", *(f"against {line.title}" for line in references)]
    text = [
        "\nThe same users in pairs: rows whose positions are kept, in the order of their recall. "
        f"Differences of {METRIC} (paired bootstrap over users, with Student's t over seeds where a row has "
        "several). The order is that of this test, which favors the row above: intervals are not adjusted "
        "for it.\n",
        "| | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for above, here in zip([None, *ranked], ranked, strict=False):
        cells = ["" if above is None else _difference(above, here)]
        cells += ["" if line is here else _difference(line, here) for line in references]
        text.append(f"| {here.title} | {here.mean:.4f} | " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def _difference(there: Line, here: Line) -> str:
    try:
        found = compare(there.seeds, here.seeds, METRIC).estimates[ALL_USERS].difference
    except InputError:
        return "cannot be compared"
    return f"{found.value:+.4f} ({found.low:+.4f} to {found.high:+.4f})"
