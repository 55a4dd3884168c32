"""What HTTP, admission and batching add to a call of the model, where the service is one process without Ray.

The model and the requests are those of `serve`, one request at a time. Each is asked of the service over
HTTP, and of a process that has the model alone, one right after the other, so that both meet the same
machine. One bar:

* `serve-overhead`: 2 ms over the median of what the one takes longer than the other.

`RAYREC_BENCH_STEPS` is the number of requests in a window, over 4.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import PeerProcess
from benchmarks.serve import CALLS_PER_STEP, THREADS, K, bodies_of, free_port, served, trained
from rayrec.platform.console import log
from rayrec.serve.config import ServeConfig
from rayrec.serve.loading import load_service
from rayrec.serve.schemas import RecommendRequest

OVERHEAD_S = 2e-3


def bench(options: BenchOptions) -> list[Bar]:
    with (
        beauty_sized(options.data) as data,
        tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder,
    ):
        run = trained(data, Path(folder) / "run")
        config = ServeConfig(threads=THREADS, port=free_port(), single_process=True)
        service, called = PeerProcess(served, (str(run), config)), PeerProcess(_calls, (str(run), config))
        bodies = itertools.cycle(bodies_of(data, K))
        try:
            service.measure(None)
            with _connection(config.port) as ask:
                ratios = [_ratio(ask, called, bodies, options) for _ in range(options.pairs + 1)][1:]
        finally:
            service.stop()
            called.stop()
        return [Bar.of("serve-overhead", ratios, "2 ms more than a call", 1.0)]


def _ratio(
    ask: Callable[[dict[str, object]], float],
    called: PeerProcess,
    bodies: Iterator[dict[str, object]],
    options: BenchOptions,
) -> float:
    asked = list(itertools.islice(bodies, options.steps * CALLS_PER_STEP))
    over_http_N, by_call_N = np.array([(ask(body), called.measure(body)) for body in asked]).T
    added_s = float(np.median(over_http_N - by_call_N))
    log.print(
        f"serve-overhead: {np.median(over_http_N) * 1e3:.2f} ms over HTTP, "
        f"{np.median(by_call_N) * 1e3:.2f} ms by a call, {added_s * 1e3:.2f} ms added",
        highlight=False,
    )
    return OVERHEAD_S / max(added_s, 1e-6)


@contextmanager
def _connection(port: int) -> Iterator[Callable[[dict[str, object]], float]]:
    """Asks the service; gives the seconds until the answer was read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(body: dict[str, object]) -> float:
        encoded = json.dumps(body)
        began = time.perf_counter()
        connection.request("POST", "/v1/recommend", encoded, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        seconds = time.perf_counter() - began
        if answer.status != 200:
            raise RuntimeError(f"the service answers {answer.status}: {content[:200]!r}")
        return seconds

    try:
        yield ask
    finally:
        connection.close()


def _calls(run: str, config: ServeConfig) -> Callable[[dict[str, object]], float]:
    """In a process: seconds of a call."""
    torch.set_num_threads(config.threads)
    service = load_service(run, config, config.device)
    service.warm_up()

    def measure(body: dict[str, object]) -> float:
        request = RecommendRequest.model_validate(body)
        began = time.perf_counter()
        service.recommend(request)
        return time.perf_counter() - began

    return measure
