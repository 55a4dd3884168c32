"""The layout `splits`: events that somebody has divided already, in `train`, `valid` and `test`.

Each is a file or a folder of parts, or lines `user item item ...` without times, as LightGCN has them. What a
model is validated and tested on is each user's first event in those files; `valid` may be missing, and may be
called `validation`, `val` or `dev`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig, Role, option
from rayrec.samples.importers.column_types import joined
from rayrec.samples.importers.found import FoundTables
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.roles import read_log, read_side, without_part
from rayrec.samples.importers.s3rec import are_sequences, sequences
from rayrec.samples.importers.tables import (
    GIVEN_SPLITS,
    PART,
    RawTable,
    RawTables,
    files_of,
    find_table,
    visible,
)

_SEQUENCES = ".txt"


class GivenSplitsImporter(Importer):
    """Reads events that are divided into files for training, validation and test."""

    EXPECTS = "train.csv and test.csv"
    HAS_NAMES = True
    READS_URLS = True

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return source.is_dir() and all(_find(source, number) is not None for number in (0, 2))

    def find(self, source: Path, config: PrepareConfig) -> FoundTables | None:
        found = _found(source, config)
        if any(path.suffix == _SEQUENCES for path in found.values()):
            return None
        return FoundTables(
            source.resolve().name,
            found,
            find_table(source, "items"),
            find_table(source, "users"),
            _ignored(source, found),
        )

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        found = _found(source, config)
        return RawTables(
            source.resolve().name,
            join_parts(_logs(found, config), str(source)),
            _side(source, "items", "item_id", config),
            _side(source, "users", "user_id", config),
            _ignored(source, found),
            order_is_time=any(path.suffix == _SEQUENCES for path in found.values()),
            is_divided=True,
        )


def join_parts(logs: Mapping[int, RawTable], label: str) -> RawTable:
    """One log of those that are for training, validation and test, with `PART`.

    Args:
        label: of the source, for messages.

    Raises:
        InputError: they have other columns, or one of another kind.
    """
    raws, parts = list(logs.values()), []
    for number, raw in logs.items():
        names, expected = raw.table.schema.names, raws[0].table.schema.names
        if set(names) != set(expected):
            raise InputError(
                f"{raw.file}: its columns are {', '.join(names)}, but those of {raws[0].file} are "
                f"{', '.join(expected)}; all must have the same"
            )
        parts.append(with_part(raw.table.select(expected), number))
    starts = [sum(map(len, parts[:at])) for at in range(len(parts))]

    def where(row: int) -> str:
        at = bisect_right(starts, row) - 1
        return raws[at].where(row - starts[at])

    table = joined(parts, [raw.file for raw in raws], label)
    notes = tuple(note for raw in raws for note in raw.notes)
    return RawTable(table, label, where, raws[0].names, notes)


def with_part(table: pa.Table, number: int) -> pa.Table:
    """Rows with the column `PART`."""
    numbers = pa.repeat(pa.scalar(number, pa.int8()), len(table))
    return table.append_column(PART, pa.chunked_array([numbers]))


def _found(source: Path, config: PrepareConfig) -> dict[int, Path]:
    """The files or folders, by `PART`.

    Raises:
        InputError: one is missing, or the config divides events, too.
    """
    if config.split == "time":
        raise InputError(
            f"{source}: its files are split already, into train and test; leave {option('split')} out"
        )
    found = {number: _find(source, number) if source.is_dir() else None for number in range(3)}
    missing = [GIVEN_SPLITS[number][0] for number in (0, 2) if found[number] is None]
    if missing:
        raise InputError(f"{source}: no file named {' or '.join(missing)}; found {files_of(source)}")
    return {number: path for number, path in found.items() if path is not None}


def _ignored(source: Path, found: Mapping[int, Path]) -> tuple[tuple[str, str], ...]:
    read = {path.name for path in found.values()}
    return tuple(
        (entry.name, "only train, valid, test, items and users are read")
        for entry in visible(source)
        if entry.name not in read and entry.name.split(".")[0] not in ("items", "users")
    )


def _find(source: Path, number: int) -> Path | None:
    """The file or folder of a part: a table, or lines of ids.

    Raises:
        InputError: there are two.
    """
    stems = GIVEN_SPLITS[number]
    if (table := find_table(source, *stems)) is not None:
        return table
    lines = find_table(source, *stems, suffixes=(_SEQUENCES,))
    return lines if lines is not None and are_sequences(lines) else None


def _logs(found: Mapping[int, Path], config: PrepareConfig) -> dict[int, RawTable]:
    """The events of each part. Those of sequences go on where the parts before end.

    Raises:
        InputError: some parts are sequences and others are tables, or a line begins with what the parts
            before have of the user, whose events would be counted twice.
    """
    lines = [path for path in found.values() if path.suffix == _SEQUENCES]
    if not lines:
        return {number: without_part(read_log(path, config)) for number, path in found.items()}
    if len(lines) < len(found):
        other = next(path for path in found.values() if path.suffix != _SEQUENCES)
        raise InputError(f"{other}: a table, but {lines[0].name} has lines of ids; write all parts alike")
    for setting, flag in (("columns", "--column"), ("names", "")):
        if getattr(config, setting):
            raise InputError(
                f"{option(setting, flag)} has no effect on {lines[0]}, which has no columns; leave it out"
            )
    logs, before = {}, Counter[str]()
    histories: dict[str, list[str]] = {}
    for number, path in found.items():
        log = sequences(path, before)
        users, items = (log.table[name].to_pylist() for name in ("user_id", "item_id"))
        own: dict[str, list[str]] = {}
        for user, item in zip(users, items, strict=True):
            own.setdefault(user, []).append(item)
        again = [
            user
            for user, new in own.items()
            if len(old := histories.get(user, [])) > 1 and new[: len(old)] == old
        ]
        if again:
            raise InputError(
                f"{path}: the line of user {again[0]!r} begins with all items that the files before have of "
                f"the user ({len(again):,} such users); leave only what is new in it"
            )
        for user, new in own.items():
            histories.setdefault(user, []).extend(new)
        logs[number] = log
    return logs


def _side(source: Path, stem: str, key: Role, config: PrepareConfig) -> RawTable | None:
    path = find_table(source, stem)
    return None if path is None else read_side(path, config, key)
