"""Which chunks of a history need no computing, since their summaries are there.

Axes: X chunks of a batch, F chunks of a history; K vectors of a chunk, D numbers of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Float32Array
from rayrec.samples.base.batches import OldChunks


@dataclass(frozen=True)
class Summaries:
    """What a model reads in the place of a history's old chunks, of one version of its weights."""

    hashes_F: NDArray[np.uint64]
    """Of each chunk's events (`OldChunks.hashes_X`), oldest first. One is used for a chunk of the same hash
    alone, so that those of other events do no harm."""
    vectors_FKD: Float32Array


def with_known(chunks: OldChunks, known: Sequence[Summaries | None]) -> OldChunks:
    """The chunks, with the summaries that are there.

    Args:
        known: of each row.

    Raises:
        ValueError: they are not all of one shape.
    """
    there = [each for each in known if each is not None and len(each.hashes_F)]
    if not there or not len(chunks.ages_X):
        return chunks
    shape = there[0].vectors_FKD.shape[1:]
    hashes_X = chunks.hashes_X.tolist()
    is_known_X = np.zeros(len(hashes_X), dtype=np.bool_)
    known_XKD = np.zeros((len(hashes_X), *shape), dtype=np.float32)
    for row, summaries in enumerate(known):
        if summaries is None or not len(summaries.hashes_F):
            continue
        if summaries.vectors_FKD.shape != (len(summaries.hashes_F), *shape):
            raise ValueError(
                f"summaries of {len(summaries.hashes_F)} chunks have the shape "
                f"{summaries.vectors_FKD.shape}, others vectors of {shape}"
            )
        place_of = {each: place for place, each in enumerate(summaries.hashes_F.tolist())}
        for chunk in range(chunks.offsets_B1[row], chunks.offsets_B1[row + 1]):
            if (place := place_of.get(hashes_X[chunk])) is not None:
                is_known_X[chunk], known_XKD[chunk] = True, summaries.vectors_FKD[place]
    return replace(chunks, is_known_X=is_known_X, known_XKD=known_XKD)


def within_budget(chunks: OldChunks, most_new: Sequence[int | None]) -> tuple[OldChunks, BoolArray]:
    """The chunks without such as would be too many to compute, the oldest of a row's unknown ones.

    Args:
        most_new: chunks of each row that may be computed; None: all.

    Returns:
        The chunks, and [B] whether some of a row are left out.
    """
    num_rows = len(chunks.offsets_B1) - 1
    is_left_out_X = np.zeros(len(chunks.ages_X), dtype=np.bool_)
    lacks_B = np.zeros(num_rows, dtype=np.bool_)
    for row, most in enumerate(most_new):
        if most is None:
            continue
        mine = np.arange(chunks.offsets_B1[row], chunks.offsets_B1[row + 1])
        new = mine if chunks.is_known_X is None else mine[~chunks.is_known_X[mine]]
        too_many = new[: max(len(new) - most, 0)]
        is_left_out_X[too_many], lacks_B[row] = True, len(too_many) > 0
    if not lacks_B.any():
        return chunks, lacks_B
    return chunks.some(np.flatnonzero(~is_left_out_X)), lacks_B
