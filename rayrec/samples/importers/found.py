"""The tables of a source that have been found, before one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.roles import read_log, read_side
from rayrec.samples.importers.tables import RawTable, RawTables


@dataclass(frozen=True)
class FoundTables:
    """Files of a source: its log, which can be read in pieces, and tables that describe items and users."""

    name: str
    log: Path | Sequence[Path] | Mapping[int, Path]
    """A file, a folder of parts, or the parts; where events are divided already, one of these by `PART`."""
    items: Path | None = None
    users: Path | None = None
    ignored: tuple[tuple[str, str], ...] = ()
    """(file, why it is not read), for the report."""

    def read(self, config: PrepareConfig) -> RawTables:
        """All tables, whole.

        Raises:
            InputError: a table cannot be read, or lacks a column.
        """
        assert not isinstance(self.log, Mapping), "read by the layout"
        return RawTables(
            self.name,
            read_log(self.log, config),
            self.read_items(config),
            self.read_users(config),
            self.ignored,
        )

    def read_items(self, config: PrepareConfig) -> RawTable | None:
        """The table of items."""
        return None if self.items is None else read_side(self.items, config, "item_id")

    def read_users(self, config: PrepareConfig) -> RawTable | None:
        """The table of users."""
        return None if self.users is None else read_side(self.users, config, "user_id")
