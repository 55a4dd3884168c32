"""Tables of `benchmarks/rl_evidence.py` in docs/benchmarks/rl.md, made of its records alone.

    python -m benchmarks.rl_evidence_page      writes the tables between their marks

Cells are means over users and seeds; changes are relative to the supervised policy of the same seed, with the
95 % interval of a bootstrap over users, with Student's t over pairs of seeds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.quality_page import RL_RECORDS
from rayrec.platform.checkout import CHECKOUT

EVIDENCE = RL_RECORDS / "evidence"
"""Folder of the records."""
PAGE = CHECKOUT / "docs" / "benchmarks" / "rl.md"
TITLES = {
    "supervised": "supervised policy",
    "supervised learning": "control: supervised learning, same prompts and steps",
    "temperature": "control: sampled at the best temperature",
    "best of 64 by the reward": "best of 64 samples by the reward itself",
    "best of 64 by item means": "control: best of 64 samples by item means of as many answers",
    "GRPO": "GRPO",
    "DAPO": "DAPO: dynamic sampling, clip-higher",
    "DAPO and supervised": "DAPO and 0.1 of the supervised loss",
    "DAPO, async": "DAPO, `async`, up to 6 steps old",
    "GRPO, graded": "GRPO, graded rewards",
    "SA-GCPO, graded": "SA-GCPO, graded rewards",
    "optimum": "the known optimum",
}
FACTS = {
    "zero_variance_share": ("groups of zero variance", "{:.0%}"),
    "oversampling": ("groups sampled per group learned from", "{:.2f}"),
    "staleness": ("age in steps", "{:.1f}"),
    "ratio_deviation": ("mean of abs(ratio - 1)", "{:.3f}"),
    "clip_share": ("clipped", "{:.1%}"),
    "kl": ("KL to the supervised policy", "{:.2f}"),
    "cpu seconds": ("CPU s", "{:.0f}"),
}
METRICS = {
    "movielens": {"recall@10": "recall@10", "ndcg@10": "NDCG@10"},
    "world": {
        "worth": "satisfaction",
        "worth, users held out": "satisfaction, users held out",
        "recall@10": "recall@10 of the log",
    },
}


def write_page() -> None:
    """Write the tables of all records that there are."""
    text = PAGE.read_text()
    for path in sorted(EVIDENCE.glob("*.json")):
        record = json.loads(path.read_text())
        begin, end = marks(record["setting"])
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        tables = f"{begin}\n\n{tables_of(record)}\n{end}"
        text = re.sub(pattern, lambda _, tables=tables: tables, text, flags=re.DOTALL)  # type: ignore[misc]
    PAGE.write_text(text)


def marks(setting: str) -> tuple[str, str]:
    """What stands before and after the tables of a setting."""
    return f"<!-- rl_evidence {setting} -->", f"<!-- end of rl_evidence {setting} -->"


def tables_of(record: Mapping[str, Any]) -> str:
    """Quality, then what the runs were like."""
    return "\n".join([_quality(record), _facts(record)])


def _quality(record: Mapping[str, Any]) -> str:
    metrics = METRICS[record["setting"]]
    lines = _head([f"{record['date']}, {len(record['seeds'])} seeds", *metrics.values()])
    for method, title in TITLES.items():
        if (found := record["results"].get(method)) is not None:
            cells = [_cell(found.get(metric), method != "supervised") for metric in metrics]
            lines.append(_row([title, *cells]))
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[str, Any] | None, has_change: bool) -> str:
    if found is None:
        return ""
    mean, change = found["mean"], found["change"]
    if not has_change:
        return f"{mean['value']:.4f} ({mean['low']:.4f} to {mean['high']:.4f})"
    return f"{mean['value']:.4f}: {change['value']:+.1%} ({change['low']:+.1%} to {change['high']:+.1%})"


def _facts(record: Mapping[str, Any]) -> str:
    lines = _head(["", *(title for title, _ in FACTS.values())])
    for method, title in TITLES.items():
        facts = record["facts"].get(method, {})
        if "cpu seconds" in facts:
            cells = [form.format(facts[name]) for name, (_, form) in FACTS.items()]
            lines.append(_row([title, *cells]))
    return "\n".join(lines) + "\n"


def _head(titles: Sequence[str]) -> list[str]:
    return [_row(titles), "| --- |" + " --- |" * (len(titles) - 1)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    write_page()
