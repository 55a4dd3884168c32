"""Keys of a partition of users or items, from the log and from the table that describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.samples.dataset.manifest import Entity, IdKind
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.prepare.distributed.spill import empty_of, read_partitions, write_partitions
from rayrec.samples.prepare.ids import (
    Collision,
    IdTable,
    collision_of,
    keys_of_integers,
    plain_spelling,
)
from rayrec.samples.prepare.key_comparison import AloneKeys, KeysCompared, are_written_as_numbers
from rayrec.samples.prepare.partitions import partition_numbers

_ID, _ROW = "__id", "__row"


def write_described(path: Path, described: RawTable, ids_R: Int64Array, num_partitions: int) -> None:
    """Write a table of users or items, which has one row for each id, by partition.

    Raises:
        NoRoomError: the disk is full.
    """
    table = described.table.append_column(_ID, pa.array(ids_R))
    table = table.append_column(_ROW, pa.array(np.arange(len(ids_R))))
    write_partitions(path, table, partition_numbers(ids_R, num_partitions))


@dataclass(frozen=True)
class Described:
    """Rows of the table of users or items in some partitions."""

    table: RawTable
    ids_D: Int64Array
    rows_D: Int64Array
    """Of the whole table."""

    @classmethod
    def read(cls, path: Path, file: str, first: int, stop: int) -> Described:
        """The rows of partitions `first` to `stop - 1`.

        Args:
            file: what the table is called in messages.
        """
        table = pa.concat_tables([empty_of(path), *read_partitions([path], first, stop)]).combine_chunks()
        ids_D, rows_D = table[_ID].to_numpy(), table[_ROW].to_numpy()
        return cls(RawTable(table.drop_columns([_ID, _ROW]), file, str), ids_D, rows_D)


@dataclass(frozen=True)
class LogKeys:
    """The distinct keys of the log in some partitions, each with its id and the row in which it is first."""

    keys: pa.Array
    ids_K: Int64Array
    rows_K: Int64Array
    collision: Collision | None
    """Of two keys; its position is the row of the second."""

    @classmethod
    def of_integers(cls, ids_K: Int64Array, rows_K: Int64Array, are_unsigned: bool) -> LogKeys:
        """Keys that are integers.

        Args:
            rows_K: in which each id is first.
        """
        order_K = np.argsort(rows_K, kind="stable")
        ids_K = ids_K[order_K]
        return cls(keys_of_integers(ids_K, are_unsigned), ids_K, rows_K[order_K], None)

    @classmethod
    def read(cls, paths: Sequence[Path], first: int, stop: int) -> LogKeys:
        """Keys that are texts, of partitions `first` to `stop - 1`.

        Args:
            paths: of all tables of rows, in the order of the log.
        """
        tables = list(read_partitions(paths, first, stop))
        if not tables:
            nothing = np.zeros(0, dtype=np.int64)
            return cls(pa.array([], pa.large_string()), nothing, nothing, None)
        table = pa.concat_tables(tables).combine_chunks()
        # A table's keys stand by partition, not by row: the first of a key is the one with the lowest row.
        table = table.take(np.argsort(table["row"].to_numpy(), kind="stable")).combine_chunks()
        keys = table["key"].chunk(0)
        is_first = ~pd.Series(keys.dictionary_encode().indices.to_numpy()).duplicated().to_numpy()
        keys, table = keys.filter(pa.array(is_first)), table.filter(pa.array(is_first))
        ids_K, rows_K = table["id"].to_numpy(), table["row"].to_numpy()
        found = collision_of(keys, ids_K)
        if found is not None:
            found = Collision(int(rows_K[found.position]), found.first, found.second, found.id)
        return cls(keys, ids_K, rows_K, found)

    def id_table(self, kind: IdKind, described: Described | None, entity: Entity) -> IdTable:
        """The ids of the log, then those that are only described."""
        keys, ids_K = self.keys.cast(pa.large_string()), self.ids_K
        if described is not None:
            is_new = ~pd.Index(described.ids_D).isin(ids_K)
            column = described.table.table[f"{entity}_id"].combine_chunks().cast(pa.large_string())
            keys = pa.concat_arrays([keys, *_chunks(column.filter(pa.array(is_new)))])
            ids_K = np.concatenate([ids_K, described.ids_D[is_new]])
        return IdTable(kind, keys, ids_K)


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


@dataclass(frozen=True)
class KeysFound:
    """What some partitions tell of the keys of users or items."""

    compared: KeysCompared
    collision: Collision | None
    num_spelled: int
    """Keys that were written to be compared by their spelling."""


def compare_keys(
    log: LogKeys,
    described: Described | None,
    num_compared: int,
    entity: Entity,
    kind: IdKind,
    spelled_file: Path,
    num_partitions: int,
) -> KeysFound:
    """Compare the keys of some partitions with those that are described.

    Keys whose spelling has to be compared with that of keys in other partitions are written by partition of
    their plain spelling; integers have one spelling.

    Args:
        num_compared: rows of the table that describes them, without what was added to it from the log.

    Raises:
        NoRoomError: the disk is full.
    """
    compared = KeysCompared(here=len(log.keys), alone_here=len(log.keys))
    here = there = AloneKeys(pa.array([], pa.large_string()), np.zeros(0, dtype=np.int64))
    collision = log.collision
    keys = log.keys.cast(pa.large_string())
    if described is not None and num_compared:
        order_D = np.argsort(described.rows_D, kind="stable")
        order_D = order_D[described.rows_D[order_D] < num_compared]
        column = described.table.table[f"{entity}_id"].take(pa.array(order_D)).combine_chunks()
        described_keys = pa.concat_arrays(_chunks(column)).cast(pa.large_string())
        rows_D = described.rows_D[order_D]
        compared, here, there = KeysCompared.of(keys, log.rows_K, described_keys, rows_D)
        if kind == "string" and collision is None:
            ids_A = described.ids_D[order_D][np.isin(rows_D, there.rows)]
            collision = collision_of(pa.concat_arrays([keys, there.keys]), np.concatenate([log.ids_K, ids_A]))
            if collision is not None:  # comes after those of the log
                collision = Collision(
                    2**62 + collision.position, collision.first, collision.second, collision.id
                )
    num_spelled = 0
    if kind == "string":
        num_spelled = _write_spelled(log, keys, here, there, spelled_file, num_partitions)
    return KeysFound(compared, collision, num_spelled)


HERE, THERE, NUMBER = 0, 1, 2
"""Keys that the log has alone, that the table has alone, and keys of the log that are written as numbers."""


def _write_spelled(
    log: LogKeys, keys: pa.Array, here: AloneKeys, there: AloneKeys, path: Path, num_partitions: int
) -> int:
    are_numbers = are_written_as_numbers(keys)
    parts = {
        HERE: here,
        THERE: there,
        NUMBER: AloneKeys(keys.filter(pa.array(are_numbers)), log.rows_K[are_numbers]),
    }
    tables = [
        pa.table({"key": part.keys, "row": part.rows, "what": np.full(len(part.rows), what, np.int8)})
        for what, part in parts.items()
    ]
    table = pa.concat_tables(tables).combine_chunks()
    if len(table):
        write_partitions(path, table, spelling_partitions(table["key"], num_partitions))
    return len(table)


def spelling_partitions(keys: pa.ChunkedArray, num_partitions: int) -> Int64Array:
    """The partition of each key by its plain spelling."""
    plain = plain_spelling(keys.combine_chunks()).to_pandas().to_numpy(dtype=object)
    hashes = pd.util.hash_array(plain, categorize=False).view(np.int64)
    return partition_numbers(hashes, num_partitions)
