"""A growing folder: new files are read when they are complete, each row once.

    refresh: listing ─► new names ─► footers ─► complete ones make the next segment
    batch(step): segments in order, each shuffled and cut into batches like an epoch; None past the last one

The order in which files are accepted is part of a run's state: after a restart, the same steps read the same
rows, whatever has arrived since. A file is complete when it has a footer; one without is waited for, then
reported. The order of names does not matter: a file that arrives late in the partition of a past hour belongs
to the next segment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import RemoteFolder, remote_folder
from rayrec.samples.reading.decoding import ReadSpec
from rayrec.samples.reading.filters import Filters, as_filters, filter_columns
from rayrec.samples.reading.read_plan import (
    ORDER,
    BatchPlan,
    EpochPlan,
    Groups,
    ReadPosition,
    ReadSettings,
    Window,
    warn_of_unreadable,
)
from rayrec.samples.reading.sources import (
    OnCorrupt,
    SourceFile,
    UnreadableFooterError,
    check_same_columns,
    columns_of,
    columns_of_files,
    list_files,
    read_footers,
)

logger = logging.getLogger(__name__)

FORMAT = 1
PATIENCE_S = 600.0


@dataclass(frozen=True)
class FileSegment:
    """Files that were accepted together; read as one epoch."""

    files: tuple[SourceFile, ...]
    num_rows: int
    """Those that pass the filters."""
    num_steps: int


class FollowedPlan:
    """Segments of a growing folder; an epoch's number is that of its segment."""

    def __init__(
        self,
        url: str | Path,
        settings: ReadSettings,
        columns: Sequence[str] | None = None,
        filters: Sequence[Any] | Filters = (),
        on_corrupt: OnCorrupt = "stop",
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            columns: what is read; None is all that the first file has. Others may differ from file to file.
            patience_s: longest that a file may stay as it is without a footer.
            clock: seconds.

        Raises:
            InputError: the folder cannot be listed, settings do not fit the columns, or it has no complete
                file yet, which would tell the columns.
        """
        self._folder: RemoteFolder = remote_folder(url)
        self._settings = settings
        self._patience_s = patience_s
        self._clock = clock
        self._incomplete: dict[str, tuple[int, float]] = {}
        """Size of a file without a footer, and since when it has it."""
        self.unreadable: dict[str, int] = {}
        """Files that were skipped, with their sizes; one whose size changes is looked at again."""
        self._segments: list[FileSegment] = []
        self._first_steps = [0]
        self._first_files = [0]
        self._accepted: set[str] = set()
        # Two: readers ask for the windows of the next segment while the last steps of this one are planned.
        self._epoch_plan = lru_cache(maxsize=2)(self._epoch_of)
        self._first_name, schema = self._first_complete()
        settings.check(schema, self._folder.url)
        self.spec = ReadSpec(
            self._folder,
            columns_of(schema, columns_of_files(schema) if columns is None else columns, self._folder.url),
            schema,
            as_filters(filters, self._folder.url),
            on_corrupt,
        )
        needed = {*self.spec.schema.names, *filter_columns(self.spec.filters)}
        if settings.batching.length_of is not None:
            needed.add(settings.batching.length_of)
        self._needed = columns_of(schema, sorted(needed), self._folder.url)
        self._hashed: tuple[int, Any] = (0, self._order_begun())
        """A number of segments, and the hash of their order that more are added to."""

    def refresh(self) -> int:
        """Accept what has been completed since; returns the number of new steps.

        Raises:
            InputError: a file differs in a column that is read, has stayed without a footer for too long
                (and is not to be skipped), or the folder cannot be listed.
        """
        listed = list_files(self._folder)
        # Files that vanished are no matter here: they were read, or their reader says that they are missing.
        new = {
            name: info
            for name, info in listed.items()
            if name not in self._accepted and self.unreadable.get(name) != info.size
        }
        files = []
        for name, footer in read_footers(self._folder, new).items():
            if isinstance(footer, UnreadableFooterError):
                self._wait_for(name, new[name].size, footer)
                continue
            file, schema = footer
            known = pa.schema([field for field in schema if field.name in self._needed.names])
            check_same_columns(self._folder, name, known, self._first_name, self._needed)
            files.append(file)
        before = self.known_steps
        if files:
            self._accept(tuple(files))
        return self.known_steps - before

    @property
    def known_steps(self) -> int:
        """Steps that there are files for by now."""
        return self._first_steps[-1]

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """In the order of their acceptance; a file's number is its index here."""
        return tuple(file for segment in self._segments for file in segment.files)

    def rows_of_files(self, epoch: int) -> dict[str, int]:
        """Rows of every file of a segment, by its name, whether they pass the filters or not."""
        files = self._segments[epoch].files if epoch < len(self._segments) else ()
        return {file.name: file.num_rows for file in files}

    @property
    def fingerprint(self) -> str:
        """Hex sha256 that tells this folder from others, and stays while it grows: of its first file."""
        if not self._segments:
            raise InputError(f"{self._folder.url}: nothing of the folder has been accepted yet")
        first = self._segments[0].files[0]
        return hashlib.sha256(repr((first.name, first.size, first.footer)).encode()).hexdigest()

    def batch(self, step: int) -> BatchPlan | None:
        """The rows of a step; None: there are no files for it yet."""
        if step >= self.known_steps:
            return None
        segment, index = self.locate(step)
        return self._epoch_plan(segment).batch(step, index)

    def window_after(self, window: Window, num_readers: int) -> Window | None:
        """The next window of the same reader; None while there is none."""
        following = self._epoch_plan(window.epoch).window(window.number + num_readers)
        # A segment without steps has no windows, and what comes after it may not be known yet: the reader
        # then decodes its next window when it is asked for it, not ahead.
        segment = window.epoch + 1
        if following is not None or segment >= len(self._segments) or not self._segments[segment].num_steps:
            return following
        return self._epoch_plan(segment).window((window.number - 1) % num_readers)

    def locate(self, step: int) -> tuple[int, int]:
        """(segment, batch within it) of a step; of the next step to come, the segment that it will be in."""
        # Segments of which no row passes the filters have no steps, so several may begin here: take the last.
        segment = bisect_right(self._first_steps, step) - 1
        return segment, step - self._first_steps[segment]

    def position(self, step: int) -> ReadPosition:
        """What has been read before a step."""
        # Segments without steps may have been accepted since, or not: a position must not depend on them, so
        # of the segments that begin with this step it names the first.
        segment = bisect_left(self._first_steps, step)
        index = 0
        if segment == len(self._first_steps) or self._first_steps[segment] != step:
            segment, index = self.locate(step)
        rows = int(self._epoch_plan(segment).cuts_S1[index]) if index else 0
        return ReadPosition(segment, rows, self._order_after(segment + (index > 0)))

    def to_json(self, first: int = 0) -> dict[str, Any]:
        """All that `restore` needs to read the same rows in the same steps.

        Args:
            first: segments before it are kept elsewhere; `restore` wants them among the others.
        """
        return {
            **self.head_to_json(),
            "first_segment": first,
            "segments": self.segments_to_json(first),
            "unreadable": self.unreadable,
        }

    def head_to_json(self) -> dict[str, Any]:
        """How rows are put in order: what stays while the folder grows."""
        return {"format": FORMAT, "order": self._order_settings()}

    def segments_to_json(self, first: int, stop: int | None = None) -> list[dict[str, Any]]:
        """The segments from one on, up to another (exclusive), in the order of their acceptance."""
        # Not by `asdict`, which copies every value.
        return [
            {**vars(segment), "files": [dict(vars(file)) for file in segment.files]}
            for segment in self._segments[first:stop]
        ]

    @classmethod
    def restore(
        cls,
        state: dict[str, Any],
        url: str | Path,
        settings: ReadSettings,
        next_step: int,
        columns: Sequence[str] | None = None,
        filters: Sequence[Any] | Filters = (),
        on_corrupt: OnCorrupt = "stop",
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> FollowedPlan:
        """The plan that was saved, to continue with `next_step`.

        Args:
            state: from `to_json`.
            next_step: the first one that will be asked for. Files of segments before it need not be there.

        Raises:
            InputError: settings differ in what the order depends on, or a file that is still needed is
                missing or has changed; and as for the constructor.
        """
        plan = cls(url, settings, columns, filters, on_corrupt, patience_s, clock)
        if state.get("format") != FORMAT:
            raise InputError(
                f"{url}: the saved state of the folder has format {state.get('format')!r}, this version "
                f"reads {FORMAT}"
            )
        assert state.get("first_segment", 0) == 0, "those before were not put back"
        plan._check_order(state["order"])
        plan.unreadable = dict(state["unreadable"])
        segments = [
            FileSegment(
                tuple(
                    SourceFile(**{**file, "group_rows": tuple(file["group_rows"])})
                    for file in segment["files"]
                ),
                segment["num_rows"],
                segment["num_steps"],
            )
            for segment in state["segments"]
        ]
        last_steps = 0
        for segment in segments:
            last_steps += segment.num_steps
            # Files of segments that have been read may be gone; only those still to be read are checked.
            plan._append(segment if last_steps <= next_step else plan._as_it_is_now(segment))
        return plan

    def _first_complete(self) -> tuple[str, pa.Schema]:
        for name, info in list_files(self._folder).items():
            footer = read_footers(self._folder, {name: info})[name]
            if not isinstance(footer, UnreadableFooterError):
                return name, footer[1]
        raise InputError(
            f"{self._folder.url}: there is no complete Parquet file yet, and only one can tell the columns; "
            "start when the first one has been written"
        )

    def _wait_for(self, name: str, size: int, why: UnreadableFooterError) -> None:
        now = self._clock()
        # A file that still grows has a writer: patience begins again with every change of size.
        known_size, since = self._incomplete.get(name, (size, now))
        if known_size != size:
            since = now
        is_new = name not in self._incomplete
        self._incomplete[name] = (size, since)
        if now - since < self._patience_s:
            if is_new:
                shown = self._folder.shown(name)
                logger.info("%s: not complete yet (%s); waiting %.0f s for it", shown, why, self._patience_s)
            return
        message = (
            f"{self._folder.shown(name)}: not a readable Parquet file since {now - since:.0f} s ({why}); "
            "complete it or remove it"
        )
        if self.spec.on_corrupt == "stop":
            raise InputError(f"{message}, or let it be skipped (data.on_corrupt: skip)")
        logger.warning("%s; it is left out", message)
        self.unreadable[name] = size

    def _accept(self, files: tuple[SourceFile, ...]) -> None:
        groups = Groups.of(self.spec, files, self._settings.batching, self._first_files[-1])
        warn_of_unreadable(self._folder.url, groups.unreadable)
        steps = self._plan_of(groups, len(self._segments)).num_steps if groups.num_rows else 0
        self._append(FileSegment(files, groups.num_rows, steps))

    def _append(self, segment: FileSegment) -> None:
        self._segments.append(segment)
        self._first_steps.append(self._first_steps[-1] + segment.num_steps)
        self._first_files.append(self._first_files[-1] + len(segment.files))
        for file in segment.files:
            self._accepted.add(file.name)
            self._incomplete.pop(file.name, None)
            self.unreadable.pop(file.name, None)

    def _epoch_of(self, number: int) -> EpochPlan:
        segment = self._segments[number]
        groups = Groups.of(self.spec, segment.files, self._settings.batching, self._first_files[number])
        if groups.num_rows != segment.num_rows:
            raise InputError(
                f"{self._folder.url}: {groups.num_rows:,} rows of {segment.files[0].name} to "
                f"{segment.files[-1].name} can be read, {segment.num_rows:,} when they were accepted"
            )
        return self._plan_of(groups, number)

    def _plan_of(self, groups: Groups, number: int) -> EpochPlan:
        settings = self._settings
        return EpochPlan(
            groups,
            settings.batching,
            settings.seed,
            number,
            settings.window_rows,
            settings.first_window_rows,
        )

    def _as_it_is_now(self, segment: FileSegment) -> FileSegment:
        """The segment with the versions that its files have now, if their footers are the same."""
        listed = list_files(self._folder)
        for file in segment.files:
            if file.name not in listed:
                raise InputError(
                    f"{self._folder.shown(file.name)}: the file is missing, and not all of it has been read"
                )
        footers = read_footers(self._folder, {file.name: listed[file.name] for file in segment.files})
        found = []
        for file in segment.files:
            footer = footers[file.name]
            # Copying a folder changes the versions of its files, but not their content: compare the footers.
            if isinstance(footer, UnreadableFooterError) or replace(footer[0], version=file.version) != file:
                raise InputError(
                    f"{self._folder.shown(file.name)}: the file has changed since the run accepted it, and "
                    "not all of it has been read; put back what was there, or start a new run"
                )
            found.append(footer[0])
        return replace(segment, files=tuple(found))

    def _order_settings(self) -> dict[str, Any]:
        values = {"version": ORDER, "filters": self.spec.filters, **asdict(self._settings)}
        # Through JSON, so that tuples are lists, as in the saved state that these are compared with.
        return dict(json.loads(json.dumps(values, default=str)))

    def _check_order(self, theirs: dict[str, Any]) -> None:
        ours = self._order_settings()
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise InputError(
                    f"{self._folder.url}: the run was begun with {name} {theirs.get(name)}, now it is "
                    f"{value}: rows would be read twice, or never; continue it with its first settings"
                )

    def _order_after(self, num_segments: int) -> str:
        """Hash of the order of rows in the first so many segments.

        Every snapshot asks for it, of the segments until then. What was hashed is not hashed again, or a
        snapshot would take longer with every file that was ever accepted.
        """
        num_hashed, digest = self._hashed
        if num_hashed > num_segments:  # a position that has been passed
            num_hashed, digest = 0, self._order_begun()
        digest = digest.copy()
        for segment in self._segments[num_hashed:num_segments]:
            files = [(file.name, file.size, file.footer) for file in segment.files]
            digest.update(repr(files).encode())
        self._hashed = num_segments, digest
        return digest.hexdigest()

    def _order_begun(self) -> Any:
        return hashlib.sha256(json.dumps(self._order_settings(), sort_keys=True).encode())
