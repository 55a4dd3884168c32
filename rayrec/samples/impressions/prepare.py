"""`prepare_impressions`: files of impressions in, a data set of them out, however many there are.

    layout ─► source: rows that can be read again
                │  divide:   only for fractions of the rows in order or time
                │  count:    only with min_count: ids of training rows
                ▼  write:    check, hash, divide
    data set, renamed when whole

Every pass reads batches, so memory grows with the distinct ids (24 bytes for each, twice that at times), not
with the rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.platform.remote_files import located
from rayrec.samples.dataset.dataset_folder import IMPRESSIONS, FileEntry, train_files
from rayrec.samples.dataset.manifest import EVALUATION_FILES
from rayrec.samples.impressions.columns import key_column, key_lists, label_column, number_column
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.division import Division, Progress, SplitCodes, divide, times_of_rows
from rayrec.samples.impressions.layouts import load_impressions
from rayrec.samples.impressions.manifest import ImpressionManifest, SchemaInfo, fingerprint_of
from rayrec.samples.impressions.report import ImpressionsReport
from rayrec.samples.impressions.source import SPLITS, ImpressionSource, SplitName
from rayrec.samples.impressions.vocabulary import Vocabulary
from rayrec.samples.prepare.splits import train_file
from rayrec.samples.prepare.writer import RowGroupWriter, check_target, whole_folder

_log = logging.getLogger(__name__)


KEPT_TIME = pa.timestamp("us", "UTC")


def silent(phase: str, done: int, total: int | None) -> None:
    pass


def prepare_impressions(
    source: str | Path, out: str | Path, config: ImpressionsConfig, progress: Progress = silent
) -> ImpressionsReport:
    """Write the data set `out` from `source`; `out` appears when it is whole, or not at all.

    Raises:
        InputError: something in the source or the config cannot be used, or `out` is taken.
    """
    check_target(Path(out), IMPRESSIONS, config.overwrite)
    loaded = load_impressions(located(source), config)
    return write_impressions(loaded, Path(out), config, str(source), progress=progress)


def write_impressions(
    source: ImpressionSource,
    out: Path,
    config: ImpressionsConfig,
    origin: str,
    layout: str | None = None,
    extra: Mapping[str, float] | None = None,
    progress: Progress = silent,
) -> ImpressionsReport:
    """`prepare_impressions` of rows that are already at hand.

    Args:
        origin: where they are from, for the manifest.
        layout: None for that of the config.
        extra: what else the manifest shall say.

    Raises:
        InputError: as there.
    """
    check_target(out, IMPRESSIONS, config.overwrite)
    with whole_folder(out) as folder:
        division = divide(source, config, progress)
        vocabulary = Vocabulary(spaces_of(source.schema))
        num_rare = dict.fromkeys(spaces_of(source.schema), 0)
        if config.min_count > 1:
            for rows in training_keys(source, config, division, progress):
                with_ids(rows, source.schema, vocabulary)
            vocabulary, num_rare = Vocabulary.without_rare(vocabulary, config.min_count)
        writer = _Writer(folder, written_schema(source), config)
        counts = SplitCounts(source.schema.labels)
        for rows, codes_R in checked_rows(source, config, division, "writing", progress):
            for split, chosen in by_split(with_ids(rows, source.schema, vocabulary), codes_R):
                writer.write(split, chosen)
                counts.add(split, chosen)
        counts.check(source.name)
        written = Written(writer.close(), counts, vocabulary, num_rare)
        manifest = written.manifest(source, config, origin, division, layout, extra)
        manifest.write(folder)
    warn_of_what_was_written(out, manifest, source.schema, config, vocabulary)
    return ImpressionsReport(out, manifest)


@dataclass(frozen=True)
class Written:
    """What is known of a data set when its files are there."""

    files: Mapping[str, FileEntry]
    """By name below the folder."""
    counts: SplitCounts
    vocabulary: Vocabulary
    num_rare: Mapping[str, int]

    def manifest(
        self,
        source: ImpressionSource,
        config: ImpressionsConfig,
        origin: str,
        division: Division,
        layout: str | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> ImpressionManifest:
        columns, counts = SchemaInfo.of(source.schema), self.counts
        return ImpressionManifest(
            format=IMPRESSIONS.format,
            name=source.name,
            source=origin,
            layout=layout or config.layout,
            columns=columns,
            split=division.split,
            seed=config.seed,
            min_count=config.min_count,
            rows={split: counts.rows[split] for split in SPLITS},
            known=counts.per_label(counts.known),
            positives=counts.per_label(counts.positives),
            num_ids=self.vocabulary.num_ids(),
            num_rare=dict(self.num_rare),
            history=source.history,
            origins=config.origins,
            kept=tuple(source.kept.values()),
            list_separator=config.list_separator,
            extra=dict(extra or {}),
            files=dict(self.files),
            fingerprint=fingerprint_of(dict(self.files), columns),
        )


def warn_of_what_was_written(
    out: Path,
    manifest: ImpressionManifest,
    schema: ImpressionSchema,
    config: ImpressionsConfig,
    vocabulary: Vocabulary,
) -> None:
    """Warn of ids that are written in two ways, of labels without information, and of lists apart."""
    for space, (number, key, plain) in vocabulary.written_in_two_ways().items():
        _log.warning(
            "%s: %s ids of the space %s differ from others only in how they are written, such as %r and %r; "
            "write them alike in all files, or they are different ids",
            manifest.name,
            f"{number:,}",
            space,
            key,
            plain,
        )
    _warn_of_constant_labels(manifest)
    _warn_of_lists_apart(out, manifest, schema, config.list_separator)


def _group_of_its_own(schema: ImpressionSchema) -> str | None:
    return schema.group if schema.group is not None and schema.group not in schema.ids else None


def _id_columns(schema: ImpressionSchema) -> dict[str, str]:
    """Columns of one id each to their space; a group of its own is one of them, in a space of its own."""
    own = _group_of_its_own(schema)
    return {**schema.ids, **({} if own is None else {own: own})}


def spaces_of(schema: ImpressionSchema) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*_id_columns(schema).values(), *schema.lists.values()]))


def training_keys(
    source: ImpressionSource,
    config: ImpressionsConfig,
    division: Division,
    progress: Progress,
    rows_before: int = 0,
) -> Iterator[pa.Table]:
    """The keys of rows to train on, whose ids are counted."""
    rows = checked_rows(source, config, division, "counting", progress, False, rows_before)
    for batch, codes_R in rows:
        yield batch.filter(pa.array(codes_R == SPLITS.index("train")))


def checked_rows(
    source: ImpressionSource,
    config: ImpressionsConfig,
    division: Division,
    phase: str,
    progress: Progress,
    with_values: bool = True,
    rows_before: int = 0,
) -> Iterator[tuple[pa.Table, SplitCodes]]:
    """Checked rows with keys instead of ids, and the split of each.

    Args:
        with_values: labels and numbers too.
        rows_before: rows of the whole source before those of this one.
    """
    schema = source.schema
    ids = _id_columns(schema)
    values = (*schema.labels, *schema.numbers) if with_values else ()
    kept = source.kept if with_values else {}
    wanted = tuple(dict.fromkeys([*values, *ids, *schema.lists, *kept, *division.columns]))
    done = rows_before
    for part in source.parts:
        first = 0
        for batch in part.read(wanted):

            def where(row: int, first: int = first) -> str:
                return part.where(first + row)  # noqa: B023 - called before the next part

            columns: dict[str, pa.Array] = {}
            for name in values:
                read = label_column if name in schema.labels else number_column
                columns[name] = read(batch.column(name), name, where)
            for name in ids:
                columns[name] = key_column(batch.column(name), name, where)
            for name in schema.lists:
                columns[name] = key_lists(batch.column(name), name, where, config.list_separator)
            for column, name in kept.items():
                if column == source.time:
                    times_R = times_of_rows(part, batch, column, config.time_unit, first)
                    columns[name] = pa.array(times_R).cast(KEPT_TIME)
                else:
                    columns[name] = key_column(batch.column(column), column, where)
            yield pa.table(columns), division.codes(part, batch, done, first)
            first += len(batch)
            done += len(batch)
            progress(phase, done, division.num_rows)


def with_ids(rows: pa.Table, schema: ImpressionSchema, vocabulary: Vocabulary) -> pa.Table:
    """The rows with ids instead of keys."""
    rows = rows.combine_chunks()
    columns = {name: rows[name] for name in rows.column_names}
    for name, space in _id_columns(schema).items():
        columns[name] = vocabulary.ids(space, _array(rows[name]))
    for name, space in schema.lists.items():
        lists = _array(rows[name])
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), vocabulary.ids(space, lists.flatten()))
    return pa.table(columns)


def _array(column: pa.ChunkedArray) -> pa.Array:
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    )


def written_schema(source: ImpressionSource) -> pa.Schema:
    """Columns of the files, and their types."""
    schema, own = source.schema, _group_of_its_own(source.schema)
    kept = {name: KEPT_TIME if column == source.time else pa.string() for column, name in source.kept.items()}
    return pa.schema(
        {
            **dict.fromkeys(schema.labels, pa.int8()),
            **dict.fromkeys(schema.numbers, pa.float32()),
            **dict.fromkeys(schema.ids, pa.int64()),
            **dict.fromkeys(schema.lists, pa.list_(pa.int64())),
            **({} if own is None else {own: pa.int64()}),
            **kept,
        }
    )


def by_split(rows: pa.Table, codes_R: SplitCodes) -> Iterator[tuple[SplitName, pa.Table]]:
    """The rows of each split that has any."""
    for code in np.unique(codes_R).tolist():
        own_R = codes_R == code
        yield SPLITS[code], rows if own_R.all() else rows.filter(pa.array(own_R))


class SplitCounts:
    """Rows of each split, and those whose label is known and positive."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = tuple(labels)
        self.rows: Counter[SplitName] = Counter()
        self.known: Counter[tuple[str, SplitName]] = Counter()
        self.positives: Counter[tuple[str, SplitName]] = Counter()

    def add(self, split: SplitName, rows: pa.Table) -> None:
        self.rows[split] += len(rows)
        for label in self._labels:
            self.known[label, split] += len(rows) - rows[label].null_count
            positives = int(np.count_nonzero(rows[label].fill_null(0).to_numpy()))
            self.positives[label, split] += positives

    def merge(self, other: SplitCounts) -> None:
        """Add those of other rows."""
        self.rows += other.rows
        self.known += other.known
        self.positives += other.positives

    def check(self, name: str) -> None:
        """Refuse a data set that nothing can be trained on.

        Raises:
            InputError: there are no training rows.
        """
        if not self.rows["train"]:
            raise InputError(
                f"{name}: there is no row to train on, {self.rows['valid']:,} validate and "
                f"{self.rows['test']:,} are tested; give more rows, or hold out less of them"
            )

    def per_label(self, counts: Counter[tuple[str, SplitName]]) -> dict[str, dict[SplitName, int]]:
        return {label: {split: counts[label, split] for split in SPLITS} for label in self._labels}


class _Writer:
    """Rows to the files of their split."""

    def __init__(self, folder: Path, schema: pa.Schema, config: ImpressionsConfig) -> None:
        self._folder = folder
        self._schema = schema
        self._writers: dict[SplitName, RowGroupWriter] = {
            "train": RowGroupWriter(
                lambda number: folder / train_file(number),
                self._schema,
                config.rows_per_group,
                config.rows_per_file,
            )
        }
        for split, name in EVALUATION_FILES.items():
            self._writers[split] = RowGroupWriter(
                lambda number, name=name: folder / name,  # type: ignore[misc]
                self._schema,
                config.rows_per_group,
            )

    def write(self, split: SplitName, rows: pa.Table) -> None:
        self._writers[split].write(rows.select(self._schema.names))

    def close(self) -> dict[str, FileEntry]:
        """Finish the files; name below the folder -> entry of the manifest."""
        rows: dict[Path, int] = {}
        for writer in self._writers.values():
            rows |= writer.close()
        return {
            path.relative_to(self._folder).as_posix(): FileEntry.of(path, count)
            for path, count in rows.items()
        }


def _warn_of_lists_apart(
    root: Path, manifest: ImpressionManifest, schema: ImpressionSchema, separator: str
) -> None:
    """Warn of lists whose ids never occur in the column of their space: probably the wrong separator.

    Looks at the first row group of training rows.
    """
    first = pq.ParquetFile(root / train_files(manifest.files)[0])
    singles = {space: column for column, space in schema.ids.items()}
    for column, space in schema.lists.items():
        if (single := singles.get(space)) is None:
            continue
        rows = first.read_row_group(0, columns=[column, single])
        listed = rows[column].combine_chunks().flatten()
        if len(listed) and not pc.any(pc.is_in(listed, rows[single].drop_null())).as_py():
            _log.warning(
                "%s: none of the ids in lists of %s is one of the column %s in the first %s rows; are their "
                "elements separated by %r (--list-separator), and written as there?",
                manifest.name,
                column,
                single,
                f"{len(rows):,}",
                separator,
            )


def _warn_of_constant_labels(manifest: ImpressionManifest) -> None:
    """They may be meant, where one of several tasks is rare; but a model learns nothing from them."""
    for label, positives in manifest.positives.items():
        known = manifest.known[label]["train"]
        if positives["train"] in (0, known):
            value = "not known" if known == 0 else int(positives["train"] > 0)
            _log.warning("%s: the label %s is %s in all training rows", manifest.name, label, value)
    for split in SPLITS:
        if not manifest.rows[split]:
            _log.warning("%s: the split %s has no rows", manifest.name, split)
