"""Serving over HTTP: requests that are merged while the model is busy, against other ways to serve it.

The model is the generative one of `configs/beauty-lazy.yaml` with 20 beams, trained for a moment; every
request names another user and asks for 10 items; 32 connections with one request each at a time, and the load
generator on the same machine. All services lie behind one proxy of Ray Serve with its default settings, with
one replica each; while one is measured, the others are idle. Bars, ratios in one run:

* `serve-batch`: requests per second, against the same service that computes one request at a time.
* `serve-batch-p99`: the 99th percentile of one at a time over ours, of the same windows.
* `serve-serve-batch`: requests per second, against the model behind `@serve.batch`, with the best of
  several batch sizes and times to wait.
* `serve-bare`: requests per second, over those of a replica that answers without its model: what is left to
  gain by any way to batch. It is also printed over those of `@serve.batch`, which is the most that
  `serve-serve-batch` could be.

`RAYREC_BENCH_STEPS` is the number of requests in a window, over 16.
"""

from __future__ import annotations

import json
import socket
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from ray import serve
from ray.serve.config import ProxyLocation

from benchmarks import serve_peers
from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.http_load import Window, windows
from benchmarks.peer_process import SETTLE_S, PeerProcess
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log
from rayrec.samples.dataset.dataset import Dataset
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.single_process import serving_here
from rayrec.serve.on_ray.application import QUIET, build_application
from rayrec.serve.web.address import url_of, wait_until_ready

BEAMS, K, CONNECTIONS, THREADS = 20, 10, 32, 1
REQUESTS_PER_STEP, CALLS_PER_STEP = 16, 4
"""In a window under load, and at one connection."""
SETTINGS = tuple((size, wait_s) for size in (8, 16, 32) for wait_s in (0.0, 0.005, 0.02))
"""Of `@serve.batch`: batch sizes, and seconds that a batch waits to become full."""
OURS, SINGLE, SERVE_BATCH = "ours", "one at a time", "@serve.batch"
ROUTES = {OURS: "/ours", SINGLE: "/single", SERVE_BATCH: "/serve-batch"}


def bench(options: BenchOptions) -> list[Bar]:
    with trained_run(options) as (data, run):
        load: PeerProcess = PeerProcess(windows, (bodies_of(data, K),), settle_s=SETTLE_S)
        try:
            with _services(run) as urls:
                return _throughput(urls, load, options)
        finally:
            load.stop()


@contextmanager
def trained_run(options: BenchOptions, beams: int = BEAMS) -> Iterator[tuple[Path, Path]]:
    """A data set, and a run of the generative model on it."""
    with (
        beauty_sized(options.data) as data,
        tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder,
    ):
        config = RunConfig.load(
            CHECKOUT / "configs" / "beauty-lazy.yaml",
            [
                f"data.path={data}",
                f"model.beam_width={beams}",
                "training.epochs=1",
                "evaluation.max_users=500",
                "cluster.dashboard=false",
            ],
        )
        log.print("serve: training a model")
        train(config, Path(folder) / "run")
        yield data, Path(folder) / "run"


def bodies_of(data: Path, k: int) -> list[dict[str, object]]:
    """A request for each user, in an order drawn at random."""
    keys = Dataset.open(data).users["user_key"].to_pylist()
    np.random.default_rng(0).shuffle(keys)
    return [{"user_id": key, "k": k} for key in keys]


@contextmanager
def _services(run: Path) -> Iterator[dict[str, str]]:
    """URLs to ask, by service."""
    port = free_port()
    config = ServeConfig(threads=THREADS, max_waiting=4 * CONNECTIONS, timeout_s=60)
    applications = {
        OURS: build_application(run, config),
        SINGLE: build_application(run, config.model_copy(update={"max_batch": 1})),
        SERVE_BATCH: serve_peers.application(run, config),
    }
    # Each replica reserves a processor, though only one of them is busy at a time.
    with ray_cluster(ClusterConfig(dashboard=False), 1 + THREADS * len(applications)):
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options={"host": "127.0.0.1", "port": port},
            logging_config=QUIET,
        )
        try:
            for name, application in applications.items():
                serve.run(application, name=name, route_prefix=ROUTES[name])
            url = url_of("127.0.0.1", port)
            wait_until_ready(url + ROUTES[OURS])
            yield {name: url + route for name, route in ROUTES.items()}
        finally:
            serve.shutdown()


def _throughput(urls: dict[str, str], load: PeerProcess, options: BenchOptions) -> list[Bar]:
    num_requests = options.steps * REQUESTS_PER_STEP

    def window(name: str, route: str = "recommend") -> Window:
        return load.measure((f"{urls[name]}/v1/{route}", CONNECTIONS, num_requests))

    for name in ROUTES:
        window(name)  # thrown away
    pairs = [(window(OURS), window(SINGLE)) for _ in range(options.pairs)]
    for ours, single in pairs:
        _show(ours, SINGLE, single)
    best = _best_settings(urls[SERVE_BATCH], lambda: window(SERVE_BATCH).rate)
    _set(urls[SERVE_BATCH], *best)

    window(SERVE_BATCH, "bare")  # thrown away
    rounds = []
    for _ in range(options.pairs):
        ours, theirs = window(OURS).rate, window(SERVE_BATCH).rate
        bare = window(SERVE_BATCH, "bare").rate
        rounds.append((ours / theirs, ours / bare))
        log.print(
            f"serve: ours {ours:.0f}/s, {SERVE_BATCH} {theirs:.0f}/s, ratio {ours / theirs:.2f}; "
            f"without a model {bare:.0f}/s, over {SERVE_BATCH} {bare / theirs:.2f}"
        )
    ratios, of_bare = map(list, zip(*rounds, strict=True))
    at_best = f"{SERVE_BATCH}, at most {best[0]} in a batch, {best[1] * 1e3:g} ms to wait"
    p99s = [single.percentile(99) / ours.percentile(99) for ours, single in pairs]
    return [
        Bar.of("serve-batch", [ours.rate / single.rate for ours, single in pairs], SINGLE, 2.0),
        Bar.of("serve-batch-p99", p99s, SINGLE, 1.0),
        Bar.of("serve-serve-batch", ratios, at_best, 1.3),
        Bar.of("serve-bare", of_bare, "answers without the model", 0.8),
    ]


def _show(ours: Window, name: str, theirs: Window) -> None:
    def said(window: Window) -> str:
        return (
            f"{window.rate:.0f}/s, p50 {window.percentile(50) * 1e3:.0f} ms, "
            f"p99 {window.percentile(99) * 1e3:.0f} ms"
        )

    log.print(f"serve: ours {said(ours)}; {name} {said(theirs)}", highlight=False)


def _best_settings(url: str, rate: Callable[[], float]) -> tuple[int, float]:
    rates: dict[tuple[int, float], float] = {}
    for settings in SETTINGS:
        _set(url, *settings)
        rates[settings] = rate()
        size, wait_s = settings
        log.print(f"{SERVE_BATCH}, {size} and {wait_s * 1e3:g} ms: {rates[settings]:.0f}/s", highlight=False)
    return max(rates, key=rates.__getitem__)


def _set(url: str, max_batch_size: int, wait_s: float) -> None:
    _post(f"{url}/settings", {"max_batch_size": max_batch_size, "wait_s": wait_s})


def _post(url: str, body: object) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    with opener.open(request, timeout=60) as answer:
        return bytes(answer.read())


def served(run: str, config: ServeConfig) -> Callable[[None], str]:
    """In a process: the service, until the process ends; its URL."""
    service = serving_here(run, config)
    url = service.__enter__()
    return lambda _: url if service else ""  # which would end with the last reference to it


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
