"""Starting or joining a Ray cluster, and disconnecting cleanly."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from rayrec.platform.config import Config
from rayrec.platform.devices import HOST, claimed_resources
from rayrec.platform.errors import MachineError
from rayrec.platform.processors import num_processors

logger = logging.getLogger(__name__)

_HOST_AND_PORT = re.compile(r"(ray://)?(?P<host>[^/:\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d+)")
ADDRESS_TRIES, ADDRESS_PATIENCE_S, ADDRESS_PAUSE_S = 3, 5.0, 2.0
"""Seconds to wait for a connection, and between two tries: a cluster may be coming up."""
START_TRIES = 3
NICENESS = "RAY_worker_niceness"
"""Variable of Ray's setting."""
TIMED_OUT = "timed out during startup"
"""In the message of Ray's exception for it, which has no class of its own."""


class ClusterConfig(Config):
    """Where a run finds its Ray cluster."""

    address: str | None = None
    """`auto`, `ray://host:port` or `host:port`; None joins the cluster of the
    surrounding Ray job, or starts one on this machine."""
    object_store_bytes: int = Field(512 * 1024 * 1024, ge=80 * 1024 * 1024)
    """Shared memory of a cluster started here; batches in flight live in it."""
    dashboard: bool = True
    """Whether a cluster started here serves the Ray dashboard (on loopback)."""


def starts_cluster(config: ClusterConfig) -> bool:
    """Whether `ray_cluster` starts a cluster on this machine, rather than joins one."""
    import ray

    return not ray.is_initialized() and _address(config) is None


@contextmanager
def ray_cluster(config: ClusterConfig, cpus_needed: float) -> Iterator[None]:
    """Connect to Ray inside the block; a cluster started here is shut down at its end.

    Raises:
        MachineError: the cluster that was joined has fewer CPUs than the run's actors ask for, none answers
            at its address, or none can be started here.
    """
    import ray

    if ray.is_initialized():
        _check_capacity(cpus_needed)
        yield
        return
    address = _address(config)
    if address is not None:
        _check_answers(address, "cluster.address" if config.address else "RAY_ADDRESS")
    logging.getLogger("ray").setLevel(logging.ERROR)  # before init, which logs
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            start_on_this_machine(
                # Our own cluster may promise more CPUs than there are: a small machine is only slower.
                num_cpus=max(num_processors(), int(cpus_needed + 0.999)),
                object_store_memory=config.object_store_bytes,
                include_dashboard=config.dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except ConnectionError as error:
        raise MachineError(
            f"cluster.address or RAY_ADDRESS: no Ray cluster answers at {address!r}; start one with "
            "'ray start --head', set RAY_AUTH_MODE=token if it wants a token, or leave the address out to "
            "start one for this run"
        ) from error
    try:
        _keep_handler(signal.SIGTERM, on_sigterm)
        _check_capacity(cpus_needed)
        yield
    finally:
        ray.shutdown()


def _keep_handler(number: signal.Signals, handler: Any) -> None:
    """Install a handler of our own again, after Ray's C++ has installed its own below Python.

    Ray's prints a trace of C++ and aborts the process, which then cannot say that the run was stopped.
    """
    # Where nobody has set one (SIG_DFL is callable, too), Ray's may stay.
    is_own = callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN)
    if is_own and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def _check_answers(address: str, setting: str) -> None:
    """Refuse an address at which no Ray listens: Ray itself would try it for a quarter of an hour.

    Raises:
        MachineError: names the setting that has it.
    """
    at = _HOST_AND_PORT.fullmatch(address)
    if at is None:  # `auto`, `local`, a name of Ray's: it looks for itself
        return
    for left in reversed(range(ADDRESS_TRIES)):
        try:
            place = (at["host"].strip("[]"), int(at["port"]))
            with socket.create_connection(place, ADDRESS_PATIENCE_S) as connection:
                if not _speaks_http2(connection):
                    raise OSError("something listens there that is no Ray cluster")
            return
        except OSError as error:
            if left:
                time.sleep(ADDRESS_PAUSE_S)
                continue
            raise MachineError(
                f"{setting}: no Ray cluster answers at {address!r} ({error}); start one with "
                "'ray start --head', or leave the address out (unset RAY_ADDRESS) to start one for this run"
            ) from error


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether a connection begins as gRPC's do, which Ray's are."""
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return True  # it would have to be asked in TLS
    # Both sides send their settings first: frame type 4, in the fourth byte (RFC 9113, section 3.4).
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    answer = b""
    while len(answer) < 4:
        part = connection.recv(4 - len(answer))
        if not part:
            return False
        answer += part
    return answer[3] == 4


@contextmanager
def _workers_as_others() -> Iterator[None]:
    """Inside the block, workers of a cluster that starts get the time that others of this machine get, unless
    the environment says otherwise. Ray's own niceness is 15, with which they wait for all else.
    """
    if NICENESS in os.environ:
        yield
        return
    os.environ[NICENESS] = "0"
    try:
        yield
    finally:
        del os.environ[NICENESS]


def start_on_this_machine(**options: Any) -> None:
    """Start a Ray cluster on this machine, again if its node does not come up in time, and connect to it.

    Ray waits 30 s for a node, which no setting changes; on a busy machine the next try often succeeds, since
    the files that its processes load have been read by then.

    Args:
        options: for `ray.init`.

    Raises:
        MachineError: no try succeeded.
    """
    import ray

    left = START_TRIES
    while True:
        try:
            # Never a cluster that happens to run on this machine.
            with _workers_as_others():
                ray.init(address="local", **options)
            return
        except Exception as error:
            if options.get("include_dashboard") and "dashboard" in str(error).lower():
                ray.shutdown()
                options["include_dashboard"] = False
                logger.warning("Ray's dashboard did not start, the run goes on without it: %s", error)
                continue
            if TIMED_OUT not in str(error):
                raise
            ray.shutdown()
            left -= 1
            if left == 0:
                raise MachineError(
                    "Ray did not start on this machine in time, which happens where others keep it busy or "
                    "memory is short; try again when there is less to do, join a cluster that runs "
                    "(RAY_ADDRESS, or cluster.address in the settings of a run), or do without Ray where the "
                    "command can (--local, --no-ray)"
                ) from error
            logger.warning("Ray did not start on this machine in time; trying again")


def check_accelerators(claim: Mapping[str, Any], num_actors: int, actors: str, remedy: str) -> None:
    """Refuse actors for which the connected cluster has no accelerator: Ray would wait forever.

    Like the check of CPUs it compares totals: accelerators that another job uses now are waited for.

    Args:
        claim: what each actor asks for, from `devices.ray_claim`.
        actors: their name in messages, in plural.
        remedy: what the user can do about it.

    Raises:
        MachineError: names the resource, and how many there are.
    """
    import ray

    for name, each in claimed_resources(claim).items():
        available = ray.cluster_resources().get(name, 0.0)
        if available < each * num_actors:
            raise MachineError(
                f"the {actors} need {each * num_actors:g} {name} and the Ray cluster has "
                f"{available:g}; {remedy}"
            )


def _address(config: ClusterConfig) -> str | None:
    return config.address or os.environ.get("RAY_ADDRESS") or None


def _check_capacity(cpus_needed: float) -> None:
    """Compares totals: CPUs that another job uses now are waited for."""
    import ray

    available = ray.cluster_resources().get(HOST.ray_resource, 0.0)
    if not available:
        raise MachineError(
            f"the run's actors need {cpus_needed:g} CPUs and the Ray cluster has none: its head takes no "
            "work (--num-cpus 0), and no other node has joined it; start a node with "
            "'ray start --address HOST:PORT'"
        )
    if available < cpus_needed:
        raise MachineError(
            f"the run's actors need {cpus_needed:g} CPUs and the Ray cluster has {available:g}; "
            "lower pipeline.num_trainers, sparse.num_servers or pipeline.cpus_per_trainer, "
            "or join a larger cluster"
        )
