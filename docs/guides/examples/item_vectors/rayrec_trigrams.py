"""Item vectors from the letters of the items' texts: similar words give similar vectors."""

from __future__ import annotations

import zlib

import numpy as np
from pydantic import Field

from rayrec.models import ItemData, ItemVectorSource, Progress


class TrigramVectors(ItemVectorSource):
    """Counts of three letters in a row, each hashed to one of `dim` numbers."""

    dim: int = Field(256, gt=0)

    def vectors(self, items: ItemData, progress: Progress | None = None) -> np.ndarray:
        vectors_ID = np.full((len(items.texts), self.dim), np.nan, dtype=np.float32)
        for position, text in enumerate(items.texts):
            if not text:
                continue  # a row of NaN: nothing is known about this item
            padded = f"  {text.lower()} "
            hashes = [zlib.crc32(padded[start : start + 3].encode()) for start in range(len(padded) - 2)]
            counts_D = np.bincount(np.array(hashes) % self.dim, minlength=self.dim)
            vectors_ID[position] = counts_D / np.linalg.norm(counts_D)
        return vectors_ID
