"""The layout `events`: one log of events under whatever column names, as loggers write it.

The source is a file, or a folder in which exactly one table has a user, an item and a time. A table
of the same folder that has items but no users describes the items; one with users only, the users.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.tables import (
    SUFFIXES,
    RawTable,
    RawTables,
    column_names,
    files_of,
    missing_columns,
    read_table,
    rename,
    visible,
)

ALIASES: dict[str, tuple[str, ...]] = {
    "user_id": ("userid", "user", "uid", "personid", "visitorid", "customerid", "memberid", "reviewerid"),
    "item_id": ("itemid", "item", "iid", "contentid", "movieid", "productid", "articleid", "asin"),
    "timestamp": (
        "timestamp",
        "time",
        "ts",
        "unixtimestamp",
        "unixreviewtime",
        "eventtime",
        "datetime",
        "date",
    ),
    "behavior": ("behavior", "behaviour", "eventtype", "event", "action", "actiontype", "interactiontype"),
    "scenario": ("scenario",),
    "title": ("title", "movietitle", "itemname", "productname", "name", "headline"),
}
"""Our name -> usual names, in lower case and without signs; earlier ones win."""

_REQUIRED = ("user_id", "item_id", "timestamp")


class EventsImporter(Importer):
    """Reads a log of events under whatever column names."""

    EXPECTS = "one CSV or Parquet file of events"

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        if source.is_file():
            return source.name.endswith(SUFFIXES)
        return any(entry.name.endswith(SUFFIXES) for entry in visible(source) if entry.is_file())

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        if source.is_file():
            return RawTables(source.name.split(".")[0], _read(source, config, _REQUIRED))
        files = [file for file in visible(source) if file.is_file() and file.name.endswith(SUFFIXES)]
        if not files:
            raise InputError(f"{source}: no Parquet or CSV file in it; found {files_of(source)}")
        roles = {file: set(roles_of(column_names(file), config)) for file in files}
        logs = [file for file in files if roles[file].issuperset(_REQUIRED)]
        if len(logs) != 1:
            if len(files) == 1:
                missing = [role for role in _REQUIRED if role not in roles[files[0]]]
                raise missing_columns(files[0], column_names(files[0]), missing)
            found = " and ".join(file.name for file in logs) or "none"
            raise InputError(
                f"{source}: expected exactly one table with a user, an item and a time, found {found} among "
                f"{files_of(source)}; give that file itself"
            )
        items = [file for file in files if "item_id" in roles[file] and "user_id" not in roles[file]]
        users = [file for file in files if "user_id" in roles[file] and "item_id" not in roles[file]]
        return RawTables(
            source.resolve().name,
            _read(logs[0], config, _REQUIRED),
            _read(items[0], config, ("item_id",)) if len(items) == 1 else None,
            _read(users[0], config, ("user_id",)) if len(users) == 1 else None,
        )


def roles_of(names: Sequence[str], config: PrepareConfig) -> dict[str, str]:
    """Our name -> the column that plays this part, configured or by a usual name."""
    plain = {"".join(filter(str.isalnum, name.lower())): name for name in reversed(names)}
    roles = {}
    for role, aliases in ALIASES.items():
        configured = config.columns.get(role)  # type: ignore[call-overload]
        if configured in names:
            roles[role] = configured
        elif configured is None:
            found = [plain[alias] for alias in aliases if alias in plain]
            if found:
                roles[role] = found[0]
    return roles


def _read(path: Path, config: PrepareConfig, required: Sequence[str]) -> RawTable:
    names = column_names(path)
    roles = roles_of(names, config)
    missing = [config.columns.get(role, role) for role in required if role not in roles]  # type: ignore[call-overload]
    if missing:
        raise missing_columns(path, names, missing)
    # A column that merely has one of our names would clash with the one that plays its part.
    found = {column: role for role, column in roles.items()}
    clash = [name for name in names if name in roles and name not in found]
    raw = read_table(path, as_text=tuple(roles.values()))
    kept = RawTable(raw.table.drop_columns(clash), raw.file, raw.where)
    return rename(kept, found, required)
