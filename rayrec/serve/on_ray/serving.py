"""The service as replicas of Ray Serve, which share the load and are started again when they die.

check run, port, certificate ─► ingress ─► ray_cluster ─► Ray Serve: ingress, replicas ─► ready ─► URL
                                │                          └ runs already: joined, at its address
                                └ sets the environment that a cluster which starts here has
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation

from rayrec.pipelines.cluster.nodes import cluster_folder
from rayrec.pipelines.cluster.service_limits import APPLICATION, ServiceLimits
from rayrec.platform.cluster import check_accelerators, ray_cluster, starts_cluster
from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import check_models, check_service
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.services import MAIN
from rayrec.serve.config.tls import check_tls
from rayrec.serve.on_ray.application import DEPLOYMENT, QUIET, build_application, replica_resources
from rayrec.serve.on_ray.deployments import build_services, replicas_of, resources_of, targets_of
from rayrec.serve.on_ray.ray_ingress import (
    Ingress,
    Kind,
    RunningServe,
    ingress_of_joined_cluster,
    ingress_of_own_cluster,
    running_serve,
)
from rayrec.serve.on_ray.rpc import grpc_options
from rayrec.serve.on_ray.scaling import (
    Bounds,
    DeploymentMetrics,
    ReplicaController,
    Scaled,
    controlled,
    within,
)
from rayrec.serve.on_ray.serve_dashboard import ServeDashboard
from rayrec.serve.web.address import check_port, url_of, wait_until_ready

logger = logging.getLogger(__name__)


@contextmanager
def serving_on_ray(run: str | Path, config: ServeConfig) -> Iterator[str]:
    """The service runs inside the block; the value is its base URL, such as `http://127.0.0.1:8000`.

    Raises:
        InputError: the run cannot be loaded, the port is taken, the cluster has no room, or Ray Serve runs
            there and has no room for this service; nothing was started.
        RuntimeError: a replica could not be started.
    """
    run = str(run)
    _check_run(run, config)
    with serve_of_cluster(config, _cpus(config)) as there:
        limits = ServiceLimits(cluster_folder())
        controller = _controller(there.config, limits)
        config = as_left(there.config, limits)
        for resources, count in _claims(run, config):
            check_accelerators(
                resources, count, "replicas", "choose another device with --device, or fewer replicas"
            )
        url = there.run(_application(run, config), config.is_scaled)
        with controlled(controller):
            yield url


@dataclass
class ServeOfCluster:
    """The Ray Serve of the connected cluster, which runs already or is started for an application."""

    config: ServeConfig
    """At its address."""
    ingress: Ingress
    running: RunningServe | None
    is_begun: bool = False

    def run(self, application: serve.Application, is_scaled: bool = False) -> str:
        """The URL of an application, which is run.

        Raises:
            RuntimeError: a replica could not be started.
        """
        self.is_begun = True
        if self.running is None:
            serve.start(
                proxy_location=ProxyLocation.HeadOnly,
                http_options=dict(self.ingress.http_options),
                grpc_options=grpc_options(self.config),
                logging_config=QUIET,
            )
        try:
            serve.run(application, name=APPLICATION, route_prefix="/", external_scaler_enabled=is_scaled)
        except RuntimeError as error:
            raise RuntimeError(_why_not_running()) from error
        has_tls = self.config.tls is not None or (self.running is not None and self.running.has_tls)
        url = url_of(self.config.host, self.config.port, has_tls)
        wait_until_ready(url)  # the proxy hears of an application a moment after its replicas are up
        logger.info("requests come by %s", self.ingress.said())
        return url

    def end(self) -> None:
        """End what was begun."""
        self.ingress.stops()
        if not self.is_begun:
            return
        # Serve's controller ends before it answers the call that ends it, as it should, and Ray
        # reports that as a failed task on this process's standard output.
        with redirect_stdout(io.StringIO()):
            serve.shutdown() if self.running is None else serve.delete(APPLICATION)


@contextmanager
def serve_of_cluster(config: ServeConfig, cpus: float) -> Iterator[ServeOfCluster]:
    """A cluster, started or joined, and its Ray Serve inside the block; what ran there ends with it.

    Raises:
        InputError: the port is taken, the certificate cannot be used, the cluster has no room, or Ray Serve
            runs there and has no room for this service; nothing was started.
    """
    if config.tls is not None:
        check_tls(config.tls)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it reports every step of its own
    with ExitStack() as stack:
        # Around the cluster, whose processes read their environment when they start.
        own = None
        if starts_cluster(config.cluster):
            _check_ports(config)
            own = stack.enter_context(ingress_of_own_cluster(config))
        stack.enter_context(ray_cluster(config.cluster, cpus))
        running = running_serve()
        if running is not None:
            config = joined(config, running)
        elif own is None:
            _check_ports(config)
        ingress = own or ingress_of_joined_cluster(config)
        if config.grpc_port is not None and config.tls is not None and ingress.kind is not Kind.HAPROXY:
            raise InputError(
                "grpc_port: Ray Serve's own proxy speaks gRPC without TLS, and there is no HAProxy here "
                f"({ingress.reason}); leave out --grpc-port, or --tls-cert and --tls-key"
            )
        there = ServeOfCluster(config, ingress, running)
        try:
            yield there
        finally:
            there.end()


def _check_ports(config: ServeConfig) -> None:
    check_port(config.host, config.port)
    if config.grpc_port is not None:
        check_port(config.host, config.grpc_port, "--grpc-port")


def from_arguments(arguments: dict[str, Any]) -> serve.Application:
    """Build the application for Ray Serve's own configuration files, such as those of a RayService.

    Args:
        arguments: `run`, and those settings of `ServeConfig` that differ from what they are.

    Raises:
        InputError: settings that are none.
    """
    values = dict(arguments)
    run = values.pop("run", None)
    if not isinstance(run, str):
        raise InputError(f"args.run: expected the folder of a run or a store of versions, got {run!r}")
    config = ServeConfig.parse(values, source="args")
    _check_run(run, config)
    return _application(run, config)


def _application(run: str, config: ServeConfig) -> serve.Application:
    return build_application(run, config) if config.services is None else build_services(run, config)


def scaled_deployments(config: ServeConfig) -> dict[str, Scaled]:
    """The deployments whose number of replicas changes, by name."""
    scaling = config.scaling
    if config.services is None:
        bounds = Bounds(config.least_replicas, config.most_replicas)
        found = {DEPLOYMENT: Scaled(bounds, config.num_replicas, scaling.requests_per_replica, scaling)}
    else:
        found = {}
        for name, replicas in replicas_of(config).items():
            # The price is of a second of the device, which the dense part has.
            by_load = {} if replicas is config.services.dense else {"worth_of_replica_s": None}
            found[name] = Scaled(
                Bounds(replicas.least, replicas.most),
                replicas.replicas,
                replicas.requests_per_replica,
                scaling.model_copy(update=by_load),
            )
    return {name: each for name, each in found.items() if each.bounds.least < each.bounds.most}


def as_left(config: ServeConfig, limits: ServiceLimits) -> ServeConfig:
    """The settings with no more replicas to begin with than a queue leaves the service."""
    limit = limits.limit()
    if limit is None or config.services is not None or not config.is_scaled:
        return config
    bounds = Bounds(config.least_replicas, config.most_replicas)
    begin, maximum = within(bounds, config.num_replicas, limit.maximum)
    if maximum < config.most_replicas:
        logger.warning("the queue leaves the service %d of %d replicas", maximum, config.most_replicas)
    return config.model_copy(update={"num_replicas": begin})


def _controller(config: ServeConfig, limits: ServiceLimits) -> ReplicaController | None:
    """None: no number of replicas changes.

    Raises:
        InputError: the cluster has no dashboard.
    """
    scaled = scaled_deployments(config)
    if not scaled:
        return None
    if not _dashboard_url():
        raise InputError(
            "max_replicas: replicas are scaled through Ray's dashboard, and this cluster has none; start its "
            "head with one (ray start --head --include-dashboard=true), or leave out --min-replicas and "
            "--max-replicas"
        )
    client = ServeDashboard(_dashboard_url)
    return ReplicaController(APPLICATION, scaled, client, limits, DeploymentMetrics())


def _dashboard_url() -> str:
    """Of the head that this process is connected to; empty if it has none."""
    from ray._private.worker import get_dashboard_url

    url = get_dashboard_url()
    return f"http://{url}" if url else ""


def _cpus(config: ServeConfig) -> float:
    return config.num_replicas * config.num_threads if config.services is None else config.services.cpus


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
    """Check what replicas will load, so that what they cannot is refused in its own words."""
    check_models(run, config)
    if config.services is not None:
        for name, (other, settings) in targets_of(run, config, config.services).items():
            if name != MAIN:
                check_service(other, settings)


def joined(config: ServeConfig, running: RunningServe) -> ServeConfig:
    """The settings at the address of a Serve that runs; what of them is not in force is said.

    Raises:
        InputError: TLS or gRPC is wanted and that Serve has none, or our routes or our name are taken.
    """
    if config.grpc_port is not None:
        raise InputError(
            "Ray Serve runs in the cluster, and what it answers over gRPC is set when it starts; leave out "
            "--grpc-port, or use another cluster"
        )
    if APPLICATION in running.routes:
        raise InputError(
            f"the Ray cluster serves an application {APPLICATION!r} already; stop it, or use another cluster"
        )
    for name, route in running.routes.items():
        if route == "/":
            raise InputError(
                f"Ray Serve runs in the cluster, and its application {name!r} has all routes (/); give that "
                "one a route_prefix, or use another cluster"
            )
    if config.tls is not None and not running.has_tls:
        raise InputError(
            f"Ray Serve runs in the cluster at {running.host}:{running.port}, without TLS; leave out "
            "--tls-cert and --tls-key, or use another cluster"
        )
    there = config.model_copy(update={"host": running.host, "port": running.port})
    asked = {"host": config.host, "port": config.port}
    unheard = [f"--{name} {value}" for name, value in asked.items() if getattr(there, name) != value]
    if unheard:
        logger.warning(
            "joined the Ray Serve that listens on %s:%d; not in force: %s",
            running.host,
            running.port,
            ", ".join(unheard),
        )
    return there
