"""The actors of a run on Ray: started together, ended together, and named when one of them dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rayrec.actors.group_caller import GROUP_STAGE
from rayrec.actors.heartbeats import (
    HEARTBEATS_PER_TIMEOUT,
    HeartbeatSettings,
    monitor_name,
    spawn_heartbeat_monitor,
)
from rayrec.actors.spawning import RayHost, Spawned, Where
from rayrec.actors.trainer import TRAINER_STAGE
from rayrec.embeddings.shard.shard import StepTimeoutError
from rayrec.pipelines.cluster.deaths import death_behind
from rayrec.pipelines.cluster.leaving import LeaveWatch
from rayrec.pipelines.cluster.nodes import cluster_folder
from rayrec.pipelines.cluster.placement import actor_groups
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.cluster.reservation import Reservation, reserved
from rayrec.pipelines.cluster.watch import Watch
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.training.lost_server import ServerReplacement
from rayrec.pipelines.training.stages import Stages, spawn_stages
from rayrec.platform.ray_errors import StageHungError, root_cause

logger = logging.getLogger(__name__)

START_PATIENCE_S = 60.0
"""Time to find room in, and to start in, after which is said what is missing."""


@contextmanager
def running_stages(
    run: str, assembly: Assembly, folder: Path | None = None, hang_timeout_s: float | None = None
) -> Iterator[Stages]:
    """Start every actor of a run on the connected cluster; leaving the block ends them.

    Args:
        folder: of the run, where trainers keep what they measure.
        hang_timeout_s: for this attempt; None: that of the config.

    Raises: as `Placement.running`.
    """
    if hang_timeout_s is None:
        hang_timeout_s = assembly.config.recovery.hang_timeout_s
    with reserved(actor_groups(assembly.config), START_PATIENCE_S) as room:
        room.log()
        monitor = spawn_heartbeat_monitor(run)
        heartbeats_to = HeartbeatSettings(monitor_name(run), hang_timeout_s / HEARTBEATS_PER_TIMEOUT)
        _warn_of_groups_apart(room, assembly.config.pipeline.group_size)
        beside_trainers = room.beside(TRAINER_STAGE, assembly.config.pipeline.group_size)

        def where(stage: str) -> Where:
            return beside_trainers if stage == GROUP_STAGE else room.of(stage)

        host = RayHost(run, heartbeats_to, where, assembly.config.placement.bound_stages)
        try:
            actors = spawn_stages(host, assembly, folder)
            stateless = frozenset(actor.name for actor in host.spawned if not actor.has_state)

            def watch_over(stateful: Sequence[Any]) -> Watch:
                return Watch(monitor, stateless, hang_timeout_s, stateful)

            watch = watch_over([*actors.servers, *actors.callers, *actors.trainers])
            _wait_until_up(host.spawned, START_PATIENCE_S, watch, max(START_PATIENCE_S, hang_timeout_s))
            must_leave = LeaveWatch(Quarantine(cluster_folder()), room.node_ids, room.has_room_elsewhere)
            stages = replace(
                Stages.of(assembly, actors, watch, host),
                must_leave=must_leave,
                without_lost=ServerReplacement(host, assembly, monitor, room.again, watch_over),
            )
            stages.connect_trainers(host)
            yield stages.led_by_groups()
        except StageHungError:
            raise  # it has been killed since, which is no news
        except Exception as error:
            if isinstance(cause := root_cause(error), StepTimeoutError):
                # A trainer whose part does not come; servers may find that before the driver does.
                raise StageHungError(str(cause)) from error
            death = death_behind(error, [actor.handle for actor in host.spawned])
            if death is None:
                raise
            raise death from error
        finally:
            host.close()
            ray.kill(monitor)


def _warn_of_groups_apart(room: Reservation, group_size: int) -> None:
    if apart := room.apart(TRAINER_STAGE, group_size):
        logger.warning(
            "group%s %s of trainers %s on several nodes: their calls cross the network before they are added "
            "up; take as many trainers per group (pipeline.trainers_per_group) as each node has",
            "s" if len(apart) > 1 else "",
            ", ".join(map(str, apart)),
            "are" if len(apart) > 1 else "is",
        )


def _wait_until_up(started: Sequence[Spawned], patience_s: float, watch: Watch, look_every_s: float) -> None:
    """Return when every constructor has run; raises the first error of one, or that of one that hangs.

    Their room is there, so it is a matter of time; what takes long is said, at growing intervals.
    """
    waiting: dict[Any, Spawned] = {actor.handle.stats.remote(): actor for actor in started}
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


def _still_starting(actors: Sequence[Spawned], waited_s: float) -> str:
    names = ", ".join(actor.name for actor in actors)
    return (
        f"after {waited_s:.0f} s, {len(actors)} of the run's actors are still starting, on nodes that have "
        f"room for them: {names}; see their logs in the Ray dashboard"
    )
