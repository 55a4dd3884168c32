"""The Ray Serve application: replicas that each hold the model and its HTTP side."""

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
from rayrec.serve.app.loading import device_of, load_api
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.ray_ingress import sticky_routing
from rayrec.serve.on_ray.rpc import RpcMethods
from rayrec.serve.on_ray.serve_dashboard import REPLICA_TAG
from rayrec.serve.rpc.service import RpcService
from rayrec.serve.web.bearer_token import require_token
from rayrec.serve.web.browsers import keep_pages_out
from rayrec.serve.web.guards import WithoutRequestId
from rayrec.serve.web.metrics import RayMeter

QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)

SPARE_REQUESTS = 32
"""Requests beyond `max_waiting` that reach a replica: health checks, and those it refuses at once."""


class RecommendReplica(RpcMethods):
    """A thin shell around `load_api`."""

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        # The run's config may name its data relative to where the command was started.
        os.chdir(working_directory)
        self._api = load_api(run, config, RayMeter(Path(run).name, _tags_of_replica()))
        self.rpc = RpcService.of(self._api, config)
        require_token(self._api, config.token_sha256)
        keep_pages_out(self._api, config)
        self._api.add_middleware(WithoutRequestId)

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
    """What each replica asks of Ray, as options of an actor."""
    return {"num_cpus": config.threads, **ray_claim(device_of(run, config))}


def build_application(run: str | Path, config: ServeConfig) -> serve.Application:
    """What `ray.serve.run` takes; nothing is loaded until then."""
    deployed = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=config.num_replicas,
        max_ongoing_requests=config.max_waiting + SPARE_REQUESTS,
        ray_actor_options=replica_resources(run, config),
        **(sticky_routing() if config.has_prefix_cache else {}),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
        # A model that cannot be loaded cannot be loaded a second time either.
        max_constructor_retry_count=1,
        logging_config=QUIET,
    )
    return deployed(serve.ingress()(RecommendReplica)).bind(absolute(str(run)), config, os.getcwd())
