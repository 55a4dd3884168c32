"""Files with records: JSON lines, Parquet, CSV and TSV, as rows of Python values that know where they are."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import located
from rayrec.samples.importers.delimited import not_utf8
from rayrec.samples.importers.tables import GIVEN_SPLITS, SUFFIXES, TableFile, files_of, visible
from rayrec.samples.text.records import BadRecordError

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_ALL = (*JSON_SUFFIXES, *SUFFIXES)


@dataclass(frozen=True)
class RawRow:
    """A row before it is checked."""

    values: dict[str, Any] | BadRecordError
    """Or why it has none."""
    file: RecordFile
    number: int
    """From 0, in its file."""

    @property
    def where(self) -> str:
        return self.file.where(self.number)


@dataclass(frozen=True)
class RecordFile:
    """One file of an input."""

    path: Path
    split: str | None
    """`train`, `valid` or `test` where its name says so."""
    table: TableFile | None
    """None: JSON lines."""

    @property
    def size(self) -> int:
        return int(self.path.stat().st_size)

    def where(self, row: int) -> str:
        """Where a row is, for messages."""
        return f"{self.path} line {row + 1}" if self.table is None else self.table.where(row)

    def rows(self) -> Iterator[RawRow]:
        """All rows, in order; lines of JSON without anything in them are none.

        Raises:
            InputError: the file cannot be read.
        """
        if self.table is None:
            for number, values in self._lines():
                yield RawRow(values, self, number)
            return
        number = 0
        for batch in self.table.read():
            for values in batch.to_pylist():
                yield RawRow(values, self, number)
                number += 1

    def _lines(self) -> Iterator[tuple[int, dict[str, Any] | BadRecordError]]:
        try:
            binary = cast(IO[bytes], self.path.open("rb"))
            if self.path.name.endswith(".gz"):
                binary = cast(IO[bytes], gzip.GzipFile(fileobj=binary))
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="\n") as file:
                for number, line in enumerate(file):
                    if line.strip():
                        yield number, _parsed(line)
        except UnicodeDecodeError as error:
            raise not_utf8(self.path) from error
        except (OSError, EOFError) as error:
            raise InputError(f"{self.path}: cannot be read ({error})") from error


def _parsed(line: str) -> dict[str, Any] | BadRecordError:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRecordError("no JSON", f"the line is not valid JSON ({error})")
    if not isinstance(values, dict):
        return BadRecordError("no JSON", f"the line is {type(values).__name__}, expected an object {{...}}")
    return values


def record_files(inputs: Sequence[str | Path]) -> list[RecordFile]:
    """The files of some inputs, each a file, a folder of files, or a URL of one.

    Raises:
        InputError: an input is not there, has no such file, or is given twice.
    """
    found: dict[str, RecordFile] = {}
    for given in inputs:
        root = located(given)
        if not root.exists():
            raise InputError(f"{given}: no such file or folder; give files or folders with records")
        paths = _below(root) if root.is_dir() else [root]
        if not paths:
            raise InputError(f"{given}: no file that ends in {', '.join(_ALL)}; found {files_of(root)}")
        for path in paths:
            if str(path) in found:
                raise InputError(f"{path}: the file is given twice; name it once")
            found[str(path)] = _opened(root, path)
    return list(found.values())


def _below(folder: Path) -> list[Path]:
    paths = []
    for entry in visible(folder):
        if entry.is_dir():
            paths += _below(entry)
        elif entry.name.endswith(_ALL):
            paths.append(entry)
    return paths


def _opened(root: Path, path: Path) -> RecordFile:
    is_json = path.name.endswith(JSON_SUFFIXES)
    if not is_json and not path.name.endswith(SUFFIXES):
        raise InputError(f"{path}: expected a file that ends in {', '.join(_ALL)}")
    # `train.jsonl`, `test-00001.parquet`, or any file in a folder `valid`.
    named = [path.name.split(".")[0].split("-")[0]] + ([path.parent.name] if path.parent != root else [])
    split = next((names[0] for names in GIVEN_SPLITS for name in named if name.lower() in names), None)
    return RecordFile(path, split, None if is_json else TableFile.open(root, path))
