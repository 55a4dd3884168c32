"""The layout `splits`: events that somebody has divided already, in `train`, `valid` and `test`.

Each is a file or a folder of parts. What a model is validated and tested on is each user's first event in
those files; `valid` may be missing, and may be called `validation`, `val` or `dev`.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig, Role, option
from rayrec.samples.importers.column_types import joined
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.roles import read_log, read_side, without_part
from rayrec.samples.importers.tables import PART, RawTable, RawTables, files_of, find_table, visible

_STEMS = (("train", "training"), ("valid", "validation", "val", "dev"), ("test",))


class GivenSplitsImporter(Importer):
    """Reads events that are divided into files for training, validation and test."""

    EXPECTS = "train.csv and test.csv"
    HAS_NAMES = True

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return source.is_dir() and all(_find(source, number) is not None for number in (0, 2))

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        if config.split == "time":
            raise InputError(
                f"{source}: its files are split already, into train and test; leave {option('split')} out"
            )
        found = {number: _find(source, number) if source.is_dir() else None for number in range(3)}
        missing = [_STEMS[number][0] for number in (0, 2) if found[number] is None]
        if missing:
            raise InputError(f"{source}: no file named {' or '.join(missing)}; found {files_of(source)}")
        logs = {
            number: without_part(read_log(path, config)) for number, path in found.items() if path is not None
        }
        raws, parts = list(logs.values()), []
        for number, raw in logs.items():
            names, expected = raw.table.schema.names, raws[0].table.schema.names
            if set(names) != set(expected):
                raise InputError(
                    f"{raw.file}: its columns are {', '.join(names)}, but those of {raws[0].file} are "
                    f"{', '.join(expected)}; all must have the same"
                )
            numbers = pa.repeat(pa.scalar(number, pa.int8()), len(raw.table))
            parts.append(raw.table.select(expected).append_column(PART, pa.chunked_array([numbers])))
        starts = [sum(map(len, parts[:at])) for at in range(len(parts))]

        def where(row: int) -> str:
            at = bisect_right(starts, row) - 1
            return raws[at].where(row - starts[at])

        table = joined(parts, [raw.file for raw in raws], str(source))
        notes = tuple(note for raw in raws for note in raw.notes)
        read = {path.name for path in found.values() if path is not None}
        return RawTables(
            source.resolve().name,
            RawTable(table, str(source), where, raws[0].names, notes),
            _side(source, "items", "item_id", config),
            _side(source, "users", "user_id", config),
            tuple(
                (entry.name, "only train, valid, test, items and users are read")
                for entry in visible(source)
                if entry.name not in read and entry.name.split(".")[0] not in ("items", "users")
            ),
            is_divided=True,
        )


def _find(source: Path, number: int) -> Path | None:
    """The file or folder of a part.

    Raises:
        InputError: there are two.
    """
    found = [path for stem in _STEMS[number] if (path := find_table(source, stem)) is not None]
    if len(found) > 1:
        raise InputError(f"{source}: {' and '.join(path.name for path in found)} are both there; keep one")
    return found[0] if found else None


def _side(source: Path, stem: str, key: Role, config: PrepareConfig) -> RawTable | None:
    path = find_table(source, stem)
    return None if path is None else read_side(path, config, key)
