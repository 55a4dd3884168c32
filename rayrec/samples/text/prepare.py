"""`prepare_text`: files with records in, a data set of text out.

    files ─► checked records ─► divided ─► cleaned ─► data set, renamed when whole

Records are held in memory, about twice the size of the files. The rows of a split are written in order of a
hash of their content, so that the same records give the same data set however they lie in files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.samples.base.config import option
from rayrec.samples.dataset.dataset_folder import TEXT, FileEntry
from rayrec.samples.dataset.manifest import EVALUATION_FILES
from rayrec.samples.importers.tables import GIVEN_SPLITS
from rayrec.samples.prepare.splits import train_file
from rayrec.samples.prepare.writer import RowGroupWriter, check_target, whole_folder
from rayrec.samples.text.cleaning import SPLITS, CleaningConfig, Progress, Split, clean, content_hash
from rayrec.samples.text.dataset import SplitRule, TextManifest, TextReport, TextSplit, fingerprint_of
from rayrec.samples.text.files import RawRow, RecordFile, record_files
from rayrec.samples.text.records import FIELDS, SCHEMA, BadRecordError, Kind, Record, record_of

_WRITTEN_AT_ONCE = 8192
_FIELDS = {"kind", *(name for fields in FIELDS.values() for name in fields)}


class TextPrepareConfig(Config):
    """How files with records become a data set of text."""

    kind: Kind | None = None
    """Kind of all records; null: a row says it, by its field `kind` or by the fields that it has."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Fields of records to what the files call them, as in `completion: answer`."""
    split: Literal["auto"] | SplitRule = "auto"
    """`files`: names of files or of their folders say it (train, valid, test); `column`: `split_column` does;
    `random`: a hash of the content does, so that a record stays where it is when others are added. `auto`: by
    a column where one is named, by files where their names say it, else random."""
    split_column: str | None = None
    """Column with train, valid (or validation, val, dev) or test."""
    valid_fraction: float = Field(0.05, ge=0, lt=1)
    """Random: part of the records that validates."""
    test_fraction: float = Field(0.05, ge=0, lt=1)
    """Random: part of the records that is tested."""
    seed: int = Field(0, ge=0)
    """Random: another seed divides otherwise."""
    on_bad_rows: Literal["stop", "drop"] = "stop"
    """What happens at a row that is no record: stop and say where it is, or leave it out and count it."""
    cleaning: CleaningConfig = CleaningConfig()
    rows_per_group: int = Field(1024, ge=1)
    """Rows of a Parquet row group: the unit that readers permute."""
    rows_per_file: int = Field(131_072, ge=1)
    """Most rows of one training file."""
    overwrite: bool = False
    """Replace a data set of text that is already there."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        unknown = next((name for name in self.columns if name not in _FIELDS), None)
        if unknown is not None:
            raise ValueError(
                f"columns: no record has a field {unknown!r}; fields are {', '.join(sorted(_FIELDS))}"
            )
        if self.split != "auto" and (self.split == "column") != (self.split_column is not None):
            raise ValueError(
                f"{option('split_column')} and split: column belong together; give both, or leave both out"
            )
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError("valid_fraction and test_fraction leave no record to train on; give less")
        if self.rows_per_file < self.rows_per_group:
            raise ValueError(
                f"rows_per_file ({self.rows_per_file}) is less than rows_per_group ({self.rows_per_group})"
            )
        return self


def silent(phase: str, done: int, total: int | None) -> None:
    """Show nothing."""


def prepare_text(
    inputs: Sequence[str | Path], out: str | Path, config: TextPrepareConfig, progress: Progress = silent
) -> TextReport:
    """Write the data set `out`; it appears when it is whole, or not at all.

    Raises:
        InputError: something in the inputs or the config cannot be used, or `out` is taken.
    """
    out = Path(out)
    check_target(out, TEXT, config.overwrite)
    files = record_files(inputs)
    rule = _rule(files, config)
    read = _read(files, rule, config, progress)
    cleaned = clean(read.records, config.cleaning, progress)
    rows = Counter(split for _, split in cleaned.records)
    if not rows["train"]:
        raise InputError(
            f"{', '.join(map(str, inputs))}: there is no record to train on, {rows['valid']:,} validate and "
            f"{rows['test']:,} are tested, of {read.num_rows:,} rows read"
            f"{_left_out(read.bad + cleaned.removed)}; give more, or leave out less"
        )
    kinds = Counter(record.kind for record, _ in cleaned.records)
    by_rule = rule == "random"
    with whole_folder(out) as folder:
        entries = _write(folder, cleaned.records, config, progress)
        manifest = TextManifest(
            format=TEXT.format,
            name=out.resolve().name,
            source=", ".join(map(str, inputs)),
            split=TextSplit(
                kind=rule,
                valid_fraction=config.valid_fraction if by_rule else None,
                test_fraction=config.test_fraction if by_rule else None,
                seed=config.seed if by_rule else None,
            ),
            cleaning=config.cleaning,
            rows={split: rows[split] for split in SPLITS},
            kinds={kind: kinds[kind] for kind in FIELDS if kinds[kind]},
            rows_read=read.num_rows,
            bad=dict(sorted(read.bad.items())),
            removed={rule: count for rule, count in cleaned.removed.items() if count},
            contaminated={split: cleaned.contaminated[split] for split in SPLITS},
            conflicting=cleaned.conflicting,
            ignored=tuple(sorted(read.ignored)),
            files=entries,
            fingerprint=fingerprint_of(entries),
        )
        manifest.write(folder)
    return TextReport(out, manifest)


def _left_out(counts: Counter[str]) -> str:
    """By reason, the most frequent first; a part of a sentence."""
    reasons = [f"{reason} {count:,}" for reason, count in counts.most_common()]
    return f", {counts.total():,} left out ({', '.join(reasons)})" if reasons else ""


class _Read:
    """Records that were read, and what was counted."""

    def __init__(self) -> None:
        self.records: list[tuple[Record, Split]] = []
        self.num_rows = 0
        self.bad: Counter[str] = Counter()
        self.ignored: set[str] = set()


def _rule(files: Sequence[RecordFile], config: TextPrepareConfig) -> SplitRule:
    """By what records are divided.

    Raises:
        InputError: names of files shall say it, and do not.
    """
    if config.split == "random":
        return "random"
    if config.split_column is not None:
        return "column"
    unnamed = [file for file in files if file.split is None]
    named = [file for file in files if file.split is not None]
    if not named and config.split == "auto":
        return "random"
    # A folder with `train.jsonl` and a `more.jsonl`: whose would those be?
    if unnamed:
        hint = f", although that of {named[0].path.name} is" if named else ""
        raise InputError(
            f"{unnamed[0].path}: its name is not train, valid or test{hint}; rename it, or choose "
            f"{option('split')} random"
        )
    return "files"


def _read(
    files: Sequence[RecordFile], rule: SplitRule, config: TextPrepareConfig, progress: Progress
) -> _Read:
    read = _Read()
    split_of = _divider(rule, config)
    used = _used(config.columns)
    for file in files:
        for row in file.rows():
            try:
                record = _checked(row, used, config.kind)
                read.records.append((record, split_of(row, record)))
            except BadRecordError as error:
                if config.on_bad_rows == "stop":
                    raise InputError(
                        f"{row.where}: {error}; correct it, or leave such rows out "
                        f"({option('on_bad_rows')} drop)"
                    ) from error
                read.bad[error.reason] += 1
            read.num_rows += 1
            if isinstance(row.values, dict):
                read.ignored |= row.values.keys() - used.keys() - {config.split_column}
            if read.num_rows % 1024 == 0:
                progress("reading", read.num_rows, None)
    return read


def _used(columns: Mapping[str, str]) -> dict[str, str]:
    """Column to the field that is read of it: what the settings say, before what names say.

    Raises:
        InputError: one column would be two fields.
    """
    used: dict[str, str] = {}
    for field, column in columns.items():
        if column in used:
            raise InputError(
                f"columns: {used[column]} and {field} are both read of {column!r}; name a column for each"
            )
        used[column] = field
    for field in sorted(_FIELDS - columns.keys()):
        used.setdefault(field, field)
    return used


def _checked(row: RawRow, used: dict[str, str], kind: Kind | None) -> Record:
    if isinstance(row.values, BadRecordError):
        raise row.values
    return record_of({used[name]: value for name, value in row.values.items() if name in used}, kind)


def _divider(rule: SplitRule, config: TextPrepareConfig) -> Callable[[RawRow, Record], Split]:
    if rule == "files":
        return lambda row, record: _named(row.file.split)
    if rule == "column":
        return lambda row, record: _of_column(row, config.split_column or "")
    held_out = (config.test_fraction, config.test_fraction + config.valid_fraction)

    def by_content(row: RawRow, record: Record) -> Split:
        # Of what exact duplicates have in common: they are never in two splits.
        content = int.from_bytes(content_hash(record)[:8], "big")
        draw = (int(combine64(config.seed, content)) >> 11) / 2.0**53
        return "test" if draw < held_out[0] else "valid" if draw < held_out[1] else "train"

    return by_content


def _named(name: Any) -> Split:
    for split, names in zip(SPLITS, GIVEN_SPLITS, strict=True):
        if isinstance(name, str) and name.lower() in names:
            return split
    raise BadRecordError("unknown splits", f"the split is {name!r}, expected train, valid or test")


def _of_column(row: RawRow, column: str) -> Split:
    assert isinstance(row.values, dict), "checked before"
    if column not in row.values:
        raise InputError(f"{row.where}: there is no column {column!r} ({option('split_column')})")
    return _named(row.values[column])


def _write(
    folder: Path, records: Sequence[tuple[Record, Split]], config: TextPrepareConfig, progress: Progress
) -> dict[str, FileEntry]:
    rows: dict[Path, int] = {}
    done = 0
    for split in SPLITS:
        writer = RowGroupWriter(
            (lambda number: folder / train_file(number))
            if split == "train"
            else (lambda number, name=EVALUATION_FILES[split]: folder / name),  # type: ignore[misc]
            SCHEMA,
            config.rows_per_group,
            config.rows_per_file if split == "train" else None,
        )
        own = [record for record, other in records if other == split]
        for start in range(0, len(own), _WRITTEN_AT_ONCE):
            part = own[start : start + _WRITTEN_AT_ONCE]
            writer.write(pa.Table.from_pylist([record.row() for record in part], SCHEMA))
            done += len(part)
            progress("writing", done, len(records))
        rows |= writer.close()
    return {path.relative_to(folder).as_posix(): FileEntry.of(path, count) for path, count in rows.items()}
