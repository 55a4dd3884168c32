"""One data-parallel trainer: lookup, dense compute and update of its share of every batch.

    prefetch(t + 1)     asks the servers for rows that batch t leaves alone
    train(t)            rows ─► forward, backward ─► row gradients to the servers
                                                 ─► dense gradients summed over the trainers, one step

The arithmetic is in the lookup modes of `rayrec.embeddings` and `rayrec.models.program.program`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rayrec.actors.collective import Address, Meeting, TrainerGroup
from rayrec.actors.feature_worker import RankBatches
from rayrec.actors.spawning import ActorRole, Host
from rayrec.actors.stage_actor import StageActor, this_node
from rayrec.actors.transport import TransportChoice, connect
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.lookup.lookups import LookupMode, LookupStats, TrainerLink
from rayrec.embeddings.lookup.modes import LookupSettings, caches_on, make_lookups
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from rayrec.embeddings.transport.client import ShardClient
from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.program.program import (
    ProgramPlacement,
    ProgramSpec,
    RankedItems,
    RecommendingProgram,
    ScoringProgram,
    WritingProgram,
)
from rayrec.models.program.utilization import Utilization
from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.devices import device_memory, get_device, ray_claim
from rayrec.platform.health.burn_in import matrix_rate
from rayrec.platform.metrics import StageClock, StageTimes
from rayrec.samples.base.batches import BatchShare, FeatureBatch
from rayrec.samples.impressions.batches import ImpressionBatch
from rayrec.samples.text.batches import TextBatch

TRAINER_STAGE = "trainer"
_STEPS_OF_EVENTS = 64
"""Steps for which the newest event is known: more than are in flight, whose updates may still be sent."""
CATALOG_CHUNK = 65_536
"""Rows of the whole catalog are read in pieces of this many items."""


@dataclass(frozen=True)
class TrainerSpec:
    """What every trainer has to know; the same for all of them."""

    program: ProgramSpec
    tables: tuple[TableConfig, ...]
    device: str
    seed: int
    lookups: LookupSettings
    transport: TransportChoice
    num_trainers: int
    num_threads: int
    group_size: int = 1
    """Trainers that reach the servers by one caller."""
    unasked_bytes: int | None = None
    """As of `ShardClient`."""
    compute: ComputeSettings = PLAIN
    catalog_ids_I: np.ndarray | None = None
    """Ids of all items, for programs that rank by their rows."""
    run_folder: Path | None = None
    """Where what trainers measure is kept with the run; None keeps it in the process."""

    def attention_file(self, member: int) -> Path | None:
        """Each trainer has its own: their batches may be of different classes."""
        return None if self.run_folder is None else self.run_folder / f"attention-{member}.json"


class StepWork(NamedTuple):
    """One trainer's own part of a step, which says how fast it is."""

    own_s: float
    """Without waiting for rows, for updates to be taken and for other trainers."""
    num_tokens: int
    """Of its share of the batch; rows where the model has no tokens. 0 where its own time is not known: where
    weights are split, trainers wait for each other inside of forward and backward."""
    node: str = ""
    """Where it runs."""


NO_WORK = StepWork(0.0, 0)


@dataclass(frozen=True)
class TrainerReport:
    """One trainer's account of one step."""

    step: int
    loss_sum: float
    num_targets: int
    """Of the global batch: the sum of all trainers' `loss_sum` over this is the batch's loss."""
    counts: dict[str, int]
    work: StepWork = NO_WORK


@dataclass(frozen=True)
class TrainerStats:
    """Where a trainer's time went, in seconds."""

    stage: StageTimes
    """Its blocked time is that of `lookups`: waiting for rows and for updates."""
    dense_s: float
    """The part of the busy time that is forward, backward, meeting the other trainers and the optimizer."""
    lookups: LookupStats
    model_flops: float = 0.0
    """Trained so far; see `rayrec.models.program.flops`."""
    matrix_rate: float = 1.0
    """FLOP/s that this trainer's device and threads reach in a product of matrices."""

    @property
    def mfu(self) -> float:
        """Share of all the time that training took."""
        times = self.stage
        return self._share_of(times.busy_s + times.waiting_s + times.blocked_s)

    @property
    def dense_mfu(self) -> float:
        """Share of the time of dense compute alone."""
        return self._share_of(self.dense_s)

    def _share_of(self, seconds: float) -> float:
        return self.model_flops / (seconds * self.matrix_rate) if seconds > 0 else 0.0


class Trainer(StageActor[StageClock]):
    """A thin shell around lookups and a dense program."""

    def __init__(self, role: ActorRole, spec: TrainerSpec, servers: Sequence[Any]) -> None:
        torch.set_num_threads(spec.num_threads)
        super().__init__(role, StageClock())
        self._spec = spec
        self._device = get_device(spec.device)
        self._group = TrainerGroup(spec.num_trainers, role.member)
        self._newest_events: dict[int, int] = {}
        self._failure: Exception | None = None
        """Of a step that has no update: rows that need it never come, and no later step may wait for them."""
        self.reach(servers)
        self._lookups = self._new_lookups(0)
        self._utilization = Utilization(self._matrix_rate())
        self._node = this_node()
        self._row_dims = {table.name: table.dim for table in spec.tables}
        self._program = spec.program.build(
            ProgramPlacement(
                self._device.torch,
                spec.seed,
                spec.compute,
                sum_over_trainers=self._group.begin_all_reduce if spec.num_trainers > 1 else None,
                attention_file=spec.attention_file(role.member),
            )
        )
        self._dense_clock = StageClock()

    def reach(self, servers: Sequence[Any]) -> None:
        """Call these servers, or the callers of them, from the next `load` on."""
        self._shard_map = ShardMap(max(len(servers), 1))
        spec = self._spec
        # The caller of a group narrows what it has added up.
        wire = spec.lookups.wire if spec.group_size == 1 else "float32"
        self._transport = connect(servers, spec.transport, wire, spec.tables)
        self._client = ShardClient(spec.tables, self._shard_map, self._transport)

    def _new_lookups(self, incarnation: int) -> LookupMode:
        spec = self._spec
        return make_lookups(
            spec.lookups,
            TrainerLink(
                spec.tables,
                self._shard_map,
                self._transport,
                self._role.member,
                incarnation,
                is_in_group=spec.group_size > 1,
                unasked_bytes=spec.unasked_bytes,
                newest_events=self._newest_events,
            ),
            self._group if spec.num_trainers > 1 else None,
            caches_on(self._device),
        )

    def rest(self) -> None:
        """Leave the group of trainers; by the answer, all calls before this one have ended.

        `join` and `load` have to follow.
        """
        self._group.leave()

    def close(self) -> None:
        """End the thread of the lookups, when nobody waits for an answer any more."""
        if isinstance(self._lookups, ThreadedLookups):
            self._lookups.close()

    def open_group(self) -> Address:
        """Where the trainers can meet; asked of the first one."""
        return self._group.open()

    def join(self, where: Address | Meeting) -> None:
        """Form the group over which dense gradients are summed and rows reach their owners."""
        self._group.join(where, self._device.collective_backend)
        self._program.join()

    def prefetch(self, batches: RankBatches) -> None:
        """Stage 3, early: request the rows of the next batch that the current one cannot change."""
        features = self._own(batches)
        if self._failure is not None:
            raise self._failure
        # The clock: a part of a batch that `train` counts.
        with self._heartbeats.during("prefetch", features.step), self._clock.busy(num_batches=0):
            self._note_newest_event(features)
            self._lookups.prefetch(features.step, features.lookups)

    def train(self, batches: RankBatches) -> TrainerReport:
        """Stages 3 to 5 for one batch; steps come in order, and after one that failed only behind `load`."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._train(batches)
        except Exception as error:
            self._failure = error
            raise

    def _train(self, batches: RankBatches) -> TrainerReport:
        features = self._own(batches)
        waited_s, began = self._waited_s(), time.perf_counter()
        with self._heartbeats.during("train", features.step), self._clock.busy():
            self._note_newest_event(features)
            rows = self._lookups.rows(features.step, features.lookups)
            with self._dense_clock.busy():
                gradients = self._program.backward(features, rows)
            self._lookups.update(features.step, features.lookups, gradients.row_grads)
            with self._dense_clock.busy():
                self._program.update()
            self._utilization.add(self._program.flops(features, self._row_dims))
        own_s = time.perf_counter() - began - (self._waited_s() - waited_s)
        work = StepWork(own_s, 0 if self._spec.compute.is_split else features.num_tokens, self._node)
        self._metrics.after_batch(self._times(), self._figures)
        return TrainerReport(features.step, gradients.loss_sum, features.num_targets, features.counts, work)

    def _own(self, batches: RankBatches) -> BatchShare:
        return batches[self._role.member % self._spec.group_size]

    def _note_newest_event(self, features: BatchShare) -> None:
        """For the tags of the step's calls."""
        if features.newest_event is not None:
            self._newest_events[features.step] = features.newest_event
            for step in [step for step in self._newest_events if step < features.step - _STEPS_OF_EVENTS]:
                del self._newest_events[step]

    def _waited_s(self) -> float:
        lookups = self._lookups.stats
        return lookups.rows_wait_s + lookups.update_wait_s + self._group.waited_s

    def drain(self) -> None:
        """Wait until the servers have committed every step sent so far."""
        with self._heartbeats.during("drain"), self._clock.busy(num_batches=0):
            self._lookups.drain()

    def begin_validation(self) -> None:
        """Before ranking or scoring, by all trainers; gives the model the rows of every item, if it ranks by
        them."""
        # When it was measured before, other actors were starting.
        self._utilization.measured(self._matrix_rate())
        self._program.begin_inference()
        if not isinstance(self._program, RecommendingProgram) or self._program.table_of_catalog is None:
            return
        table, ids_I = self._program.table_of_catalog, self._spec.catalog_ids_I
        assert ids_I is not None, "trainers are started with what their programs rank by"

        def read_rows(ids_M: Int64Array) -> Float32Array:
            chunks = np.array_split(ids_M, max(1, len(ids_M) // CATALOG_CHUNK))
            return np.concatenate([self._client.read({table: ids})[table] for ids in chunks])

        self._program.take_catalog(ids_I, read_rows)

    def _matrix_rate(self) -> float:
        return matrix_rate(self._device.torch, self._spec.compute.matrix_dtype)

    def recommend(self, prepared: tuple[FeatureBatch, np.ndarray], k: int, exclude_seen: bool) -> RankedItems:
        """The k best next items of each row, with the tables as they are now."""
        features, seen_BE = prepared
        assert isinstance(self._program, RecommendingProgram), "runs ask for what their model does"
        return self._program.recommend(
            features, self._rows_now(features), k, seen_BE if exclude_seen else None
        )

    def predict(self, features: ImpressionBatch) -> np.ndarray:
        """[B, T] probabilities of each task, with the tables as they are now."""
        assert isinstance(self._program, ScoringProgram), "runs ask for what their model does"
        return self._program.predict(features, self._rows_now(features))

    def log_likelihoods(self, features: TextBatch) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
        """([B] of each row's targets, [B] how many there are, what was not read whole), with the tables as
        they are now."""
        assert isinstance(self._program, WritingProgram), "runs ask for what their model does"
        log_B = self._program.log_likelihoods(features, self._rows_now(features))
        return log_B, features.targets_B, features.counts

    def generate(self, features: TextBatch, max_new_tokens: int) -> tuple[list[np.ndarray], dict[str, int]]:
        """(The tokens that follow each row, what was not read whole), with the tables as they are now."""
        assert isinstance(self._program, WritingProgram), "runs ask for what their model does"
        tokens = self._program.generate(features, self._rows_now(features), max_new_tokens)
        return tokens, features.counts

    def _rows_now(self, features: BatchShare) -> dict[str, np.ndarray]:
        return self._client.read({name: lookup.ids_M for name, lookup in features.lookups.items()})

    def dense_weights(self) -> dict[str, np.ndarray]:
        """Of the first trainer; others, asked where weights are split, only give theirs to it."""
        return self._if_first(self._program.weights())

    def dense_optimizer_state(self) -> dict[str, np.ndarray]:
        """As `dense_weights`."""
        return self._if_first(self._program.optimizer_state())

    def _if_first(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state if self._role.member == 0 else {}

    def load(
        self,
        weights: Mapping[str, np.ndarray],
        optimizer_state: Mapping[str, np.ndarray] | None,
        incarnation: int,
    ) -> None:
        """Take over a snapshot's dense part; updates are sent under the servers' new incarnation.

        Args:
            optimizer_state: None begins with a new optimizer.
        """
        self._program.load(weights, optimizer_state)
        self._lookups = self._new_lookups(incarnation)
        self._failure = None

    def stats(self) -> TrainerStats:
        times = self._times()
        self._metrics.publish(times, self._figures())
        return TrainerStats(
            times,
            self._dense_clock.times().busy_s,
            self._lookups.stats,
            self._utilization.total_flops,
            self._utilization.matrix_rate,
        )

    def _figures(self) -> dict[str, float]:
        stats, times = self._lookups.stats, self._times()
        num_asked = stats.num_cache_hits + stats.num_cache_misses
        return {
            "lookup_early_rows": stats.num_early,
            "lookup_late_rows": stats.num_late,
            "lookup_max_staleness": stats.max_staleness,
            "cache_hit_rate": stats.num_cache_hits / max(num_asked, 1),
            "mfu": self._utilization.since_last(times.busy_s + times.waiting_s + times.blocked_s),
            **self._memory_figures(),
        }

    def _memory_figures(self) -> dict[str, float]:
        memory = device_memory(self._device.torch)
        if memory is None:
            return {}
        return {f"device_memory_{name}_bytes": float(value) for name, value in memory._asdict().items()}

    def _times(self) -> StageTimes:
        """The lookups wait inside of what the clock takes for work."""
        times, lookups = self._clock.times(), self._lookups.stats
        blocked_s = lookups.rows_wait_s + lookups.update_wait_s
        return replace(times, busy_s=times.busy_s - blocked_s, blocked_s=blocked_s)


def spawn_trainers(
    host: Host, spec: TrainerSpec, servers: Sequence[Any], callers: Sequence[Any], num_cpus: float
) -> list[Any]:
    """Start the trainers of a run; `connect_trainers` lets several of them meet.

    Args:
        callers: of their groups, which trainers call in place of the servers; none where they have none.
    """
    options = {"num_cpus": num_cpus, **ray_claim(spec.device)}
    shared = host.put(spec)  # the catalog's arrays travel once
    return [
        host.spawn(
            Trainer,
            TRAINER_STAGE,
            rank,
            (shared, [callers[rank // spec.group_size]] if callers else list(servers)),
            options,
        )
        for rank in range(spec.num_trainers)
    ]


def connect_trainers(host: Host, trainers: Sequence[Any]) -> list[Any]:
    """Let several trainers meet, so that they can sum their dense gradients; promises of it."""
    where: Any = host.meeting(TRAINER_STAGE) or trainers[0].open_group.remote()
    return [trainer.join.remote(where) for trainer in trainers]
