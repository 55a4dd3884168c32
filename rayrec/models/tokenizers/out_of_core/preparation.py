"""`VectorPreparation` of item vectors in files: means and covariances are summed block by block.

    blocks ─► products of each, in files ─► strips of rows, each summed over all blocks ─► one covariance

No process has the products of more than one block: of 1,024 dimensions they take 8 MiB a block.

Axes: I items, R items of a block, D dimensions of a source or of all of them, C components.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rayrec.models.tokenizers.out_of_core.components import RunStage, eigen_of
from rayrec.models.tokenizers.out_of_core.row_files import (
    Blocks,
    RowFiles,
    mapped,
    one_thread,
    write_array,
)
from rayrec.models.tokenizers.vector_preparation import (
    BlockScaling,
    PreparedVectors,
    PrincipalComponents,
    VectorPreparation,
    known_rows,
)
from rayrec.platform.arrays import Float64Array, Int64Array

_STRIP_ROWS = 128
"""Of the covariance that one task sums over all blocks; changes no bit."""


@dataclass(frozen=True)
class Sources:
    """The vectors of all items, from each of some sources."""

    files: Mapping[str, RowFiles]
    ids_file: Path
    """[I] ids, int64."""
    blocks: Blocks

    def read(self, start: int, stop: int) -> tuple[dict[str, np.ndarray], Int64Array]:
        """Vectors by source, and ids, of items start to stop - 1."""
        ids_R = np.array(mapped(self.ids_file, "<i8")[start:stop])
        return {name: files.read(start, stop) for name, files in self.files.items()}, ids_R

    def take(self, items_R: Int64Array) -> tuple[dict[str, np.ndarray], Int64Array]:
        """Those of some items."""
        ids_R = np.array(mapped(self.ids_file, "<i8")[items_R])
        return {name: files.take(items_R) for name, files in self.files.items()}, ids_R


class _Sums(NamedTuple):
    """Of the known rows of a block."""

    num_known: int
    sum_D: Float64Array
    largest: float


def fit_preparation(
    sources: Sources, weights: Mapping[str, float], num_components: int, seed: int, run: RunStage
) -> VectorPreparation:
    """As `VectorPreparation.fit`, its errors included."""
    tasks = sources.blocks.tasks()
    means_D: dict[str, Float64Array] = {}
    counts: dict[str, int] = {}
    largest: dict[str, float] = {}
    for name, files in sources.files.items():
        found = [each for task in run(f"sums-{name}", _sums, (files, sources.blocks), tasks) for each in task]
        counts[name] = sum(each.num_known for each in found)
        if not counts[name]:
            raise ValueError(f"the {name} vectors know none of {files.num_rows} items")
        total_D = np.zeros(files.dim)
        for each in found:
            total_D += each.sum_D
        means_D[name] = total_D / counts[name]
        largest[name] = max(each.largest for each in found)
    lengths: dict[str, float] = {}
    for name, files in sources.files.items():
        shared = (files, sources.blocks, means_D[name])
        squares = [each for task in run(f"squares-{name}", _squares, shared, tasks) for each in task]
        lengths[name] = float(np.sqrt(sum(squares) / counts[name]))
        if lengths[name] <= 1e-6 * largest[name]:
            raise ValueError(f"the {name} vectors of all {counts[name]} known items are the same")
    scaling = BlockScaling(means_D, lengths, {name: float(weights.get(name, 1.0)) for name in means_D}, seed)
    dim = sum(files.dim for files in sources.files.values())
    run("products", _write_products, (sources, scaling), tasks)
    strips = [range(first, min(first + _STRIP_ROWS, dim + 1)) for first in range(0, dim + 1, _STRIP_ROWS)]
    summed = np.concatenate(run("covariance", _sum_products, (sources, dim), strips))
    for block in range(len(sources.blocks)):
        _products_file(sources, block).unlink(missing_ok=True)
    sum_D, products_DD = summed[0], summed[1:]
    num_items = sources.blocks.num_rows
    mean_D = sum_D / num_items
    if num_components >= dim:
        return VectorPreparation(scaling, PrincipalComponents(mean_D, None))
    centered_DD = products_DD - num_items * np.outer(mean_D, mean_D)
    _, directions_DD = eigen_of(centered_DD, "directions", run)
    directions_DC = np.ascontiguousarray(directions_DD[:, : -num_components - 1 : -1])
    return VectorPreparation(scaling, PrincipalComponents(mean_D, directions_DC))


def prepared(
    preparation: VectorPreparation, vectors: Mapping[str, np.ndarray], ids_R: Int64Array
) -> PreparedVectors:
    """As `VectorPreparation.apply`, with one thread."""
    scaled = preparation.scaling.apply(vectors, ids_R)
    components = preparation.components
    centered_RD = torch.from_numpy(scaled.vectors_ID.astype(np.float64) - components.mean_D)
    if components.directions_DC is not None:
        with one_thread():
            centered_RD = centered_RD @ torch.from_numpy(np.ascontiguousarray(components.directions_DC))
    return PreparedVectors(centered_RD.float().numpy(), scaled.num_without_data)


def _sums(shared: tuple[RowFiles, Blocks], blocks: range) -> list[_Sums]:
    files, all_blocks = shared
    found = []
    for block in blocks:
        rows_RD = files.read(*all_blocks.span(block))
        known_RD = rows_RD[known_rows(rows_RD)].astype(np.float64)
        found.append(_Sums(len(known_RD), known_RD.sum(axis=0), float(np.abs(known_RD).max(initial=0.0))))
    return found


def _squares(shared: tuple[RowFiles, Blocks, Float64Array], blocks: range) -> list[float]:
    files, all_blocks, mean_D = shared
    found = []
    for block in blocks:
        rows_RD = files.read(*all_blocks.span(block))
        known_RD = rows_RD[known_rows(rows_RD)].astype(np.float64)
        found.append(float(np.square(known_RD - mean_D).sum()))
    return found


def _products_file(sources: Sources, block: int) -> Path:
    """[1 + D, D] float64: the sum of a block's rows, and the sums of their products."""
    return sources.ids_file.with_name(f"products-{block:06}.f64")


def _write_products(shared: tuple[Sources, BlockScaling], blocks: range) -> None:
    sources, scaling = shared
    for block in blocks:
        rows_RD = torch.from_numpy(
            scaling.apply(*sources.read(*sources.blocks.span(block))).vectors_ID
        ).double()
        with one_thread():
            sums = torch.cat((rows_RD.sum(dim=0)[None], rows_RD.T @ rows_RD))
        write_array(_products_file(sources, block), sums.numpy())


def _sum_products(shared: tuple[Sources, int], strip: range) -> Float64Array:
    """Some rows of the sum of all blocks' files: in the order of the blocks, whatever a task takes."""
    sources, dim = shared
    total_SD = np.zeros((len(strip), dim))
    for block in range(len(sources.blocks)):
        path = _products_file(sources, block)
        total_SD += np.fromfile(path, np.float64, total_SD.size, offset=8 * dim * strip.start).reshape(
            -1, dim
        )
    return total_SD
