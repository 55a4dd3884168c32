"""Ten thousand bad requests: what the service answers to them, and whether it is the same afterwards.

A service of one process with everything on (page, events, request log, limits) gets requests that the schemas
of its OpenAPI page forbid (schemathesis) and as many made by hand (`bad_requests.py`), after a fifth as many
that fill its caches. Bars, 1 where it is so and 0 where not:

* `serve-fuzz-answers`: no answer is a 5xx but a 503 that says when to come back, none has a stack trace, and
  a good request is answered as before.
* `serve-fuzz-waits`: a good request that is sent all the while beside the bad ones never waits 250 ms because
  of one of them. Its own answer takes a few milliseconds, and the largest body is parsed in a step of 20 to
  70 ms in which nobody has the interpreter, so 150 ms are for the service; 100 are for this process, whose
  threads have their interpreter in turns, and for the machine. What took longer is laid to a bad request only
  if it does so each time that this is sent again: a pause of the machine does not.
* `serve-fuzz-growth`: no more threads, at most 8 more open files (connections that close), and at most 32 MiB
  more of resident memory, about what the caches of interpreter and allocators still take.

`RAYREC_BENCH_ROWS` is the number of requests, 10,000 if not set.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bad_requests import BadRequest, from_openapi, made_by_hand, why_wrong
from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import PeerProcess
from benchmarks.serve import free_port, served, trained_run
from rayrec.platform.console import log
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.events import EventsConfig, LogConfig, RequestLogConfig
from rayrec.serve.config.serve import ServeConfig

REQUESTS, WARM_SHARE = 10_000, 0.2
MOST_FILES, MOST_BYTES = 8, 32 * 2**20
MOST_WAIT_S, REPEATS = 0.25, 3


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    num_bytes: int
    """Resident."""
    num_files: int
    num_threads: int

    @staticmethod
    def now() -> Held:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Held(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )

    def has_grown_since(self, before: Held) -> bool:
        return (
            self.num_bytes > before.num_bytes + MOST_BYTES
            or self.num_files > before.num_files + MOST_FILES
            or self.num_threads > before.num_threads
        )


def bench(options: BenchOptions) -> list[Bar]:
    with trained_run(options) as (_, run):
        config = ServeConfig(
            port=free_port(),
            single_process=True,
            page=True,
            admission=AdmissionConfig.parse({"callers": {"rate": 100_000}, "service": {"concurrency": 64}}),
            events=EventsConfig(log=LogConfig(folder=str(run.parent / "events"))),
            request_log=RequestLogConfig(folder=str(run.parent / "requests"), share=1.0),
        )
        service: PeerProcess = PeerProcess(_service, (str(run), config))
        try:
            return _bars(service, options.rows or REQUESTS)
        finally:
            service.stop()


def _service(run: str, config: ServeConfig) -> Callable[[str], str | Held]:
    """In a process: the service; says its URL, and what the process holds."""
    url = served(run, config)
    return lambda what: url(None) if what == "url" else Held.now()


class _Watch:
    """Sends a good request again and again, from a thread of its own, inside the block."""

    def __init__(self, url: str, good: dict[str, Any]) -> None:
        self._url, self._good = f"{url}/v1/recommend", good
        self._is_warm, self._ends = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._began: float | None = None
        self._worst_s = 0.0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        assert self._is_warm.wait(timeout=60), "the service answers"
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join()

    def worst_s(self) -> float:
        """The longest wait since this was asked the last time, the one that is under way included."""
        with self._lock:
            now = 0.0 if self._began is None else time.perf_counter() - self._began
            worst_s, self._worst_s = max(self._worst_s, now), 0.0
        return worst_s

    def _run(self) -> None:
        with httpx.Client(trust_env=False, timeout=30) as client:
            client.post(self._url, json=self._good)  # a connection, and what is imported for it
            self._is_warm.set()
            while not self._ends.wait(0.002):
                with self._lock:
                    self._began = time.perf_counter()
                client.post(self._url, json=self._good)
                with self._lock:
                    self._worst_s = max(self._worst_s, time.perf_counter() - self._began)
                    self._began = None


class _Fuzzer:
    """Sends bad requests and collects what is wrong with answers."""

    def __init__(self, client: httpx.Client, url: str, watch: _Watch) -> None:
        self._client, self._url, self._watch = client, url, watch
        self.wrong: list[str] = []
        self.slow: list[str] = []
        """Requests that let others wait, each time."""
        self.worst_s = 0.0
        """Of the waits that were laid to a request; of those below the bound, all are."""
        self.statuses: Counter[int] = Counter()
        """0: refused by the client, or the server's parser, as no HTTP."""

    def send(self, count: int, seed: int) -> None:
        page = self._client.get(f"{self._url}/openapi.json").json()
        from_openapi(page, count // 2, self._ask, seed)
        for request in made_by_hand(count - count // 2, seed):
            self._ask(request)

    def _ask(self, request: BadRequest) -> None:
        self._watch.worst_s()
        self._send(request)
        wait_s = self._watch.worst_s()
        for _ in range(REPEATS):
            if wait_s <= MOST_WAIT_S:
                break
            self._send(request)
            wait_s = min(wait_s, self._watch.worst_s())
        self.worst_s = max(self.worst_s, wait_s)
        if wait_s > MOST_WAIT_S:
            self.slow.append(f"{wait_s:.2f} s: {request.method} {request.path} {request.body[:200]!r}")

    def _send(self, request: BadRequest) -> None:
        headers = {name: value.encode("latin-1") for name, value in request.headers.items()}
        try:
            answer = self._client.request(
                request.method, self._url + request.path, content=request.body, headers=headers
            )
        except (httpx.InvalidURL, httpx.LocalProtocolError, httpx.RemoteProtocolError):
            self.statuses[0] += 1
            return
        self.statuses[answer.status_code] += 1
        if why := why_wrong(answer.status_code, dict(answer.headers), answer.text):
            self.wrong.append(f"{why}: {request.method} {request.path} {request.body[:200]!r}")


def _bars(service: PeerProcess, num_requests: int) -> list[Bar]:
    url: str = service.measure("url")
    with httpx.Client(trust_env=False, timeout=30) as client:
        good = {"user_id": client.get(f"{url}/v1/users").json()["users"][0], "k": 5}
        before = client.post(f"{url}/v1/recommend", json=good).json()
        with _Watch(url, good) as watch:
            fuzzer = _Fuzzer(client, url, watch)
            fuzzer.send(int(num_requests * WARM_SHARE), seed=1_000)
            began: Held = service.measure("held")
            fuzzer.statuses.clear()
            fuzzer.send(num_requests, seed=0)
            ended: Held = service.measure("held")
        is_same = client.post(f"{url}/v1/recommend", json=good).json() == before
    by_status = json.dumps(dict(sorted(fuzzer.statuses.items())))
    log.print(f"serve-fuzz: {fuzzer.statuses.total()} requests, {by_status}", highlight=False)
    log.print(f"serve-fuzz: a good request waited {1000 * fuzzer.worst_s:.0f} ms at most", highlight=False)
    for line in (*fuzzer.wrong[:10], *fuzzer.slow[:10]):
        log.print(f"serve-fuzz: {line}", highlight=False, markup=False)
    more = (ended.num_bytes - began.num_bytes) / 2**20
    log.print(
        f"serve-fuzz: {more:+.1f} MiB of {began.num_bytes / 2**20:.0f}, "
        f"{ended.num_files - began.num_files:+d} files, {ended.num_threads - began.num_threads:+d} threads",
        highlight=False,
    )
    return [
        _verdict(
            "serve-fuzz-answers", is_same and not fuzzer.wrong, "no 5xx but a deliberate 503, no stack trace"
        ),
        _verdict(
            "serve-fuzz-waits", not fuzzer.slow, f"a good request waits {1000 * MOST_WAIT_S:g} ms at most"
        ),
        _verdict("serve-fuzz-growth", not ended.has_grown_since(began), "32 MiB, 8 files, no thread"),
    ]


def _verdict(name: str, holds: bool, what: str) -> Bar:
    value = 1.0 if holds else 0.0
    return Bar(name, value, value, what, 1.0, holds)
