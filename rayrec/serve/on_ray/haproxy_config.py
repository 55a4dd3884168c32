"""What stands between Ray Serve and HAProxy: a program that Serve takes for HAProxy.

Serve writes HAProxy's configuration from a template that has no settings for any of this:

* its metrics and statistics listen on all interfaces; here on loopback;
* requests arrive without the address of the client, and one that a client invents would be believed, since
  the replicas' servers trust headers that come from this machine; here HAProxy says whose they are;
* there is no TLS, and the address of HAProxy is also the one of the replicas; here HAProxy alone has the
  service's address, and the replicas are on loopback;
* every request is logged, with its query, to port 514 of this machine; here none is;
* a replica gets whatever comes, and to refuse a request takes it longer than HAProxy, of the time in which it
  computes; here HAProxy refuses what is to be computed while the replicas have as much of it as they hold;
* where no replica answers, callers get status 500, and where HAProxy does not know the application yet, 404;
  here 503, with the time after which to try again, in the form of the protocol that was spoken;
* while no replica is there, as after the only one died, requests wait in Serve's own proxy, for as long as a
  replica takes to load, and clients run into their timeouts; here that proxy is asked by nobody, and they get
  the same 503 at once;
* when HAProxy dies, nobody listens until Serve has started another one; here `haproxy_stand_in.py` does;
* `/-/routes` tells every client which applications there are; here it does not where callers need a token
  (`/-/healthz`, which says whether there are replicas, is a probe of health and stays open);
* a replica does not know how long a request has waited for it; here HAProxy says when it came;
* calls over gRPC come without their deadline, which the replicas' servers do not tell; here it is a header;
* a user's requests, where they are to go to one replica, would all move when a replica comes or goes; here
  the hash is consistent, and none gets much more than the others.

So Serve is told of this program instead of HAProxy. It rewrites the configuration that it is given, refuses
one that it does not know to the last address, and becomes HAProxy, in the same process. It runs at every
change of the replicas, by its path and without the rest of the package: it imports the standard library and
`haproxy_stand_in.py` only.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import re
import shlex
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn, NotRequired, TypedDict

if __name__ == "__main__":  # by its path: there is no package to import it from
    sys.path.append(str(Path(__file__).resolve().parent))
    import haproxy_stand_in as stand_in
else:
    from rayrec.serve.on_ray import haproxy_stand_in as stand_in

METRICS, REQUESTS, STATISTICS = "frontend prometheus", "frontend http_frontend", "listen stats"
CALLS = "frontend grpc_frontend"
"""Sections that listen; the last one where gRPC is spoken."""

_SECTION = re.compile(r"(global|defaults|frontend|backend|listen|userlist|peers|resolvers|cache|program)\b")
_UNKNOWN = "backend default_backend"
"""The section that says 404 to all: reached while no application is known, since ours has all routes."""
_WITHOUT_REPLICAS = ("default_backend", "default_grpc_backend", "grpc_fallback_backend")
_BIND = re.compile(r"(?P<indent>\s+)bind\s+(?P<address>\S*):(?P<port>\d+)(?P<http2> proto h2)?\s*")
_NO_CALLS = "backend default_grpc_backend"
"""As `_UNKNOWN`, of gRPC."""
_KNOWN = re.compile(r"^\s*use_backend (?!grpc_fallback_backend\b)", re.MULTILINE)
"""In a configuration that knows an application."""
_DIE_WITH_PARENT = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


class Listen(TypedDict):
    """Where HAProxy answers requests."""

    host: str
    """An IP address."""
    port: int
    grpc_port: NotRequired[int | None]
    """Where it answers calls over gRPC; None: nowhere."""
    certificate: str | None
    """File of a certificate chain, with the key in a file next to it that ends with `.key`; None: no TLS."""


class Plan(TypedDict):
    """What the program is told."""

    haproxy: str
    """Path of the program that it becomes."""
    listen: Listen
    most: int
    """Requests to compute something that a replica holds at once."""
    rest_ms: NotRequired[int]
    """See `REST_MS`."""
    has_token: NotRequired[bool]
    """Whether callers have to send a token, which the replicas ask for."""
    of_one_address: NotRequired[int]
    """Connections of one client's address at most; without it, any number."""
    launcher: NotRequired[int]
    """The process that stops the service; without one, nothing stands in for a HAProxy that died."""


REST_MS = 20
"""After a replica had no time for a request, others with as little time are refused for so long. What the
replica has in flight takes it many times as long, so it does not run out of work."""
HEADERS_S = 10
"""In which the headers of a request have to come."""
_OF_MODEL = "^/models/[^/]+"
"""Paths of one of several models begin so, see `web/models.py`."""
_UNBOUNDED_MS = 1_000_000_000
_NO_TIME_HEADER = "X-No-Time"
"""As `wire/deadlines.py` has it."""
_SENTENCE = "no replica has room for the request, or none has started yet; try again in a second"
NO_REPLICA = {"error": _SENTENCE}
NO_REPLICA_OPENAI = {"error": {"message": _SENTENCE, "type": "server_error", "param": None, "code": None}}
"""In the form of that protocol, as `errors.py` has it."""
NO_APPLICATIONS = "this service needs a token, and does not tell its applications"
NO_ROUTES = {"error": "this service needs a token, and does not tell its routes"}


def write_program(folder: Path, python: str, plan: Plan) -> Path:
    """A file for `RAY_SERVE_HAPROXY_BINARY_PATH`.

    Args:
        folder: that nobody else may write to; it has to stay.
        python: the interpreter to run it with.
    """
    plan_file, program = folder / "plan.json", folder / "haproxy"
    plan_file.write_text(json.dumps(plan))
    # Without site-packages (-S) and the environment's paths (-I), which nothing here needs.
    command = [python, "-I", "-S", str(Path(__file__).resolve()), str(plan_file)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(stat.S_IRWXU)
    return program


def rewritten(
    config: str,
    listen: Listen,
    most: int,
    rest_ms: int = REST_MS,
    has_token: bool = False,
    listens: bool = True,
    of_one_address: int | None = None,
) -> str:
    """Serve's configuration with our addresses and bounds.

    Args:
        most: requests to compute something that a replica holds at once.
        rest_ms: as `REST_MS`.
        has_token, of_one_address: as in a `Plan`.
        listens: whether requests come here.

    Raises:
        ValueError: something listens in it that this module does not know, or what it knows is missing.
    """
    lines: list[str] = []
    seen: list[str] = []
    section = ""
    expected = [METRICS, REQUESTS, STATISTICS, *([CALLS] if listen.get("grpc_port") is not None else [])]
    for line in config.splitlines():
        if _SECTION.match(line):
            section = line.strip()
        words = line.split()
        if section == "global" and words[:1] == ["log"]:
            continue
        if section == _NO_CALLS and words[:3] == ["http-request", "return", "status"]:
            lines.append(f"    {_refused_call(UNAVAILABLE, _SENTENCE)}")
            continue
        if section == _UNKNOWN and words[:4] == ["http-request", "return", "status", "404"]:
            lines.append(
                "    http-request return status 503 content-type application/json "
                "lf-string '%[var(txn.rayrec_no_replica)]' hdr Retry-After 1"
            )
            continue
        if words[:1] == ["errorfile"]:
            # A file would be the same for all paths; `_requests` says what is in this variable.
            lines.append(
                f"    http-error status {words[1]} content-type application/json "
                "lf-string '%[var(txn.rayrec_no_replica)]' hdr Retry-After 1"
            )
            continue
        if words[:1] == ["server"] and words[-1] == "backup":
            lines.append(f"{line.rstrip()} disabled")
            continue
        if words[:1] != ["bind"]:
            lines.append(line)
            if words[:1] == ["balance"] and words[1].startswith("hdr("):
                # A replica that comes or goes moves its share of users alone; one that has a quarter more to
                # do than the others hands on what is too much.
                lines += ["    hash-type consistent", "    hash-balance-factor 125"]
            if words[:1] == ["backend"] and words[1].startswith("grpc-"):
                lines += [f"    {text}" for text in _refusals_of_calls(most)]
            elif words[:1] == ["backend"] and words[1] not in _WITHOUT_REPLICAS:
                lines += [f"    {text}" for text in _refusals(most, rest_ms)]
            continue
        found = _BIND.fullmatch(line)
        if found is None or section not in expected or bool(found["http2"]) != (section == CALLS):
            raise ValueError(f"{section!r} listens in a way that is not known: {line.strip()!r}")
        seen.append(section)
        if section == CALLS:
            bind, *rules = _calls(listen, has_token, of_one_address)
            lines += [found["indent"] + text for text in ([bind, *rules] if listens else rules)]
        elif section == REQUESTS:
            bind, *rules = _requests(listen, has_token, of_one_address)
            lines += [found["indent"] + text for text in ([bind, *rules] if listens else rules)]
        else:
            lines.append(f"{found['indent']}bind 127.0.0.1:{found['port']}")
    if sorted(seen) != sorted(expected):
        raise ValueError(f"expected one address of each section, found those of {', '.join(seen) or 'none'}")
    return "\n".join(lines) + "\n"


def _requests(listen: Listen, has_token: bool, of_one_address: int | None) -> list[str]:
    family = f"ipv{ipaddress.ip_address(listen['host']).version}"
    bind = f"bind {family}@{listen['host']}:{listen['port']}"
    if listen["certificate"] is not None:
        bind += f" ssl crt '{listen['certificate']}' ssl-min-ver TLSv1.2 alpn http/1.1"
    scheme = "http" if listen["certificate"] is None else "https"
    no_routes = "http-request return status 403 content-type application/json string"
    of_routes = "if { path,url_dec -m reg -i ^/+-/+routes/*$ }"
    of_openai = (
        "if { path /v1/completions } or { path_beg /v1/models } or { path_beg /v1/chat } "
        f"or {{ path_reg {_OF_MODEL}/v1/completions$ }}"
    )
    return [
        bind,
        *_bounds(of_one_address),
        # Else a client that sends its headers byte by byte keeps its connection. Bodies: `web/guards.py`.
        f"timeout http-request {HEADERS_S}s",
        "http-request set-header X-Forwarded-For %[src]",
        f"http-request set-header X-Forwarded-Proto {scheme}",
        # As `wire/deadlines.py` has it.
        "http-request set-header X-Request-Start %[date(0,ms)]",
        f"http-request set-var-fmt(txn.rayrec_no_replica) '{json.dumps(NO_REPLICA)}'",
        f"http-request set-var-fmt(txn.rayrec_no_replica) '{json.dumps(NO_REPLICA_OPENAI)}' {of_openai}",
        # Of HAProxy's own answers: replicas have none of them.
        "http-after-response set-status 503 if { status 502 504 }",
        # In front of the rule that would tell them; replicas decode `%2D`, and would tell them as well.
        *([f"{no_routes} '{json.dumps(NO_ROUTES)}' {of_routes}"] if has_token else []),
    ]


def _bounds(of_one_address: int | None) -> list[str]:
    if of_one_address is None:
        return []
    return [
        "stick-table type ipv6 size 100k expire 1m store conn_cur",
        "tcp-request connection track-sc1 src",
        f"tcp-request connection reject if {{ sc1_conn_cur gt {of_one_address} }}",
    ]


def _calls(listen: Listen, has_token: bool, of_one_address: int | None) -> list[str]:
    """As `_requests`, of the section that speaks gRPC."""
    family = f"ipv{ipaddress.ip_address(listen['host']).version}"
    bind = f"bind {family}@{listen['host']}:{listen.get('grpc_port')}"
    if listen["certificate"] is None:
        bind += " proto h2"
    else:
        bind += f" ssl crt '{listen['certificate']}' ssl-min-ver TLSv1.2 alpn h2"
    said, timeout = "req.hdr(X-Request-Timeout-Ms)", "http-request set-header X-Request-Timeout-Ms"
    asks = "if { path /ray.serve.RayServeAPIService/ListApplications }"
    return [
        bind,
        *_bounds(of_one_address),
        f"timeout http-request {HEADERS_S}s",
        "http-request set-header X-Forwarded-For %[src]",
        "http-request set-header X-Request-Start %[date(0,ms)]",
        # The deadline, which gRPC writes as a number of hours to nanoseconds.
        *(
            f"{timeout} %[req.hdr(grpc-timeout),regsub({unit}$,){to_ms}] "
            f"if !{{ {said} -m found }} {{ req.hdr(grpc-timeout) -m reg ^[0-9]{{1,8}}{unit}$ }}"
            for unit, to_ms in _UNITS.items()
        ),
        *([f"{_refused_call(PERMISSION_DENIED, NO_APPLICATIONS)} {asks}"] if has_token else []),
    ]


_UNITS = {
    "H": ",mul(3600000)",
    "M": ",mul(60000)",
    "S": ",mul(1000)",
    "m": "",
    # At least 1: a timeout of 0 is none.
    "u": ",div(1000),add(1)",
    "n": ",div(1000000),add(1)",
}
PERMISSION_DENIED, UNAVAILABLE = 7, 14
"""Statuses of gRPC."""


def _refused_call(status: int, sentence: str) -> str:
    """A rule that answers a call without a message."""
    return (
        f"http-request return status 200 hdr content-type application/grpc hdr grpc-status {status} "
        f"hdr grpc-message '{sentence}'"
    )


def _refusals_of_calls(most: int) -> list[str]:
    """As `_refusals`: calls that find as many of them in flight as there may be."""
    full = "if rayrec_computes { var(txn.rayrec_room) -m int lt 0 }"
    return [
        "acl rayrec_computes path /inference.GRPCInferenceService/ModelInfer",
        f"http-request set-var(txn.rayrec_most) nbsrv,mul({most})",
        "http-request set-var(txn.rayrec_room) be_conn,neg,add(txn.rayrec_most)",
        f"{_refused_call(UNAVAILABLE, _SENTENCE)} hdr grpc-retry-pushback-ms 1000 {full}",
    ]


def _refusals(most: int, rest_ms: int) -> list[str]:
    """Rules of the replicas' section: refuse what finds as many requests in flight as there may be, and what
    comes right after one that would have been late."""
    refused = "http-request return status 503 content-type application/json hdr Retry-After 1 string"
    full = "if rayrec_computes { var(txn.rayrec_room) -m int lt 0 }"
    # Variables that nobody has set are less than nothing: no rule holds then.
    late = "if rayrec_computes { var(txn.rayrec_rest) -m int lt 0 } { var(txn.rayrec_more) -m int le 0 }"
    said_late = f"if {{ res.hdr({_NO_TIME_HEADER}) -m found }}"
    return [
        # As `web/guards.py` has them.
        "acl rayrec_computes path /v1/recommend /v1/completions",
        "acl rayrec_computes path_reg ^/v2/models/.*/infer$",
        f"acl rayrec_computes path_reg {_OF_MODEL}/(v1/recommend|v1/completions|v2/models/.*/infer)$",
        f"http-request set-var(txn.rayrec_most) nbsrv,mul({most})",
        # The request itself counts already.
        "http-request set-var(txn.rayrec_room) be_conn,neg,add(txn.rayrec_most)",
        f"http-request set-var(txn.rayrec_has_ms) int({_UNBOUNDED_MS})",
        # As `wire/deadlines.py` has it.
        "http-request set-var(txn.rayrec_has_ms) req.hdr(X-Request-Timeout-Ms) "
        "if { req.hdr(X-Request-Timeout-Ms) -m reg ^[0-9]{1,9}$ }",
        "http-request set-var(txn.rayrec_more) var(txn.rayrec_has_ms),sub(proc.rayrec_late_ms)",
        "http-request set-var(txn.rayrec_rest) date(0,ms),sub(proc.rayrec_late_until)",
        *(
            f"{refused} '{json.dumps(body)}' {when}{path}"
            for when in (full, late)
            for body, path in ((NO_REPLICA_OPENAI, " { path_end /v1/completions }"), (NO_REPLICA, ""))
        ),
        f"http-response set-var(proc.rayrec_late_ms) var(txn.rayrec_has_ms) {said_late}",
        f"http-response set-var(proc.rayrec_late_until) date({rest_ms},ms) {said_late}",
        f"http-response del-header {_NO_TIME_HEADER}",
    ]


def main(arguments: list[str]) -> NoReturn:
    """Called as `PLAN.json [arguments of HAProxy]`."""
    plan_file = Path(arguments[0])
    plan: Plan = json.loads(plan_file.read_text())
    rest = arguments[1:]
    launcher = plan.get("launcher")
    if "-f" in rest:
        file = Path(rest[rest.index("-f") + 1])
        # Serve's own file, since Serve knows its HAProxy by that path among its arguments.
        changed = file.with_name(f"{file.name}.changed")
        try:
            rest_ms, has_token = plan.get("rest_ms", REST_MS), plan.get("has_token", False)
            written = file.read_text()
            # Serve begins with one that knows no application: what stands in for the one before knows it.
            is_known = _KNOWN.search(written) is not None
            listens = is_known or launcher is None or not stand_in.answers(plan_file.parent)
            config = rewritten(
                *(written, plan["listen"], plan["most"], rest_ms, has_token, listens),
                plan.get("of_one_address"),
            )
            changed.write_text(config)
            if is_known and launcher is not None:
                stand_in.note_current(plan_file.parent, config)
                stand_in.start(plan_file.parent, plan["haproxy"], launcher)
        except ValueError as error:
            sys.exit(f"rayrec: this version of Ray Serve configures HAProxy in a new way: {error}")
        changed.replace(file)
    # Also when the process that started it is killed: nobody would stop it any more.
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("rayrec: the process that started HAProxy is gone")
    os.execv(plan["haproxy"], [plan["haproxy"], *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
