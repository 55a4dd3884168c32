"""An application on a Ray Serve of its own, reached as `rayrec serve` or as Ray Serve has it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation

from benchmarks.serve import free_port
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.application import QUIET
from rayrec.serve.on_ray.ray_ingress import Ingress, Kind, ingress_of_own_cluster
from rayrec.serve.web.address import url_of, wait_until_ready

MAX_ONGOING = 96
"""Requests that Serve lets a replica have at once: what `rayrec serve` sets by default."""


def deployment(replica: Any, *arguments: Any, cpus: float = 1.0) -> serve.Application:
    """With the settings of all that is measured here."""
    deployed = serve.deployment(
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": cpus},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
        logging_config=QUIET,
    )
    bound: serve.Application = deployed(replica).bind(*arguments)
    return bound


@contextmanager
def running(application: serve.Application, fast: bool = True) -> Iterator[tuple[str, Ingress]]:
    """Its URL, and how requests come; it answers `/health/ready`.

    Args:
        fast: as `rayrec serve` sets it up; else Ray Serve's proxy as it is.
    """
    config = ServeConfig(port=free_port())
    with _ingress(config, fast) as ingress, ray_cluster(ClusterConfig(dashboard=False), 2):
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=dict(ingress.http_options),
            logging_config=QUIET,
        )
        try:
            serve.run(application, route_prefix="/")
            url = url_of(config.host, config.port)
            wait_until_ready(url)
            yield url, ingress
        finally:
            with redirect_stdout(io.StringIO()):  # Ray calls the controller's end a failure
                serve.shutdown()


@contextmanager
def _ingress(config: ServeConfig, fast: bool) -> Iterator[Ingress]:
    if not fast:
        options: dict[str, str | int] = {"host": config.host, "port": config.port}
        yield Ingress(Kind.PROXY, "as it is", http_options=options)
        return
    with ingress_of_own_cluster(config) as ingress:
        yield ingress
