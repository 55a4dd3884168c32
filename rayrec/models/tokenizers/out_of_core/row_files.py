"""A matrix that is larger than memory, in files of equally many rows.

Files are raw numbers without a header: rows are read at their offset, and a file that is gone on with after a
kill is there whole or not at all. They are read, not mapped: what a process has read of them is not its
memory.

Axes: I rows (items), D columns, R rows that are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.files import no_room, written_whole

_F32 = np.dtype("<f4")


@dataclass(frozen=True)
class Blocks:
    """Rows in blocks: a block is what arithmetic takes at once, some blocks are a task."""

    num_rows: int
    rows: int
    """Of a block. Part of the method: other blocks give other roundings."""
    per_task: int
    """Blocks of a task; changes no bit."""

    def __len__(self) -> int:
        return -(-self.num_rows // self.rows)

    def span(self, block: int) -> tuple[int, int]:
        """First row of a block, and the one after its last."""
        return block * self.rows, min((block + 1) * self.rows, self.num_rows)

    def tasks(self) -> list[range]:
        """The blocks of each task."""
        return [
            range(first, min(first + self.per_task, len(self)))
            for first in range(0, len(self), self.per_task)
        ]


@dataclass(frozen=True)
class RowFiles:
    """[I, D] float32 in files `NAME-000000.f32`, ..."""

    folder: Path
    name: str
    num_rows: int
    dim: int
    rows_per_file: int

    def path(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:06}.f32"

    def write(self, number: int, rows_RD: Float32Array) -> None:
        """Write one file, whole or not at all.

        Raises:
            NoRoomError: the disk is full.
        """
        first = number * self.rows_per_file
        assert rows_RD.shape == (min(self.rows_per_file, self.num_rows - first), self.dim)
        with written(self.path(number)) as unfinished:
            np.ascontiguousarray(rows_RD, dtype=_F32).tofile(unfinished)

    def read(self, start: int, stop: int) -> Float32Array:
        """[R, D] rows start to stop - 1."""
        found = np.empty((stop - start, self.dim), dtype=np.float32)
        row = start
        while row < stop:
            number, at = divmod(row, self.rows_per_file)
            count = min(self.rows_per_file - at, stop - row)
            part = np.fromfile(self.path(number), _F32, count * self.dim, offset=at * self._row_bytes)
            found[row - start : row - start + count] = part.reshape(count, self.dim)
            row += count
        return found

    def take(self, rows_R: Int64Array) -> Float32Array:
        """[R, D] these rows, in the order asked for."""
        files_R, at_R = np.divmod(rows_R, self.rows_per_file)
        with ExitStack() as stack:
            opened = {}
            for number in np.unique(files_R).tolist():
                opened[number] = stack.enter_context(self.path(number).open("rb", buffering=0)).fileno()
            size = self._row_bytes
            found = b"".join(
                os.pread(opened[number], size, at * size)
                for number, at in zip(files_R.tolist(), at_R.tolist(), strict=True)
            )
        return np.frombuffer(found, dtype=_F32).reshape(len(rows_R), self.dim)

    def delete(self) -> None:
        for path in self.folder.glob(f"{self.name}-*.f32"):
            path.unlink(missing_ok=True)

    @property
    def _row_bytes(self) -> int:
        return self.dim * _F32.itemsize


@dataclass(frozen=True)
class ColumnFiles:
    """[I, S] float32 in one file for some columns each: what is looked up at random has to be mapped.

    One mapped file takes 4 bytes an item and column of each process, the bytes shared by those of a node.
    Blocks are written at their place by tasks, which may run again and write the same.
    """

    folder: Path
    name: str
    num_rows: int
    num_columns: int
    columns_per_file: int = 16
    """16 float32 are a line of the processor's cache."""

    def __len__(self) -> int:
        return -(-self.num_columns // self.columns_per_file)

    def columns(self, file: int) -> slice:
        first = file * self.columns_per_file
        return slice(first, min(first + self.columns_per_file, self.num_columns))

    def mapped(self, file: int) -> Float32Array:
        """[I, columns of the file], read-only."""
        return np.memmap(self._path(file), _F32, "r", shape=(self.num_rows, self._width(file)))

    def read(self, start: int, stop: int) -> Float32Array:
        """[R, S] rows start to stop - 1."""
        parts = []
        for file in range(len(self)):
            width = self._width(file)
            offset = start * width * _F32.itemsize
            part = np.fromfile(self._path(file), _F32, (stop - start) * width, offset=offset)
            parts.append(part.reshape(stop - start, width))
        return np.concatenate(parts, axis=1)

    def write_file(self, file: int, start: int, rows: Float32Array) -> None:
        """Put rows of the columns of one file in their place.

        Raises:
            NoRoomError: the disk is full.
        """
        content = np.ascontiguousarray(rows, dtype=_F32).data
        try:
            descriptor = os.open(self._path(file), os.O_RDWR | os.O_CREAT, 0o666)
            try:
                left, at = content.cast("B"), start * self._width(file) * _F32.itemsize
                while left:
                    written_bytes = os.pwrite(descriptor, left, at)
                    left, at = left[written_bytes:], at + written_bytes
            finally:
                os.close(descriptor)
        except OSError as error:
            if (full := no_room(error, self.folder)) is not None:
                raise full from error
            raise

    def write(self, start: int, rows_RS: Float32Array) -> None:
        """Put rows of all columns in their place; errors as `write_file`."""
        for file in range(len(self)):
            self.write_file(file, start, rows_RS[:, self.columns(file)])

    def delete(self) -> None:
        for file in range(len(self)):
            self._path(file).unlink(missing_ok=True)

    def _path(self, file: int) -> Path:
        return self.folder / f"{self.name}-{file:03}.columns"

    def _width(self, file: int) -> int:
        columns = self.columns(file)
        return columns.stop - columns.start


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Another name to write a file under; it has its own after the block, and is gone after an error.

    Raises:
        NoRoomError: the disk is full.
    """
    try:
        with written_whole(path) as unfinished:
            yield unfinished
    except BaseException as error:
        if (full := no_room(error, path.parent)) is not None:
            raise full from error
        raise


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write raw numbers, whole or not at all.

    Raises:
        NoRoomError: the disk is full.
    """
    with written(path) as unfinished:
        np.ascontiguousarray(array).tofile(unfinished)


def mapped(path: Path, dtype: str) -> NDArray[Any]:
    """The numbers of a file, read-only; the memory is shared by the processes of a node."""
    return np.memmap(path, dtype, "r")


@contextmanager
def one_thread() -> Iterator[None]:
    """Arithmetic of torch inside the block has one thread: how many there are must not change a rounding,
    and the other processors have tasks of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
