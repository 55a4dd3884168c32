"""A lost server is replaced, and everything else stays: processes, compiled networks, other servers' rows.

    error ─► who died? ─── not one server alone, or not known ──► all actors end, and the run starts again
                 │ one server
                 ├─► a new server starts ────────────────────────────────────┐
                 └─► others let go who waits ─► trainers come to rest, part ─┴─► reach it, and meet again

What they hold is loaded as at the start of any attempt. Servers that stayed read what has changed since the
snapshot, and nothing else (`ParameterServer.load`); the run goes on behind it with the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError

from rayrec.actors.parameter_server import SERVER_STAGE, spawn_parameter_server
from rayrec.actors.spawning import ActorRole, RayHost
from rayrec.pipelines.cluster.deaths import deaths_among
from rayrec.pipelines.cluster.watch import Watch
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.training.stages import Replaced, Stages, server_spec
from rayrec.platform.ray_errors import ActorDeathError, StageHungError, root_cause

logger = logging.getLogger(__name__)

REST_S = 30.0
"""Time in which those that stay have to end what they are at."""
START_S = 120.0
"""Time in which the new server has to be there."""


@dataclass(frozen=True)
class ServerReplacement:
    """Called with an error and the stages it came from, as `Stages.without_lost`."""

    host: RayHost
    assembly: Assembly
    monitor: Any
    """Of heartbeats."""
    place_again: Callable[[str, int], Mapping[str, Any] | None]
    """Where a member of a stage may start again."""
    watch_over: Callable[[Sequence[Any]], Watch]
    """Waits for answers, and looks after these actors with state."""

    def __call__(self, error: Exception, stages: Stages) -> Replaced | None:
        """
        Raises:
            ActorDeathError: it was begun, and cannot be done.
        """
        if not self._is_possible(error, stages):
            return None
        stateful = [*stages.servers, *stages.callers, *stages.trainers]
        deaths = deaths_among(stateful)
        if len(deaths) != 1 or (shard := next(iter(deaths))) >= len(stages.servers):
            return None
        (death,) = deaths.values()
        began, where = time.monotonic(), self.place_again(SERVER_STAGE, shard)
        if where is None:
            logger.warning("%s with its node, and there is no other place for it alone", death)
            return None
        try:
            stages = self._replaced(stages, shard, death, where)
        except RayError as failed:
            logger.warning("%s, and cannot be replaced alone: %s", death, root_cause(failed))
            raise death from failed
        logger.info("server %d has been replaced in %.1f s; all others stay", shard, time.monotonic() - began)
        return Replaced(stages, death)

    def _is_possible(self, error: Exception, stages: Stages) -> bool:
        """Not where trainers hold what nobody else has: rows in caches, parts of the weights."""
        cause, config = root_cause(error), self.assembly.config
        return (
            config.recovery.replace_lost_server
            and isinstance(cause, RayError | RuntimeError)
            and not isinstance(cause, StageHungError)
            and not stages.dense_is_split
            and not config.sparse.cache_rows
        )

    def _replaced(
        self, stages: Stages, shard: int, death: ActorDeathError, where: Mapping[str, Any]
    ) -> Stages:
        """
        Raises:
            RayError: somebody else has died, or does not come to rest.
        """
        lost = stages.servers[shard]
        self.host.forget(lost)
        name = ActorRole(self.host.run, SERVER_STAGE, shard).actor_name
        _get([self.monitor.forget.remote(name)], REST_S)
        new = self._started(shard, where)
        why = RuntimeError(f"{death}; all steps after the last snapshot are given up")
        waited_for = [*(server for server in stages.servers if server is not lost), *stages.callers]
        _get([actor.abort.remote(why) for actor in waited_for], REST_S)
        _get([trainer.rest.remote() for trainer in stages.trainers], REST_S)
        _get([new.stats.remote()], START_S)

        servers = [new if server is lost else server for server in stages.servers]
        _get([actor.reach.remote(servers) for actor in stages.callers or stages.trainers], REST_S)
        if any(table.disk for table in self.assembly.tables):
            _get([worker.reach.remote(servers) for worker in stages.feature_workers], REST_S)
        watch = self.watch_over([*servers, *stages.callers, *stages.trainers])
        stages = replace(stages, servers=servers, watch=watch, by_group=None)
        stages.connect_trainers(self.host)
        return stages.led_by_groups()

    def _started(self, shard: int, where: Mapping[str, Any]) -> Any:
        """The handle of a new server; its process is not there yet."""
        host, ends = replace(self.host, room=lambda stage: lambda member: where), time.monotonic() + REST_S
        cpus = self.assembly.config.pipeline.cpus_per_actor
        while True:
            try:
                return spawn_parameter_server(host, server_spec(self.assembly), shard, cpus)
            except ActorAlreadyExistsError:  # that the name is free is known a moment after the death is
                if time.monotonic() > ends:
                    raise
                time.sleep(0.1)


def _get(refs: list[Any], timeout_s: float) -> None:
    ray.get(refs, timeout=timeout_s)
