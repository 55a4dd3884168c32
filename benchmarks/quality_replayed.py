"""What the quality page says of models that go on learning, from the records of `benchmarks.replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality_pairs import METRIC, Line, line, pairs_table

FOLDER = "replayed"
"""Beside the records of rows that did not go on learning."""
_COLUMNS = (METRIC, "recall@50", "validation recall@10", "steps", "CPU min of learning")


def replayed_records(records: Path) -> list[dict[str, Any]]:
    """All that were measured, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted((records / FOLDER).glob("*.json"))]


def replayed_table(
    records: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
    folder: Path,
    shown: str,
    others: Mapping[str, Line],
    baseline: str | None,
) -> str:
    """The table of a data set; nothing where no model went on learning.

    Args:
        titles: of the methods, in the order of the rows.
        folder: of the records of rows that did not go on learning.
        shown: name of the list that the page shows.
        others: rows with positions by method or neighbor; those of the same methods are compared, too.
        baseline: one of these, which all are compared with.
    """
    lines = [
        "Learning goes on while the rest of the log is replayed (one seed):\n",
        "| | " + " | ".join(_COLUMNS) + " |",
        "| --- |" + " --- |" * len(_COLUMNS),
    ]
    replayed: list[Line] = []
    methods: dict[str, None] = {}
    for method, title in titles.items():
        by_days = {record["replay"]["days"]: record for record in records if record["method"] == method}
        for days, record in sorted(by_days.items()):
            named = f"{title}, learning {'every day' if days == 1 else f'every {days} days'}"
            lines.append("| " + " | ".join([named, *_cells(record, shown)]) + " |")
            replayed += line(named, [record], folder / FOLDER, shown)
            methods[method] = None
    if not replayed:
        return ""
    peer = None if baseline is None else others[baseline]
    compared = [others[name] for name in methods if name in others] + ([] if peer is None else [peer])
    return "\n".join(lines) + "\n" + pairs_table([*compared, *replayed], peer)


def _cells(record: Mapping[str, Any], shown: str) -> list[str]:
    results, replay = record["results"][shown], record["replay"]
    cells = [
        f"{results[metric]['value']:.4f} ± {(results[metric]['high'] - results[metric]['low']) / 2:.4f}"
        for metric in (METRIC, "recall@50")
    ]
    cells.append(f"{replay['validation'][METRIC]['value']:.4f}")
    return [*cells, f"{replay['steps']:,}", f"{replay['processor_minutes']:.1f}"]
