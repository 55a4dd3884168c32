"""The layout `table`: Parquet, CSV or TSV under whatever column names, whose parts the config says.

The source is a file, a folder with `train`, `valid` (or `validation`, `val`, `dev`) and `test`, each a file
or a folder of files, or a folder of files that are read in the order of their names and then divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.importers.tables import GIVEN_SPLITS, SUFFIXES, TableFile, find_table, table_files
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.layouts.logs import column_of
from rayrec.samples.impressions.layouts.query_columns import Columns, QueryColumns
from rayrec.samples.impressions.layouts.split_files import split_files
from rayrec.samples.impressions.source import ImpressionSource, SourcePart, SplitName


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """Open a source of this layout.

    Raises:
        InputError: there is no table, or one lacks a column.
    """
    schema = ImpressionSchema(config.labels, config.numbers, config.ids, config.lists, config.group)
    needed = dict.fromkeys((*schema.labels, *schema.features))
    needed |= dict.fromkeys(name for name in (schema.group, config.time, *config.kept) if name is not None)
    files = _files(source)
    parts = tuple(_part(file, split, tuple(needed)) for file, split in files)
    return ImpressionSource(
        source.resolve().name.split(".")[0],
        schema,
        parts,
        time=config.time,
        kept=config.kept,
        files=tuple(file.path for file, _ in files),
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


def _files(source: Path) -> list[tuple[TableFile, SplitName | None]]:
    if source.is_dir() and any(find_table(source, stem) for stem in GIVEN_SPLITS[0]):
        found = split_files(source, ("", *SUFFIXES))
        return [
            (TableFile.open(path, file), split if len(found) > 1 else None)
            for split, path in found.items()
            for file in table_files(path)
        ]
    return [(TableFile.open(source, file), None) for file in table_files(source)]


def _part(file: TableFile, split: SplitName | None, needed: tuple[str, ...]) -> SourcePart:
    _check_columns(file.path, file.names, needed)
    return SourcePart(file.read, file.where, split)


def _check_columns(path: Path, found: Sequence[str], needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in found]
    if missing:
        plural = "s" if len(missing) > 1 else ""
        raise InputError(
            f"{path}: no column{plural} {', '.join(missing)}; found {', '.join(found)}; name columns as the "
            "file has them"
        )
