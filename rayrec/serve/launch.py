"""Starting the service, and stopping it clean.

serve_run ─► serving ─► check run, port ─► ray_cluster ─► Ray Serve: proxy, replicas ─► ready ─► URL
    └ waits for a signal; then the same way back
"""

from __future__ import annotations

import errno
import io
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation

from rayrec.pipelines.ranking_stage import RankingStage
from rayrec.pipelines.recommender import Recommender
from rayrec.platform.cluster import check_accelerators, ray_cluster
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError
from rayrec.serve.application import DEPLOYMENT, QUIET, build_application, replica_resources
from rayrec.serve.config import ServeConfig

logger = logging.getLogger(__name__)

APPLICATION = "rayrec"
READY_TIMEOUT_S = 60.0
"""Between the replicas being up and the proxy routing to them; usually a fraction of a second."""


def serve_run(run: str | Path, config: ServeConfig) -> None:
    """Answer requests with a run's model until SIGINT or SIGTERM; call it on the main thread.

    Raises:
        InputError: as `serving`.
    """
    with serving(run, config) as url, _stop_signal() as stopped:
        logger.info("answering at %s/v1/recommend, described at %s/docs; Ctrl-C stops", url, url)
        stopped.wait()
        logger.info("stopping")


@contextmanager
def serving(run: str | Path, config: ServeConfig) -> Iterator[str]:
    """The service runs inside the block; the value is its base URL, such as `http://127.0.0.1:8000`.

    Raises:
        InputError: the run cannot be loaded, the port is taken, or the cluster has no room or runs
            Ray Serve already; nothing was started.
        RuntimeError: a replica could not be started.
    """
    run = Path(run)
    _check_run(run, config)
    _check_port(config.host, config.port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it reports every step of its own
    # Read by the processes of a cluster that starts here. Ray gives its workers a low priority: on a busy
    # machine a proxy may need longer than the default of 5 s, and would be started again and again.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", f"{READY_TIMEOUT_S:g}")
    with ray_cluster(config.cluster, config.num_replicas * config.threads):
        _refuse_second_serve()
        check_accelerators(
            replica_resources(run, config),
            config.num_replicas,
            "replicas",
            "choose another device with --device, or fewer --replicas",
        )
        try:
            yield _start(run, config)
        finally:
            # Serve's controller ends before it answers the call that ends it, as it should, and Ray
            # reports that as a failed task on this process's standard output.
            with redirect_stdout(io.StringIO()):
                serve.shutdown()


def _start(run: Path, config: ServeConfig) -> str:
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options={"host": config.host, "port": config.port},
        logging_config=QUIET,
    )
    try:
        serve.run(build_application(run, config), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise RuntimeError(_why_not_running()) from error
    url = _url(config.host, config.port)
    _wait_until_ready(url)
    return url


def _why_not_running() -> str:
    """The reason that `serve.run` leaves out of its error: the last line of a replica's traceback."""
    found = serve.status().applications.get(APPLICATION)
    deployed = None if found is None else found.deployments.get(DEPLOYMENT)
    lines = deployed.message.strip().splitlines() if deployed is not None else []
    return f"the service could not be started: {lines[-1].strip() if lines else 'Ray Serve gives no reason'}"


def _check_run(run: Path, config: ServeConfig) -> None:
    """Load the model as a replica will, so that one that cannot be loaded is refused in its own words."""
    # On the CPU, which is always here; this machine may lack the device of the replicas.
    recommender = Recommender.load(run, config.snapshot, device=HOST.kind, data=config.data)
    if config.ranking is not None:
        RankingStage.load(recommender, config.ranking, device=HOST.kind)


def _check_port(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections of an earlier service may still be closing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} on {host} is in use; choose another with --port") from error
        raise InputError(
            f"cannot listen on port {port} of {host}: {error.strerror}; choose others with --host and --port"
        ) from error


def _refuse_second_serve() -> None:
    """Its address cannot be changed while it runs, and stopping ours would stop it."""
    status = serve.status()
    if status.proxies or status.applications:
        names = ", ".join(status.applications) or "none"
        raise InputError(
            f"the Ray cluster runs Ray Serve already (applications: {names}); "
            "stop it with 'serve shutdown', or use another cluster"
        )


def _url(host: str, port: int) -> str:
    """Where this machine reaches the service."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return f"http://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def _wait_until_ready(url: str) -> None:
    """The proxy hears of a new application a moment after its replicas are up."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    # Never through a proxy of the environment: the service is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(f"{url}/health/ready", timeout=READY_TIMEOUT_S):
                return
        except OSError as error:  # other statuses than 200 among them
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the service at {url} is not ready after {READY_TIMEOUT_S:g} s: {error}"
                ) from error
        time.sleep(0.05)


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set inside the block, instead of what they did before."""
    stopped = threading.Event()

    def stop(signum: int, frame: Any) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
