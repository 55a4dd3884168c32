"""Logged requests, answered again by every action: what each finds, and what it takes.

    request log ─► histories and k ─► every action, batch by batch, in turns ─► items, seconds
                                                                                  │
    mass: probabilities of the items by the model that reads the whole history ◄──┘ ─► ValueCurves.fit

No labels are needed: a generative model knows the probability of each item exactly. An action that reads
fewer events is judged by what the model says that reads all of them: probabilities for another history are
probabilities of something else.

Axes: N requests, A actions, W items of an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from rayrec.pipelines.inference.answers import Budget, Query, Wanted
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import remote_folder
from rayrec.serve.engine.value_curves import ActionKey, ValueCurves, mean_shares, version_of

_COLUMNS = ("user_id", "item_ids", "timestamps", "k")
_REPEATS = 2
"""Of each batch: the shorter time counts, for whatever else the machine did only adds to it."""


@dataclass(frozen=True)
class LoggedRequests:
    """What the model was asked, by number of events."""

    queries: list[Query]
    ks: list[int]
    num_skipped: int
    """Rows without a history: they are answered without the model, whatever the action."""


def read_requests(folder: str, most: int) -> LoggedRequests:
    """Requests of a log of `rayrec serve --request-log`, in equal distances if there are too many.

    The log has neither filters nor `exclude_seen`: requests count as such without a filter, that leave out
    what was seen.

    Args:
        folder: path or URL.
        most: requests that are taken.

    Raises:
        InputError: there is no such folder, or no request with a history in it.
    """
    table = _read(folder)
    lengths_R = pc.fill_null(pc.list_value_length(table["item_ids"]), 0).to_numpy(zero_copy_only=False)
    (places,) = np.nonzero(lengths_R > 0)
    if not len(places):
        raise InputError(
            f"{folder}: {len(table):,} requests, none of which has a history; log requests of known users "
            "(share in the settings of the request log)"
        )
    num_skipped = len(table) - len(places)
    if len(places) > most:
        places = places[np.linspace(0, len(places) - 1, most).round().astype(np.int64)]
    places = places[np.argsort(lengths_R[places], kind="stable")]
    rows = table.take(pa.array(places)).to_pylist()
    return LoggedRequests([_query_of(row) for row in rows], [int(row["k"]) for row in rows], num_skipped)


def _read(folder: str) -> pa.Table:
    place = remote_folder(folder)
    try:
        found = pads.dataset(place.path, filesystem=place.filesystem, format="parquet", partitioning="hive")
        if missing := [name for name in _COLUMNS if name not in found.schema.names]:
            raise InputError(
                f"{folder}: no column {', '.join(missing)}; expected what `rayrec serve --request-log` writes"
            )
        return found.to_table(columns=list(_COLUMNS))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{folder}: no request log can be read there ({error})") from error


def _query_of(row: dict[str, list[int] | int | None]) -> Query:
    times = row["timestamps"]
    return Query(
        np.array(row["item_ids"], dtype=np.int64),
        row["user_id"],  # type: ignore[arg-type]
        None if times is None else np.array(times, dtype=np.int64),
    )


@dataclass(frozen=True)
class Replayed:
    """What came of requests."""

    num_events_N: Int64Array
    full_N: Float64Array
    """Mass that full effort finds."""
    masses_NA: Float64Array
    seconds_NA: Float64Array
    """A request's part of the time that its batch takes."""

    @property
    def shares_A(self) -> Float64Array:
        """[A] of full effort's mass, all requests together, as it was measured."""
        return mean_shares(self.masses_NA, self.full_N)

    def fit(
        self, version: str, actions: Sequence[ActionKey], edges: Sequence[int] | None = None
    ) -> ValueCurves:
        """The curves of these actions."""
        return ValueCurves.fit(
            version, actions, self.num_events_N, self.masses_NA, self.full_N, self.seconds_NA, edges
        )


class CurveReplay:
    """Answers requests again, by every action. Not thread-safe."""

    def __init__(
        self,
        recommender: Recommender,
        actions: Sequence[ActionKey],
        stage: RankingStage | None = None,
        ranking_gain: float | None = None,
        near_line_lag: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            stage: ranks behind the recommender.
            ranking_gain: how many times as much an answer is worth that is ranked; needed where some actions
                rank and some do not, since the mass says nothing of the order.
            near_line_lag: newest events that an answer which was computed before does not know.

        Raises:
            InputError: the model scores every item, or actions differ in what cannot be measured here.
        """
        if not recommender.num_beams(1):
            raise InputError(
                f"{recommender.run}: the model scores every item at once, so there is one action, and no "
                "curve over several; give a generative model"
            )
        if len({action.rank for action in actions}) > 1:
            if stage is None:
                raise InputError(
                    "actions: some rank and some do not, but there is no ranking stage here; name one with "
                    "--ranker, or give all the same `rank`"
                )
            if ranking_gain is None:
                raise InputError(
                    "actions: some rank and some do not, and the probability mass says nothing of the order; "
                    "say with --ranking-gain how many times as much a ranked answer is worth (1.05, from "
                    "a test between the two), or give all the same `rank`"
                )
        self._recommender, self._stage, self._actions = recommender, stage, list(actions)
        self._gain = 1.0 if stage is None or ranking_gain is None else ranking_gain
        self._lag, self._clock = near_line_lag, clock
        self._item_keys = pd.Index(recommender.dataset.items.keys.to_pandas())

    @property
    def version(self) -> str:
        """The identity of the model."""
        return version_of(self._recommender.run, self._recommender.committed_step + 1)

    def replay(
        self,
        requests: LoggedRequests,
        batch_size: int,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> Replayed:
        """Answer all requests by every action.

        Args:
            on_batch: told how many requests are done, of how many.

        Raises:
            InputError: a request asks for what the model cannot answer.
        """
        total = len(requests.queries)
        full_N, shape = np.zeros(total), (total, len(self._actions))
        masses_NA, seconds_NA = np.zeros(shape), np.zeros(shape)
        for first in range(0, total, batch_size):
            rows = slice(first, min(first + batch_size, total))
            queries, ks = requests.queries[rows], requests.ks[rows]
            if not first:  # the first batch also waits for what is made once
                for action in self._actions:
                    self._timed(queries, ks, action)
            full_N[rows] = self._mass(queries, self._found(queries, ks, ActionKey()))
            for place, action in enumerate(self._actions):
                if not action.near_line:  # which is computed before the request
                    seconds_NA[rows, place] = self._timed(queries, ks, action) / len(queries)
                gain = 1.0 if action.rank else 1.0 / self._gain
                masses_NA[rows, place] = gain * self._mass(queries, self._found(queries, ks, action))
            on_batch(rows.stop, total)
        num_events_N = np.array([len(query.history_ids) for query in requests.queries], dtype=np.int64)
        return Replayed(num_events_N, full_N, masses_NA, seconds_NA)

    def _timed(self, queries: Sequence[Query], ks: Sequence[int], action: ActionKey) -> float:
        """Seconds of a batch."""
        source = self._stage if action.rank and self._stage is not None else self._recommender
        wanted, shortest = self._wanted(ks, action), float("inf")
        for _ in range(_REPEATS):
            began = self._clock()
            source.answer_each(queries, wanted)
            shortest = min(shortest, self._clock() - began)
        return shortest

    def _wanted(self, ks: Sequence[int], action: ActionKey) -> list[Wanted]:
        budget = Budget(action.max_beams, action.max_events)
        return [Wanted(min(k, len(self._item_keys)), budget=budget) for k in ks]

    def _found(self, queries: Sequence[Query], ks: Sequence[int], action: ActionKey) -> Int64Array:
        """[N, W] catalog positions of the items, without a ranking stage; -1 where there is none."""
        if action.near_line:
            return self._found_before(queries, ks)
        answers = self._recommender.answer_each(queries, self._wanted(ks, action))
        return self._positions([[item.item_key for item in answer.items] for answer in answers])

    def _found_before(self, queries: Sequence[Query], ks: Sequence[int]) -> Int64Array:
        """The same of an answer that knows all but the newest events, without what was seen since."""
        before = [
            replace(
                query,
                history_ids=query.history_ids[: -self._lag],
                times=None if query.times is None else query.times[: -self._lag],
            )
            for query in queries
        ]
        answers = self._recommender.answer_each(
            before, self._wanted([k + self._lag for k in ks], ActionKey())
        )
        found_NW = self._positions([[item.item_key for item in answer.items] for answer in answers])
        kept = []
        for found_W, query, k in zip(found_NW, queries, ks, strict=True):
            seen = self._recommender.dataset.item_positions(query.history_ids)
            kept.append(found_W[~np.isin(found_W, seen)][:k].tolist())
        return _padded(kept)

    def _positions(self, keys: Sequence[Sequence[str]]) -> Int64Array:
        return _padded([self._item_keys.get_indexer(list(each)).tolist() for each in keys])

    def _mass(self, queries: Sequence[Query], items_NW: Int64Array) -> Float64Array:
        """[N] the probability that the next item is among these, by all events."""
        if not items_NW.shape[1]:
            return np.zeros(len(queries))
        mass_N: Float64Array = np.exp(self._recommender.item_log_probs(queries, items_NW)).sum(axis=1)
        return mass_N


def _padded(rows: Sequence[Sequence[int]]) -> Int64Array:
    padded = np.full((len(rows), max(map(len, rows), default=0)), -1, dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded
