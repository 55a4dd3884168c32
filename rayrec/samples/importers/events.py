"""The layout `events`: one log of events under whatever column names, as loggers write it.

The source is a file, or a folder in which one table, or several parts of one with the same columns, have a
user, an item and a time. A table of the same folder that has items but no users describes the items; one with
users only, the users.
"""

from __future__ import annotations

from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig, Role
from rayrec.samples.importers.found import FoundTables
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.roles import REQUIRED, roles_of, side_roles_of
from rayrec.samples.importers.tables import (
    SUFFIXES,
    RawTables,
    column_names,
    files_of,
    visible,
)


class EventsImporter(Importer):
    """Reads a log of events under whatever column names."""

    EXPECTS = "one CSV or Parquet file of events"
    HAS_NAMES = True
    READS_URLS = True

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        if source.is_file():
            return source.name.endswith(SUFFIXES)
        return any(entry.name.endswith(SUFFIXES) or "=" in entry.name for entry in visible(source))

    def find(self, source: Path, config: PrepareConfig) -> FoundTables:
        if source.is_file():
            beside = [
                file.name for file in visible(source.parent) if file.name.split(".")[0] in ("items", "users")
            ]
            ignored = tuple((name, "the source is a single file; give the folder") for name in beside)
            return FoundTables(source.name.split(".")[0], source, ignored=ignored)
        files = [file for file in visible(source) if file.is_file() and file.name.endswith(SUFFIXES)]
        if not files:
            return FoundTables(source.resolve().name, source)  # folders key=value, or nothing
        columns = {file: column_names(file) for file in files}
        logs = [file for file in files if set(roles_of(columns[file], config)).issuperset(REQUIRED)]
        if config.names is not None:
            logs = files
        if len({frozenset(columns[file]) for file in logs}) != 1:
            if len(files) == 1:
                return FoundTables(source.resolve().name, files[0])  # reading it says what is missing
            everywhere = {name for names in columns.values() for name in names}
            for role, name in config.columns.items():
                if name not in everywhere:
                    raise InputError(
                        f"{source}: no table has a column {name!r}, which is said to be {role}; there are "
                        f"{', '.join(sorted(everywhere)[:30])}"
                    )
            found = " and ".join(file.name for file in logs) or "none"
            raise InputError(
                f"{source}: expected exactly one table with a user, an item and a time, found {found} among "
                f"{files_of(source)}; give that file itself"
            )
        others = [file for file in files if file not in logs]
        sides = {file: set(side_roles_of(columns[file], config)) & {"user_id", "item_id"} for file in others}
        items, why_items = _only(sides, "item_id")
        users, why_users = _only(sides, "user_id")
        unread = tuple(
            (entry.name, "only tables in the folder itself are read")
            for entry in visible(source)
            if entry not in files
        )
        unknown = tuple((file.name, "it has no ids") for file, keys in sides.items() if not keys)
        both = tuple(
            (f.name, "it has users and items, but no times") for f, keys in sides.items() if len(keys) > 1
        )
        return FoundTables(
            source.resolve().name,
            logs[0] if len(logs) == 1 else logs,
            items,
            users,
            (*why_items, *why_users, *unknown, *both, *unread),
        )

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        return self.find(source, config).read(config)


def _only(sides: dict[Path, set[Role]], key: Role) -> tuple[Path | None, tuple[tuple[str, str], ...]]:
    """The table that describes what has the key; with several, none and why."""
    found = [file for file, keys in sides.items() if keys == {key}]
    if len(found) == 1:
        return found[0], ()
    names = " and ".join(file.name for file in found)
    return None, tuple((file.name, f"{names} could all describe the same; keep one") for file in found)
