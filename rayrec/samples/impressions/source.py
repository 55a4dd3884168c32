"""What a layout makes of the files that it reads: rows that can be read as often as needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa

from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.impressions.history_rule import HistoryRule

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")

BATCH_ROWS = 65_536
"""Rows that are read, checked and hashed at once."""


@dataclass(frozen=True)
class SourcePart:
    """A file, or rows that a layout has put together."""

    read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
    """Reads the named columns; every call starts from the first row."""
    where: Callable[[int], str]
    """Where a row is in the source, for messages: "train.tsv line 7"."""
    split: SplitName | None = None
    """None: rows are divided by the rule of the config."""


@dataclass(frozen=True)
class ImpressionSource:
    """All that preparation has to know of a source."""

    name: str
    schema: ImpressionSchema
    parts: tuple[SourcePart, ...]
    """Either all of one split each, or none."""
    time: str | None = None
    """The column that rows may be divided by."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Columns that are written beside what the schema says, to the names that they get."""
    boundaries: tuple[float, float] | None = None
    """UNIX seconds from which rows validate and are tested, where the layout has divided them by time."""
    held_out_of: str | None = None
    """Fingerprint of the data set of histories whose held-out events the layout has held out."""
    files: tuple[Path, ...] = ()
    """Of each part its file, which any process may read; none where a layout has put rows together."""
    history: HistoryRule | None = None
    """What histories are made of, where the layout made them, or was told."""

    @property
    def is_divided(self) -> bool:
        return any(part.split is not None for part in self.parts)


def rows_as_part(
    take: Callable[[int, int], dict[str, pa.Array]],
    num_rows: int,
    where: Callable[[int], str],
    split: SplitName | None = None,
) -> SourcePart:
    """Rows that are made in pieces: `take(start, stop)` gives their columns."""

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for start in range(0, num_rows, BATCH_ROWS):
            made = take(start, min(start + BATCH_ROWS, num_rows))
            yield pa.record_batch({name: made[name] for name in columns})

    return SourcePart(read, where, split)
