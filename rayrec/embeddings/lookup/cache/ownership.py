"""Which trainer holds a row, and how ids, rows and gradients get there and back.

Axes: M distinct ids of one table in this trainer's share, U distinct ids that this trainer owns of the
global batch, D numbers of a row, T trainers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rayrec.embeddings.base.distinct_ids import add_rows
from rayrec.embeddings.base.exchange import Exchange
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.lookup.cache.cached_records import Rows, on_host
from rayrec.embeddings.storage.index import IdIndex
from rayrec.platform.arrays import Int64Array


@dataclass(frozen=True)
class Route:
    """The way of one table's ids of one batch."""

    owned_ids_U: Int64Array
    positions_by_owner: tuple[Int64Array, ...] = ()
    """[T] of this trainer's ids, those that belong to each trainer."""
    asked_by: tuple[Int64Array, ...] = ()
    """[T] positions in owned_ids_U of what each trainer asked for, in its order."""


class Ownership(Protocol):
    """All trainers call the methods in the same order."""

    is_sole: bool
    """Whether there is no other trainer."""

    def collect(self, ids_M: Int64Array) -> Route:
        """Send ids to their owners; learn which of this trainer's the others want."""
        ...

    def rows_back(self, route: Route, rows_UD: Rows) -> Rows:
        """Send rows from their owners; returns [M, D] those of this trainer's ids."""
        ...

    def gradients(self, route: Route, grads_MD: Rows | None, dim: int) -> tuple[Int64Array, Rows]:
        """Send gradients to the owners, where they are added up in the order of the ranks.

        A trainer without gradients of the table gives None, and sends none of its rows.

        Returns:
            (positions in owned_ids_U that have gradients, their sums).
        """
        ...


class SoleOwner:
    """The only trainer owns every row."""

    is_sole = True

    def collect(self, ids_M: Int64Array) -> Route:
        return Route(ids_M)

    def rows_back(self, route: Route, rows_UD: Rows) -> Rows:
        return rows_UD

    def gradients(self, route: Route, grads_MD: Rows | None, dim: int) -> tuple[Int64Array, Rows]:
        if grads_MD is None:
            return np.empty(0, dtype=np.int64), np.empty((0, dim), dtype=np.float32)
        return np.arange(len(grads_MD)), grads_MD


class OwnersByBucket:
    """The virtual buckets are divided among the trainers, as they are among shards.

    What is exchanged is on the host: rows and gradients that are elsewhere are copied, and stay arrays.
    """

    is_sole = False

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._owners = ShardMap(exchange.num_trainers)

    def collect(self, ids_M: Int64Array) -> Route:
        positions_by_owner = self._owners.split(ids_M)
        asked = self._exchange.all_to_all([ids_M[positions] for positions in positions_by_owner])
        index = IdIndex(expected_ids=sum(map(len, asked)))
        asked_by = tuple(index.find_or_add(ids) for ids in asked)
        return Route(index.items()[0], tuple(positions_by_owner), asked_by)

    def rows_back(self, route: Route, rows_UD: Rows) -> Rows:
        rows_UD = on_host(rows_UD)
        parts = self._exchange.all_to_all([rows_UD[asked] for asked in route.asked_by])
        num_ids = sum(map(len, route.positions_by_owner))
        rows_MD = np.empty((num_ids, rows_UD.shape[1]), dtype=np.float32)
        for positions, part in zip(route.positions_by_owner, parts, strict=True):
            rows_MD[positions] = part
        return rows_MD

    def gradients(self, route: Route, grads_MD: Rows | None, dim: int) -> tuple[Int64Array, Rows]:
        nothing = np.empty((0, dim), dtype=np.float32)
        sent_MD = None if grads_MD is None else on_host(grads_MD)
        parts = self._exchange.all_to_all(
            [nothing if sent_MD is None else sent_MD[positions] for positions in route.positions_by_owner]
        )
        num_owned = len(route.owned_ids_U)
        sum_UD = np.zeros((num_owned, dim), dtype=np.float32)
        has_gradient_U = np.zeros(num_owned, dtype=np.bool_)
        for asked, part in zip(route.asked_by, parts, strict=True):
            if len(part):
                add_rows(sum_UD, asked, part)
                has_gradient_U[asked] = True
        positions = np.flatnonzero(has_gradient_U)
        return positions, sum_UD[positions]
