"""What it costs to be several deployments: one process, one deployment, and three of them.

The model and the requests are those of `serve`. All are started as `rayrec serve` starts them, each Ray
cluster in a process of its own; while one is measured, the others are idle. Idle clusters are not free: their
daemons and controllers wake up many times a second. So what is asked in milliseconds is measured before there
are more of them than the two that are compared. Bars, ratios in one run:

* `serve-services-hop`: 3 ms over what each of the two calls between deployments (gateway to sparse, sparse to
  dense) adds at one connection, medians, against one deployment that does it all.
* `serve-services-rate`: requests per second at 32 connections, against one deployment; on two cores it can
  only lose, since nothing computes at the same time that could not before.
* `serve-services-sockets`: what a call adds where all go by Ray Serve's handles (`local_calls: false`), over
  ours.
* `serve-services-bare`: the same for Ray Serve's own calls, between deployments that do nothing
  (`bare_calls.py`), over ours.

Lines for comparison only: the medians at one connection of one process without Ray, and of the deployments.

`RAYREC_BENCH_STEPS` is the number of requests in a window, over 16; at one connection, over 4.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from benchmarks.bare_calls import NO_CALLS, TWO_CALLS, application
from benchmarks.harness import Bar, BenchOptions
from benchmarks.http_load import Window, windows
from benchmarks.own_serve import running
from benchmarks.peer_process import SETTLE_S, PeerProcess
from benchmarks.serve import (
    CALLS_PER_STEP,
    CONNECTIONS,
    REQUESTS_PER_STEP,
    THREADS,
    K,
    bodies_of,
    free_port,
    trained_run,
)
from rayrec.platform.cluster import ClusterConfig
from rayrec.platform.console import log
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.services import ServicesConfig
from rayrec.serve.launch.launch import serving

HOPS, HOP_S = 2, 3e-3
PROCESS, DEPLOYMENT, SERVICES = "one process", "one deployment", "three deployments"
HANDLES = "three by handles"


def bench(options: BenchOptions) -> list[Bar]:
    with trained_run(options) as (data, run), ExitStack() as started:
        load: PeerProcess = PeerProcess(windows, (bodies_of(data, K),), settle_s=SETTLE_S)
        started.callback(load.stop)

        def start(make: Callable[..., Callable[[bool], str]], *arguments: Any) -> str:
            service: PeerProcess = PeerProcess(make, arguments)
            started.callback(service.stop)
            url: str = service.measure(True)
            started.callback(service.measure, False)
            return url

        def window(url: str, connections: int) -> Window:
            per_step = CALLS_PER_STEP if connections == 1 else REQUESTS_PER_STEP
            measured: Window = load.measure((url, connections, options.steps * per_step))
            return measured

        # One after the other: clusters that start at once make each other late.
        urls = {
            name: f"{start(_served, str(run), _config(name))}/v1/recommend"
            for name in (PROCESS, DEPLOYMENT, SERVICES)
        }
        bars = _against_one(urls, window, options.pairs)
        urls[HANDLES] = f"{start(_served, str(run), _config(HANDLES))}/v1/recommend"
        bare_url = start(_bare)
        urls |= {path: bare_url + path for path in (NO_CALLS, TWO_CALLS)}
        return bars + _against_handles(urls, window, options.pairs)


def _config(name: str) -> ServeConfig:
    return ServeConfig(
        threads=THREADS,
        port=free_port(),
        max_waiting=4 * CONNECTIONS,
        timeout_s=60,
        single_process=name == PROCESS,
        services=ServicesConfig(local_calls=name == SERVICES) if name in (SERVICES, HANDLES) else None,
        cluster=ClusterConfig(dashboard=False),
    )


def _against_one(urls: dict[str, str], window: Callable[[str, int], Window], pairs: int) -> list[Bar]:
    """Three deployments against one, while no other cluster is there."""
    for url in urls.values():
        window(url, CONNECTIONS)  # thrown away
    hops, rates = [], []
    for _ in range(pairs):
        alone = {name: window(url, 1).percentile(50) for name, url in urls.items()}
        under_load = {name: window(urls[name], CONNECTIONS).rate for name in (DEPLOYMENT, SERVICES)}
        hop_s = _hop_s(alone[SERVICES], alone[DEPLOYMENT])
        hops.append(HOP_S / hop_s)
        rates.append(under_load[SERVICES] / under_load[DEPLOYMENT])
        said = [f"{name} {seconds * 1e3:.2f} ms" for name, seconds in alone.items()]
        said += [
            f"a call {hop_s * 1e3:.2f} ms",
            *(f"{name} {rate:.0f}/s" for name, rate in under_load.items()),
        ]
        log.print(f"serve-services: {'; '.join(said)}", highlight=False)
    return [
        Bar.of("serve-services-hop", hops, "3 ms for each call between deployments", 1.0),
        Bar.of("serve-services-rate", rates, f"{DEPLOYMENT}, {CONNECTIONS} connections", 0.5),
    ]


def _against_handles(urls: dict[str, str], window: Callable[[str, int], Window], pairs: int) -> list[Bar]:
    """Ray Serve's own calls, of our deployments and of empty ones, over our calls."""
    for name in (HANDLES, NO_CALLS, TWO_CALLS):
        window(urls[name], CONNECTIONS)  # thrown away
    by_handles, shares = [], []
    for _ in range(pairs):
        alone = {name: window(url, 1).percentile(50) for name, url in urls.items()}
        hop_s = _hop_s(alone[SERVICES], alone[DEPLOYMENT])
        handles_s = _hop_s(alone[HANDLES], alone[DEPLOYMENT])
        bare_s = _hop_s(alone[TWO_CALLS], alone[NO_CALLS])
        by_handles.append(handles_s / hop_s)
        shares.append(bare_s / hop_s)
        log.print(
            f"serve-services: a call {hop_s * 1e3:.2f} ms, by handles {handles_s * 1e3:.2f} ms, "
            f"a bare one {bare_s * 1e3:.2f} ms",
            highlight=False,
        )
    return [
        Bar.of("serve-services-sockets", by_handles, "calls by Ray Serve's handles over ours", 1.5),
        Bar.of("serve-services-bare", shares, "Ray Serve's calls alone over ours", 0.5),
    ]


def _hop_s(with_calls_s: float, without_s: float) -> float:
    """Seconds that each call adds."""
    return max((with_calls_s - without_s) / HOPS, 1e-6)


def _served(run: str, config: ServeConfig) -> Callable[[bool], str]:
    """In a process: a service, until it is told to stop; its URL."""
    service = serving(run, config)
    return _until_told(service, service.__enter__())


def _bare() -> Callable[[bool], str]:
    """As `_served`, of deployments that do nothing."""
    service = running(application())
    return _until_told(service, service.__enter__()[0])


def _until_told(service: AbstractContextManager[Any], url: str) -> Callable[[bool], str]:
    def told(goes_on: bool) -> str:
        if not goes_on:
            service.__exit__(None, None, None)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which Ray would say at length
        return url

    return told
