"""Folders `key=value` around the files of a table, as Spark and Hive write them; keys are columns."""

from __future__ import annotations

from urllib.parse import unquote

_NULL = "__HIVE_DEFAULT_PARTITION__"


def values_of_folders(name: str) -> dict[str, str | None]:
    """The keys and values in the name of a file below its table's folder.

    Signs that a path cannot have are written as in URLs, and a missing value by a name of its own.
    """
    pairs = (part.partition("=") for part in name.split("/")[:-1] if "=" in part)
    return {unquote(key): None if value == _NULL else unquote(value) for key, _, value in pairs}
