"""What `rayrec impressions` did, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rayrec.samples.impressions.manifest import ImpressionManifest
from rayrec.samples.impressions.source import SPLITS

_SPLITS = {
    "files": "one file each",
    "order": "by order",
    "time": "by time",
    "random": "random",
    "data_set": "what a data set of histories holds out",
}
_NAMES = {"train": "training", "valid": "validation", "test": "test"}


@dataclass(frozen=True)
class ImpressionsReport:
    """A data set that has been written."""

    path: Path
    manifest: ImpressionManifest

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) in the order to print."""
        manifest = self.manifest
        split = manifest.split
        shown = _SPLITS[split.kind]
        if split.valid_start is not None and split.test_start is not None:
            shown += f", validation from {_date(split.valid_start)}, test from {_date(split.test_start)}"
        columns = manifest.columns
        lines = [
            ("data set", str(self.path)),
            ("source", f"{manifest.source} ({manifest.layout})"),
            ("split", shown),
            *((f"{_NAMES[name]} rows", f"{manifest.rows[name]:,}") for name in SPLITS),
        ]
        lines += [(f"positives of {label}", self._positives(label)) for label in columns.labels]
        lines += [
            ("numbers", f"{len(columns.numbers)}"),
            ("columns of one id", f"{len(columns.ids)}"),
            ("columns of lists", f"{len(columns.lists)}"),
            ("grouped by", columns.group or "nothing"),
        ]
        lines += [(f"ids of {space}", self._ids(space)) for space in manifest.num_ids]
        lines += [(name.replace("_", " "), f"{value:.4f}") for name, value in manifest.extra.items()]
        return [*lines, ("fingerprint", manifest.fingerprint[:16])]

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {"path": str(self.path), **self.manifest.model_dump(mode="json")}

    def _positives(self, label: str) -> str:
        parts = []
        for name in SPLITS:
            known, positives = self.manifest.known[label][name], self.manifest.positives[label][name]
            share = f" ({positives / known:.2%})" if known else ""
            unknown = self.manifest.rows[name] - known
            parts.append(f"{positives:,}{share}" + (f", {unknown:,} not known" if unknown else ""))
        return " / ".join(parts)

    def _ids(self, space: str) -> str:
        shown = f"{self.manifest.num_ids[space]:,}"
        rare = self.manifest.num_rare[space]
        return shown + (f", and {rare:,} rare ones as one" if rare else "")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
