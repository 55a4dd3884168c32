"""What every tokenizer's core has to offer: from finite vectors to tuples of codes, and back.

Axes: I items, L levels, K codes of a level, D dimensions of a vector, W dimensions of a centroid (D, or those
of a latent space or of a subspace).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

from numpy.typing import NDArray
from torch import Tensor

from rayrec.platform.arrays import Float32Array


class Quantizer(Protocol):
    """Fitted once, on the device of the vectors it is given; the same vectors, seed and kind of device give
    the same codes. A code depends on the vector alone, so that items which were not fitted have codes too."""

    num_levels: int
    codebook_size: int
    num_iterations: int

    def __init__(
        self, num_levels: int, codebook_size: int, seed: int, num_iterations: int | None = None
    ) -> None:
        """`num_iterations` are rounds over the vectors; None takes what suits the method."""

    @property
    def codebooks_LKD(self) -> Tensor:
        """[L, K, W] float32 centroids. Raises ValueError before `fit`."""

    @property
    def description(self) -> str:
        """How the codes are made, for people."""

    def fit(self, vectors_ID: Tensor, may_leave_unused: bool = False) -> Self:
        """Learn from [I, D] vectors.

        Args:
            may_leave_unused: where the levels before leave fewer distinct residuals than codes, or parts of
                vectors have fewer distinct values, let codes be unused instead of raising.

        Raises:
            ValueError: a vector holds NaN or infinity, or there are fewer distinct vectors than codes.
        """

    def encode(self, vectors_ID: Tensor) -> Tensor:
        """[I, L] int64 codes."""

    def decode(self, codes_IL: Tensor) -> Tensor:
        """[I, D] vectors near those that were encoded; fewer columns than levels are coarser."""

    def last_level_distances(self, vectors_ID: Tensor, codes_IL: Tensor) -> Tensor:
        """[I, K] squared distances that the last code is chosen by, given the codes before it."""

    def arrays(self) -> dict[str, Float32Array]:
        """All that was learned; with the arguments of the constructor, `restore` makes the same of it."""

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Take what was learned before. Raises KeyError or ValueError if that is something else."""
