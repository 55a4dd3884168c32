"""The actors of a run: started together, stopped together, and named when one of them dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrec.actors.feature_worker import spawn_feature_workers
from rayrec.actors.heartbeats import BEATS_PER_TIMEOUT, Heart, monitor_name, spawn_heartbeat_monitor
from rayrec.actors.lookup_modes import LookupSettings
from rayrec.actors.parameter_server import spawn_parameter_servers
from rayrec.actors.read_ahead import ReadAhead
from rayrec.actors.sample_reader import spawn_sample_readers
from rayrec.actors.spawning import ActorRole
from rayrec.actors.trainer import TrainerSpec, connect_trainers, spawn_trainers
from rayrec.embeddings.shard.shard import StepTimeoutError
from rayrec.pipelines.cluster.deaths import death_behind
from rayrec.pipelines.cluster.placement import actor_groups
from rayrec.pipelines.cluster.reservation import Reservation, reserved
from rayrec.pipelines.cluster.watch import StageHungError, Watch
from rayrec.pipelines.metrics.stage_stats import StageStats
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.tasks.features import features_of
from rayrec.platform.ray_errors import root_cause
from rayrec.samples.reading.read_plan import RowPlan

logger = logging.getLogger(__name__)

START_PATIENCE_S = 60.0
"""Time to find room in, and to start in, after which is said what is missing."""


@dataclass(frozen=True)
class Stages:
    """Handles of every actor, stage by stage, and what the readers are to read."""

    plan: RowPlan
    readers: list[ActorHandle]
    feature_workers: list[ActorHandle]
    servers: list[ActorHandle]
    trainers: list[ActorHandle]
    watch: Watch
    """To wait for them with."""
    dense_is_split: bool = False
    """Whether each trainer holds a part of the dense weights only."""

    @property
    def actors(self) -> list[ActorHandle]:
        return [*self.readers, *self.feature_workers, *self.servers, *self.trainers]

    def stats(self) -> StageStats:
        groups = [self.readers, self.feature_workers, self.servers, self.trainers]
        return StageStats(*(self.watch.get([actor.stats.remote() for actor in group]) for group in groups))


@dataclass(frozen=True)
class _Member:
    """One actor, and what is said of it while it does not start."""

    actor: ActorHandle
    name: str


@contextmanager
def running_stages(
    run: str, assembly: Assembly, folder: Path | None = None, hang_timeout_s: float | None = None
) -> Iterator[Stages]:
    """Start every actor of a run; leaving the block ends them, whatever happened inside.

    Args:
        folder: of the run, where trainers keep what they measure.
        hang_timeout_s: for this attempt; None: that of the config.

    Raises:
        ActorDeathError: an actor's process died; names the actor. Other errors pass as they are.
    """
    if hang_timeout_s is None:
        hang_timeout_s = assembly.config.recovery.hang_timeout_s
    with reserved(actor_groups(assembly.config), START_PATIENCE_S) as room:
        room.log()
        with _started_stages(run, assembly, folder, hang_timeout_s, room) as stages:
            yield stages


@contextmanager
def _started_stages(
    run: str, assembly: Assembly, folder: Path | None, hang_timeout_s: float, room: Reservation
) -> Iterator[Stages]:
    pipeline, sparse, recovery = assembly.config.pipeline, assembly.config.sparse, assembly.config.recovery
    started: list[_Member] = []

    def keep(stage: str, actors: list[ActorHandle]) -> list[ActorHandle]:
        started.extend(
            _Member(actor, ActorRole(run, stage, member).actor_name) for member, actor in enumerate(actors)
        )
        return actors

    monitor = spawn_heartbeat_monitor(run)
    heart = Heart(monitor_name(run), hang_timeout_s / BEATS_PER_TIMEOUT)
    try:
        num_cpus = pipeline.cpus_per_actor
        servers = keep(
            "parameter_server",
            spawn_parameter_servers(
                run,
                assembly.tables,
                sparse.num_servers,
                pipeline.num_trainers,
                sparse.wait_timeout_s,
                num_cpus,
                lookup_settings(assembly).max_staleness,
                sparse.server_memory,
                sparse.server_threads,
                heart,
                room.of("parameter_server"),
            ),
        )
        readers = keep(
            "sample_reader",
            spawn_sample_readers(
                run,
                assembly.plan.spec,
                pipeline.num_readers,
                num_cpus,
                heart,
                recovery.stage_restarts,
                room.of("sample_reader"),
            ),
        )
        workers = keep(
            "feature_worker",
            spawn_feature_workers(
                run,
                partial(features_of, assembly.config, assembly.rows.columns),
                pipeline.num_feature_workers,
                num_cpus,
                ReadAhead(assembly.tables, servers) if any(t.disk for t in assembly.tables) else None,
                heart,
                recovery.stage_restarts,
                room.of("feature_worker"),
            ),
        )
        trainers = keep(
            "trainer",
            spawn_trainers(
                run,
                trainer_spec(assembly, folder),
                servers,
                pipeline.cpus_per_trainer,
                heart,
                room.of("trainer"),
            ),
        )
        stateless = frozenset(member.name for member in started if member.actor in [*readers, *workers])
        watch = Watch(monitor, stateless, hang_timeout_s, [*servers, *trainers])
        _wait_until_up(started, START_PATIENCE_S, watch, max(START_PATIENCE_S, hang_timeout_s))
        if len(trainers) > 1:
            watch.get(connect_trainers(trainers))
        is_split = assembly.config.training.compute.is_sharded
        yield Stages(assembly.plan, readers, workers, servers, trainers, watch, is_split)
    except StageHungError:
        raise  # it has been killed since, which is no news
    except Exception as error:
        if isinstance(cause := root_cause(error), StepTimeoutError):
            # A trainer whose part does not come; servers may find that before the driver does.
            raise StageHungError(str(cause)) from error
        death = death_behind(error, [member.actor for member in started])
        if death is None:
            raise
        raise death from error
    finally:
        for actor in [*(member.actor for member in started), monitor]:
            ray.kill(actor)


def _wait_until_up(started: Sequence[_Member], patience_s: float, watch: Watch, look_every_s: float) -> None:
    """Return when every constructor has run; raises the first error of one, or that of one that hangs.

    Their room is there, so it is a matter of time; what takes long is said, at growing intervals.
    """
    waiting: dict[Any, _Member] = {member.actor.stats.remote(): member for member in started}
    began = said = looked = time.monotonic()
    while waiting:
        due = min(said + patience_s, looked + look_every_s)
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, due - time.monotonic()))
        ray.get(ready)
        for ref in ready:
            del waiting[ref]
        now = time.monotonic()
        if not ready and now >= looked + look_every_s:
            watch.look_after_silent()
            looked = now
        if not ready and now >= said + patience_s:
            logger.warning("%s", _still_starting(list(waiting.values()), now - began))
            said, patience_s = now, 2 * patience_s


def _still_starting(members: Sequence[_Member], waited_s: float) -> str:
    names = ", ".join(member.name for member in members)
    return (
        f"after {waited_s:.0f} s, {len(members)} of the run's actors are still starting, on nodes that have "
        f"room for them: {names}; see their logs in the Ray dashboard"
    )


def lookup_settings(assembly: Assembly) -> LookupSettings:
    pipeline = assembly.config.pipeline
    return LookupSettings(
        mode=pipeline.mode,
        max_staleness=pipeline.max_staleness if pipeline.mode == "bounded_stale" else 0,
        cache_rows=assembly.config.sparse.cache_rows,
    )


def trainer_spec(assembly: Assembly, folder: Path | None) -> TrainerSpec:
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
        compute=config.training.compute,
        run_folder=folder,
    )
