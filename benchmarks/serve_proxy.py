"""The way to a replica: that of `rayrec serve` against Ray Serve's own, for a handler that does nothing.

Both services are Ray clusters of their own on this machine with one replica of the same deployment; while
one is measured, the other is idle. 16 connections have one request each at a time (`socket_load.py`, on the
same machine). One bar, a ratio of requests per second in one run:

* `serve-proxy`: what `rayrec serve` sets up (`serve/ray_ingress.py`), against Serve's proxy as it is.

Lines for comparison only: how much the load generator gets of HAProxy alone, which bounds what can be
measured, and the seconds that each service takes to stop.

`RAYREC_BENCH_STEPS` is the length of a window in tenths of a second.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.own_serve import deployment, running
from benchmarks.peer_process import PeerProcess
from benchmarks.socket_load import rates
from rayrec.platform.console import log
from rayrec.serve.on_ray.ray_ingress import Kind

CONNECTIONS, TARGET = 16, 5.0
SECONDS_PER_STEP = 0.1
ANSWERED_BY_HAPROXY = "/-/routes"


def bench(options: BenchOptions) -> list[Bar]:
    ours, peer = PeerProcess(_service, (True,)), PeerProcess(_service, (False,))
    load = PeerProcess(rates, ())
    seconds = options.steps * SECONDS_PER_STEP
    try:
        # One after the other: two clusters that start at once make each other late.
        urls = {service: service.measure("url") for service in (ours, peer)}

        def rate(service: PeerProcess, path: str = "/") -> float:
            measured: float = load.measure((urls[service] + path, CONNECTIONS, seconds))
            return measured

        for service in urls:
            rate(service)  # thrown away
        log.print(f"serve-proxy: {ours.measure('said')}", highlight=False)
        if ours.measure("kind") == Kind.HAPROXY.name:
            log.print(f"serve-proxy: HAProxy alone {rate(ours, ANSWERED_BY_HAPROXY):.0f}/s", highlight=False)

        def both(a: float, b: float) -> None:
            log.print(f"serve-proxy: ours {a:.0f}/s, Serve's {b:.0f}/s, ratio {a / b:.1f}", highlight=False)

        ratios = interleaved(lambda: rate(ours), lambda: rate(peer), options.pairs, both)
        log.print(
            f"serve-proxy: stopped in {ours.measure('stop'):.1f} s, Serve's in {peer.measure('stop'):.1f} s",
            highlight=False,
        )
    finally:
        for process in (load, ours, peer):
            process.stop()
    return [Bar.of("serve-proxy", ratios, f"Serve's proxy, {CONNECTIONS} connections", TARGET)]


class _Handler:
    """Answers with next to nothing; a framework's work on a request is not that of the way to it."""

    def __init__(self) -> None:
        async def answer(request: Request) -> Response:
            return PlainTextResponse("ready")

        self._api = Starlette(routes=[Route(path, answer) for path in ("/", "/health/ready")])

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._api


def _service(fast: bool) -> Callable[[str], str | float]:
    """In a process: a service, until it is told to stop; says its URL, how requests come, and the
    seconds that it takes to stop."""
    service = running(deployment(serve.ingress()(_Handler)), fast)
    url, ingress = service.__enter__()

    def told(what: str) -> str | float:
        if what == "stop":
            began = time.perf_counter()
            service.__exit__(None, None, None)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which Ray would say at length
            return time.perf_counter() - began
        return {"url": url, "said": ingress.said(), "kind": ingress.kind.name}[what]

    return told
