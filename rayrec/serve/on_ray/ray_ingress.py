"""How requests come to the replicas of Ray Serve, and all that depends on experimental parts of Ray.

    HAPROXY   HAProxy ─► the server of a replica, on loopback     of clusters started here
    PROXY     Serve's proxy, in Python ─► replica                 everywhere else

HAProxy takes several times the requests and is the default where it is there, as it is on Linux, since
`ray[serve]` brings it along. Serve reads whether to use it from the environment of its processes, which is
that of the process that started the Ray cluster: for a cluster that is joined, this module can only say what
is in force. HAProxy is configured by `haproxy_config.py`, which says why; so it listens where the service is
to listen, with TLS if that is wanted, and nowhere else outside of loopback.

(The ports on which Ray's own processes talk to each other listen on all interfaces. Ray 2.60 answers there
only to processes that have the cluster's token, unless RAY_AUTH_MODE turns that off.)

The names here were read in the sources of one version of Ray; a test says which of them a new one lacks.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.platform.errors import InputError
from rayrec.serve.config.admission import USER_HEADER
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.tls import link_for_haproxy
from rayrec.serve.on_ray.haproxy_config import Plan, write_program
from rayrec.serve.on_ray.haproxy_stand_in import STOPPING
from rayrec.serve.web.address import READY_TIMEOUT_S, ip_of
from rayrec.serve.web.guards import BODY_TIMEOUT_S

if TYPE_CHECKING:  # Serve reads the environment when it is imported
    from ray.serve.handle import DeploymentHandle

HAPROXY_SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
HAPROXY_PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
DIRECT_SWITCH = "RAY_SERVE_ENABLE_DIRECT_INGRESS"

FAST: Mapping[str, str] = {
    HAPROXY_SWITCH: "1",
    # A replica handles requests on the event loop that they come to. What computes is on threads anyway.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A replica that ends would wait half a minute for balancers of others; HAProxy asks another one itself.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # They cost a third of the requests: a line to a process in Python for each. Replicas count them, too.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # Of a client that sends nothing in the middle of a request, or takes nothing of its answer; an hour by
    # default. Longer than a replica waits for a body, since that one says so in the form of the protocol.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": f"{2 * BODY_TIMEOUT_S:.0f}",
}
"""What HAProxy's path sets, unless the environment has it already."""

PLAIN: Mapping[str, str] = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # It would start servers that nothing asks, and makes the proxy drain for half a minute.
    DIRECT_SWITCH: "0",
}
"""What the path of Serve's proxy sets: gRPC to the replicas instead of Ray's calls."""

COMMON: Mapping[str, str] = {
    # On a busy machine a proxy may need longer than the default of 5 s, and would be started again and again.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{READY_TIMEOUT_S:g}",
    # A proxy that died is missed after three of them, half a minute by default.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
}
_FOLDERS: Mapping[str, str] = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
"""Whose default is a folder in /tmp that anybody may have made, with a socket that obeys anybody."""
_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)
"""Of loopback, with defaults that a second service, or another program, may have."""
STICKY_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
STICKY: Mapping[str, str] = {
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"hdr({USER_HEADER})",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": USER_HEADER,
}
"""What sends a user's requests to the same replica, of HAProxy's path and of the proxy's."""
VARIABLES = (*FAST, *PLAIN, *COMMON, *STICKY, HAPROXY_PROGRAM, *_FOLDERS, *_PORTS)
"""All that this module sets."""

MIN_HAPROXY = (2, 6)
"""Which takes Serve's configuration; Ray brings 2.8."""
_MAX_FOLDER = 28
"""Characters: HAProxy's socket lies below it and the id of a Ray node, and may be 97 long."""


class Kind(enum.Enum):
    """Names as the log has them."""

    HAPROXY = "HAProxy in front of the replicas' own servers"
    PROXY = "Ray Serve's proxy"


@dataclass(frozen=True)
class HAProxy:
    """That can be used."""

    program: Path
    version: str
    """As it says it."""


@dataclass(frozen=True)
class Ingress:
    """What was chosen."""

    kind: Kind
    reason: str
    """Which HAProxy, or why not HAProxy."""
    not_in_force: tuple[str, ...] = ()
    """Settings of the fastest path that the cluster was started without, as `NAME=VALUE`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """For the environment of a cluster that is started here."""
    http_options: Mapping[str, str | int] = field(default_factory=dict)
    """For `serve.start`."""
    folder: Path | None = None
    """Of what HAProxy is told; None: nothing is."""

    def said(self) -> str:
        """For the log."""
        text = f"{self.kind.value} ({self.reason})"
        if self.not_in_force:
            text += f"; not in force: {', '.join(self.not_in_force)}"
        return text

    def stops(self) -> None:
        """Call it before the service is stopped: a HAProxy that ends from now on was not meant to go on."""
        if self.folder is not None:
            (self.folder / STOPPING).touch()


@contextmanager
def ingress_of_own_cluster(config: ServeConfig) -> Iterator[Ingress]:
    """The way requests come in a cluster that is started inside the block, whose environment is set there.

    Variables that are set already stay as they are.
    """
    folder = Path(tempfile.mkdtemp(prefix="rayrec-", dir=_short_folder()))  # with access for nobody else
    try:
        haproxy = _find_haproxy(config, folder)
        ingress = _plain(config, haproxy) if isinstance(haproxy, str) else _fast(config, haproxy, folder)
        with _environment(ingress.variables):
            yield ingress
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ingress_of_joined_cluster(config: ServeConfig) -> Ingress:
    """The way requests come in the cluster that this process is connected to, by its processes' environment.

    Raises:
        InputError: TLS is wanted, and the ingress of that cluster has none.
    """
    found = _environments()
    if config.tls is not None and any(map(_is_direct, found)):
        raise InputError(
            "the Ray cluster was started with Serve's HAProxy or direct ingress, which have no TLS; leave "
            "out --tls-cert and --tls-key, or let this command start a cluster"
        )
    kind, reason = Kind.PROXY, "the cluster was not started by this command"
    if all(environment.get(HAPROXY_SWITCH) == "1" for environment in found):
        kind, reason = Kind.HAPROXY, "as the cluster was started, with its metrics on all interfaces"
    missing = tuple(
        f"{name}={value}"
        for name, value in {**FAST, **_sticky(config)}.items()
        if any(environment.get(name) != value for environment in found)
    )
    return Ingress(kind, reason, missing, {}, _proxy_options(config))


@dataclass(frozen=True)
class RunningServe:
    """A Ray Serve that somebody else started, whose address cannot be changed while it runs."""

    host: str
    port: int
    has_tls: bool
    routes: Mapping[str, str | None]
    """Prefix of the routes of each of its applications, by name."""


def running_serve() -> RunningServe | None:
    """That of the connected cluster; None where there is none."""
    from ray import serve
    from ray.serve.context import _get_global_client

    status = serve.status()
    if not status.proxies and not status.applications:
        return None
    client = _get_global_client()
    assert client is not None, "it has just told its status"
    http = client.http_config
    applications = client.get_serve_details()["applications"]
    routes = {name: application["route_prefix"] for name, application in applications.items()}
    return RunningServe(http.host, http.port, bool(http.ssl_certfile), routes)


def by_message(handle: DeploymentHandle) -> DeploymentHandle:
    """The same deployment, called by gRPC messages instead of Ray's calls: half the time of a call.

    Clusters that are started here do that anyway (`RAY_SERVE_THROUGHPUT_OPTIMIZED`); joined ones may not.
    """
    messages: DeploymentHandle = handle.options(_by_reference=False)
    return messages


def sticky_routing() -> dict[str, Any]:
    """Options of a deployment whose calls go to a replica by the hash of their session.

    Those without one go to any. A replica that comes or goes moves the sessions of its share alone.
    """
    from ray.serve.config import RequestRouterConfig

    settings: Any = {"request_router_class": STICKY_ROUTER}
    return {"request_router_config": RequestRouterConfig(**settings)}


def of_session(handle: DeploymentHandle, session: str) -> DeploymentHandle:
    """The same deployment, called for a session; see `sticky_routing`."""
    sticky: DeploymentHandle = handle.options(session_id=session)
    return sticky


def _is_direct(environment: Mapping[str, str]) -> bool:
    """Whether replicas answer HTTP themselves, as Serve decides it."""
    if environment.get(HAPROXY_SWITCH) == "1":
        return True
    return environment.get(DIRECT_SWITCH, environment.get("RAY_SERVE_THROUGHPUT_OPTIMIZED")) == "1"


def _plain(config: ServeConfig, reason: str) -> Ingress:
    variables = _unless_set({**PLAIN, **COMMON, **_sticky(config)}) | {HAPROXY_SWITCH: "0"}
    return Ingress(Kind.PROXY, reason, (), variables, _proxy_options(config))


def _fast(config: ServeConfig, haproxy: HAProxy, folder: Path) -> Ingress:
    from ray._common.network_utils import get_localhost_ip

    certificate = None if config.tls is None else link_for_haproxy(config.tls, folder)
    plan: Plan = {
        "haproxy": str(haproxy.program),
        "listen": {
            "host": ip_of(config.host),
            "port": config.port,
            "grpc_port": config.grpc_port,
            "certificate": None if certificate is None else str(certificate),
        },
        "most": config.max_in_flight,
        "has_token": config.token_sha256 is not None,
        "launcher": os.getpid(),
        "of_one_address": config.connections.of_one_address,
    }
    own = {HAPROXY_PROGRAM: str(write_program(folder, sys.executable, plan))}
    own |= {name: str(folder / file) for name, file in _FOLDERS.items()}
    loopback = get_localhost_ip()
    own |= {name: str(port) for name, port in zip(_PORTS, _free_ports(len(_PORTS), loopback), strict=True)}
    # The address of the replicas; HAProxy's is in the plan.
    options: dict[str, str | int] = {"host": loopback, "port": config.port, **_keep_alive(config)}
    wanted = {**FAST, **_sticky(config)}
    variables = _unless_set({**wanted, **COMMON}) | own
    otherwise = tuple(f"{name}={value}" for name, value in wanted.items() if variables[name] != value)
    return Ingress(Kind.HAPROXY, haproxy.version, otherwise, variables, options, folder)


def _sticky(config: ServeConfig) -> Mapping[str, str]:
    return STICKY if config.is_sticky else {}


def _keep_alive(config: ServeConfig) -> dict[str, int]:
    keep_alive_s = config.connections.keep_alive_s
    return {} if keep_alive_s is None else {"keep_alive_timeout_s": keep_alive_s}


def _proxy_options(config: ServeConfig) -> dict[str, str | int]:
    options: dict[str, str | int] = {"host": config.host, "port": config.port, **_keep_alive(config)}
    if config.tls is not None:
        # In this order: Serve checks the second against the first.
        options |= {"ssl_keyfile": config.tls.key, "ssl_certfile": config.tls.certificate}
    return options


def _find_haproxy(config: ServeConfig, folder: Path) -> HAProxy | str:
    """HAProxy, or the reason why it is not used."""
    if os.environ.get(HAPROXY_SWITCH, "1") != "1":
        return f"{HAPROXY_SWITCH} is {os.environ[HAPROXY_SWITCH]}"
    if not sys.platform.startswith("linux"):
        return "Ray Serve has HAProxy on Linux only"
    if len(str(folder)) > _MAX_FOLDER:
        return f"the path of the temporary folder {folder} is too long for HAProxy's socket"
    program = _haproxy_program()
    if program is None:
        return "no HAProxy is installed"
    said = _output_of([str(program), "-vv"])
    version = re.search(r"^HA-?Proxy version (\d+)\.(\d+)[.\d]*", said, re.MULTILINE)
    if version is None:
        return f"{program} cannot be run"
    if (int(version[1]), int(version[2])) < MIN_HAPROXY:
        return f"{program} is {version[0]}, needed is {MIN_HAPROXY[0]}.{MIN_HAPROXY[1]}"
    if config.tls is not None and "+OPENSSL" not in said:
        return f"{program} was built without TLS"
    if not _may_run_programs(folder):
        return f"no program may be run in {folder}"
    return HAProxy(program, version[0])


def _haproxy_program() -> Path | None:
    """As Serve would choose it."""
    from ray.serve._private.haproxy import get_haproxy_binary

    told = os.environ.get(HAPROXY_PROGRAM)
    if told:  # Serve has read it when it was imported
        return Path(told)
    try:
        return Path(get_haproxy_binary())
    except FileNotFoundError:
        return None


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=READY_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _may_run_programs(folder: Path) -> bool:
    """Some systems forbid it for all that lies in temporary folders."""
    program = folder / "probe"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    try:
        return os.access(program, os.X_OK) and subprocess.run([str(program)]).returncode == 0
    except OSError:
        return False


def _short_folder() -> str | None:
    """Where the temporary folder goes; None: where the system says."""
    too_long = len(f"{tempfile.gettempdir()}/rayrec-12345678") > _MAX_FOLDER
    return "/tmp" if too_long and os.access("/tmp", os.W_OK) else None


def _free_ports(count: int, host: str) -> list[int]:
    """At this moment: who starts at the same time may take one of them, and Serve would say so."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probes = [socket.socket(family) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in variables.items()}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set inside the block, for the processes that are started there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _environments() -> list[dict[str, str]]:
    """What processes find in their environment, of every node of the connected cluster."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(_own_environment)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)).remote()
        for node in nodes
    ]
    found: list[dict[str, str]] = ray.get(asked)
    return found


def _own_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}
