"""Which keys a query sees, as data that any backend can evaluate.

A mask lets a query see one or two stretches of its own row's keys: all keys up to its own index, for
example. So a mask comes down to a few integers per query (`Spans`), which a dense backend compares with an
arange, a kernel loads with the query, and block-sparse backends turn into lists of blocks. A model with a
mask of its own derives it from `Mask`; every backend but `ascend`, whose kernel knows these two kinds,
computes it.

Row b of the queries always belongs to row b of the keys. Where a row has more keys than queries, its
queries stand at the end, as in a decoding step: the last query's own key is the last one.

Axes: N queries, M keys, B rows, W the one or two spans of each query, T and S the longest row of queries
and of keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout


@dataclass(frozen=True, eq=False)
class Spans:
    """Query n sees the keys `first_WN[w, n] <= index < stop_WN[w, n]` of its row, for every w.

    Indices count from 0 in the row. The spans of a query do not overlap; empty ones have stop <= first.
    """

    first_WN: Tensor
    """int32, not negative."""
    stop_WN: Tensor
    """int32, not past the end of the row."""

    def padded(self, queries: JaggedLayout) -> tuple[Tensor, Tensor]:
        """First and stop as [B, T, W]; what is past the end of a row sees nothing."""
        return queries.pad(self.first_WN.T), queries.pad(self.stop_WN.T)

    def dense(self, queries: JaggedLayout, keys: JaggedLayout) -> Tensor:
        """[B, T, S] bool: whether the query sees the key."""
        return visible(*self.padded(queries), torch.arange(keys.longest, device=keys.device))


def visible(first_W: Tensor, stop_W: Tensor, place_S: Tensor) -> Tensor:
    """[..., W] spans and [S] places to [..., S] bool."""
    spans = zip(first_W.unbind(-1), stop_W.unbind(-1), strict=True)
    inside = [(place_S >= first[..., None]) & (place_S < stop[..., None]) for first, stop in spans]
    return inside[0] if len(inside) == 1 else inside[0] | inside[1]


@dataclass(frozen=True)
class Mask(ABC):
    """What all masks can do."""

    @abstractmethod
    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        """Range of keys that each query sees.

        Raises:
            ValueError: the mask does not fit the layouts.
        """

    @property
    def kind(self) -> str:
        """Name under which backends and measurements know the mask."""
        return type(self).__name__


@dataclass(frozen=True)
class Full(Mask):
    """Every key of the row."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        stop_N = _key_lengths_N(queries, keys)
        return spans_of(queries, keys, (torch.zeros_like(stop_N), stop_N))


@dataclass(frozen=True)
class Causal(Mask):
    """The query's own key and those before it."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        own_N = own_places_N(queries, keys)
        return spans_of(queries, keys, (torch.zeros_like(own_N), own_N + 1))


@dataclass(frozen=True)
class CausalGroups(Mask):
    """As many queries for each of a row's last keys: those of a key see it and the ones before it.

    What is predicted behind each event of a history has several tokens, all of which see the events so far,
    and what stands before the first event.
    """

    size: int
    """Queries of each key."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        num_before_B = keys.lengths_B - queries.lengths_B // self.size
        if (queries.lengths_B % self.size).any() or (num_before_B < 0).any():
            raise ValueError(
                f"CausalGroups: rows of {queries.lengths_B.tolist()} queries do not hold {self.size} for "
                f"each of the last of {keys.lengths_B.tolist()} keys"
            )
        stop_N = queries.place_N // self.size + 1
        if num_before_B.any():
            before_B = torch.from_numpy(num_before_B).to(stop_N.device)
            stop_N = stop_N + before_B.index_select(0, queries.row_N)
        return spans_of(queries, keys, (torch.zeros_like(stop_N), stop_N))


def own_places_N(queries: JaggedLayout, keys: JaggedLayout) -> Tensor:
    """[N] index of each query's own key in its row of keys; negative where the row has too few keys."""
    if queries is keys:
        return queries.place_N
    shift_B = keys.lengths_on_device_B() - queries.lengths_on_device_B()
    return queries.place_N + shift_B.index_select(0, queries.row_N)


def _key_lengths_N(queries: JaggedLayout, keys: JaggedLayout) -> Tensor:
    return keys.lengths_on_device_B().index_select(0, queries.row_N)


def spans_of(queries: JaggedLayout, keys: JaggedLayout, *spans: tuple[Tensor, Tensor]) -> Spans:
    """Build `Spans` from one or two pairs of [N] first and stop, which may reach beyond the row."""
    length_N = _key_lengths_N(queries, keys)
    first_WN = torch.stack([first_N.clamp(min=0) for first_N, _ in spans])
    stop_WN = torch.stack([torch.minimum(stop_N.clamp(min=0), length_N) for _, stop_N in spans])
    return Spans(first_WN.int(), stop_WN.int())
