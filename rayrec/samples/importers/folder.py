"""The layout `folder`: `interactions`, perhaps `items` and `users`, each a file or a folder of files."""

from __future__ import annotations

from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.tables import RawTable, RawTables, files_of, find_table, read_table, rename

_AS_TEXT = ("user_id", "item_id", "timestamp", "behavior", "scenario", "title")


class FolderImporter(Importer):
    """Reads tables that already have our column names."""

    EXPECTS = "interactions.parquet or .csv"

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return source.is_dir() and find_table(source, "interactions") is not None

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        interactions = find_table(source, "interactions") if source.is_dir() else None
        if interactions is None:
            raise InputError(
                f"{source}: no interactions.parquet or interactions.csv in it; found {files_of(source)}"
            )
        return RawTables(
            name=source.resolve().name,
            interactions=rename(read_table(interactions, _AS_TEXT), {}, ("user_id", "item_id", "timestamp")),
            items=_optional(source, "items", "item_id"),
            users=_optional(source, "users", "user_id"),
        )


def _optional(source: Path, stem: str, key: str) -> RawTable | None:
    path = find_table(source, stem)
    return None if path is None else rename(read_table(path, _AS_TEXT), {}, (key,))
