"""Which column of a source plays which part: as configured, else by a usual name; and what becomes of it.

The log and the tables of items and users go through the same functions in every layout, so that a setting
which names a column either has an effect or is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig, Role, option
from rayrec.samples.base.event_labels import HISTORY_LABELS, LABEL_COLUMNS, TARGET_LABELS
from rayrec.samples.base.event_times import HISTORY_TIMES, TIMES
from rayrec.samples.importers.column_types import plain, without_nulls_type
from rayrec.samples.importers.tables import (
    PART,
    OpenTable,
    RawTable,
    RawTables,
    column_names,
    missing_columns,
    read_table,
    rename,
)

ALIASES: dict[Role, tuple[str, ...]] = {
    "user_id": (
        *("userid", "user", "uid", "personid", "visitorid", "customerid", "memberid", "reviewerid"),
        *("customer", "clientid", "accountid", "profileid", "buyerid", "username"),
    ),
    "item_id": (
        *("itemid", "item", "iid", "contentid", "movieid", "productid", "articleid", "asin"),
        *(
            "sku",
            "skuid",
            "product",
            "article",
            "goodsid",
            "listingid",
            "videoid",
            "trackid",
            "songid",
            "bookid",
        ),
    ),
    "timestamp": (
        *("timestamp", "time", "ts", "unixtimestamp", "unixreviewtime", "eventtime", "datetime", "date"),
        *("createdat", "eventtimestamp", "eventdate", "purchasedate", "orderdate", "clicktime", "viewedat"),
    ),
    "behavior": (
        *("behavior", "behaviour", "eventtype", "event", "action", "actiontype", "interactiontype"),
        *("eventname", "activity", "behaviortype"),
    ),
    "scenario": ("scenario",),
    "title": ("title", "movietitle", "itemname", "productname", "name", "headline"),
}
"""Our name -> usual names, in lower case and without signs; earlier ones win."""
REQUIRED: tuple[Role, ...] = ("user_id", "item_id", "timestamp")

OWN_NAMES = {
    "interactions": frozenset(
        {
            *("item_ids", TIMES, "history", HISTORY_TIMES, "target"),
            *(*LABEL_COLUMNS.values(), *HISTORY_LABELS.values(), *TARGET_LABELS.values()),
            # Of rows per user, before they are split.
            *(
                "num_train",
                "valid_at",
                "test_at",
                "valid_without_history",
                "test_without_history",
                "duplicates",
                "first_duplicate",
                "first_row",
                "ties",
                "__row",
            ),
        }
    ),
    "items": frozenset({"item_key", "train_count"}),
    "users": frozenset({"user_key"}),
}
"""Names that written files, or the tables on their way there, use themselves."""


def roles_of(names: Sequence[str], config: PrepareConfig) -> dict[Role, str]:
    """Our name -> the column that plays this part, configured or by a usual name."""
    usual = {"".join(filter(str.isalnum, name.lower())): name for name in reversed(names)}
    roles: dict[Role, str] = {}
    for role, aliases in ALIASES.items():
        configured = config.columns.get(role)
        if configured is not None:
            if configured in names:
                roles[role] = configured
        elif role in names:
            roles[role] = role
        elif (found := next((usual[alias] for alias in aliases if alias in usual), None)) is not None:
            roles[role] = found
    return roles


def side_roles_of(names: Sequence[str], config: PrepareConfig) -> dict[Role, str]:
    """`roles_of` a table of items or users: what is configured may be the log's name alone."""
    configured: dict[Role, str] = {role: name for role, name in config.columns.items() if name in names}
    return roles_of(names, config.model_copy(update={"columns": configured}))


def read_log(path: Path | Sequence[Path], config: PrepareConfig) -> RawTable:
    """Read the events of a log under our names.

    Raises:
        InputError: a column that is needed, or that a setting names, is not there.
    """
    table, roles = open_log(path, config)
    return under_our_names(table.read(), roles, REQUIRED)


def open_log(path: Path | Sequence[Path], config: PrepareConfig) -> tuple[OpenTable, dict[Role, str]]:
    """The files of a log, and which column plays which part.

    Raises:
        InputError: as `read_log`.
    """
    roles = log_roles(column_names(path, config.names), config, _label(path))
    return OpenTable.open(path, tuple(roles.values()), names=config.names), roles


def log_roles(names: Sequence[str], config: PrepareConfig, file: str) -> dict[Role, str]:
    """`roles_of` the columns of a log.

    Raises:
        InputError: naming the file, if one is missing that a log needs.
    """
    roles = roles_of(names, config)
    missing = [config.columns.get(role, role) for role in REQUIRED if role not in roles]
    if missing:
        if config.names is None and _are_values(names):
            raise InputError(
                f"{file}: its first line looks like values ({', '.join(names)}), not like names of columns; "
                f"give their names, as in {option('names')} user_id,item_id,timestamp"
            )
        raise missing_columns(file, names, missing)
    return roles


def read_side(path: Path, config: PrepareConfig, key: Role) -> RawTable:
    """Read a table of items or users under our names.

    Raises:
        InputError: it has no column of the key.
    """
    names = column_names(path)
    roles = side_roles_of(names, config)
    if key not in roles:
        raise missing_columns(path, names, [key])
    # What a log has of an event, a description may have under the same name for something else.
    roles = {role: name for role, name in roles.items() if role in (key, "title")}
    return under_our_names(read_table(path, tuple(roles.values())), roles, (key,))


def under_roles(raw: RawTable, config: PrepareConfig, required: Sequence[Role]) -> RawTable:
    """A table that has been read, under our names.

    Raises:
        InputError: a column that is needed is not there.
    """
    is_log = set(required) == set(REQUIRED)
    names = raw.table.schema.names
    roles = roles_of(names, config) if is_log else side_roles_of(names, config)
    if not is_log:
        roles = {role: name for role, name in roles.items() if role in (*required, "title")}
    missing = [config.columns.get(role, role) for role in required if role not in roles]
    if missing:
        raise missing_columns(raw.file, names, missing)
    return under_our_names(raw, roles, required)


def check_columns(tables: RawTables, config: PrepareConfig) -> None:
    """Refuse names of columns that no table has.

    Raises:
        InputError: naming the first of them and the columns that there are.
    """
    log = tables.interactions
    for role, name in config.columns.items():
        parts = [part for part in (tables.interactions, tables.items, tables.users) if part is not None]
        if not any(part.names.get(role, role) == name and role in part.table.schema.names for part in parts):
            found = ", ".join(log.names.get(one, one) for one in log.table.schema.names)
            raise InputError(
                f"{tables.interactions.file}: {option('columns', '--column')} says that {role} is called "
                f"{name!r}, but there is no such column; found {found}"
            )


def keep_apart(tables: RawTables) -> RawTables:
    """The tables with other names for columns of theirs that have a name which the data set uses itself."""
    return replace(
        tables,
        interactions=keep_log_apart(tables.interactions, tables.is_divided),
        items=None if tables.items is None else _apart(tables.items, OWN_NAMES["items"]),
        users=None if tables.users is None else _apart(tables.users, OWN_NAMES["users"]),
    )


def keep_log_apart(log: RawTable, is_divided: bool) -> RawTable:
    """`keep_apart` of a log."""
    return _apart(log if is_divided else without_part(log), OWN_NAMES["interactions"])


def without_part(log: RawTable) -> RawTable:
    """A log whose own column `PART`, if it has one, has another name: that one decides the split."""
    return _apart(log, {PART})


def _apart(raw: RawTable, own: Collection[str]) -> RawTable:
    raw = replace(raw, table=without_nulls_type(plain(raw.table)))  # what importers of others may bring
    there = raw.table.schema.names
    names = {name: _of_source(name, there) for name in there if name in own}
    return rename(raw, names, ()) if names else raw


def _of_source(name: str, there: Collection[str]) -> str:
    """What a column is called that gives way, as no other is."""
    name = f"{name}_of_source"
    while name in there:
        name += "_"
    return name


def under_our_names(raw: RawTable, roles: Mapping[Role, str], required: Sequence[str]) -> RawTable:
    """A table under our names, of which it has those that are required."""
    # A column that merely has one of our names gives way to the one that plays its part.
    found: dict[str, str] = {column: role for role, column in roles.items()}
    there = raw.table.schema.names
    taken = {name: _of_source(name, there) for name in there if name in roles and name not in found}
    return rename(raw, {**found, **taken}, required)


def _label(path: Path | Sequence[Path]) -> str:
    return str(path[0] if isinstance(path, Sequence) else path)


def _are_values(names: Sequence[str]) -> bool:
    """Whether the first line of a file can hardly be names: most of them are numbers or dates."""
    numbers = sum(not any(map(str.isalpha, name)) for name in names)
    return 2 * numbers > len(names)
