"""A tokenizer: code l of an item is the bin of the l-th number of its vector, bins of about equal count.

Axes: I items, L levels, K codes of a level, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class QuantileTokenizer:
    def __init__(
        self, num_levels: int, codebook_size: int, seed: int, num_iterations: int | None = None
    ) -> None:
        self.num_levels = num_levels
        self.codebook_size = codebook_size
        self.num_iterations = 1  # nothing here is iterated
        self._centers_LK: Tensor | None = None
        self._dim = 0

    def fit(self, vectors_ID: Tensor, may_leave_unused: bool = False) -> QuantileTokenizer:
        if vectors_ID.shape[1] < self.num_levels:
            raise ValueError(f"{self.num_levels} levels need vectors of as many numbers or more")
        middles_K = (torch.arange(self.codebook_size) + 0.5) / self.codebook_size
        self._centers_LK = vectors_ID[:, : self.num_levels].float().quantile(middles_K, dim=0).T.contiguous()
        self._dim = vectors_ID.shape[1]
        return self

    @property
    def codebooks_LKD(self) -> Tensor:
        if self._centers_LK is None:
            raise ValueError("fit the tokenizer first")
        return self._centers_LK[:, :, None]

    @property
    def description(self) -> str:
        return f"quantiles, {self.num_levels} levels of {self.codebook_size} codes"

    def encode(self, vectors_ID: Tensor) -> Tensor:
        distances_ILK = (vectors_ID[:, : self.num_levels, None] - self.codebooks_LKD[None, :, :, 0]).abs()
        return distances_ILK.argmin(dim=2)

    def decode(self, codes_IL: Tensor) -> Tensor:
        vectors_ID = torch.zeros(len(codes_IL), self._dim)
        for level in range(codes_IL.shape[1]):
            vectors_ID[:, level] = self.codebooks_LKD[level, codes_IL[:, level], 0]
        return vectors_ID

    def last_level_distances(self, vectors_ID: Tensor, codes_IL: Tensor) -> Tensor:
        last = self.num_levels - 1
        return (vectors_ID[:, last, None] - self.codebooks_LKD[None, last, :, 0]).square()

    def arrays(self) -> dict[str, Any]:
        return {"centers": self.codebooks_LKD[:, :, 0].numpy(), "dim": np.array([self._dim], np.float32)}

    def restore(self, arrays: Mapping[str, Any]) -> QuantileTokenizer:
        self._centers_LK = torch.from_numpy(arrays["centers"])
        self._dim = int(arrays["dim"][0])
        if self._centers_LK.shape != (self.num_levels, self.codebook_size):
            raise ValueError(f"expected {self.num_levels} levels of {self.codebook_size} codes")
        return self
