"""A prepared data set of impressions, opened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.dataset.dataset_folder import DatasetFolder
from rayrec.samples.dataset.manifest import EVALUATION_FILES, Split
from rayrec.samples.impressions.manifest import ImpressionManifest


class ImpressionDataset(DatasetFolder[ImpressionManifest]):
    """A folder written by `rayrec impressions`. Tables are read when asked for."""

    MANIFEST = ImpressionManifest

    @cached_property
    def schema(self) -> ImpressionSchema:
        """What the columns mean; the files have no others but those that were kept for operations."""
        return self.manifest.columns.to_schema()

    @property
    def num_ids(self) -> dict[str, int]:
        """By space: distinct ids in all splits; null, which is one more, not counted."""
        return dict(self.manifest.num_ids)

    def split_columns(self, split: Split) -> tuple[str, ...]:
        """Names of the columns of `valid` or `test`.

        Raises:
            InputError: its file cannot be read.
        """
        path = self.root / EVALUATION_FILES[split]
        try:
            return tuple(pq.read_schema(path).names)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: cannot be read ({error}); prepare the data set again") from error

    def split_table(self, split: Split, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of `valid` or `test`, in the order in which they were written.

        Args:
            columns: None for all.

        Raises:
            InputError: there is no such split, or its file cannot be read.
        """
        if split not in EVALUATION_FILES:
            raise InputError(f"there is no split {split!r} to evaluate; choose 'valid' or 'test'")
        return self.read(EVALUATION_FILES[split], columns)
