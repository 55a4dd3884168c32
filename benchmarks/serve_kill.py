"""One of two replicas is killed, again and again, while requests come.

The model is the generative one of `configs/beauty-lazy.yaml` with 20 beams, trained for a moment, behind two
replicas of Ray Serve, which `rayrec serve` sets up with HAProxy where there is one. 8 clients ask one thing
after the other, and once more where that fails; every answer is held to what the model itself says of that
user (`checked_load.py`). Meanwhile a replica is killed by SIGKILL, and the other one as soon as two answer
again. `serve-kill` is the way that `rayrec serve` chooses, `serve-kill-proxy` Ray Serve's own proxy. Bars:

* `-wrong`: 1 where no answer was another than the model's, 0 where one was.
* `-failed`: 0.1 % of the requests over those that failed after they were tried once more.

Lines beside: kills, first tries that failed, and the longest time in which nobody was answered.

`RAYREC_BENCH_STEPS` is the length of it in units of 4 s.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.checked_load import Checked, Expected, Window, checks
from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import SETTLE_S, PeerProcess
from benchmarks.serve import THREADS, K, free_port, trained_run
from benchmarks.serve_overload import SECONDS_PER_STEP, service_in_process
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.cluster import ClusterConfig
from rayrec.platform.console import log
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.ray_ingress import HAPROXY_SWITCH

CONNECTIONS, NUM_USERS, REPLICAS = 8, 500, 2
MOST_FAILED = 0.001
READY_AGAIN_S = 120.0
"""After a kill, at most."""


def bench(options: BenchOptions) -> list[Bar]:
    """By the way that the launcher chooses."""
    return _bench("serve-kill", options, {})


def bench_by_proxy(options: BenchOptions) -> list[Bar]:
    """By Ray Serve's proxy."""
    return _bench("serve-kill-proxy", options, {HAPROXY_SWITCH: "0"})


def _bench(name: str, options: BenchOptions, environment: Mapping[str, str]) -> list[Bar]:
    with trained_run(options) as (_, run):
        seconds = options.steps * SECONDS_PER_STEP
        return bars(name, measured(run, seconds, environment))


def bars(name: str, found: tuple[Checked, Kills]) -> list[Bar]:
    """Of what was measured."""
    checked, kills = found
    share = checked.failed / max(checked.requests, 1)
    failures = ", ".join(f"{each}: {count}" for each, count in sorted(checked.failures.items())) or "none"
    latencies = np.array(checked.latencies_s or [np.nan])
    _say(
        f"{name}: {len(kills.pids)} kills, two replicas again after "
        f"{' '.join(f'{each:.1f}' for each in kills.ready_s)} s"
    )
    _say(
        f"{name}: {checked.requests} requests, {len(checked.wrong)} wrong answers, {checked.again} tried "
        f"again, {checked.failed} failed ({share:.3%}); first tries: {failures}; nobody answered for "
        f"{checked.longest_gap_s:.2f} s; p50 {1e3 * np.median(latencies):.0f} ms, p99 "
        f"{1e3 * np.percentile(latencies, 99):.0f} ms"
    )
    for sentence in checked.wrong[:3]:
        _say(f"{name}: {sentence}")
    right = 1.0 if checked.latencies_s and kills.pids and not checked.wrong else 0.0
    return [
        Bar.once(f"{name}-wrong", right, "the model called directly", 1.0),
        Bar.once(f"{name}-failed", MOST_FAILED / max(share, 1e-9), "0.1 % of the requests", 1.0),
    ]


@dataclass
class Kills:
    """What was killed."""

    pids: list[int] = field(default_factory=list)
    """Of the victims."""
    ready_s: list[float] = field(default_factory=list)
    """From each kill to two replicas that answer; the last one may have none."""


def measured(
    run: Path, seconds: float, environment: Mapping[str, str], most: int | None = None
) -> tuple[Checked, Kills]:
    """What clients found of a service that is started for it.

    Args:
        most: kills at most; None: as many as there is time for.
    """
    config = ServeConfig(
        threads=THREADS,
        port=free_port(),
        num_replicas=REPLICAS,
        cluster=ClusterConfig(dashboard=False),
    )
    load: PeerProcess = PeerProcess(checks, (expected_of(run), K), settle_s=SETTLE_S)
    service = PeerProcess(service_in_process, (run, config), environment)
    try:
        url = service.measure("url") + "/v1/recommend"
        load.measure(Window(url, CONNECTIONS, 1.0))  # thrown away
        killer = _Killer(service, most)
        checked: Checked = load.measure(Window(url, CONNECTIONS, seconds))
        kills = killer.stop()
        service.measure("stop")
        return checked, kills
    finally:
        for process in (load, service):
            process.stop()


def expected_of(run: Path) -> Expected:
    """Answers of the model to some users, without a service."""
    recommender = Recommender(TrainedModel.load(run))
    users = recommender.dataset.users["user_key"].to_pylist()[:NUM_USERS]
    queries = [recommender.query_of_user(user) for user in users]
    assert None not in queries
    found = recommender.recommend([query for query in queries if query is not None], K)
    return {
        None: {
            user: ([item.item_key for item in items], [item.score for item in items])
            for user, items in zip(users, found, strict=True)
        }
    }


class _Killer:
    """Kills a replica as soon as there are two, on a thread; the other one each time."""

    def __init__(self, service: PeerProcess, most: int | None) -> None:
        self._service, self._most = service, most
        self._kills = Kills()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        victim, was_there = 0, self._running()
        while not self._stopped.wait(0.2) and (self._most is None or len(self._kills.pids) < self._most):
            others = [process for process in was_there if process != victim]
            victim = others[0]  # the older one: the last victim's successor has a higher number
            os.kill(victim, signal.SIGKILL)
            self._kills.pids.append(victim)
            began = time.perf_counter()
            while not self._stopped.is_set():
                was_there = [process for process in self._running() if process != victim]
                if len(was_there) >= REPLICAS and self._service.measure("running") >= REPLICAS:
                    self._kills.ready_s.append(time.perf_counter() - began)
                    break
                assert time.perf_counter() < began + READY_AGAIN_S, "no replica comes back"
                self._stopped.wait(0.1)

    def _running(self) -> list[int]:
        found: list[int] = self._service.measure("processes")
        return found

    def stop(self) -> Kills:
        self._stopped.set()
        self._thread.join()
        return self._kills


def _say(text: str) -> None:
    log.print(text, highlight=False)
