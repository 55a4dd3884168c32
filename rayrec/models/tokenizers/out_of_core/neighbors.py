"""How often items occur near each other, counted in pieces of the sequences: a sparse matrix in files.

    piece of sequences ─► pairs, sorted and added up ─► a file, divided by the row's item
                          files of all pieces ─► counts of some items ─► information of these

Counts are whole numbers, so that the order in which they are added says nothing: two events t places apart
count a multiple of 1/t.

Axes: I items, N events, B sequences (offsets_B1), E entries of the matrix, P parts of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.models.tokenizers.item_vectors import CONTEXT_SMOOTHING
from rayrec.models.tokenizers.out_of_core.row_files import mapped, write_array, written
from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.mapped_tensors import mapped_tensors, write_tensors

_FINEST = 1 << 20
"""Weights are exact in windows up to 16 places; in wider ones they are rounded to such a part."""
_ENTRY = np.dtype([("key", "<i8"), ("count", "<i8")])
MOST_ITEMS = 1 << 30


@dataclass(frozen=True)
class NeighborFiles:
    """The files of one matrix, which tasks write and read."""

    folder: Path
    num_items: int
    window: int
    bounds_P1: tuple[int, ...]
    """Part p has the rows of items bounds[p] to bounds[p + 1] - 1."""

    @property
    def num_parts(self) -> int:
        return len(self.bounds_P1) - 1

    def pairs(self, piece: int) -> Path:
        return self.folder / f"pairs-{piece:06}.entries"

    def totals(self, part: int) -> Path:
        return self.folder / f"totals-{part:06}.f64"

    @property
    def all_totals(self) -> Path:
        return self.folder / "totals.f64"

    def counts(self, part: int) -> Path:
        return self.folder / f"counts-{part:06}.safetensors"

    def information(self, part: int) -> Path:
        return self.folder / f"information-{part:06}.safetensors"


def bounds_of_parts(num_items: int, num_entries: int, entries_of_part: int) -> tuple[int, ...]:
    """Rows divided evenly, so that a part has about so many entries; items come in the order of a hash."""
    num_parts = min(max(1, -(-num_entries // entries_of_part)), num_items)
    return tuple(number * num_items // num_parts for number in range(num_parts + 1))


def spill_pairs(
    files: NeighborFiles, piece: int, positions_N: Int64Array, offsets_B1: Int64Array
) -> list[int]:
    """Write the pairs of a piece of the sequences.

    Args:
        positions_N: catalog positions of the events, oldest first; none is negative.

    Returns:
        [P + 1] where the entries of each part begin in the file.

    Raises:
        NoRoomError: the disk is full.
    """
    key_E, count_E = pair_counts(positions_N, offsets_B1, files.num_items, files.window)
    entries_E = np.empty(len(key_E), dtype=_ENTRY)
    entries_E["key"], entries_E["count"] = key_E, count_E
    write_array(files.pairs(piece), entries_E)
    firsts = np.array(files.bounds_P1, dtype=np.int64) * files.num_items
    starts: list[int] = np.searchsorted(key_E, firsts).tolist()
    return starts


def pair_counts(
    positions_N: Int64Array, offsets_B1: Int64Array, num_items: int, window: int
) -> tuple[Int64Array, Int64Array]:
    """([E] ascending item * num_items + neighbor, [E] how often), both directions of each pair."""
    assert num_items <= MOST_ITEMS
    row_N = np.repeat(np.arange(len(offsets_B1) - 1), np.diff(offsets_B1))
    weights = weights_of(window)
    keys_T: list[Int64Array] = []
    counts_T: list[Int64Array] = []
    for distance in range(1, window + 1):
        left, right = positions_N[:-distance], positions_N[distance:]
        # An item beside itself says nothing about how it relates to others.
        pair = (row_N[:-distance] == row_N[distance:]) & (left != right)
        left, right = left[pair], right[pair]
        # Sorting numbers is five times as fast as sorting which of them come first.
        keys = np.sort(np.concatenate([left * num_items + right, right * num_items + left]))
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        keys_T.append(keys[starts])
        counts_T.append(np.diff(starts, append=len(keys)) * weights[distance - 1])
    return added_up(np.concatenate(keys_T), np.concatenate(counts_T))


def weights_of(window: int) -> list[int]:
    """Of neighbors 1, 2, ... places apart: in proportion to 1/t."""
    whole = math.lcm(*range(1, window + 1))
    if whole <= _FINEST:
        return [whole // distance for distance in range(1, window + 1)]
    return [round(_FINEST / distance) for distance in range(1, window + 1)]


def added_up(key_E: Int64Array, count_E: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Each key once, ascending, with the sum of its counts."""
    if not len(key_E):
        return key_E, count_E
    order_E = np.argsort(key_E, kind="stable")
    key_E, count_E = key_E[order_E], count_E[order_E]
    starts = np.flatnonzero(np.diff(key_E, prepend=-1))
    return key_E[starts], np.add.reduceat(count_E, starts)


def merge_part(files: NeighborFiles, part: int, starts_of_pieces: Sequence[tuple[int, int]]) -> int:
    """Write the counts of one part out of the files of all pieces, and the total of each of its items.

    Args:
        starts_of_pieces: first entry of the part in the file of each piece, and the one after its last.

    Returns:
        Entries.

    Raises:
        NoRoomError: the disk is full.
    """
    entries = [
        np.fromfile(files.pairs(piece), _ENTRY, stop - start, offset=start * _ENTRY.itemsize)
        for piece, (start, stop) in enumerate(starts_of_pieces)
        if stop > start
    ]
    entries_E = np.concatenate(entries) if entries else np.empty(0, dtype=_ENTRY)
    del entries
    key_E, count_E = added_up(entries_E["key"], entries_E["count"])
    del entries_E
    first, stop = files.bounds_P1[part : part + 2]
    row_E = key_E // files.num_items - first
    column_E = (key_E - (row_E + first) * files.num_items).astype(np.int32)
    sizes = np.bincount(row_E, minlength=stop - first)
    totals = np.bincount(row_E, weights=count_E, minlength=stop - first)  # sums of whole numbers: exact
    _write(
        files.counts(part),
        {"starts": np.concatenate([[0], np.cumsum(sizes)]), "columns": column_E, "counts": count_E},
    )
    write_array(files.totals(part), totals.astype("<f8"))
    return len(key_E)


def gather_totals(files: NeighborFiles) -> float:
    """Put the totals of all parts into one file.

    Returns:
        The sum of the smoothed totals, which `write_information` needs.
    """
    totals_I: Float64Array = np.concatenate(
        [np.fromfile(files.totals(part), "<f8") for part in range(files.num_parts)]
    )
    write_array(files.all_totals, totals_I)
    return float((totals_I**CONTEXT_SMOOTHING).sum())


def write_information(files: NeighborFiles, part: int, context_sum: float) -> int:
    """Make of the counts of a part the positive information, of its rows and of its columns.

    The counts are symmetric, the information is not, as the context is smoothed; what a column has follows
    from the same counts as what a row has.

    Returns:
        Entries that are not zero in both.

    Raises:
        NoRoomError: the disk is full.
    """
    arrays = read_arrays(files.counts(part))
    starts, column_E = arrays["starts"], arrays["columns"]
    totals_I = mapped(files.all_totals, "<f8")
    first = files.bounds_P1[part]
    row_E = np.repeat(np.arange(first, first + len(starts) - 1), np.diff(starts))
    count_E = arrays["counts"].astype(np.float64)
    of_row_E, of_column_E = totals_I[row_E], totals_I[column_E]
    ratio_E = count_E / (of_row_E * of_column_E) * context_sum

    def information(context_E: Float64Array) -> NDArray[np.float32]:
        # p(i, j) / (p(i) p(j)), where p(j) has the power of the smoothing instead of one.
        values_E = np.log(ratio_E * context_E ** (1.0 - CONTEXT_SMOOTHING))
        return np.maximum(values_E, 0.0).astype(np.float32)

    forward_E, backward_E = information(of_column_E), information(of_row_E)
    kept_E = (forward_E > 0) | (backward_E > 0)
    sizes = np.bincount(row_E[kept_E] - first, minlength=len(starts) - 1)
    _write(
        files.information(part),
        {
            "starts": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            "columns": column_E[kept_E],
            "forward": forward_E[kept_E],
            "backward": backward_E[kept_E],
        },
    )
    return int(kept_E.sum())


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """What `_write` has written, mapped."""
    return mapped_tensors(path)[1]


def _write(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with written(path) as unfinished:
        write_tensors(unfinished, arrays)
