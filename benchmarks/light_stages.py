"""Actors of a run that do everything but the arithmetic: light processes, without torch, so that many fit.

A trainer looks its rows up and sends gradients of them as a real one does in mode `exact_prefetch`; between
the two it computes nothing. A feature worker makes the ids of a batch out of its number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rayrec.actors.feature_worker import BatchSummary, hand_over
from rayrec.actors.parameter_server import ParameterServer, ServerSpec
from rayrec.actors.spawning import ActorRole
from rayrec.actors.transport import connect
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import TrainerLink
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from rayrec.embeddings.transport.protocol import ApplyCall, ApplyHeadCall, LookupCall
from rayrec.samples.base.intervals import Intervals
from rayrec.samples.reading.read_plan import AssignedPart, BatchPlan, ReadPart, Window

TABLE = TableConfig(name="item", dim=64, seed=1)
CATALOG, IDS_OF_TRAINER = 200_000, 512
"""Ids that there are, and Zipf draws of one trainer's batch."""


class Ids(NamedTuple):
    """What the lookup stage is told of a batch of one trainer."""

    ids_M: np.ndarray
    updated_ids: np.ndarray


class RankBatch(NamedTuple):
    """One trainer's batch."""

    step: int
    lookups: dict[str, Ids]


class Report(NamedTuple):
    """What the pipeline asks of a trainer's report."""

    step: int
    loss_sum: float
    num_targets: int
    counts: dict[str, int]
    work: None


class StepPlan:
    """A row for every step."""

    spec: Any = None

    def batch(self, step: int) -> BatchPlan:
        return BatchPlan(step, 0, (ReadPart(Window(0, step, (), step, 1, seed=0), step, step + 1),))

    def window_after(self, window: Window, num_readers: int) -> None:
        return None


class LightActor:
    """What every actor of a run has."""

    def __init__(self, role: ActorRole) -> None:
        self._role = role

    def start_clock(self) -> None:
        pass

    def stop_clock(self) -> None:
        pass

    def stats(self) -> None:
        pass


class LightReader(LightActor):
    def read(self, reading: AssignedPart) -> int:
        return reading.part.start

    def rest(self, seconds: float) -> None:
        """Answers so much later."""
        time.sleep(seconds)


class LightFeatureWorker(LightActor):
    """Draws ids of all trainers, and gives each its batch."""

    def __init__(
        self, role: ActorRole, num_trainers: int, group_size: int, leaders: Sequence[Any] = ()
    ) -> None:
        super().__init__(role)
        self._num_trainers, self._group_size, self._leaders = num_trainers, group_size, leaders

    def compute(self, step: int, row: int) -> Any:
        random = np.random.default_rng(step)
        drawn_TN = random.zipf(1.2, (self._num_trainers, IDS_OF_TRAINER)) % CATALOG
        updated = np.unique(drawn_TN)
        batches = [RankBatch(step, {TABLE.name: Ids(np.unique(drawn_N), updated)}) for drawn_N in drawn_TN]
        summary = BatchSummary(Intervals())
        starts = range(0, self._num_trainers, self._group_size)
        groups = [tuple(batches[first : first + self._group_size]) for first in starts]
        if self._leaders:
            hand_over(step, groups, self._leaders)
            return summary
        return summary, *groups


class LightTrainer(LightActor):
    def __init__(self, role: ActorRole, servers: Sequence[Any], choice: Any, group_size: int) -> None:
        super().__init__(role)
        self._position = role.member % group_size
        link = TrainerLink(
            (TABLE,),
            ShardMap(len(servers)),
            connect(servers, choice),
            role.member,
            is_in_group=group_size > 1,
        )
        self._lookups = ThreadedLookups(ExactPrefetch(link))

    def prefetch(self, batches: Sequence[RankBatch]) -> None:
        batch = batches[self._position]
        self._lookups.prefetch(batch.step, batch.lookups)

    def train(self, batches: Sequence[RankBatch]) -> Report:
        batch = batches[self._position]
        rows = self._lookups.rows(batch.step, batch.lookups)
        self._lookups.update(batch.step, batch.lookups, rows)
        return Report(batch.step, 1.0, 1, {}, None)

    def drain(self) -> None:
        self._lookups.drain()


class CountingServer(ParameterServer):
    """Counts its calls, and the ids and rows in them."""

    def __init__(self, role: ActorRole, spec: ServerSpec) -> None:
        super().__init__(role, spec)
        self._num_calls = self._num_bytes = 0

    def answer(self, call: Any, empty: Any = np.empty) -> Any:
        reply = super().answer(call, empty)
        self._num_calls += 1
        self._num_bytes += _bytes_of(call) + _bytes_of_rows(reply)
        return reply

    def traffic(self) -> tuple[int, int, float]:
        """(Calls, bytes of ids, rows and gradients in them, processor's seconds) so far."""
        return self._num_calls, self._num_bytes, time.process_time()


def _bytes_of(call: Any) -> int:
    match call:
        case LookupCall():
            return sum(ids_M.nbytes for ids_M in call.request.values())
        case ApplyHeadCall():
            ids = [*call.rest.values(), *call.wanted.values()]
            return _bytes_of_pairs(call.head) + sum(ids_M.nbytes for ids_M in ids)
        case ApplyCall():
            return _bytes_of_pairs(call.update)
    raise TypeError(f"a light trainer makes no {type(call).__name__}")


def _bytes_of_pairs(update: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> int:
    return sum(ids_M.nbytes + grads_MD.nbytes for ids_M, grads_MD in update.values())


def _bytes_of_rows(reply: Any) -> int:
    return sum(rows_MD.nbytes for rows_MD in reply.values()) if isinstance(reply, dict) else 0
