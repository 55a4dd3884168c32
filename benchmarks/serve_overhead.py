"""What HTTP, admission and batching add to a call of the model, where the service is one process without Ray.

The model and the requests are those of `serve`, one request at a time. Each is asked of the service over
HTTP, and of a process that has the model alone, one right after the other, so that both meet the same
machine. One bar:

* `serve-overhead`: 2 ms over the median of what the one takes longer than the other.

The client is a bare socket: what an HTTP library takes to write requests and to parse answers is not the
service's.

`RAYREC_BENCH_STEPS` is the number of requests in a window, over 4.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import PeerProcess
from benchmarks.serve import CALLS_PER_STEP, THREADS, K, bodies_of, free_port, served, trained_run
from rayrec.platform.console import log
from rayrec.serve.app.loading import load_service
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.wire.schemas import RecommendRequest

OVERHEAD_S = 2e-3


def bench(options: BenchOptions) -> list[Bar]:
    with trained_run(options) as (data, run):
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
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(body: dict[str, object]) -> float:
            encoded = json.dumps(body)
            request = (
                f"POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(encoded)}\r\n\r\n{encoded}"
            ).encode()
            began = time.perf_counter()
            connection.sendall(request)
            answer = _whole_answer(connection)
            seconds = time.perf_counter() - began
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the service answers {bytes(answer[:200])!r}")
            return seconds

        yield ask


def _whole_answer(connection: socket.socket) -> bytearray:
    answer = bytearray()
    while received := connection.recv(65_536):
        answer += received
        head, end, body = answer.partition(b"\r\n\r\n")
        if end and len(body) >= content_length(head):
            return answer
    raise RuntimeError("the service closed the connection in the middle of an answer")


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


def content_length(head: bytearray) -> int:
    """Bytes of the body that follows."""
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    if not found:
        raise RuntimeError("an answer does not say how long it is")
    return int(rest.partition(b"\r\n")[0])
