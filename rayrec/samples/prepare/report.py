"""What `rayrec prepare` did, for people and for programs."""

from __future__ import annotations

from rayrec.samples.dataset.dataset_folder import DatasetReport
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


class PrepareReport(DatasetReport[Manifest]):
    """What `rayrec prepare` wrote."""

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) in the order to print; what did not happen is left out."""
        manifest = self.manifest
        split = manifest.split
        shown = {"leave_one_out": "leave-one-out", "time": "by time"}[split.kind]
        counts = [
            (label, f"{manifest.counts[name]:,}")
            for name, label in _LABELS.items()
            if name in _ALWAYS or manifest.counts[name]
        ]
        rule = {"shuffle": f"shuffled by seed {manifest.seed}", "file": "in the order of the source"}
        ties = manifest.ties
        return [
            *self.head(shown, split.valid_start, split.test_start),
            *counts,
            ("columns that are the items' text", ", ".join(manifest.text_columns) or "none"),
            (
                "neighboring events at the same time",
                f"{ties.neighbors:,} of {ties.users:,} users, {rule[ties.rule]}",
            ),
            ("fingerprint", manifest.fingerprint[:16]),
        ]
