"""What `rayrec prepare` did, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rayrec.platform.event_labels import LABELS
from rayrec.samples.base.config import TargetRule
from rayrec.samples.dataset.dataset_folder import DatasetReport
from rayrec.samples.dataset.manifest import Manifest
from rayrec.samples.importers.tables import PART, RawTables

_LABELS = {
    "users": "users",
    "items": "items",
    "events": "events",
    "train_rows": "training rows (users)",
    "train_events": "training events",
    "valid_rows": "validation targets",
    "test_rows": "test targets",
    "valid_without_history": "users whose events for validation have nothing before them, left out there",
    "test_without_history": "users whose events for the test have nothing before them, left out there",
    "duplicates": "duplicate events dropped",
    "short_users": "users with one event, trained on only",
    "cold_items": "items without interactions, kept in the catalog",
    "undescribed_items": "items without a description",
    "users_without_events": "described users without events, left out",
    "events_filtered": "events of other behaviors, left out",
    "missing_ids": "rows without an id, left out",
    "bad_times": "events without a usable time, left out",
    "repeated_descriptions": "descriptions of one item or user after the first, left out",
    "unused_events": "held-out events that are neither trained on nor targets",
    "trimmed_ids": "ids without the blanks around them",
}
_SPLITS = {"leave_one_out": "leave-one-out", "time": "by time", "given": "as the files of the source"}
_TARGETS: dict[TargetRule, str] = {
    "first": ", each user's first event of a period",
    "last": ", each user's last event of a period",
    "random": ", a random event of each user in a period",
}
_ALWAYS = {"users", "items", "events", "train_rows", "train_events", "valid_rows", "test_rows"}


@dataclass(frozen=True)
class Use:
    """What became of a file of the source, or of one of its columns."""

    file: str
    column: str | None
    use: str


def uses_of(raw: RawTables, textual: Sequence[str]) -> tuple[Use, ...]:
    """What became of every file and column of a source."""
    uses = []
    log = raw.interactions
    parts = {"events": log, "items": raw.items, "users": raw.users}
    for what, part in parts.items():
        if part is None or (what == "items" and part.file == log.file):  # made of the log's titles
            continue
        file = Path(part.file).name
        uses += [Use(file, None, note) for note in part.notes]
        for name in part.table.schema.names:
            if name == PART:
                continue
            column = part.names.get(name, name)
            uses.append(Use(file, column, _use_of(what, name, column, textual)))
    if raw.titles_of_log:
        uses.append(Use(Path(log.file).name, log.names.get("title", "title"), raw.titles_of_log))
    uses += [Use(file, None, f"ignored: {why}") for file, why in raw.ignored]
    return tuple(uses)


def _use_of(what: str, name: str, column: str, textual: Sequence[str]) -> str:
    if name in ("user_id", "item_id", "timestamp", *LABELS):
        return name
    if what == "items" and name == "title":
        return "title and text"
    if what == "items" and name in textual:
        return "text"
    return "kept" if name == column else f"kept as {name}"


@dataclass(frozen=True)
class PrepareReport(DatasetReport[Manifest]):
    """What `rayrec prepare` wrote."""

    uses: tuple[Use, ...] = ()
    """What became of every file and column of the source."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {**super().to_json(), "uses": [asdict(use) for use in self.uses]}

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) in the order to print; what did not happen is left out."""
        manifest = self.manifest
        split = manifest.split
        shown = _SPLITS[split.kind] + (_TARGETS[split.targets] if split.kind == "time" else "")
        counts = [
            (label, f"{manifest.counts[name]:,}")
            for name, label in _LABELS.items()
            if name in _ALWAYS or manifest.counts.get(name)
        ]
        rule = {"shuffle": f"shuffled by seed {manifest.seed}", "file": "in the order of the source"}
        ties = manifest.ties
        return [
            *self.head(shown, split.valid_start, split.test_start),
            *counts,
            ("columns that are the items' text", ", ".join(manifest.text_columns) or "none"),
            (
                "neighboring events at the same time",
                f"{ties.neighbors:,} pairs, of {ties.users:,} users, {rule[ties.rule]}",
            ),
            ("times", self._times()),
            *((file, "; ".join(texts)) for file, texts in self._uses_by_file().items()),
            ("fingerprint", manifest.fingerprint[:16]),
        ]

    def _times(self) -> str:
        counts = self.manifest.counts
        if counts.get("ordered_without_times"):
            return "none in the source: the order of its events is believed"
        if "earliest" not in counts:  # of 0.1
            return "unknown"
        first, last = (datetime.fromtimestamp(counts[name], UTC) for name in ("earliest", "latest"))
        return f"from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC"

    def _uses_by_file(self) -> dict[str, list[str]]:
        """For each file what became of it and its columns, those of one use together."""
        found: dict[str, dict[str, list[str]]] = {}
        for use in self.uses:
            columns = found.setdefault(use.file, {}).setdefault(use.use, [])
            columns += [use.column] if use.column is not None else []
        return {
            file: [
                use if not columns else columns[0] if columns == [use] else f"{', '.join(columns)}: {use}"
                for use, columns in uses.items()
            ]
            for file, uses in found.items()
        }
