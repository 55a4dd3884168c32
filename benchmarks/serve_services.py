"""What it costs to be several deployments: one process, one deployment, and three of them.

The model and the requests are those of `serve`. All are started as `rayrec serve` starts them, each Ray
cluster in a process of its own; while one is measured, the others are idle. Bars, ratios in one run:

* `serve-services-hop`: 3 ms over what each of the two calls between deployments (gateway to sparse, sparse to
  dense) adds at one connection, medians, against one deployment that does it all.
* `serve-services-sockets`: the same where all calls go by Ray Serve's handles (`local_calls: false`), over
  ours.
* `serve-services-bare`: the same for Ray Serve's own calls, between deployments that do nothing
  (`bare_calls.py`), over ours.
* `serve-services-rate`: requests per second at 32 connections, against one deployment; on two cores it can
  only lose, since nothing computes at the same time that could not before.

Lines for comparison only: the medians at one connection of one process without Ray, and of the deployments.

`RAYREC_BENCH_STEPS` is the number of requests in a window, over 16; at one connection, over 4.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
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
    with trained_run(options) as (data, run):
        load: PeerProcess = PeerProcess(windows, (bodies_of(data, K),), settle_s=SETTLE_S)
        services = {
            name: PeerProcess(_served, (str(run), _config(name)))
            for name in (PROCESS, DEPLOYMENT, SERVICES, HANDLES)
        }
        bare: PeerProcess = PeerProcess(_bare, ())
        try:
            # One after the other: clusters that start at once make each other late.
            urls = {name: f"{service.measure(True)}/v1/recommend" for name, service in services.items()}
            bare_url = bare.measure(True)
            urls |= {path: bare_url + path for path in (NO_CALLS, TWO_CALLS)}
            bars = _bars(urls, load, options)
            for service in (bare, *services.values()):
                service.measure(False)
            return bars
        finally:
            for process in (load, bare, *services.values()):
                process.stop()


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


def _bars(urls: dict[str, str], load: PeerProcess, options: BenchOptions) -> list[Bar]:
    def window(name: str, connections: int) -> Window:
        per_step = CALLS_PER_STEP if connections == 1 else REQUESTS_PER_STEP
        measured: Window = load.measure((urls[name], connections, options.steps * per_step))
        return measured

    for name in urls:
        window(name, CONNECTIONS)  # thrown away
    hops, by_handles, shares, rates = [], [], [], []
    for _ in range(options.pairs):
        alone = {name: window(name, 1).percentile(50) for name in urls}
        under_load = {name: window(name, CONNECTIONS).rate for name in (PROCESS, DEPLOYMENT, SERVICES)}
        hop_s = max((alone[SERVICES] - alone[DEPLOYMENT]) / HOPS, 1e-6)
        handles_s = (alone[HANDLES] - alone[DEPLOYMENT]) / HOPS
        bare_s = (alone[TWO_CALLS] - alone[NO_CALLS]) / HOPS
        hops.append(HOP_S / hop_s)
        by_handles.append(handles_s / hop_s)
        shares.append(bare_s / hop_s)
        rates.append(under_load[SERVICES] / under_load[DEPLOYMENT])
        said = "; ".join(
            f"{name} {alone[name] * 1e3:.2f} ms, {rate:.0f}/s" for name, rate in under_load.items()
        )
        said += f"; a call {hop_s * 1e3:.2f} ms, by handles {handles_s * 1e3:.2f} ms"
        said += f", a bare one {bare_s * 1e3:.2f} ms"
        log.print(f"serve-services: {said}", highlight=False)
    return [
        Bar.of("serve-services-hop", hops, "3 ms for each call between deployments", 1.0),
        Bar.of("serve-services-sockets", by_handles, "calls by Ray Serve's handles over ours", 1.5),
        Bar.of("serve-services-bare", shares, "Ray Serve's calls alone over ours", 0.5),
        Bar.of("serve-services-rate", rates, f"{DEPLOYMENT}, {CONNECTIONS} connections", 0.5),
    ]


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
