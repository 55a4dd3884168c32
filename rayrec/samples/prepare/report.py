"""What `rayrec prepare` did, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rayrec.samples.dataset.manifest import Manifest

_LABELS = {
    "users": "users",
    "items": "items",
    "events": "events",
    "train_rows": "training rows (users)",
    "train_events": "training events",
    "valid_rows": "validation targets",
    "test_rows": "test targets",
    "duplicates": "duplicate events dropped",
    "short_users": "users with one event, trained on only",
    "cold_items": "items without interactions, kept in the catalog",
    "undescribed_items": "items without a description",
    "users_without_events": "described users without events, left out",
    "events_filtered": "events of other behaviors, left out",
}
_ALWAYS = {"users", "items", "events", "train_rows", "train_events", "valid_rows", "test_rows"}


@dataclass(frozen=True)
class PrepareReport:
    """A data set that has been written."""

    path: Path
    manifest: Manifest

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) in the order to print; what did not happen is left out."""
        manifest = self.manifest
        split = manifest.split
        shown = {"leave_one_out": "leave-one-out", "time": "by time"}[split.kind]
        if split.valid_start is not None and split.test_start is not None:
            shown += f", validation from {_date(split.valid_start)}, test from {_date(split.test_start)}"
        counts = [
            (label, f"{manifest.counts[name]:,}")
            for name, label in _LABELS.items()
            if name in _ALWAYS or manifest.counts[name]
        ]
        rule = {"shuffle": f"shuffled by seed {manifest.seed}", "file": "in the order of the source"}
        ties = manifest.ties
        return [
            ("data set", str(self.path)),
            ("source", f"{manifest.source} ({manifest.layout})"),
            ("split", shown),
            *counts,
            ("columns that are the items' text", ", ".join(manifest.text_columns) or "none"),
            (
                "neighboring events at the same time",
                f"{ties.neighbors:,} of {ties.users:,} users, {rule[ties.rule]}",
            ),
            ("fingerprint", manifest.fingerprint[:16]),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {"path": str(self.path), **self.manifest.model_dump(mode="json")}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
