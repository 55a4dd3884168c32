"""The truncated singular value decomposition of a sparse matrix in files, in passes over it.

    random [I, S] ─► M x ─► orthonormal ─► (M^T x ─► orthonormal ─► M x ─► orthonormal) * rounds ─► M^T x

A pass reads the matrix once for each 16 columns of x, which are mapped: 64 bytes an item. A product's row has
the order of its entries, in whichever process. Columns are made orthonormal by their Gram matrix, a sum over
blocks of rows, in double precision.

Source: randomized subspace iteration, Halko, Martinsson and Tropp, arXiv:0909.4061, algorithms 4.4 and 5.1;
orthonormal columns from the eigenvectors of the Gram matrix, Stathopoulos and Wu, SIAM J. Sci. Comput. 2002.

Axes: I items, D dimensions, S columns of the sketch, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from rayrec.models.tokenizers.out_of_core.neighbors import NeighborFiles, read_arrays
from rayrec.models.tokenizers.out_of_core.row_files import Blocks, ColumnFiles, RowFiles, one_thread
from rayrec.platform.arrays import Float64Array
from rayrec.platform.tasks import Task

ROUNDS = 2
"""Of the subspace iteration: on Amazon Beauty, recall of next items by these vectors is that of four rounds
(0.064 and 0.061 at 10); with none it is half."""
_MORE_COLUMNS = 16
"""Of the sketch than are wanted: what is cut off at the end takes most of the error."""
_SMALLEST = 1e-10
"""Eigenvalues of a Gram matrix below such a part of the largest are rounding."""


class RunStage(Protocol):
    """Runs a stage's tasks, unless an interrupted run has done them, and returns their results in order."""

    def __call__(self, stage: str, task: Task, shared: Any, arguments: Sequence[Any]) -> list[Any]: ...


@dataclass(frozen=True)
class _Pass:
    """What tasks of one pass share."""

    neighbors: NeighborFiles
    blocks: Blocks
    source: ColumnFiles
    target: ColumnFiles
    values: str = "forward"
    """Of the matrix: `forward`, or `backward` for the transposed one."""
    right: Float64Array | None = None
    """[S, S or D] what blocks are multiplied by."""
    seed: int = 0


def interaction_rows(
    neighbors: NeighborFiles,
    blocks: Blocks,
    dim: int,
    seed: int,
    name: str,
    run: RunStage,
    parts_per_task: int,
) -> RowFiles:
    """[I, D] vectors of the items, as `item_vectors.interaction_vectors` defines them; NaN rows of others.

    Args:
        neighbors: whose information is there.
        seed: of the sketch.
        name: of the files of vectors.
        parts_per_task: parts of the matrix that one task multiplies.

    Raises:
        ValueError: no item has information about another.
        NoRoomError: the disk is full.
    """
    num_columns = min(dim + _MORE_COLUMNS, neighbors.num_items)
    dim = min(dim, neighbors.num_items)
    vectors = RowFiles(neighbors.folder, name, neighbors.num_items, dim, blocks.rows)

    def files(pass_name: str) -> ColumnFiles:
        return ColumnFiles(neighbors.folder, pass_name, neighbors.num_items, num_columns)

    sketch = _Pass(neighbors, blocks, files("sketch"), files("sketch"), seed=seed)
    run("sketch", _draw, sketch, blocks.tasks())
    step = replace(sketch, target=files("product-0"))
    orders = ["forward", *("backward", "forward") * ROUNDS]
    for number, values in enumerate(orders):
        product, basis = files(f"product-{number}"), files(f"basis-{number}")
        step = replace(step, target=product, values=values)
        _multiply(step, f"product-{number}", run, parts_per_task)
        step.source.delete()
        eigen, directions_SS = _eigen(product, step, str(number), run)
        if eigen[-1] <= 0:
            raise ValueError(f"the neighbors of {neighbors.num_items} items tell nothing of one another")
        # Directions that are rounding are left out: columns of zeros.
        scale_S = np.where(eigen > _SMALLEST * eigen[-1], 1.0 / np.sqrt(np.maximum(eigen, 1e-300)), 0.0)
        step = replace(step, source=product, target=basis, right=directions_SS * scale_S)
        run(f"basis-{number}", _turn, step, blocks.tasks())
        product.delete()
        step = replace(step, source=basis, right=None)
    basis, last = step.source, files("last")
    step = replace(step, target=last, values="backward")
    _multiply(step, "last", run, parts_per_task)
    eigen, directions_SS = _eigen(last, step, "last", run)
    last.delete()
    roots_D = np.maximum(eigen[::-1][:dim], 0.0) ** 0.25  # of singular values
    step = replace(step, source=basis, right=directions_SS[:, ::-1][:, :dim] * roots_D)
    run(name, _write_vectors, (step, vectors), blocks.tasks())
    basis.delete()
    return vectors


def _multiply(step: _Pass, stage: str, run: RunStage, parts_per_task: int) -> None:
    parts = range(step.neighbors.num_parts)
    arguments = [
        (file, parts[first : first + parts_per_task])
        for file in range(len(step.source))
        for first in range(0, len(parts), parts_per_task)
    ]
    run(stage, _multiply_parts, step, arguments)


def _multiply_parts(step: _Pass, what: tuple[int, range]) -> None:
    """Some rows of the matrix times the columns of one file."""
    from scipy.sparse import csr_array

    file, parts = what
    columns = step.source.mapped(file)
    for part in parts:
        first, stop = step.neighbors.bounds_P1[part : part + 2]
        arrays = read_arrays(step.neighbors.information(part))
        matrix = csr_array(
            (arrays[step.values], arrays["columns"], arrays["starts"]),
            shape=(stop - first, step.neighbors.num_items),
        )
        step.target.write_file(file, first, matrix @ columns)


def _eigen(files: ColumnFiles, step: _Pass, stage: str, run: RunStage) -> tuple[Float64Array, Float64Array]:
    """Eigenvalues, rising, and eigenvectors of the Gram matrix of the columns."""
    gram_SS = np.zeros((files.num_columns, files.num_columns))
    for grams in run(f"gram-{stage}", _gram, replace(step, source=files, right=None), step.blocks.tasks()):
        for block_SS in grams:
            gram_SS += block_SS
    return eigen_of(gram_SS, f"eigen-{stage}", run)


def eigen_of(matrix_SS: Float64Array, stage: str, run: RunStage) -> tuple[Float64Array, Float64Array]:
    """Eigenvalues, rising, and eigenvectors of a symmetric matrix.

    A task, so that the result is kept: another processor, on which an interrupted run goes on, would have
    other last bits.
    """
    (found,) = run(stage, _solve, matrix_SS, [None])
    eigen: tuple[Float64Array, Float64Array] = found
    return eigen


def _solve(matrix_SS: Float64Array, _: None) -> tuple[Float64Array, Float64Array]:
    with one_thread():
        values_S, vectors_SS = torch.linalg.eigh(torch.tensor(matrix_SS))
    return values_S.numpy(), vectors_SS.numpy()


def _draw(step: _Pass, blocks: range) -> None:
    for block in blocks:
        start, stop = step.blocks.span(block)
        random = np.random.default_rng([step.seed, block])
        step.target.write(start, random.standard_normal((stop - start, step.target.num_columns), np.float32))


def _gram(step: _Pass, blocks: range) -> list[Float64Array]:
    grams = []
    with one_thread():
        for block in blocks:
            rows_RS = torch.from_numpy(step.source.read(*step.blocks.span(block))).double()
            grams.append((rows_RS.T @ rows_RS).numpy())
    return grams


def _turn(step: _Pass, blocks: range) -> None:
    for start, turned in _turned(step, blocks):
        step.target.write(start, turned.astype(np.float32))


def _write_vectors(shared: tuple[_Pass, RowFiles], blocks: range) -> None:
    """Rows scaled to length one; of nothing but zeros, NaN."""
    step, vectors = shared
    for block, (_, turned) in zip(blocks, _turned(step, blocks), strict=True):
        length_R1 = np.linalg.norm(turned, axis=1, keepdims=True)
        unit = np.full(turned.shape, np.nan, dtype=np.float32)
        np.divide(turned, length_R1, out=unit, where=length_R1 > 0, casting="same_kind")
        vectors.write(block, unit)


def _turned(step: _Pass, blocks: range) -> Iterator[tuple[int, Float64Array]]:
    """(first row, [R, S or D] its rows times `right`) of each block."""
    assert step.right is not None
    right = torch.from_numpy(np.ascontiguousarray(step.right))
    for block in blocks:
        start, stop = step.blocks.span(block)
        with one_thread():
            turned = torch.from_numpy(step.source.read(start, stop)).double() @ right
        yield start, turned.numpy()
