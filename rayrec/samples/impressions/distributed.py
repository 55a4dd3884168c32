"""`prepare_impressions` in tasks: the same data set, bit for bit, with the files of a source side by side.

    files ─► look ──────► count ──────► rows ─────────► files
             rows, and    ids of        checked,        each by one task,
             times, for   training      hashed,         in the order of
             the division rows          divided, spilled the source

The second pass is only with `min_count`. A task reads one file in batches, so it holds a batch and the
distinct ids of the file; this process merges those of all files, 24 bytes for each id, and writes the
manifest. A source of one file is read by one task.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.platform.files import no_room, written_whole
from rayrec.platform.remote_files import located
from rayrec.platform.tasks import RunTasks, run_tasks_locally
from rayrec.platform.work_folder import WorkFolder, finished_report
from rayrec.samples.dataset.dataset_folder import IMPRESSIONS, FileEntry
from rayrec.samples.dataset.manifest import EVALUATION_FILES
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.division import Division, Progress, RowsSeen, division_of, rows_seen, rule_of
from rayrec.samples.impressions.layouts import load_impressions
from rayrec.samples.impressions.manifest import ImpressionManifest
from rayrec.samples.impressions.prepare import (
    SplitCounts,
    Written,
    by_split,
    checked_rows,
    silent,
    spaces_of,
    training_keys,
    warn_of_what_was_written,
    with_ids,
    written_schema,
)
from rayrec.samples.impressions.report import ImpressionsReport
from rayrec.samples.impressions.source import ImpressionSource, SplitName
from rayrec.samples.impressions.vocabulary import Vocabulary
from rayrec.samples.prepare.distributed.log_pieces import FileVersion
from rayrec.samples.prepare.distributed.spill import read_rows
from rayrec.samples.prepare.splits import train_file
from rayrec.samples.prepare.writer import (
    RowGroupWriter,
    check_target,
    groups_per_file,
    holds_data_set,
    put_in_place,
)

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of work folders: one of another version is not gone on with."""


def prepare_impressions_distributed(
    source: str | Path,
    out: str | Path,
    config: ImpressionsConfig,
    run_tasks: RunTasks = run_tasks_locally,
    progress: Progress = silent,
    resume: bool = False,
    spill: Path | None = None,
) -> ImpressionsReport:
    """Write the data set `out` from `source`; `out` appears when it is whole, or not at all.

    The result is that of `prepare_impressions` for the same source and config.

    Args:
        run_tasks: where tasks run; all of them read the source and write beside `out`.
        resume: go on with what an interrupted preparation of the same has done, if there is one; if it is
            finished, say so and do nothing.
        spill: folder for the rows between the passes; None: beside `out`.

    Raises:
        InputError: something in the source or the config cannot be used, or `out` is taken.
        NoRoomError: a disk is full.
    """
    out = Path(out)
    if resume and (report := finished_impressions(source, out, config)) is not None:
        return report
    check_target(out, IMPRESSIONS, config.overwrite)
    loaded, versions = _opened(source, config)
    plan = _plan(source, config, versions)
    with WorkFolder.open(out, spill, plan, resume) as work:
        job = _Job(loaded, versions, config, spill=work.spill)
        return _Preparation(job, str(source), out, run_tasks, progress, work).run()


def finished_impressions(
    source: str | Path, out: Path, config: ImpressionsConfig
) -> ImpressionsReport | None:
    """What was reported of a data set that the same preparation has written; None: there is none to keep.

    Raises:
        InputError: the data set there is of another source, of other settings, or does not say of which.
    """
    if config.overwrite or not holds_data_set(out, IMPRESSIONS):
        return None
    finished_report(out, _plan(source, config, _opened(source, config)[1]))
    logger.info("%s: is finished already", out)
    return ImpressionsReport(out, ImpressionManifest.read(out))


def _opened(
    source: str | Path, config: ImpressionsConfig
) -> tuple[ImpressionSource, tuple[FileVersion, ...]]:
    loaded = load_impressions(located(source), config)
    if not loaded.files:
        raise InputError(
            f"{source}: rows of the layout {config.layout} are put together by one process; prepare them "
            "without Ray (--no-ray)"
        )
    return loaded, tuple(map(FileVersion.of, loaded.files))


def _plan(source: str | Path, config: ImpressionsConfig, versions: Sequence[FileVersion]) -> dict[str, Any]:
    """What tells whether an interrupted preparation was one of the same."""
    return {
        "format": FORMAT,
        "source": str(source),
        **config.model_dump(mode="json", exclude={"overwrite"}, warnings=False),
        "files": [[str(one.path), f"{one.bytes} bytes, {one.version}"] for one in versions],
    }


@dataclass(frozen=True)
class _Job:
    """What the tasks of a pass share."""

    source: ImpressionSource
    versions: tuple[FileVersion, ...]
    """Of its files, when it was opened."""
    config: ImpressionsConfig
    division: Division | None = None
    """None before it is known."""
    vocabulary: Vocabulary | None = None
    """Which ids are kept; it has met nothing."""
    spill: Path = Path()

    def of_part(self, index: int) -> ImpressionSource:
        """A source of one of the files.

        Raises:
            InputError: the file has changed since.
        """
        self.versions[index].check()
        return replace(self.source, parts=(self.source.parts[index],))


@dataclass(frozen=True)
class _Part:
    """One of the files, and how many rows are before it."""

    index: int
    rows_before: int


@dataclass(frozen=True)
class _Spilled:
    """The rows of one of the files."""

    counts: SplitCounts
    vocabulary: Vocabulary
    """What it has met."""
    batches: Mapping[SplitName, tuple[int, ...]]
    """Rows of each batch that lies on disk, by split."""


def _look(job: _Job, index: int) -> RowsSeen:
    return rows_seen(job.of_part(index), job.config, silent)


def _count(job: _Job, part: _Part) -> Vocabulary:
    assert job.division is not None, "the pass before found it"
    source, vocabulary = job.of_part(part.index), Vocabulary(spaces_of(job.source.schema))
    for rows in training_keys(source, job.config, job.division, silent, part.rows_before):
        with_ids(rows, source.schema, vocabulary)
    return vocabulary


def _spill(job: _Job, part: _Part) -> _Spilled:
    assert job.division is not None, "a pass before found it"
    assert job.vocabulary is not None, "a pass before found it"
    source, vocabulary = job.of_part(part.index), job.vocabulary.like()
    counts, schema = SplitCounts(source.schema.labels), written_schema(source)
    rows_of = checked_rows(source, job.config, job.division, "writing", silent, rows_before=part.rows_before)
    with _SplitFiles(job.spill, part.index, schema) as files:
        for rows, codes_R in rows_of:
            for split, chosen in by_split(with_ids(rows, source.schema, vocabulary), codes_R):
                files.write(split, chosen)
                counts.add(split, chosen)
    return _Spilled(counts, vocabulary, files.batches)


@dataclass(frozen=True)
class _FileToWrite:
    name: str
    split: SplitName
    first: int
    stop: int


@dataclass(frozen=True)
class _FilesJob:
    """What the tasks of the last pass share."""

    folder: Path
    spill: Path
    schema: pa.Schema
    rows_per_group: int
    batches: tuple[Mapping[SplitName, tuple[int, ...]], ...]
    """Of each file of the source, the rows of each batch on disk."""


def _write_file(job: _FilesJob, file: _FileToWrite) -> FileEntry:
    path = job.folder / file.name
    try:
        writer = RowGroupWriter(lambda number: path, job.schema, job.rows_per_group)
        for rows in _rows_of(job, file):
            writer.write(rows)
        writer.close()
    except BaseException as error:
        if (full := no_room(error, job.folder.parent)) is not None:
            raise full from error
        raise
    return FileEntry.of(path, file.stop - file.first)


def _rows_of(job: _FilesJob, file: _FileToWrite) -> Iterator[pa.Table]:
    """The rows of a file, in order. Only batches that have some of them are decoded."""
    at = 0
    for index, batches in enumerate(job.batches):
        lengths = np.array(batches.get(file.split, ()), dtype=np.int64)
        stops = at + np.cumsum(lengths)
        wanted = np.flatnonzero((stops > file.first) & (stops - lengths < file.stop))
        at += int(lengths.sum())
        if not len(wanted):
            continue
        tables = read_rows(_spilled(job.spill, index, file.split), range(wanted[0], wanted[-1] + 1))
        for place, table in zip((stops - lengths)[wanted].tolist(), tables, strict=True):
            first, stop = max(file.first - place, 0), min(file.stop - place, len(table))
            yield table.slice(first, stop - first)


def _spilled(folder: Path, index: int, split: SplitName) -> Path:
    return folder / f"rows-{index:06}-{split}.arrow"


class _SplitFiles:
    """Rows of one file of the source to a file on disk for each split; they are there when they are whole."""

    def __init__(self, folder: Path, index: int, schema: pa.Schema) -> None:
        self._folder = folder
        self._index = index
        self._schema = schema
        self._open = ExitStack()
        self._writers: dict[SplitName, Any] = {}
        self._batches: dict[SplitName, list[int]] = {}

    @property
    def batches(self) -> dict[SplitName, tuple[int, ...]]:
        """Rows of each batch that was written, by split."""
        return {split: tuple(lengths) for split, lengths in self._batches.items()}

    def __enter__(self) -> _SplitFiles:
        return self

    def write(self, split: SplitName, rows: pa.Table) -> None:
        """Append rows.

        Raises:
            NoRoomError: the disk is full.
        """
        try:
            if split not in self._writers:
                path = _spilled(self._folder, self._index, split)
                unfinished = self._open.enter_context(written_whole(path))
                file = self._open.enter_context(pa.OSFile(str(unfinished), "wb"))
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                writer = pa.ipc.new_file(file, self._schema, options=options)
                self._writers[split] = self._open.enter_context(writer)
            for batch in rows.select(self._schema.names).cast(self._schema).combine_chunks().to_batches():
                self._writers[split].write_batch(batch)
                self._batches.setdefault(split, []).append(len(batch))
        except OSError as error:
            if (full := no_room(error, self._folder)) is not None:
                raise full from error
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._open.__exit__(kind, error, traceback)
        except OSError as failed:
            if (full := no_room(failed, self._folder)) is not None:
                raise full from failed
            raise


class _Preparation:
    """The passes, one after the other."""

    def __init__(
        self,
        job: _Job,
        origin: str,
        out: Path,
        run_tasks: RunTasks,
        progress: Progress,
        work: WorkFolder,
    ) -> None:
        self._job = job
        self._source, self._config = job.source, job.config
        self._origin = origin
        self._out = out
        self._run_tasks = run_tasks
        self._progress = progress
        self._work = work

    def run(self) -> ImpressionsReport:
        source, config, work, job = self._source, self._config, self._work, self._job
        parts = list(range(len(source.parts)))
        seen, rows_before_P = None, np.zeros(len(parts) + 1, dtype=np.int64)
        if rule_of(source, config) != "given":
            self._run("look", _look, job, parts, keep=False)
            seen = RowsSeen.of(work.results("look", len(parts)))
            rows_P = [one.num_rows for one in work.results("look", len(parts))]
            rows_before_P = np.cumsum([0, *rows_P])
        division = division_of(source, config, seen)
        at = [_Part(index, int(rows_before_P[index])) for index in parts]
        job = replace(job, division=division)
        vocabulary, num_rare = (
            Vocabulary(spaces_of(source.schema)),
            dict.fromkeys(spaces_of(source.schema), 0),
        )
        if config.min_count > 1:
            self._run("count", _count, job, at, keep=False)
            for one in work.results("count", len(at)):
                vocabulary.merge(one)
            vocabulary, num_rare = Vocabulary.without_rare(vocabulary, config.min_count)
        self._run("rows", _spill, replace(job, vocabulary=vocabulary), at, keep=False)
        counts, batches = SplitCounts(source.schema.labels), []
        for spilled in work.results("rows", len(at)):
            counts.merge(spilled.counts)
            vocabulary.merge(spilled.vocabulary)
            batches.append(spilled.batches)
        counts.check(source.name)
        written = Written(self._write(batches, counts), counts, vocabulary, num_rare)
        manifest = written.manifest(source, config, self._origin, division)
        work.keep_plan()
        manifest.write(work.data)
        put_in_place(work.data, self._out)
        warn_of_what_was_written(self._out, manifest, source.schema, config, vocabulary)
        return ImpressionsReport(self._out, manifest)

    def _write(
        self, batches: list[Mapping[SplitName, tuple[int, ...]]], counts: SplitCounts
    ) -> dict[str, FileEntry]:
        config = self._config
        step = config.rows_per_group * groups_per_file(config.rows_per_group, config.rows_per_file)
        starts = range(0, counts.rows["train"], step)
        files = [
            _FileToWrite(train_file(number), "train", first, min(first + step, counts.rows["train"]))
            for number, first in enumerate(starts)
        ]
        files += [
            _FileToWrite(name, split, 0, counts.rows[split]) for split, name in EVALUATION_FILES.items()
        ]
        for path in {self._work.data / file.name for file in files}:
            path.parent.mkdir(parents=True, exist_ok=True)
        job = _FilesJob(
            self._work.data,
            self._work.spill,
            written_schema(self._source),
            config.rows_per_group,
            tuple(batches),
        )
        entries = self._run("files", _write_file, job, files)
        return {file.name: entry for file, entry in zip(files, entries, strict=True)}

    def _run(self, stage: str, task: Any, shared: Any, arguments: list[Any], keep: bool = True) -> list[Any]:
        done = 0

        def tell(index: int, result: Any) -> None:
            nonlocal done
            done += 1
            self._progress(stage, done, len(arguments))

        return self._work.run(stage, self._run_tasks, task, shared, arguments, tell, keep)
