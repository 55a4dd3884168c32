"""Positions beside the records of the quality page, and what they say of neighboring rows.

A record names a file of positions with the list that the page shows: about a byte for each user. From them
rows are compared in pairs, over users and, where a row has several, over seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rayrec.pipelines.evaluation.compare import ALL_USERS, Evaluated, compare
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport
from rayrec.pipelines.metrics.paired_bootstrap import PairedEstimate
from rayrec.pipelines.metrics.positions import SUFFIX, Positions
from rayrec.platform.errors import InputError

METRIC = "recall@10"
FOLDER = "positions"
"""Beside the records."""
_KEY = "positions"
_COLUMNS = ("against", f"difference of {METRIC}", "ratio", "users only here", "users only there")


class Line(NamedTuple):
    """One row of a table with positions."""

    title: str
    seeds: Sequence[Evaluated]


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
        folder: of the records.
        shown: name of the list that the page shows.
    """
    if records and all(_KEY in record for record in records):
        names = [str(record[_KEY]) for record in records]
        yield Line(title, [Evaluated(name, shown, Positions.read(folder / name)) for name in names])


def pairs_table(lines: Sequence[Line]) -> str:
    """Every row against the one above it; nothing where fewer than two have positions."""
    if len(lines) < 2:
        return ""
    text = [
        "\nPairs of rows, each against the one above that has positions "
        "(paired bootstrap over users, with Student's t over seeds where a row has several):\n",
        "| | " + " | ".join(_COLUMNS) + " |",
        "| --- |" + " --- |" * len(_COLUMNS),
    ]
    for above, here in pairwise(lines):
        try:
            found = compare(above.seeds, here.seeds, METRIC).estimates[ALL_USERS]
        except InputError:
            cells = ["cannot be compared", "", "", ""]
        else:
            cells = _cells(found)
        text.append("| " + " | ".join([here.title, above.title, *cells]) + " |")
    return "\n".join(text) + "\n"


def _cells(found: PairedEstimate) -> list[str]:
    difference, ratio = found.difference, found.ratio
    return [
        f"{difference.value:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})",
        "" if ratio is None else f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
        f"{found.only_b:,.0f}",
        f"{found.only_a:,.0f}",
    ]
