"""The layout `table`: Parquet, CSV or TSV under whatever column names, whose parts the config says.

The source is a file, a folder with `train`, `valid` (or `dev`) and `test`, each a file or a folder of files,
or a folder of files that are read in the order of their names and then divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.importers.delimited import DelimitedFile
from rayrec.samples.importers.tables import SUFFIXES, table_files
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.layouts.logs import column_of
from rayrec.samples.impressions.layouts.query_columns import Columns, QueryColumns
from rayrec.samples.impressions.layouts.split_files import split_files
from rayrec.samples.impressions.source import BATCH_ROWS, ImpressionSource, SourcePart, SplitName


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """Open a source of this layout.

    Raises:
        InputError: there is no table, or one lacks a column.
    """
    schema = ImpressionSchema(config.labels, config.numbers, config.ids, config.lists, config.group)
    needed = dict.fromkeys((*schema.labels, *schema.features))
    needed |= dict.fromkeys(name for name in (schema.group, config.time) if name is not None)
    parts = tuple(_part(file, split, tuple(needed)) for file, split in _files(source))
    return ImpressionSource(
        source.resolve().name.split(".")[0],
        schema,
        parts,
        time=config.time,
        history=HistoryRule(events="all", length=config.history_length),
    )


def query_columns(rule: HistoryRule, origins: Mapping[str, str]) -> QueryColumns:
    """What can be made of those who ask: columns whose origin was named at preparation."""

    def whose(origin: str) -> tuple[str, ...]:
        return tuple(column for column, own in origins.items() if own == origin)

    def made_of(kind: str) -> Callable[[pa.Table], Columns]:
        named = {
            column: own.removeprefix(f"{kind}.")
            for column, own in origins.items()
            if own.startswith(f"{kind}.")
        }

        def columns_of(table: pa.Table) -> Columns:
            found = {column: column_of(table, name) for column, name in named.items()}
            return {column: values for column, values in found.items() if values is not None}

        return columns_of

    return QueryColumns(
        rule,
        user=whose("user"),
        item=whose("item"),
        history=whose("history"),
        of_users=made_of("user"),
        of_items=made_of("item"),
    )


def _files(source: Path) -> list[tuple[Path, SplitName | None]]:
    if source.is_file():
        return [(source, None)]
    named = [path for path in source.iterdir() if path.name.split(".")[0] == "train"]
    if named:
        found = split_files(source, ("", *SUFFIXES))
        return [
            (file, split if len(found) > 1 else None)
            for split, path in found.items()
            for file in table_files(path)
        ]
    return [(file, None) for file in table_files(source)]


def _part(path: Path, split: SplitName | None, needed: tuple[str, ...]) -> SourcePart:
    if path.suffix == ".parquet":
        return _parquet(path, split, needed)
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    file = DelimitedFile.detect(path)
    _check_columns(path, file.columns, needed)
    return SourcePart(file.read, file.where, split)


def _parquet(path: Path, split: SplitName | None, needed: tuple[str, ...]) -> SourcePart:
    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a readable Parquet file: {error}") from error
    _check_columns(path, names, needed)

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(BATCH_ROWS, columns=list(columns))
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: not a readable Parquet file: {error}") from error

    return SourcePart(read, lambda row: f"{path} row {row + 1}", split)


def _check_columns(path: Path, found: Sequence[str], needed: Sequence[str]) -> None:
    if len(set(found)) < len(found):
        raise InputError(f"{path}: a column is there twice in {', '.join(found)}; rename one")
    missing = [name for name in needed if name not in found]
    if missing:
        plural = "s" if len(missing) > 1 else ""
        raise InputError(
            f"{path}: no column{plural} {', '.join(missing)}; found {', '.join(found)}; name columns as the "
            "file has them"
        )
