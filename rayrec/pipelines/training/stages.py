"""The actors of a run, stage by stage, wherever they live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rayrec.actors.feature_worker import spawn_feature_workers
from rayrec.actors.group_caller import GroupSpec, spawn_trainer_groups
from rayrec.actors.parameter_server import ServerSpec, spawn_parameter_servers
from rayrec.actors.read_ahead import ReadAhead
from rayrec.actors.sample_reader import spawn_sample_readers
from rayrec.actors.spawning import Calls, Host
from rayrec.actors.trainer import TRAINER_STAGE, TrainerSpec, connect_trainers, spawn_trainers
from rayrec.embeddings.lookup.modes import LookupSettings
from rayrec.embeddings.shard.step_buffer import part_bytes_without_asking
from rayrec.pipelines.metrics.stage_stats import StageStats
from rayrec.pipelines.runs.snapshots import Snapshot
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.tasks.features import features_of
from rayrec.pipelines.training.trainer_calls import ByGroup, EachTrainer, TrainerCalls
from rayrec.samples.reading.read_plan import RowPlan


class StageActors(NamedTuple):
    """Handles of every actor, stage by stage."""

    readers: list[Any]
    feature_workers: list[Any]
    servers: list[Any]
    trainers: list[Any]
    callers: list[Any]
    """Of the servers, one for each group of trainers; none where every trainer calls for itself."""


class Replaced(NamedTuple):
    """What has become of stages that lost an actor."""

    stages: Stages
    """With others in its place; what they hold is to be loaded."""
    death: Exception
    """Names who was lost."""


@dataclass(frozen=True)
class Stages:
    """The actors of a run, what the readers are to read, and what waits for answers."""

    plan: RowPlan
    readers: list[Any]
    feature_workers: list[Any]
    servers: list[Any]
    trainers: list[Any]
    watch: Calls
    callers: list[Any] = field(default_factory=list)
    dense_is_split: bool = False
    """Whether each trainer holds a part of the dense weights only."""
    put: Callable[[Any], Any] = lambda value: value
    """As `Host.put`."""
    group_size: int = 1
    """Trainers whose per-rank batches are one object."""
    by_group: ByGroup | None = None
    """Calls trainers by their groups; None: each by itself."""
    must_leave: Callable[[], str | None] = lambda: None
    """Which node the run has to leave and why; None: it may stay."""
    without_lost: Callable[[Exception, Stages], Replaced | None] = lambda error, stages: None
    """After an error: the stages with a new actor for the lost one; None: all have to start again."""

    @classmethod
    def of(cls, assembly: Assembly, actors: StageActors, watch: Calls, host: Host) -> Stages:
        return cls(
            assembly.plan,
            actors.readers,
            actors.feature_workers,
            actors.servers,
            actors.trainers,
            watch,
            actors.callers,
            assembly.config.training.compute.is_sharded,
            host.put,
            assembly.config.pipeline.group_size,
        )

    @property
    def trainer_calls(self) -> TrainerCalls:
        """All trainers at once, for a loop over steps."""
        return self.by_group or EachTrainer(self.trainers, self.group_size)

    def led_by_groups(self) -> Stages:
        """The same stages, with calls of trainers by the processes beside them, where there are any."""
        if not self.callers:
            return self
        return replace(self, by_group=ByGroup(self.callers, self.trainers, self.group_size, self.watch.get))

    @property
    def beside_trainers(self) -> list[Any]:
        """All other actors."""
        return [*self.readers, *self.feature_workers, *self.servers, *self.callers]

    def stats(self) -> StageStats:
        groups = [self.readers, self.feature_workers, self.servers, self.trainers, self.callers]
        return StageStats(*(self.watch.get([actor.stats.remote() for actor in group]) for group in groups))

    def load(
        self, snapshot: Snapshot, committed_step: int, incarnation: int, weights_only: bool = False
    ) -> None:
        """Let servers and trainers take what a snapshot holds.

        Args:
            committed_step: the last one; the run goes on with the next.
            incarnation: of the servers, higher than any before.
            weights_only: of it, what another run begins with.
        """
        chain = [[str(path.resolve()) for path in files] for files in snapshot.sparse_chain]
        loading = [
            server.load.remote(chain, committed_step, incarnation, weights_only) for server in self.servers
        ]
        self.watch.get(loading, may_take_long=True)
        weights = self.put(snapshot.weights)
        optimizer_state = None if weights_only else self.put(snapshot.optimizer_state)
        self.watch.get(
            [trainer.load.remote(weights, optimizer_state, incarnation) for trainer in self.trainers]
        )

    def connect_trainers(self, host: Host) -> None:
        """Let several trainers meet."""
        if len(self.trainers) > 1:
            self.watch.get(connect_trainers(host, self.trainers))


def spawn_stages(host: Host, assembly: Assembly, folder: Path | None) -> StageActors:
    """Start every actor of a run.

    Args:
        folder: of the run, where trainers keep what they measure.
    """
    config = assembly.config
    pipeline, sparse, recovery = config.pipeline, config.sparse, config.recovery
    groups = GroupSpec(
        assembly.tables,
        pipeline.num_trainers,
        pipeline.group_size,
        sparse.transport,
        sparse.wait_timeout_s,
        lookup_settings(assembly).max_staleness,
        sparse.wire,
        pipeline.queue_depth,
        unasked_bytes(assembly),
    )
    servers = spawn_parameter_servers(host, server_spec(assembly), pipeline.cpus_per_actor)
    readers = spawn_sample_readers(
        host, assembly.plan.spec, pipeline.num_readers, pipeline.cpus_per_actor, recovery.stage_restarts
    )
    callers = spawn_trainer_groups(host, groups, servers)
    workers = spawn_feature_workers(
        host,
        partial(features_of, config, assembly.rows.columns),
        pipeline.num_feature_workers,
        pipeline.cpus_per_actor,
        ReadAhead(assembly.tables, servers) if any(table.disk for table in assembly.tables) else None,
        recovery.stage_restarts,
        pipeline.group_size,
        # Threads of one process are called one by one, with objects that are there anyway.
        callers if host.meeting(TRAINER_STAGE) is None else (),
    )
    trainers = spawn_trainers(
        host, trainer_spec(assembly, folder), servers, callers, pipeline.cpus_per_trainer
    )
    return StageActors(readers, workers, servers, trainers, callers)


def server_spec(assembly: Assembly) -> ServerSpec:
    """What all servers of a run have to know; they differ in `shard`."""
    config, sparse = assembly.config, assembly.config.sparse
    num_trainers, group_size = config.pipeline.num_trainers, config.pipeline.group_size
    return ServerSpec(
        assembly.tables,
        num_shards=config.num_servers,
        shard=0,
        num_trainers=-(-num_trainers // group_size),
        wait_timeout_s=sparse.wait_timeout_s,
        max_staleness=lookup_settings(assembly).max_staleness,
        memory_limit=sparse.server_memory,
        num_threads=sparse.server_threads,
        called_by="trainer" if group_size == 1 else "group",
        step_buffer=sparse.step_buffer,
    )


def unasked_bytes(assembly: Assembly) -> int | None:
    """Of a part of a step that trainers, or the callers of their groups, send without asking for room."""
    servers = server_spec(assembly)
    return part_bytes_without_asking(servers.step_buffer, servers.num_trainers, servers.max_staleness)


def lookup_settings(assembly: Assembly) -> LookupSettings:
    """How trainers of a run read rows."""
    pipeline = assembly.config.pipeline
    return LookupSettings(
        mode=pipeline.mode,
        max_staleness=pipeline.max_staleness if pipeline.mode == "bounded_stale" else 0,
        cache_rows=assembly.config.sparse.cache_rows,
        wire=assembly.config.sparse.wire,
    )


def trainer_spec(assembly: Assembly, folder: Path | None) -> TrainerSpec:
    """What all trainers of a run have to know."""
    config = assembly.config
    return TrainerSpec(
        program=assembly.task.program(assembly.dense_optimizer()),
        catalog_ids_I=assembly.task.catalog_ids_I,
        tables=assembly.tables,
        device=config.device,
        seed=config.seed,
        lookups=lookup_settings(assembly),
        transport=config.sparse.transport,
        num_trainers=config.pipeline.num_trainers,
        num_threads=assembly.trainer_threads,
        group_size=config.pipeline.group_size,
        unasked_bytes=unasked_bytes(assembly),
        compute=config.training.compute,
        run_folder=folder,
    )
