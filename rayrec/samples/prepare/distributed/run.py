"""`prepare` in tasks: the same data set, bit for bit, and no process that holds the log.

    log ─ pieces ─► look ──► rows ────► users ─────────► items ───► files
                    types,   checked,   a partition's    counters   each by one task,
                    only of  spilled by sequences and    and keys   in order of
                    texts    user       users            merged     mix64(user_id)

Every pass waits for the one before it. Between passes tables lie on disk, in a folder that all nodes see:
Ray Data's own shuffles keep them in the object store or in actors, whose memory then grows with the log, and
nothing of them is left after a kill. This process merges counters and writes the manifest.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import Label
from rayrec.platform.tasks import RunTasks, run_tasks_locally
from rayrec.platform.work_folder import WorkFolder, finished_report
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset_folder import HISTORIES, FileEntry
from rayrec.samples.dataset.manifest import Entity, IdKind, Manifest, SplitInfo, TiesInfo, fingerprint_of
from rayrec.samples.importers import recognize
from rayrec.samples.importers.roles import check_columns, keep_apart
from rayrec.samples.importers.tables import RawTable, RawTables, open_parquet, table_files
from rayrec.samples.prepare.catalog import latest_of, merge_titles, text_columns
from rayrec.samples.prepare.distributed.boundaries import (
    FIRST_UNIT,
    UNITS,
    Counts,
    Period,
    TimesJob,
    count_times,
)
from rayrec.samples.prepare.distributed.files import (
    FilesJob,
    FileToWrite,
    Kind,
    Stored,
    files_to_write,
    write_file,
)
from rayrec.samples.prepare.distributed.items import ItemsBuilt, ItemsJob, build_items
from rayrec.samples.prepare.distributed.keys import KeysFound, write_described
from rayrec.samples.prepare.distributed.log_pieces import FileVersion, LogForm, OpenLog, PieceLook
from rayrec.samples.prepare.distributed.rows import ENTITIES, RowsJob, SpilledRows, spill_piece
from rayrec.samples.prepare.distributed.spellings import SpellingsFound, compare_spellings
from rayrec.samples.prepare.distributed.spill import read_partitions, read_rows
from rayrec.samples.prepare.distributed.users import (
    CatalogJob,
    UsersBuilt,
    UsersJob,
    build_users,
    labels_of,
)
from rayrec.samples.prepare.findings import Findings
from rayrec.samples.prepare.ids import (
    collision_error,
    ids_of_kind,
    integer_range,
    is_integer_id,
    refuse_outside,
)
from rayrec.samples.prepare.key_comparison import KeysCompared
from rayrec.samples.prepare.prepare import Progress, silent, split_rule
from rayrec.samples.prepare.report import PrepareReport, Use, uses_of
from rayrec.samples.prepare.sequences import SequenceBuilder
from rayrec.samples.prepare.time_split import boundary_ranks, check_boundaries
from rayrec.samples.prepare.times import TextForm, TextForms, TimesSeen
from rayrec.samples.prepare.totals import (
    CatalogCounts,
    LogCounts,
    SequenceTotals,
    find_cold,
    find_in_sequences,
    manifest_counts,
    shown_values,
)
from rayrec.samples.prepare.validation import (
    ID_COLUMNS,
    SOURCE_ROW,
    RowTally,
    add_alike,
    described,
    no_events,
    trimmed_ids,
    with_comparison,
)
from rayrec.samples.prepare.writer import check_target, holds_data_set, put_in_place

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of work folders: one of another version is not gone on with."""


@dataclass(frozen=True)
class TaskSizes:
    """What one task holds; does not change the result."""

    piece_rows: int = 2_000_000
    """Rows of a piece of Parquet, about."""
    table_rows: int = 2_000_000
    """Rows that are checked and spilled at once."""
    partition_rows: int = 2_500_000
    """Events of a partition of users, on average, at most; some 140 bytes each."""
    largest_partition_rows: int = 10_000_000
    """Events of one partition, which has more than others if it has a user with very many."""
    counter_rows: int = 4_000_000
    """Counters of items, or keys, that are merged at once."""


def prepare_distributed(
    source: str | Path,
    out: str | Path,
    config: PrepareConfig | None = None,
    run_tasks: RunTasks = run_tasks_locally,
    progress: Progress = silent,
    resume: bool = False,
    spill: Path | None = None,
    sizes: TaskSizes | None = None,
) -> PrepareReport:
    """Write the data set `out` from `source`; `out` appears when it is whole, or not at all.

    The result is that of `prepare` for the same source and config.

    Args:
        run_tasks: where tasks run; all of them read the source and write beside `out`.
        resume: go on with what an interrupted preparation of the same has done, if there is one; if it is
            finished, say so and do nothing.
        spill: folder for the tables between the passes; None: beside `out`.

    Raises:
        InputError: something in the source or the config cannot be used, or `out` is taken.
        NoRoomError: a disk is full.
    """
    config, out, sizes = config or PrepareConfig(), Path(out), sizes or TaskSizes()
    if resume and (report := finished_preparation(source, out, config, sizes)) is not None:
        return report
    check_target(out, HISTORIES, config.overwrite)
    opened = _Opened.open(source, config, sizes)
    with WorkFolder.open(out, spill, opened.plan(config, sizes), resume) as work:
        return _Preparation(opened, out, config, run_tasks, progress, work, sizes).run()


def finished_preparation(
    source: str | Path, out: Path, config: PrepareConfig, sizes: TaskSizes | None = None
) -> PrepareReport | None:
    """What was reported of a data set that the same preparation has written; None: there is none to keep.

    Raises:
        InputError: the data set there is of another source, of other settings, or does not say of which.
    """
    if config.overwrite or not holds_data_set(out, HISTORIES):
        return None
    sizes = sizes or TaskSizes()
    uses = finished_report(out, _Opened.open(source, config, sizes).plan(config, sizes))
    logger.info("%s: is finished already", out)
    return PrepareReport(out, Manifest.read(out), tuple(Use(**use) for use in uses))


def about_events(source: str | Path, config: PrepareConfig) -> int | None:
    """About how many events a source has, by the footers and sizes of its files; None of one whose layout is
    read by one process.

    Raises:
        InputError: nothing is there that can be read.
    """
    recognized = recognize(source, config)
    found = recognized.importer.find(recognized.path, config)
    if found is None:
        return None
    logs = found.log.values() if isinstance(found.log, Mapping) else [found.log]
    total = 0
    for file in (file for log in logs for file in table_files(log)):
        if file.suffix == ".parquet":
            with open_parquet(file) as opened:
                total += opened.metadata.num_rows
        else:
            total += file.stat().st_size // (_PACKED_BYTES if file.suffix == ".gz" else _TEXT_BYTES)
    return total


_TEXT_BYTES, _PACKED_BYTES = 30, 8
"""Of an event in a text file, about."""


@dataclass(frozen=True)
class _Opened:
    """A source, none of whose events has been read."""

    source: str
    layout: str
    log: OpenLog
    tables: RawTables
    """Those of items and users; the log has no rows in it."""
    versions: tuple[FileVersion, ...]
    """Of the files of these two."""

    @classmethod
    def open(cls, source: str | Path, config: PrepareConfig, sizes: TaskSizes) -> _Opened:
        recognized = recognize(source, config)
        found = recognized.importer.find(recognized.path, config)
        if found is None:
            raise InputError(
                f"{source}: a source of the layout {recognized.layout} is read by one process; prepare it "
                "without Ray (--no-ray)"
            )
        log = OpenLog.open(found, recognized.path, config, sizes.piece_rows)
        sides = [path for path in (found.items, found.users) if path is not None]
        versions = tuple(FileVersion.of(file) for path in sides for file in table_files(path))
        no_rows = RawTable(pa.table({}), log.label, str)
        tables = RawTables(
            found.name,
            no_rows,
            found.read_items(config),
            found.read_users(config),
            found.ignored,
            is_divided=log.is_divided,
        )
        return cls(str(source), recognized.layout, log, tables, versions)

    def plan(self, config: PrepareConfig, sizes: TaskSizes) -> dict[str, Any]:
        """What tells whether an interrupted preparation was one of the same."""
        versions = (*self.log.versions, *self.versions)
        return {
            "format": FORMAT,
            "source": self.source,
            "layout": self.layout,
            **config.model_copy(update={"allow": sorted(config.allow)}).model_dump(
                mode="json", exclude={"overwrite"}, warnings=False
            ),
            **asdict(sizes),
            "files": [[str(one.path), f"{one.bytes} bytes, {one.version}"] for one in versions],
        }


class _OtherKindsError(Exception):
    """Ids that were taken for integers are texts."""

    def __init__(self, entities: set[Entity]) -> None:
        super().__init__(entities)
        self.entities = entities


@dataclass(frozen=True)
class _Rows:
    """The log after the first pass."""

    job: RowsJob
    spilled: SpilledRows


class _Preparation:
    """The passes, one after the other."""

    def __init__(
        self,
        opened: _Opened,
        out: Path,
        config: PrepareConfig,
        run_tasks: RunTasks,
        progress: Progress,
        work: WorkFolder,
        sizes: TaskSizes,
    ) -> None:
        self._opened = opened
        self._out = out
        self._config = config
        self._run_tasks = run_tasks
        self._progress = progress
        self._work = work
        self._sizes = sizes
        self._findings = Findings()

    def run(self) -> PrepareReport:
        log, config = self._opened.log, self._config
        form, text_form = self._look()
        where = form.where(log)
        raw_log = RawTable(form.schema.empty_table(), log.label, where, form.sources, form.notes)
        tables = replace(self._opened.tables, interactions=raw_log)
        if config.columns:
            check_columns(tables, config)
        tables = keep_apart(tables)
        split = split_rule(log.label, False, log.is_divided, config)
        if not form.num_rows:
            raise no_events(log.label)
        sides = Findings()
        items, trimmed_items = described(tables.items, "item", sides)
        users, trimmed_users = described(tables.users, "user", sides)
        rows = self._spill_rows(form, text_form, {"item": items, "user": users}, split)
        spilled = rows.spilled
        self._findings.merge(spilled.findings, where)
        spilled.tally.refuse(raw_log, self._findings, config)
        for kind, one in sides.found.items():
            self._findings.add(kind, one.count, one.row, one.where, one.describe)
        num_compared: dict[Entity, int] = {"item": _num_rows(items), "user": _num_rows(users)}
        titles_of_log = ""
        if "title" in form.schema.names:
            items, titles_of_log = merge_titles(raw_log, self._titles(rows), items)
            raw_log = replace(raw_log, table=raw_log.table.drop_columns(["title"]))
        split = self._with_boundaries(split, rows)
        textual = text_columns(items, config.text_columns)
        catalog, ids = self._catalog(rows, {"item": items, "user": users}, num_compared)
        users_built = self._build_users(catalog, split, spilled.rows_P)
        items_built = self._build_items(catalog, users_built, textual)
        self._refuse_collisions(users_built, items_built)
        items, users = self._compare(catalog, raw_log, items, users, users_built, items_built)
        totals = _merged([one.totals for one in users_built.values()])
        num_cold = sum(one.num_cold for one in items_built.values())
        first_cold = [one.first_cold for one in items_built.values() if one.first_cold >= 0]
        find_in_sequences(self._findings, totals, where, lambda row: self._values(form, row))
        find_cold(self._findings, items, num_cold, min(first_cold, default=-1))
        self._findings.refuse(config.allowed)
        files = self._write(catalog, users_built, items_built, textual)
        counts = CatalogCounts(
            users=sum(one.rows.get("users", 0) for one in users_built.values()),
            items=sum(one.num_items for one in items_built.values()),
            described_items=0 if ids["item"] is None else len(ids["item"]),
            cold_items=num_cold,
            users_without_events=sum(one.without_events for one in users_built.values()),
        )
        assert spilled.earliest_us is not None, "refused without events"
        assert spilled.latest_us is not None, "refused without events"
        log_counts = LogCounts(
            num_filtered=spilled.tally.num_filtered,
            num_trimmed=spilled.tally.num_trimmed + trimmed_items + trimmed_users,
            earliest_us=spilled.earliest_us,
            latest_us=spilled.latest_us,
            num_ordered=0,
        )
        behaviors, scenarios = (catalog.labels.get(label, ()) for label in ("behavior", "scenario"))
        manifest = Manifest(
            format=HISTORIES.format,
            name=tables.name,
            source=self._opened.source,
            layout=self._opened.layout,
            split=split,
            seed=config.seed,
            ties=TiesInfo(rule=config.ties, neighbors=totals.ties, users=totals.tied_users),
            id_kinds={"user": catalog.kind("user"), "item": catalog.kind("item")},
            behaviors=behaviors,
            scenarios=scenarios,
            text_columns=textual,
            counts=manifest_counts(totals, files, counts, log_counts, self._findings),
            files=files,
            fingerprint=fingerprint_of(files, behaviors, scenarios),
        )
        raw = replace(tables, interactions=raw_log, items=items, users=users, titles_of_log=titles_of_log)
        uses = uses_of(raw, textual)
        self._work.keep_plan([asdict(use) for use in uses])
        manifest.write(self._work.data)
        put_in_place(self._work.data, self._out)
        return PrepareReport(self._out, manifest, uses)

    # What all rows decide, before they are read

    def _look(self) -> tuple[LogForm, TextForm | None]:
        """The form of the log, and that of its times, if they are texts."""
        log = self._opened.log
        looks = [log.look_at_footer(piece) for piece in log.pieces]
        texts = [number for number, look in enumerate(looks) if look is None]
        with_times = self._config.time_format is None
        done = 0

        def on_result(index: int, result: PieceLook) -> None:
            nonlocal done
            done += 1
            self._progress("looking at the log", done, len(texts))

        found = self._work.run("look", self._run_tasks, _look, (log, with_times, False), texts, on_result)
        for number, look in zip(texts, found, strict=True):
            looks[number] = look
        form = log.form([look or PieceLook() for look in looks], self._config)
        if not with_times or not log.times_are_texts(form):
            return form, None
        forms = TextForms()
        for look in found:
            forms.merge(look.times)
        others = [number for number in range(len(looks)) if number not in set(texts)]
        for look in self._work.run("look-times", self._run_tasks, _look, (log, True, False), others):
            forms.merge(look.times)
        if forms.form is not None:
            return form, forms.form
        everywhere = list(range(len(looks)))
        for look in self._work.run("look-mixed", self._run_tasks, _look, (log, True, True), everywhere):
            forms.merge(look.times)
        return form, forms.mixed_form

    # Rows

    def _spill_rows(
        self,
        form: LogForm,
        text_form: TextForm | None,
        described_by: Mapping[Entity, RawTable | None],
        split: SplitInfo,
    ) -> _Rows:
        kinds: dict[Entity, IdKind] = {}
        ranges: dict[Entity, tuple[int, int]] = {}
        for entity in ENTITIES:
            table = described_by[entity]
            kinds[entity] = "integer"
            if table is not None and len(table.table):
                column = table.table[f"{entity}_id"]
                if is_integer_id(column):
                    ranges[entity] = integer_range(column)
                else:
                    kinds[entity] = "string"
        num_partitions = max(
            self._config.num_partitions, math.ceil(form.num_rows / self._sizes.partition_rows)
        )
        while True:
            job = RowsJob(
                self._config,
                self._opened.log,
                form,
                text_form,
                dict(kinds),
                num_partitions,
                self._sizes.table_rows,
                split.kind == "time" and self._config.starts is None,
                self._work.spill,
            )
            try:
                spilled = self._spill_as(job)
                break
            except _OtherKindsError as error:
                # Only all rows tell; most logs tell in the first piece.
                self._work.remove_spilled(f"*-{job.code}-*.arrow")
                kinds |= dict.fromkeys(error.entities, "string")
        for entity in ENTITIES:
            if kinds[entity] == "integer":
                both = [one[entity] for one in (spilled.ranges, ranges) if entity in one]
                if both:
                    lowest, highest = min(one[0] for one in both), max(one[1] for one in both)
                    refuse_outside(lowest, highest, entity)
                    spilled.ranges[entity] = lowest, highest
        return _Rows(job, spilled)

    def _spill_as(self, job: RowsJob) -> SpilledRows:
        done = 0

        def on_result(index: int, result: SpilledRows) -> None:
            nonlocal done
            if result.not_integers:
                raise _OtherKindsError(result.not_integers)
            done += job.form.rows[index]
            self._progress("reading", done, job.form.num_rows)

        stage = f"rows-{job.code}"
        numbers = list(range(len(job.log.pieces)))
        found = self._work.run(stage, self._run_tasks, spill_piece, job, numbers, on_result)
        spilled = SpilledRows(RowTally(TimesSeen(self._config.time_unit)))
        for number, one in enumerate(found):
            spilled.merge(one, job.form.first_row(number))
        return spilled

    def _titles(self, rows: _Rows) -> pd.DataFrame:
        """The latest title of each item; as many are held as there are items with one."""
        held: list[pd.DataFrame] = []
        for table in rows.spilled.tables:
            held += [part.to_pandas() for part in read_rows(rows.job.titles_file(table.name))]
            if len(held) > 1 and sum(map(len, held[1:])) > len(held[0]) + self._sizes.counter_rows // 4:
                held = [latest_of(pd.concat(held))]
        if not held:
            return pd.DataFrame({"key": [], "title": [], "time": [], "row": []})
        return latest_of(pd.concat(held))

    def _with_boundaries(self, split: SplitInfo, rows: _Rows) -> SplitInfo:
        if split.kind != "time":
            return split
        spilled, starts = rows.spilled, self._config.starts
        assert spilled.earliest_us is not None, "refused without events"
        assert spilled.latest_us is not None, "refused without events"
        if starts is None:
            ranks = boundary_ranks(int(spilled.rows_P.sum()), self._config.fractions)
            days = Counts(*(np.array(one) for one in zip(*sorted(spilled.days.items()), strict=True)))
            periods = tuple(days.period_of_rank(FIRST_UNIT, rank) for rank in ranks)
            paths = [rows.job.events_file(table.name) for table in spilled.tables]
            for unit in UNITS:
                job = TimesJob(periods, unit, rows.job.num_partitions)
                periods = self._finer(job, paths)
            first, second = (period.start / 1_000_000 for period in periods)
            starts = first, second
        check_boundaries(spilled.earliest_us, spilled.latest_us, starts)
        return SplitInfo(
            kind="time", valid_start=starts[0], test_start=starts[1], targets=self._config.targets
        )

    def _finer(self, job: TimesJob, paths: Sequence[Path]) -> tuple[Period, ...]:
        """The units of periods in which the boundaries lie."""
        totals: list[Counts] = []

        def on_result(index: int, result: tuple[Counts, ...]) -> None:
            nonlocal totals
            totals = [a.merge(b) for a, b in zip(totals, result, strict=True)] if totals else [*result]

        stage = f"times-{job.unit}"
        self._work.run(stage, self._run_tasks, count_times, job, paths, on_result, keep=False)
        return tuple(
            total.period_of_rank(job.unit, period.rank)
            for total, period in zip(totals, job.periods, strict=True)
        )

    # Users and items

    def _catalog(
        self,
        rows: _Rows,
        described_by: Mapping[Entity, RawTable | None],
        num_compared: Mapping[Entity, int],
    ) -> tuple[CatalogJob, dict[Entity, Int64Array | None]]:
        """What the passes over users and items share, and the ids of their tables."""
        files: dict[Entity, tuple[Path, str]] = {}
        ids: dict[Entity, Int64Array | None] = {}
        for entity, table in described_by.items():
            ids[entity] = None
            if table is not None:
                path = self._work.spill / f"described-{entity}s.arrow"
                found = ids_of_kind(table.table[f"{entity}_id"], rows.job.kinds[entity], entity)
                write_described(path, table, found, rows.job.num_partitions)
                files[entity], ids[entity] = (path, table.file), found
        are_unsigned = {
            entity: entity in rows.spilled.ranges and rows.spilled.ranges[entity][1] >= 2**63
            for entity in ENTITIES
        }
        labels: dict[Label, tuple[str, ...]] = labels_of(rows.spilled.names)
        tables = tuple(rows.spilled.tables)
        return CatalogJob(rows.job, tables, labels, files, num_compared, are_unsigned), ids

    def _build_users(
        self, catalog: CatalogJob, split: SplitInfo, rows_P: Int64Array
    ) -> dict[int, UsersBuilt]:
        """What is known of each partition of users.

        Args:
            rows_P: events of each.
        """
        self._refuse_large(catalog, rows_P)
        wanted = [
            number
            for number in range(catalog.num_partitions)
            if rows_P[number] or "user" in catalog.described
        ]
        builder = SequenceBuilder(split, self._config.ties, self._config.seed, tuple(catalog.labels))
        done, total = 0, int(rows_P.sum())
        self._progress("sequences", done, total)

        def on_result(index: int, result: UsersBuilt) -> None:
            nonlocal done
            done += int(rows_P[wanted[index]])
            self._progress("sequences", done, total)

        job = UsersJob(catalog, builder)
        found = self._work.run("users", self._run_tasks, build_users, job, wanted, on_result)
        self._work.remove_spilled("events-*.arrow")
        return dict(zip(wanted, found, strict=True))

    def _refuse_large(self, catalog: CatalogJob, rows_P: Int64Array) -> None:
        """Refuse a log whose events of one user are too many for a process."""
        number = int(np.argmax(rows_P))
        limit = self._sizes.largest_partition_rows
        if rows_P[number] <= limit:
            return
        paths = [catalog.rows.events_file(table.name) for table in catalog.tables]
        counts: dict[int, int] = {}
        rows: dict[int, int] = {}
        for events in read_partitions(paths, number, number + 1, ["user_id", SOURCE_ROW]):
            ids, first, found = np.unique(events["user_id"].to_numpy(), return_index=True, return_counts=True)
            for user, at, count in zip(ids.tolist(), first.tolist(), found.tolist(), strict=True):
                counts[user] = counts.get(user, 0) + count
                rows.setdefault(user, events[SOURCE_ROW][at].as_py())
        user = max(counts, key=counts.__getitem__)
        key = self._values(catalog.rows.form, rows[user])["user_id"]
        raise InputError(
            f"{catalog.rows.log.label}: user {key!r} has {counts[user]:,} of the {int(rows_P.sum()):,} "
            f"events; one process orders the events of a user, and takes {limit:,} at most; leave this user "
            "out, or all but the latest events"
        )

    def _build_items(
        self, catalog: CatalogJob, users: Mapping[int, UsersBuilt], textual: tuple[str, ...]
    ) -> dict[int, ItemsBuilt]:
        """What is known of each group of partitions of items, by its first partition."""
        with_events = tuple(number for number, one in users.items() if one.schema is not None)
        job = ItemsJob(catalog, with_events, textual)
        num_counts = sum(one.num_counts for one in users.values()) + catalog.num_compared["item"]
        groups = _groups(catalog.num_partitions, num_counts, self._sizes.counter_rows)
        done = 0

        def on_result(index: int, result: ItemsBuilt) -> None:
            nonlocal done
            done += 1
            self._progress("items", done, len(groups))

        found = self._work.run("items", self._run_tasks, build_items, job, groups, on_result)
        return dict(zip([first for first, _ in groups], found, strict=True))

    def _refuse_collisions(self, users: Mapping[int, UsersBuilt], items: Mapping[int, ItemsBuilt]) -> None:
        for entity, built in (("item", items.values()), ("user", users.values())):
            found = [one.keys.collision for one in built if one.keys.collision is not None]
            if found:
                raise collision_error(min(found, key=lambda one: one.position), entity)

    def _compare(
        self,
        catalog: CatalogJob,
        log: RawTable,
        items: RawTable | None,
        users: RawTable | None,
        users_built: Mapping[int, UsersBuilt],
        items_built: Mapping[int, ItemsBuilt],
    ) -> tuple[RawTable | None, RawTable | None]:
        """Find ids that are written in several ways; the tables of items and users with notes about it."""
        found: dict[Entity, SpellingsFound] = {}
        keys: dict[Entity, dict[int, KeysFound]] = {
            "item": {number: one.keys for number, one in items_built.items()},
            "user": {number: one.keys for number, one in users_built.items()},
        }
        tables: dict[Entity, RawTable | None] = {"item": items, "user": users}
        for entity, of_parts in keys.items():
            found[entity] = self._spellings(catalog, entity, of_parts)
            found[entity].numbers.find(self._findings, log.file, f"{entity}_id")
            if (table := tables[entity]) is not None and catalog.num_compared[entity]:
                column = table.table[f"{entity}_id"].slice(0, catalog.num_compared[entity])
                add_alike(table.file, column, f"{entity}_id", self._findings)
        for entity, of_parts in keys.items():
            if (table := tables[entity]) is not None and catalog.num_compared[entity]:
                compared = KeysCompared()
                for one in of_parts.values():
                    compared.merge(one.compared)
                tables[entity] = with_comparison(
                    table, compared, found[entity].compared, entity, log.file, self._findings
                )
        return tables["item"], tables["user"]

    def _spellings(
        self, catalog: CatalogJob, entity: Entity, keys: Mapping[int, KeysFound]
    ) -> SpellingsFound:
        paths = [catalog.spelled_file(entity, number) for number, one in keys.items() if one.num_spelled]
        merged = SpellingsFound()
        if not paths:
            return merged
        num_rows = sum(one.num_spelled for one in keys.values())
        groups = _groups(catalog.num_partitions, num_rows, self._sizes.counter_rows)
        stage = f"spellings-{entity}"
        for one in self._work.run(stage, self._run_tasks, compare_spellings, paths, groups):
            merged.merge(one)
        return merged

    def _values(self, form: LogForm, row: int) -> Mapping[str, Any]:
        """What the log has in a row, without blanks around ids, for a message."""
        found = form.row(self._opened.log, row)
        for name in ID_COLUMNS:
            found, _ = trimmed_ids(found, name)
        return shown_values(found, 0)

    # Files

    def _write(
        self,
        catalog: CatalogJob,
        users: Mapping[int, UsersBuilt],
        items: Mapping[int, ItemsBuilt],
        textual: tuple[str, ...],
    ) -> dict[str, FileEntry]:
        """The files of the data set."""
        items_job = ItemsJob(catalog, (), textual)
        with_events = {number: one for number, one in users.items() if one.schema is not None}
        first = next(iter(with_events.values()))
        job = FilesJob(
            self._config,
            self._work.data,
            tuple(Stored(catalog.sequences_file(number), one.rows) for number, one in with_events.items()),
            tuple(Stored(catalog.users_file(number), one.rows) for number, one in with_events.items()),
            tuple(
                Stored(items_job.items_file(number), {"items": one.num_items})
                for number, one in items.items()
            ),
            first.schema,
            first.users_schema,
            next(iter(items.values())).schema,
        )
        rows: dict[Kind, int] = {
            kind: sum(one.rows[kind] for one in with_events.values())
            for kind in ("users", "history", "train", "valid", "test")
        }
        rows["items"] = sum(one.num_items for one in items.values())
        files = files_to_write(self._config, rows)
        done, total = 0, sum(file.stop - file.first for file in files)
        self._progress("writing", done, total)

        def on_result(index: int, result: FileEntry) -> None:
            nonlocal done
            done += result.rows
            self._progress("writing", done, total)

        found = self._work.run("files", self._run_tasks, write_file, job, files, on_result)
        # As one process writes them: the order is that of the manifest.
        entries = {file.name: entry for file, entry in zip(files, found, strict=True)}
        return {name: entries[name] for name in names_in_order(files)}


def names_in_order(files: Sequence[FileToWrite]) -> list[str]:
    """The names of files in the order in which a manifest has them."""
    kinds: list[Kind] = ["train", "history", "valid", "test", "items", "users"]
    return [file.name for kind in kinds for file in files if file.kind == kind]


def _look(shared: tuple[OpenLog, bool, bool], number: int) -> PieceLook:
    log, with_times, are_mixed = shared
    return log.look(log.pieces[number], with_times, are_mixed)


def _groups(num_partitions: int, num_rows: int, most_rows: int) -> list[tuple[int, int]]:
    """Partitions in groups of neighbors, (first, after the last), that have about so many rows at most."""
    num_groups = min(max(math.ceil(num_rows / most_rows), 1), num_partitions)
    bounds = [num_partitions * number // num_groups for number in range(num_groups + 1)]
    return list(itertools.pairwise(bounds))


def _num_rows(table: RawTable | None) -> int:
    return 0 if table is None else len(table.table)


def _merged(totals: Sequence[SequenceTotals]) -> SequenceTotals:
    merged = SequenceTotals()
    for one in totals:
        merged.merge(one)
    return merged
