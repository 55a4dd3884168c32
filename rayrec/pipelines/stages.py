"""The actors of a run: started together, stopped together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from rayrec.actors.feature_worker import spawn_feature_workers
from rayrec.actors.parameter_server import spawn_parameter_servers
from rayrec.actors.sample_reader import spawn_sample_readers
from rayrec.actors.trainer import TrainerSpec, TrainerStats, connect_trainers, spawn_trainers
from rayrec.embeddings.shard import ShardStats
from rayrec.pipelines.assembly import Assembly
from rayrec.platform.metrics import StageTimes


@dataclass(frozen=True)
class StageStats:
    """Every actor's account of its time, by stage."""

    readers: list[StageTimes]
    feature_workers: list[StageTimes]
    servers: list[ShardStats]
    trainers: list[TrainerStats]

    def summary(self) -> dict[str, float]:
        """Busy and waiting seconds of each of the five stages, averaged over its members."""
        trainers = self.trainers
        return {
            "read_busy_s": _mean([times.busy_s for times in self.readers]),
            "read_waiting_s": _mean([times.waiting_s for times in self.readers]),
            "features_busy_s": _mean([times.busy_s for times in self.feature_workers]),
            "features_waiting_s": _mean([times.waiting_s for times in self.feature_workers]),
            "servers_busy_s": _mean([stats.busy_s for stats in self.servers]),
            "servers_waiting_s": _mean([stats.waiting_s for stats in self.servers]),
            "lookup_waiting_s": _mean([stats.lookups.rows_wait_s for stats in trainers]),
            "update_waiting_s": _mean([stats.lookups.update_wait_s for stats in trainers]),
            "dense_busy_s": _mean([stats.dense_s for stats in trainers]),
            "trainer_busy_s": _mean([stats.stage.busy_s for stats in trainers]),
            "trainer_waiting_s": _mean([stats.stage.waiting_s for stats in trainers]),
            "sparse_rows": float(sum(sum(stats.num_rows.values()) for stats in self.servers)),
            "sparse_bytes": float(sum(stats.num_bytes for stats in self.servers)),
        }


@dataclass(frozen=True)
class Stages:
    """Handles of every actor, stage by stage."""

    readers: list[ActorHandle]
    feature_workers: list[ActorHandle]
    servers: list[ActorHandle]
    trainers: list[ActorHandle]

    @property
    def actors(self) -> list[ActorHandle]:
        return [*self.readers, *self.feature_workers, *self.servers, *self.trainers]

    def stats(self) -> StageStats:
        groups = [self.readers, self.feature_workers, self.servers, self.trainers]
        return StageStats(*(ray.get([actor.stats.remote() for actor in group]) for group in groups))


@contextmanager
def running_stages(run: str, assembly: Assembly) -> Iterator[Stages]:
    """Start every actor of a run; leaving the block ends them, whatever happened inside."""
    pipeline, sparse = assembly.config.pipeline, assembly.config.sparse
    started: list[ActorHandle] = []

    def keep(actors: list[ActorHandle]) -> list[ActorHandle]:
        started.extend(actors)
        return actors

    try:
        servers = keep(
            spawn_parameter_servers(
                run,
                assembly.tables,
                sparse.num_servers,
                pipeline.num_trainers,
                sparse.wait_timeout_s,
                pipeline.cpus_per_actor,
            )
        )
        readers = keep(
            spawn_sample_readers(run, assembly.plan, pipeline.num_readers, pipeline.cpus_per_actor)
        )
        workers = keep(
            spawn_feature_workers(
                run, assembly.features, pipeline.num_feature_workers, pipeline.cpus_per_actor
            )
        )
        trainers = keep(spawn_trainers(run, trainer_spec(assembly), servers, pipeline.cpus_per_trainer))
        ray.get([actor.stats.remote() for actor in started])  # every constructor has run
        if len(trainers) > 1:
            connect_trainers(trainers)
        yield Stages(readers, workers, servers, trainers)
    finally:
        for actor in started:
            ray.kill(actor)


def trainer_spec(assembly: Assembly) -> TrainerSpec:
    config = assembly.config
    return TrainerSpec(
        model=config.model,
        optimizer=assembly.dense_optimizer(),
        catalogue=assembly.catalogue,
        item_ids_I=assembly.dataset.items.ids_I,
        tables=assembly.tables,
        device=config.device,
        seed=config.seed,
        mode=config.pipeline.mode,
        num_trainers=config.pipeline.num_trainers,
        num_threads=assembly.trainer_threads,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
