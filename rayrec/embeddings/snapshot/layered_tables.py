"""Tables for those who only read, as one version of a model after the other changes them.

    base ◄── changes of step 10 ◄── changes of step 20       newest first: the first layer that knows an id
                                                             says what its row is, or that it has none

Nothing here changes once it is made: the tables of the next version are new layers on the same ones, so that
two versions take hardly more memory than one, requests need no lock, and going back takes no time. What is on
disk is described in `snapshot`; of it, the state of optimizers is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import IdAdmissionConfig, SgdConfig, TableConfig
from rayrec.embeddings.snapshot.snapshot import load_changes, load_tables
from rayrec.embeddings.storage.index import MISSING, IdMap
from rayrec.embeddings.table.admission import Sighted
from rayrec.embeddings.table.eviction import Evicted
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import TableRows
from rayrec.platform.arrays import BoolArray, Float32Array, Int64Array
from rayrec.platform.errors import InputError

_MOST_CHANGES = 8
"""Layers of changes above the base, each of which a lookup asks; then they are made one."""
_READ_AT_ONCE = 65_536
"""Rows of the base: who reads those of all items lets others in between."""


def reading_config(config: TableConfig) -> TableConfig:
    """The table without what only training needs: the same rows in less memory."""
    return config.model_copy(
        update={"optimizer": SgdConfig(), "admission": IdAdmissionConfig(), "eviction": None}
    )


def reading_rows(parts: Iterable[TableRows]) -> Iterator[TableRows]:
    """Rows as `reading_config` holds them."""
    for part in parts:
        no_state = np.empty((len(part.ids_M), 0), dtype=np.float32)
        yield replace(part, state_MS=no_state, sighted=Sighted.nothing(), evicted=Evicted.nothing())


@dataclass(frozen=True)
class _Changes:
    """What one or more increments say of a table."""

    rows: EmbeddingTable
    """That they brought."""
    removed: IdMap
    """Ids whose rows they gave up; some may have come back, and are among the rows."""

    @classmethod
    def of(cls, config: TableConfig, parts: Iterable[TableRows]) -> _Changes:
        removed, rows = IdMap(), EmbeddingTable(config)

        def noted() -> Iterator[TableRows]:
            for part in parts:
                removed.assign(part.removed_X, np.zeros(len(part.removed_X), dtype=np.int64))
                yield part

        rows.load(noted())
        return cls(rows, removed)

    def speaks_of(self, ids_M: Int64Array) -> BoolArray:
        """[M] whether each id is one of these, with a row or without."""
        known_M = self.rows.has_rows(ids_M)
        return known_M | (self.removed.find(ids_M) != MISSING) if len(self.removed) else known_M

    def parts(self, since: int) -> Iterator[TableRows]:
        """As an increment has them."""
        nothing = self.rows.export()
        removed_X, _ = self.removed.items()
        empty = np.empty(0, dtype=np.int64)
        yield replace(_no_rows(nothing), since=since, removed_X=removed_X)
        yield replace(nothing, since=since, removed_X=empty)


class LayeredTable:
    """One table; never changed."""

    def __init__(
        self,
        base: EmbeddingTable,
        changes: Sequence[_Changes] = (),
        reading: AbstractContextManager[object] | None = None,
    ) -> None:
        """Stack increments on base rows.

        Args:
            base: that nobody changes any more.
            changes: oldest first.
            reading: held to read the base, by all tables on it; None for the first one.
        """
        self._base = base
        self._changes = tuple(changes)
        if reading is None:
            # Rows in memory lie still. Those on disk are moved by who reads them, and one version
            # answers while another one on the same base is made.
            reading = nullcontext() if base.config.disk is None else threading.Lock()
        self._reading = reading

    @classmethod
    def of(cls, config: TableConfig, parts: Iterable[TableRows], num_threads: int = 1) -> LayeredTable:
        """Make a table without increments from rows that were read.

        Args:
            config: as `reading_config` makes it.
            parts: all rows, as `reading_rows` makes them.
        """
        base = EmbeddingTable(config, num_threads)
        base.load(parts)
        return cls(base)

    @property
    def dim(self) -> int:
        return self._base.config.dim

    @property
    def num_layers(self) -> int:
        return 1 + len(self._changes)

    @property
    def num_changed(self) -> int:
        """Rows that are in layers of changes."""
        return sum(changes.rows.num_rows for changes in self._changes)

    @property
    def num_base(self) -> int:
        """Rows of the base, those that have been changed or given up since among them."""
        return self._base.num_rows

    def lookup(self, ids_M: Int64Array) -> Float32Array:
        """[M, D] weights of each id; one without a row has its initial value."""
        rows_MD = self._base_rows(ids_M)
        for changes in self._changes:
            known = np.flatnonzero(changes.speaks_of(ids_M))
            if len(known):  # what was given up has no row there, and so its initial value
                rows_MD[known] = changes.rows.lookup(ids_M[known])
        return rows_MD

    def _base_rows(self, ids_M: Int64Array) -> Float32Array:
        if len(ids_M) <= _READ_AT_ONCE or self._base.config.disk is None:
            with self._reading:
                return self._base.lookup(ids_M)
        rows_MD = np.empty((len(ids_M), self.dim), dtype=np.float32)
        for first in range(0, len(ids_M), _READ_AT_ONCE):
            part = slice(first, first + _READ_AT_ONCE)
            with self._reading:
                part_MD = self._base.lookup(ids_M[part])
            rows_MD[part] = part_MD  # without the lock: who waits for it gets it now
        return rows_MD

    def changed_by(self, parts: Iterable[TableRows]) -> LayeredTable:
        """This table and an increment on it."""
        # In memory whatever the base is: changes are few, and a file on disk is one table's.
        config = self._base.config.model_copy(update={"disk": None})
        changes = [*self._changes, _Changes.of(config, parts)]
        if len(changes) > _MOST_CHANGES:
            every = (part for each in changes for part in each.parts(since=0))
            changes = [_Changes.of(config, every)]
        return LayeredTable(self._base, changes, self._reading)

    def export(self) -> tuple[Int64Array, Float32Array]:
        """([R] ids, [R, D] weights) of all rows, in the order of a snapshot; for comparisons."""
        merged = EmbeddingTable(self._base.config.model_copy(update={"disk": None}))
        with self._reading:
            base = self._base.export()
        merged.load([base, *(part for each in self._changes for part in each.parts(since=0))])
        rows = merged.export()
        return rows.ids_M, rows.weights_MD


class LayeredTables:
    """All tables of a version, which move together; never changed. Any thread may read."""

    def __init__(self, tables: Mapping[str, LayeredTable], step: int | None) -> None:
        """Hold the tables as a run had them after a step.

        Args:
            step: after which the run had these rows; None of a model without tables.
        """
        self._tables = dict(tables)
        self.step = step

    @classmethod
    def load(cls, tables: Sequence[TableConfig], paths: Sequence[Path], step: int | None) -> LayeredTables:
        """Read the tables from the files of snapshots.

        Args:
            tables: as `reading_config` makes them.
            paths: files with all rows of a step.

        Raises:
            InputError: as `snapshot.load_tables`.
        """
        if not tables:
            return cls({}, step)
        loaded = load_tables(paths, tables, ShardMap(1), shard=0)
        return cls({config.name: LayeredTable.of(config, loaded[config.name]) for config in tables}, step)

    def changed_by(self, tables: Sequence[TableConfig], paths: Sequence[Path], step: int) -> LayeredTables:
        """These tables and what has changed until a later step.

        Args:
            paths: files of an increment on them.

        Raises:
            InputError: it is none, or one on other rows.
        """
        if not self._tables:
            return LayeredTables({}, step)
        assert self.step is not None
        changes = load_changes(paths, tables, self.step)
        if changes is None:
            raise InputError(f"{paths[0].parent}: has all rows, expected what has changed since {self.step}")
        return LayeredTables(
            {name: table.changed_by(changes[name]) for name, table in self._tables.items()}, step
        )

    def read(self, ids: Mapping[str, Int64Array]) -> dict[str, Float32Array]:
        """[M, D] rows of ids by table."""
        return {name: self._tables[name].lookup(ids_M) for name, ids_M in ids.items()}

    def __getitem__(self, name: str) -> LayeredTable:
        return self._tables[name]

    @property
    def num_rows(self) -> int:
        """Rows that are held, older ones of the base that were changed since among them."""
        return sum(table.num_base + table.num_changed for table in self._tables.values())


def _no_rows(rows: TableRows) -> TableRows:
    return TableRows(
        ids_M=rows.ids_M[:0],
        weights_MD=rows.weights_MD[:0],
        state_MS=rows.state_MS[:0],
        steps_M=rows.steps_M[:0],
        counts_M=rows.counts_M[:0],
    )
