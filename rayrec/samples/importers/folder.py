"""The layout `folder`: `interactions`, perhaps `items` and `users`, each a file or a folder of files."""

from __future__ import annotations

from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.found import FoundTables
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.tables import RawTables, files_of, find_table, visible

_TABLES = ("interactions", "items", "users")


class FolderImporter(Importer):
    """Reads tables by the names of their files."""

    EXPECTS = "interactions.parquet or .csv"
    HAS_NAMES = True
    READS_URLS = True

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return source.is_dir() and find_table(source, "interactions") is not None

    def find(self, source: Path, config: PrepareConfig) -> FoundTables:
        interactions = find_table(source, "interactions") if source.is_dir() else None
        if interactions is None:
            raise InputError(
                f"{source}: no interactions.parquet or interactions.csv in it; found {files_of(source)}"
            )
        return FoundTables(
            name=source.resolve().name,
            log=interactions,
            items=find_table(source, "items"),
            users=find_table(source, "users"),
            ignored=tuple(
                (entry.name, "only interactions, items and users are read")
                for entry in visible(source)
                if entry.name.split(".")[0] not in _TABLES
            ),
        )

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        return self.find(source, config).read(config)
