"""The layout `folder`: `interactions`, perhaps `items` and `users`, each a file or a folder of files."""

from __future__ import annotations

from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig, Role
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.roles import read_log, read_side
from rayrec.samples.importers.tables import RawTable, RawTables, files_of, find_table, visible

_TABLES = ("interactions", "items", "users")


class FolderImporter(Importer):
    """Reads tables by the names of their files."""

    EXPECTS = "interactions.parquet or .csv"
    HAS_NAMES = True

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
            interactions=read_log(interactions, config),
            items=_optional(source, "items", config, "item_id"),
            users=_optional(source, "users", config, "user_id"),
            ignored=tuple(
                (entry.name, "only interactions, items and users are read")
                for entry in visible(source)
                if entry.name.split(".")[0] not in _TABLES
            ),
        )


def _optional(source: Path, stem: str, config: PrepareConfig, key: Role) -> RawTable | None:
    path = find_table(source, stem)
    return None if path is None else read_side(path, config, key)
