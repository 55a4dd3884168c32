"""What `rayrec impressions` did, for people and for programs."""

from __future__ import annotations

from rayrec.samples.dataset.dataset_folder import DatasetReport
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


class ImpressionsReport(DatasetReport[ImpressionManifest]):
    """What `rayrec impressions` wrote."""

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) in the order to print."""
        manifest = self.manifest
        split = manifest.split
        columns = manifest.columns
        lines = [
            *self.head(_SPLITS[split.kind], split.valid_start, split.test_start),
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
