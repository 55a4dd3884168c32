"""Ten thousand bad requests: what the service answers to them, and whether it is the same afterwards.

A service of one process with everything on (page, events, request log, limits) gets requests that the schemas
of its OpenAPI page forbid (schemathesis) and as many made by hand (`bad_requests.py`), after a fifth as many
that fill its caches. Bars, 1 where it is so and 0 where not:

* `serve-fuzz-answers`: no answer is a 5xx but a 503 that says when to come back, none has a stack trace, and
  a good request is answered as before.
* `serve-fuzz-growth`: no more threads, at most 8 more open files (connections that close), and at most 32 MiB
  more of resident memory, about what the caches of interpreter and allocators still take.

`RAYREC_BENCH_ROWS` is the number of requests, 10,000 if not set.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.bad_requests import BadRequest, from_openapi, made_by_hand, why_wrong
from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import PeerProcess
from benchmarks.serve import free_port, served, trained
from rayrec.platform.console import log
from rayrec.serve.access.config import AccessConfig
from rayrec.serve.config import ServeConfig
from rayrec.serve.events.config import EventsConfig, LogConfig, RequestLogConfig

REQUESTS, WARM_SHARE = 10_000, 0.2
MOST_FILES, MOST_BYTES = 8, 32 * 2**20


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
    with (
        beauty_sized(options.data) as data,
        tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder,
    ):
        run = trained(data, Path(folder) / "run")
        config = ServeConfig(
            port=free_port(),
            single_process=True,
            page=True,
            access=AccessConfig.parse({"callers": {"rate": 100_000}, "service": {"concurrency": 64}}),
            events=EventsConfig(log=LogConfig(folder=str(Path(folder) / "events"))),
            request_log=RequestLogConfig(folder=str(Path(folder) / "requests"), share=1.0),
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


class _Fuzzer:
    """Sends bad requests and collects what is wrong with answers."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url = client, url
        self.wrong: list[str] = []
        self.statuses: Counter[int] = Counter()
        """0: refused by the client, or the server's parser, as no HTTP."""

    def send(self, count: int, seed: int) -> None:
        page = self._client.get(f"{self._url}/openapi.json").json()
        from_openapi(page, count // 2, self._ask, seed)
        for request in made_by_hand(count - count // 2, seed):
            self._ask(request)

    def _ask(self, request: BadRequest) -> None:
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
        fuzzer = _Fuzzer(client, url)
        good = {"user_id": client.get(f"{url}/v1/users").json()["users"][0], "k": 5}
        before = client.post(f"{url}/v1/recommend", json=good).json()
        fuzzer.send(int(num_requests * WARM_SHARE), seed=1_000)
        began: Held = service.measure("held")
        fuzzer.statuses.clear()
        fuzzer.send(num_requests, seed=0)
        ended: Held = service.measure("held")
        is_same = client.post(f"{url}/v1/recommend", json=good).json() == before
    by_status = json.dumps(dict(sorted(fuzzer.statuses.items())))
    log.print(f"serve-fuzz: {fuzzer.statuses.total()} requests, {by_status}", highlight=False)
    for line in fuzzer.wrong[:10]:
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
        _verdict("serve-fuzz-growth", not ended.has_grown_since(began), "32 MiB, 8 files, no thread"),
    ]


def _verdict(name: str, holds: bool, what: str) -> Bar:
    value = 1.0 if holds else 0.0
    return Bar(name, value, value, what, 1.0, holds)
