"""Tables on disk, divided by partition: an Arrow file with a batch for each partition that has rows.

Files and partitions are many, so one file holds all partitions of a table; a partition is read from each of
them by its batch. A file is renamed when it is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.files import no_room, written_whole

_PARTITIONS = b"partitions"
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")
_BATCH_ROWS = 65_536


def write_partitions(path: Path, table: pa.Table, partition_R: Int64Array) -> None:
    """Write rows by partition; within one they keep their order.

    Args:
        partition_R: the partition of each row.

    Raises:
        NoRoomError: the disk is full.
    """
    # As 16 bits, so that numpy sorts by digits, unless there are more partitions than that.
    narrow = partition_R.astype(np.uint16) if partition_R.max(initial=0) < 2**16 else partition_R
    order_R = np.argsort(narrow, kind="stable")
    found, starts = np.unique(partition_R[order_R], return_index=True)
    rows = table.take(pa.array(order_R)).combine_chunks()
    stops = np.append(starts, len(rows))[1:].tolist()  # as many as starts, of a table without rows, too
    batches = (rows.slice(start, stop - start) for start, stop in zip(starts.tolist(), stops, strict=True))
    write_batches(path, rows.schema, batches, found.tolist())


def write_batches(
    path: Path, schema: pa.Schema, tables: Iterable[pa.Table], partitions: Sequence[int] = ()
) -> None:
    """Write tables, each as one batch; the file is there when it is whole.

    Args:
        partitions: of each table, if it is one's.

    Raises:
        NoRoomError: the disk is full.
    """
    schema = schema.with_metadata({_PARTITIONS: np.array(partitions, dtype=np.int64).tobytes()})
    try:
        with (
            written_whole(path) as unfinished,
            pa.OSFile(str(unfinished), "wb") as file,
            pa.ipc.new_file(file, schema, options=_COMPRESSED) as writer,
        ):
            for table in tables:
                for batch in table.combine_chunks().to_batches():
                    writer.write_batch(batch.cast(schema) if batch.schema != schema else batch)
    except BaseException as error:
        if (full := no_room(error, path.parent)) is not None:
            raise full from error
        raise


def write_rows(path: Path, table: pa.Table) -> None:
    """Write a table in batches of moderate size.

    Raises:
        NoRoomError: the disk is full.
    """
    table = table.combine_chunks()
    starts = range(0, len(table), _BATCH_ROWS)
    write_batches(path, table.schema, (table.slice(start, _BATCH_ROWS) for start in starts))


def read_rows(path: Path, batches: range | None = None) -> Iterator[pa.Table]:
    """The tables that `write_rows` has written, one after the other.

    Args:
        batches: numbers of those that are wanted; None: all.
    """
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches) if batches is None else batches:
            yield pa.Table.from_batches([reader.get_batch(number)]).replace_schema_metadata(None)


def read_partitions(
    paths: Iterable[Path], first: int, stop: int, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The rows of partitions `first` to `stop - 1` in files of `write_partitions`, file by file.

    Args:
        columns: None: all.
    """
    for path in paths:
        with pa.memory_map(str(path)) as file:
            schema = pa.ipc.open_file(file).schema
            fields = None if columns is None else [schema.get_field_index(name) for name in columns]
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=fields))
            found = np.frombuffer(schema.metadata[_PARTITIONS], dtype=np.int64)
            for number in np.flatnonzero((found >= first) & (found < stop)).tolist():
                batch = pa.Table.from_batches([reader.get_batch(number)])
                yield batch.replace_schema_metadata(None)


def empty_of(path: Path) -> pa.Table:
    """A table without rows that has a file's columns."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).schema.remove_metadata().empty_table()
