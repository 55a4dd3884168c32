"""What the quality page says of rows after equal tuning, from the records of `benchmarks.equal_tuning`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality_pairs import METRIC, line, pairs_table

FOLDER = "tuned"
"""Beside the records of rows that were not tuned."""
_COLUMNS = (
    METRIC,
    "validation ndcg@10: recipe → best",
    "trials (ended early)",
    "CPU min of all trials",
    "settings of the best",
)


def tuned_records(records: Path) -> list[dict[str, Any]]:
    """All that were measured, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted((records / FOLDER).glob("*.json"))]


def tuned_table(
    records: Sequence[Mapping[str, Any]], titles: Mapping[str, str], folder: Path, shown: str
) -> str:
    """The table of a data set; nothing where no method was tuned.

    Args:
        titles: of the methods, in the order of the rows.
        folder: of the records of rows that were not tuned.
        shown: name of the list that the page shows.
    """
    by_method = {record["method"]: record for record in records}
    found = [(title, by_method[name]) for name, title in titles.items() if name in by_method]
    if not found:
        return ""
    lines = [
        "After equal tuning (one seed):\n",
        "| | " + " | ".join(_COLUMNS) + " |",
        "| --- |" + " --- |" * len(_COLUMNS),
        *("| " + " | ".join(_cells(title, record, shown)) + " |" for title, record in found),
    ]
    pairs = pairs_table(
        [each for title, record in found for each in line(title, [record], folder / FOLDER, shown)]
    )
    return "\n".join(lines) + "\n" + pairs


def _cells(title: str, record: Mapping[str, Any], shown: str) -> Iterator[str]:
    search, results = record["search"], record["results"][shown]
    yield title
    estimate = results[METRIC]
    yield f"{estimate['value']:.4f} ± {(estimate['high'] - estimate['low']) / 2:.4f}"
    before = "failed" if search["of_recipe"] is None else f"{search['of_recipe']:.4f}"
    judged = search.get("judged")  # on all validation users, by number of the trial
    on_all = ""
    if judged and {"0", str(search["best"])} <= judged.keys():
        on_all = f"; on all users {judged['0']:.4f} → {judged[str(search['best'])]:.4f}"
    yield f"{before} → {search['of_best']:.4f}{on_all}"
    trials = search["trials"]
    failed = f", {trials['failed']} failed" if trials["failed"] else ""
    yield f"{sum(trials.values())} ({trials['pruned']}{failed})"
    yield f"{search['processor_minutes']:.0f}"
    if search["best"] == 0:
        yield "those of the recipe"
    else:
        yield ", ".join(
            f"{key.rpartition('.')[2]} {_shown(value)}" for key, value in search["settings"].items()
        )


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
