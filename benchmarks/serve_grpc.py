"""The Open Inference Protocol over gRPC against the same over HTTP: one service, and Triton's two clients.

The model and the users are those of `serve`, the service is one process without Ray, and the clients are in
another process of the same machine. Windows of both are measured in turns. Bars, ratios in one run:

* `grpc`: requests per second over gRPC, against HTTP, 32 calls at once.
* `grpc-one`: the median time of a call over HTTP over that of one over gRPC, one call at a time.

`RAYREC_BENCH_STEPS` is the number of requests in a window, over 16.
"""

from __future__ import annotations

from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import SETTLE_S, PeerProcess
from benchmarks.serve import (
    CALLS_PER_STEP,
    CONNECTIONS,
    REQUESTS_PER_STEP,
    THREADS,
    K,
    bodies_of,
    free_port,
    served,
    trained_run,
)
from benchmarks.triton_load import Protocol, windows
from rayrec.platform.console import log
from rayrec.serve.config.serve import ServeConfig


def bench(options: BenchOptions) -> list[Bar]:
    with trained_run(options) as (data, run):
        config = ServeConfig(
            threads=THREADS,
            max_waiting=4 * CONNECTIONS,
            timeout_s=60,
            port=free_port(),
            grpc_port=free_port(),
            single_process=True,
        )
        users = [str(body["user_id"]) for body in bodies_of(data, K)]
        service: PeerProcess = PeerProcess(served, (str(run), config))
        load: PeerProcess = PeerProcess(windows, (users, K), settle_s=SETTLE_S)
        try:
            service.measure(None)
            return _bars(load, config, options)
        finally:
            load.stop()
            service.stop()


def _bars(load: PeerProcess, config: ServeConfig, options: BenchOptions) -> list[Bar]:
    addresses: dict[Protocol, str] = {
        "http": f"{config.host}:{config.port}",
        "grpc": f"{config.host}:{config.grpc_port}",
    }

    def pair(at_once: int, num_requests: int) -> tuple[float, float]:
        """Of gRPC over HTTP: the rates, and the inverse of the median times."""
        calls, http = (
            load.measure((protocol, addresses[protocol], at_once, num_requests))
            for protocol in ("grpc", "http")
        )
        log.print(
            f"grpc: {at_once} at once: gRPC {calls.rate:.0f}/s, p50 {calls.percentile(50) * 1e3:.2f} ms; "
            f"HTTP {http.rate:.0f}/s, p50 {http.percentile(50) * 1e3:.2f} ms",
            highlight=False,
        )
        return calls.rate / http.rate, http.percentile(50) / calls.percentile(50)

    many, one = options.steps * REQUESTS_PER_STEP, options.steps * CALLS_PER_STEP
    pair(CONNECTIONS, many)  # thrown away
    rates = [pair(CONNECTIONS, many)[0] for _ in range(options.pairs)]
    times = [pair(1, one)[1] for _ in range(options.pairs)]
    peer = "the same over HTTP, Triton's clients"
    return [Bar.of("grpc", rates, peer, 1.0), Bar.of("grpc-one", times, peer, 1.0)]
