"""What a pair of query and key adds to its score for how far apart they are, in places and in time.

Two small learned tables with one entry per head and bucket. Places have a bucket for each distance up to a
largest one; time differences have buckets whose width grows with the difference, as in the reference
implementation of HSTU. The bucket of a difference follows from integer bounds and not from a logarithm,
so that all backends agree at the bounds.

Axes: H heads, P buckets of places, D buckets of time differences, N queries, M keys, B rows, T and S the
longest row of queries and of keys.

Source: Zhai et al., ICML 2024, arXiv:2402.17152 (relative attention bias).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import own_places_N

LOG_WIDTH = 0.301
"""Bucket d begins at a difference of exp(LOG_WIDTH * d), so that each is 35 % wider than the one before."""
LARGEST_DIFFERENCE = 2**62


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """Tables, which take gradients, and the times that their buckets are computed from.

    Raises:
        ValueError: a table without its times, times without a table, or an even number of places.
    """

    place_HP: Tensor | None = None
    """[H, P], P odd: entry P // 2 + d for a query d places after the key; distances of more than P // 2
    count as that."""
    time_HD: Tensor | None = None
    """[H, D]: entry d for times that differ by at least `time_bounds(D)[d]`, either way."""
    query_time_N: Tensor | None = None
    """[N] int64: of the query's own event. That of the event to be predicted would give it away."""
    key_time_M: Tensor | None = None
    """[M] int64, in the same unit."""

    def __post_init__(self) -> None:
        if self.place_HP is not None and self.place_HP.shape[1] % 2 == 0:
            raise ValueError(
                f"RelativeBias.place_HP must have an odd number of buckets, got {self.place_HP.shape[1]}: "
                "as many for keys after the query as for keys before it, and one for its own"
            )
        times = (self.time_HD, self.query_time_N, self.key_time_M)
        if any(part is None for part in times) != all(part is None for part in times):
            raise ValueError("RelativeBias: time_HD, query_time_N and key_time_M come together or not at all")

    @property
    def kind(self) -> str:
        return "+".join(
            name for name, table in (("place", self.place_HP), ("time", self.time_HD)) if table is not None
        )

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return tuple(table for table in (self.place_HP, self.time_HD) if table is not None)

    def dense(self, queries: JaggedLayout, keys: JaggedLayout) -> Tensor:
        """[B, H, T, S] bias of all pairs; those with padding have some value that nobody may see."""
        parts = []
        if self.place_HP is not None:
            own_BT = queries.pad(own_places_N(queries, keys))
            place_S = torch.arange(keys.longest, device=keys.device)
            parts.append(_entries(self.place_HP, place_buckets(own_BT, place_S, self.place_HP.shape[1])))
        if self.time_HD is not None:
            assert self.query_time_N is not None
            assert self.key_time_M is not None
            query_BT, key_BS = queries.pad(self.query_time_N), keys.pad(self.key_time_M)
            parts.append(_entries(self.time_HD, time_buckets(query_BT, key_BS, self.time_HD.shape[1])))
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def place_buckets(own_BT: Tensor, place_S: Tensor, num_buckets: int) -> Tensor:
    """[B, T] own places of queries and [S] places of keys to [B, T, S] buckets."""
    middle = num_buckets // 2
    return (own_BT[:, :, None] - place_S).clamp(-middle, middle) + middle


def time_buckets(query_BT: Tensor, key_BS: Tensor, num_buckets: int) -> Tensor:
    """[B, T] and [B, S] times to [B, T, S] buckets."""
    apart_BTS = (query_BT[:, :, None] - key_BS[:, None, :]).abs()
    return torch.bucketize(apart_BTS, time_bounds(num_buckets, query_BT.device)[1:], right=True)


@lru_cache(maxsize=32)
def time_bounds(num_buckets: int, device: torch.device) -> Tensor:
    """[D] int64: the smallest difference in each bucket; some of the first buckets stay empty."""
    bounds = [0]
    for bucket in range(1, num_buckets):
        exact = LOG_WIDTH * bucket
        bounds.append(LARGEST_DIFFERENCE if exact > 42 else math.ceil(math.exp(exact)))
    return torch.tensor(bounds, device=device)


def _entries(table_HK: Tensor, bucket_BTS: Tensor) -> Tensor:
    # In float32 at least: the gradient of an entry is a sum over all pairs of its bucket, which a GPU would
    # round to the table's half precision after each addend.
    wide_HK = table_HK.to(torch.promote_types(table_HK.dtype, torch.float32))
    entries_H = wide_HK.index_select(1, bucket_BTS.flatten()).to(table_HK.dtype)
    return entries_H.view(-1, *bucket_BTS.shape).transpose(0, 1)
