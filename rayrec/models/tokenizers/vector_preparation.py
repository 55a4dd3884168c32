"""From blocks of item vectors to the vectors that are quantized: one fitted object, kept with the codebooks.

    raw blocks ─► center, scale, weigh, side by side ─► principal components
                  (BlockScaling)                         (PrincipalComponents)

What was fitted on the items of one catalog is applied to new items as it is, or their codes would mean
something else.

Axes: I items, D dimensions of a block or of all of them, C components.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from rayrec.platform.hashing import combine64


@dataclass(frozen=True)
class PreparedVectors:
    """A finite vector for every item."""

    vectors_ID: Float32Array
    num_without_data: int
    """Items about which no block knew anything; they got a vector of noise."""


@dataclass(frozen=True)
class BlockScaling:
    """Puts blocks side by side so that each has its weight in a squared distance, and fills gaps.

    A block is centered and divided by the root mean square length of its rows,
    then multiplied by the square root of its weight. An item that
    one block does not know has the block's mean there. An item that no
    block knows gets the mean of all, perturbed by noise of length one that
    depends on (seed, item id) alone: it is as far from the mean as a usual item
    is, but in no direction that means anything, so such items neither pull a
    cluster together nor end up with one tuple.
    """

    means_D: Mapping[str, Float64Array]
    """By name of block, in the order in which they stand side by side."""
    lengths: Mapping[str, float]
    weights: Mapping[str, float]
    seed: int
    """Of the noise."""

    @classmethod
    def fit(
        cls, blocks: Mapping[str, Float32Array], weights: Mapping[str, float] | None = None, seed: int = 0
    ) -> BlockScaling:
        """Learn how to center, scale and reduce blocks of item vectors.

        Args:
            blocks: By name, [I, D] with NaN rows for unknown items.
            weights: By name of block; positive, 1 unless given.

        Raises:
            ValueError: no block, a weight without block or not positive, a block
                that knows no item, or one whose known rows are all the same.
        """
        weights = weights or {}
        if not blocks or set(weights) - set(blocks):
            raise ValueError(f"there are vectors from {sorted(blocks)}, but weights for {sorted(weights)}")
        means_D, lengths = {}, {}
        for name, block_ID in blocks.items():
            if weights.get(name, 1.0) <= 0:
                raise ValueError(f"the weight of the {name} vectors must be positive, got {weights[name]}")
            known_ID = block_ID[known_rows(block_ID)].astype(np.float64)
            if not len(known_ID):
                raise ValueError(f"the {name} vectors know none of {len(block_ID)} items")
            means_D[name] = known_ID.mean(axis=0)
            lengths[name] = float(np.sqrt(np.square(known_ID - means_D[name]).sum(axis=1).mean()))
            if lengths[name] <= 1e-6 * np.abs(known_ID).max():
                raise ValueError(f"the {name} vectors of all {len(known_ID)} known items are the same")
        return cls(means_D, lengths, {name: float(weights.get(name, 1.0)) for name in blocks}, seed)

    def apply(self, blocks: Mapping[str, Float32Array], item_ids_I: Int64Array) -> PreparedVectors:
        """Prepare blocks of vectors in the way that was fitted.

        Args:
            blocks: Some or all of those fitted; one that is not there knows no item.

        Raises:
            ValueError: a block that was not fitted, or of another shape.
        """
        if unknown := set(blocks) - set(self.means_D):
            raise ValueError(
                f"there are vectors from {sorted(unknown)}, but only {[*self.means_D]} were fitted"
            )
        is_known_I = np.zeros(len(item_ids_I), dtype=bool)
        scaled = []
        for name, mean_D in self.means_D.items():
            filled_ID = np.zeros((len(item_ids_I), len(mean_D)))
            if name in blocks:
                block_ID = blocks[name]
                if len(block_ID) != len(item_ids_I):
                    raise ValueError(f"{len(item_ids_I)} items, but {len(block_ID)} {name} vectors")
                if block_ID.shape[1] != len(mean_D):
                    raise ValueError(
                        f"the {name} vectors have {block_ID.shape[1]} dimensions; {len(mean_D)} were fitted"
                    )
                known_I = known_rows(block_ID)
                filled_ID[known_I] = (block_ID[known_I].astype(np.float64) - mean_D) / self.lengths[name]
                is_known_I |= known_I
            scaled.append(np.sqrt(self.weights[name]) * filled_ID)
        vectors_ID = np.concatenate(scaled, axis=1)
        # The blocks are centered: the mean of all is zero.
        vectors_ID[~is_known_I] = _unit_noise(item_ids_I[~is_known_I], vectors_ID.shape[1], self.seed)
        return PreparedVectors(vectors_ID.astype(np.float32), int((~is_known_I).sum()))


@dataclass(frozen=True)
class PrincipalComponents:
    """Coordinates along the directions of largest variance, about the mean.

    Residual k-means needs few dimensions: what is left of wide vectors after a level or two points
    everywhere, a centroid near zero is then closer to most of them than any other is, and a level ends
    with most items in a handful of its codes.
    """

    mean_D: Float64Array
    directions_DC: Float64Array | None
    """None: vectors are centered, and keep their dimensions."""

    @classmethod
    def fit(cls, vectors_ID: Float32Array, dim: int) -> PrincipalComponents:
        """The first `dim` directions; all dimensions as they are if there are no more."""
        mean_D = np.asarray(np.mean(vectors_ID, axis=0, dtype=np.float64))
        if dim >= vectors_ID.shape[1]:
            return cls(mean_D, None)
        centered_ID = np.asarray(vectors_ID, dtype=np.float64) - mean_D
        _, directions_DD = np.linalg.eigh(centered_ID.T @ centered_ID)  # by rising eigenvalue
        return cls(mean_D, np.ascontiguousarray(directions_DD[:, : -dim - 1 : -1]))

    def apply(self, vectors_ID: Float32Array) -> Float32Array:
        """[I, C] coordinates."""
        centered_ID = np.asarray(vectors_ID, dtype=np.float64) - self.mean_D
        if self.directions_DC is not None:
            centered_ID = centered_ID @ self.directions_DC
        return centered_ID.astype(np.float32)


@dataclass(frozen=True)
class VectorPreparation:
    """Scaling, then components; everything between raw blocks and a quantizer."""

    scaling: BlockScaling
    components: PrincipalComponents

    @classmethod
    def fit(
        cls,
        blocks: Mapping[str, Float32Array],
        item_ids_I: Int64Array,
        weights: Mapping[str, float] | None = None,
        num_components: int = 64,
        seed: int = 0,
    ) -> VectorPreparation:
        """Arguments and errors as those of `BlockScaling` and `PrincipalComponents`."""
        scaling = BlockScaling.fit(blocks, weights, seed)
        vectors = scaling.apply(blocks, item_ids_I)
        return cls(scaling, PrincipalComponents.fit(vectors.vectors_ID, num_components))

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks that were fitted."""
        return tuple(self.scaling.means_D)

    def apply(self, blocks: Mapping[str, Float32Array], item_ids_I: Int64Array) -> PreparedVectors:
        """Vectors to quantize, of items that were fitted or of others; errors as `BlockScaling.apply`."""
        vectors = self.scaling.apply(blocks, item_ids_I)
        return PreparedVectors(self.components.apply(vectors.vectors_ID), vectors.num_without_data)

    def settings(self) -> dict[str, Any]:
        """Plain JSON values; with `arrays`, all that was fitted."""
        scaling = self.scaling
        blocks = [
            {"name": name, "length": scaling.lengths[name], "weight": scaling.weights[name]}
            for name in self.blocks
        ]
        return {"blocks": blocks, "seed": scaling.seed}

    def arrays(self) -> dict[str, Float64Array]:
        arrays = {f"block_mean_D.{name}": mean_D for name, mean_D in self.scaling.means_D.items()}
        arrays["mean_D"] = self.components.mean_D
        if self.components.directions_DC is not None:
            arrays["directions_DC"] = self.components.directions_DC
        return arrays

    @classmethod
    def from_saved(cls, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> VectorPreparation:
        """Raises KeyError or TypeError for what `settings` and `arrays` did not make."""
        blocks = settings["blocks"]
        scaling = BlockScaling(
            {block["name"]: arrays[f"block_mean_D.{block['name']}"] for block in blocks},
            {block["name"]: block["length"] for block in blocks},
            {block["name"]: block["weight"] for block in blocks},
            settings["seed"],
        )
        return cls(scaling, PrincipalComponents(arrays["mean_D"], arrays.get("directions_DC")))


def known_rows(block_ID: Float32Array) -> BoolArray:
    return np.asarray(np.isfinite(block_ID).all(axis=1))


def _unit_noise(item_ids_G: Int64Array, dim: int, seed: int) -> Float64Array:
    """[G, D] vectors of length one, each a function of (seed, id)."""
    bits_GD = combine64(seed, item_ids_G[:, None], np.arange(dim))
    centered_GD = (bits_GD >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    return centered_GD / np.linalg.norm(centered_GD, axis=1, keepdims=True)
