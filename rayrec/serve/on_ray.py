"""The service as replicas of Ray Serve, which share the load and are started again when they die.

check run, port, certificate ─► ingress ─► ray_cluster ─► Ray Serve: ingress, replicas ─► ready ─► URL
                                └ sets the environment that a cluster which starts here has
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation

from rayrec.platform.cluster import check_accelerators, ray_cluster, starts_cluster
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError
from rayrec.serve.address import check_port, url_of, wait_until_ready
from rayrec.serve.application import QUIET, build_application, replica_resources
from rayrec.serve.config import ServeConfig
from rayrec.serve.loading import load_service
from rayrec.serve.ray_ingress import Ingress, ingress_of_joined_cluster, ingress_of_own_cluster
from rayrec.serve.services.config import MAIN
from rayrec.serve.services.deployments import build_services, resources_of, targets_of
from rayrec.serve.tls import check_tls

logger = logging.getLogger(__name__)

APPLICATION = "rayrec"


@contextmanager
def serving_on_ray(run: str | Path, config: ServeConfig) -> Iterator[str]:
    """The service runs inside the block; the value is its base URL, such as `http://127.0.0.1:8000`.

    Raises:
        InputError: the run cannot be loaded, the port is taken, or the cluster has no room or runs
            Ray Serve already; nothing was started.
        RuntimeError: a replica could not be started.
    """
    run = str(run)
    _check_run(run, config)
    check_port(config.host, config.port)
    if config.tls is not None:
        check_tls(config.tls)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it reports every step of its own
    with ExitStack() as stack:
        # Around the cluster, whose processes read their environment when they start.
        own = stack.enter_context(ingress_of_own_cluster(config)) if starts_cluster(config.cluster) else None
        stack.enter_context(ray_cluster(config.cluster, _cpus(config)))
        _refuse_second_serve()
        for resources, count in _claims(run, config):
            check_accelerators(
                resources, count, "replicas", "choose another device with --device, or fewer replicas"
            )
        ingress = own or ingress_of_joined_cluster(config)
        try:
            yield _start(run, config, ingress)
        finally:
            # Serve's controller ends before it answers the call that ends it, as it should, and Ray
            # reports that as a failed task on this process's standard output.
            with redirect_stdout(io.StringIO()):
                serve.shutdown()


def _start(run: str, config: ServeConfig, ingress: Ingress) -> str:
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=dict(ingress.http_options),
        logging_config=QUIET,
    )
    try:
        serve.run(_application(run, config), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise RuntimeError(_why_not_running()) from error
    url = url_of(config.host, config.port, config.tls is not None)
    wait_until_ready(url)  # the proxy hears of an application a moment after its replicas are up
    logger.info("requests come by %s", ingress.said())
    return url


def _application(run: str, config: ServeConfig) -> serve.Application:
    return build_application(run, config) if config.services is None else build_services(run, config)


def _cpus(config: ServeConfig) -> float:
    return config.num_replicas * config.threads if config.services is None else config.services.cpus


def _claims(run: str, config: ServeConfig) -> list[tuple[dict[str, Any], int]]:
    """What actors ask of Ray, and how many of them."""
    if config.services is None:
        return [(replica_resources(run, config), config.num_replicas)]
    return resources_of(run, config)


def _why_not_running() -> str:
    """The reason that `serve.run` leaves out of its error: the last line of a replica's traceback."""
    found = serve.status().applications.get(APPLICATION)
    deployed = [] if found is None else list(found.deployments.values())
    lines = [line for each in deployed for line in each.message.strip().splitlines()]
    return f"the service could not be started: {lines[-1].strip() if lines else 'Ray Serve gives no reason'}"


def _check_run(run: str, config: ServeConfig) -> None:
    """Load the model as a replica will, so that one that cannot be loaded is refused in its own words."""
    # On the CPU, which is always here; this machine may lack the device of the replicas.
    load_service(run, config, HOST.kind)
    if config.services is not None:
        for name, (other, settings) in targets_of(run, config, config.services).items():
            if name != MAIN:
                load_service(other, settings, HOST.kind)


def _refuse_second_serve() -> None:
    """Its address cannot be changed while it runs, and stopping ours would stop it."""
    status = serve.status()
    if status.proxies or status.applications:
        names = ", ".join(status.applications) or "none"
        raise InputError(
            f"the Ray cluster runs Ray Serve already (applications: {names}); "
            "stop it with 'serve shutdown', or use another cluster"
        )
