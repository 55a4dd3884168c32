"""The Ray Serve application: replicas that each hold the model, or all of several, and their HTTP side.

Several models are in each replica and not in deployments of their own: so one process answers what is asked
of all of them, clients need not know Serve's applications (over gRPC, Serve tells them apart by metadata that
no client of the Open Inference Protocol sends), and nothing is handed on between processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from rayrec.pipelines.cluster.service_limits import DEPLOYMENT
from rayrec.platform.devices import ray_claim
from rayrec.platform.remote_files import absolute
from rayrec.serve.app.loading import device_of, load_models
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.events.request_log import REQUEST_ID
from rayrec.serve.on_ray.ray_ingress import sticky_routing
from rayrec.serve.on_ray.rpc import RpcMethods
from rayrec.serve.on_ray.serve_dashboard import REPLICA_TAG
from rayrec.serve.rpc.service import RpcService
from rayrec.serve.web.guards import WithoutHeader
from rayrec.serve.web.metrics import RayMeter
from rayrec.serve.web.models import protect
from rayrec.serve.wire.deadlines import NO_TIME_HEADER

QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)

SPARE_REQUESTS = 32
"""Requests beyond `max_waiting` that reach a replica: health checks, and those it refuses at once."""


class RecommendReplica(RpcMethods):
    """A thin shell around `load_models`."""

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        # The run's config may name its data relative to where the command was started.
        os.chdir(working_directory)
        tags = _tags_of_replica()
        self._api = load_models(run, config, lambda of, name: RayMeter(Path(of).name, tags, name))
        self.rpc = RpcService.of(self._api, config)
        protect(self._api, config)
        # Ray Serve adds the same one.
        self._api.add_middleware(WithoutHeader, name=REQUEST_ID)
        if config.models:
            # HAProxy knows of no models, and would refuse requests to the others, too.
            self._api.add_middleware(WithoutHeader, name=NO_TIME_HEADER)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        return self._api


def _tags_of_replica() -> dict[str, str]:
    """By which the controller of replicas tells whose a gauge is."""
    try:
        return {REPLICA_TAG: serve.get_replica_context().replica_id.unique_id}
    except RayServeException:  # held by something else than Ray Serve
        return {}


def replica_resources(run: str | Path, config: ServeConfig) -> dict[str, Any]:
    """What each replica asks of Ray, as options of an actor: its models share a device."""
    claims = ray_claim(device_of(run, config))
    for each in config.models:
        claims = claims | ray_claim(device_of(each.run, config.beside[each.name]))
    return {"num_cpus": config.num_threads, **claims}


def build_application(run: str | Path, config: ServeConfig) -> serve.Application:
    """What `ray.serve.run` takes; nothing is loaded until then."""
    models = [config, *config.beside.values()]
    deployed = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=config.num_replicas,
        max_ongoing_requests=sum(each.max_waiting for each in models) + SPARE_REQUESTS,
        ray_actor_options=replica_resources(run, config),
        **(sticky_routing() if config.is_sticky else {}),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
        # A model that cannot be loaded cannot be loaded a second time either.
        max_constructor_retry_count=1,
        logging_config=QUIET,
    )
    return deployed(serve.ingress()(RecommendReplica)).bind(absolute(str(run)), config, os.getcwd())
