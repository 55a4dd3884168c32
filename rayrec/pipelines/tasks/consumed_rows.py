"""`rayrec data cursor`: which rows of which files a run has trained on, as one of its snapshots knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_consumed
from rayrec.pipelines.tasks.features import row_source
from rayrec.pipelines.tasks.training_rows import training_rows
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.reading.cursor import Cursor, FileProgress


@dataclass(frozen=True)
class EpochProgress:
    """What has been consumed of all files in one epoch; of a growing folder, an epoch is one segment."""

    epoch: int
    files: int
    consumed: int
    """Rows."""
    unreadable: int
    """Rows that were passed over since they cannot be decoded."""
    rows: int | None
    """To be read in the epoch; None where it is not known."""


@dataclass(frozen=True)
class ConsumedRows:
    """What a snapshot says of the rows of its run."""

    run: str
    snapshot: str
    steps: int
    dataset: str
    """Fingerprint of the data that files and rows are of."""
    epochs: list[EpochProgress]
    files: list[FileProgress]
    """By epoch and name."""
    unknown: str | None
    """Why it is not known how many rows there are; None where it is."""


def consumed_rows(run: Path, which: str = "last") -> ConsumedRows:
    """List the rows that a run has trained on up to a snapshot.

    Args:
        which: snapshot, in words of `RunFolder.chosen_snapshot`.

    Raises:
        InputError: no such run or snapshot, or the snapshot is damaged.
    """
    folder = RunFolder.open(run)
    path = folder.chosen_snapshot(which)
    state, cursor = read_consumed(path)
    unknown = None
    there: _Nothing
    try:
        there = _Accepted(state.followed) if state.followed is not None else _Planned(folder.config, cursor)
    except (InputError, UnavailableError) as error:
        there, unknown = _Nothing(), str(error)
    files = cursor.progress(there.rows_of_files)
    by_epoch: dict[int, list[FileProgress]] = {}
    for file in files:
        by_epoch.setdefault(file.epoch, []).append(file)
    epochs = [
        EpochProgress(
            epoch,
            len(lines),
            sum(line.consumed for line in lines),
            sum(line.unreadable for line in lines),
            there.rows_of_epoch(epoch),
        )
        for epoch, lines in by_epoch.items()
    ]
    return ConsumedRows(
        folder.name, path.name, state.committed_step + 1, cursor.dataset, epochs, files, unknown
    )


class _Nothing:
    """The folder of the rows cannot be opened."""

    def rows_of_files(self, epoch: int) -> Mapping[str, int]:
        return {}

    def rows_of_epoch(self, epoch: int) -> int | None:
        return None


class _Planned(_Nothing):
    """Rows of files that stay as they are: the same in every epoch."""

    def __init__(self, config: RunConfig, cursor: Cursor) -> None:
        """
        Raises:
            InputError: the rows cannot be opened, or are others than those that were consumed.
            UnavailableError: a store that an operation asks does not answer.
        """
        rows = training_rows(config, row_source(config))
        cursor.check_belongs_to(rows.fingerprint, "the cursor")
        self._rows = rows.plan.rows_of_files(0)

    def rows_of_files(self, epoch: int) -> Mapping[str, int]:
        return self._rows

    def rows_of_epoch(self, epoch: int) -> int | None:
        return sum(self._rows.values())


class _Accepted(_Nothing):
    """Rows of a growing folder, as they were accepted; the folder is not looked at."""

    def __init__(self, followed: dict[str, Any]) -> None:
        self._segments: list[dict[str, Any]] = followed["segments"]
        self._is_filtered = bool(followed["order"]["filters"])

    def rows_of_files(self, epoch: int) -> Mapping[str, int]:
        if self._is_filtered:  # how many of a file pass was not written down
            return {}
        return {file["name"]: sum(file["group_rows"]) for file in self._segments[epoch]["files"]}

    def rows_of_epoch(self, epoch: int) -> int | None:
        rows: int = self._segments[epoch]["num_rows"]
        return rows
