"""Three times what a service can do, for two minutes: who is answered, who is refused, when it is over.

The model is the generative one of `configs/beauty-lazy.yaml` with 20 beams, trained for a moment, and who is
admitted is said by `docs/operations/admission.yaml`. First 16 connections ask one after the other: what the
service can do with nothing lowered. Then requests come three times as often, at random times that wait for
no answer (`open_load.py`), half of them of one caller, and each says that its answer is of use for half a
second. `serve-overload` is one process, `serve-overload-ray` one replica of Ray Serve. Bars:

* `-deadline`: half a second over the 99th percentile of answers, by tenths of the time.
* `-refusal`: 150 ms over the 99th percentile of refusals, by tenths of the time.
* `-memory`: what was resident after a quarter over what was later on, by tenths of the time.
* `-recovery`: 5 s over the time from the last request to the last of 20 in a row that are answered in full.

The generator shares the machine: what it was late with its requests is shown, and above 50 ms for one in a
hundred, the load was not the one that was meant, and the first two bars are left unmeasured.

`RAYREC_BENCH_STEPS` is the length of the load in units of 4 s.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, BenchOptions
from benchmarks.http_load import Window, windows
from benchmarks.open_load import LOST, Outcome, Plan, outcomes
from benchmarks.peer_process import SETTLE_S, PeerProcess
from benchmarks.processes import descendants, resident_bytes
from benchmarks.serve import THREADS, K, bodies_of, free_port, trained_run
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.cluster import ClusterConfig
from rayrec.platform.console import log
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.launch import serving

ADMISSION = CHECKOUT / "docs" / "operations" / "admission.yaml"
REPLICA = "ray::ServeReplica:"
"""What commands of replicas begin with."""
CONNECTIONS, CAPACITY_REQUESTS = 16, 1500
TIMES_CAPACITY, DEADLINE_S, REFUSAL_S, RECOVERY_S, IN_A_ROW = 3.0, 0.5, 0.150, 5.0, 20
MAX_LAG_S = 0.05
SECONDS_PER_STEP, PARTS = 4.0, 10
MEMORY_TARGET = 0.98
"""Of what was resident after a quarter: allocators take a little more, now and then, of what is free."""
SHARES = (0.5, *[0.5 / 7] * 7)
"""Of the callers: the first asks for more than it may."""


def bench(options: BenchOptions) -> list[Bar]:
    """One process."""
    return _bench("serve-overload", options, single_process=True)


def bench_on_ray(options: BenchOptions) -> list[Bar]:
    """One replica of Ray Serve."""
    return _bench("serve-overload-ray", options, single_process=False)


def _bench(name: str, options: BenchOptions, single_process: bool) -> list[Bar]:
    with trained_run(options) as (data, run):
        return measured(name, data, run, options.steps * SECONDS_PER_STEP, single_process)


def measured(name: str, data: Path, run: Path, seconds: float, single_process: bool) -> list[Bar]:
    """Bars of a service that is started for it.

    Args:
        data: data set of the run, whose users ask.
    """
    config = ServeConfig(
        threads=THREADS,
        port=free_port(),
        single_process=single_process,
        admission=AdmissionConfig.load(ADMISSION),
        cluster=ClusterConfig(dashboard=False),
    )
    bodies = bodies_of(data, K)
    load: PeerProcess = PeerProcess(outcomes, (bodies,), settle_s=SETTLE_S)
    closed: PeerProcess = PeerProcess(windows, (bodies,), settle_s=SETTLE_S)
    service = PeerProcess(service_in_process, (run, config))
    try:
        url = service.measure("url") + "/v1/recommend"
        closed.measure((url, 1, 50))  # thrown away
        capacity: Window = closed.measure((url, CONNECTIONS, CAPACITY_REQUESTS))
        _say(
            f"{name}: {capacity.rate:.0f}/s with {CONNECTIONS} connections, p50 "
            f"{capacity.percentile(50) * 1e3:.0f} ms, p99 {capacity.percentile(99) * 1e3:.0f} ms"
        )
        plan = Plan(
            url=url,
            rate=TIMES_CAPACITY * capacity.rate,
            seconds=seconds,
            timeout_ms=round(1000 * DEADLINE_S),
            shares=SHARES,
            header=config.admission.callers.header,
        )
        resident = _Resident(service.measure("processes"), seconds)
        outcome: Outcome = load.measure(plan)
        recovery_s = _seconds_to_recover(url, bodies[0], plan.header)
        return _bars(name, plan, outcome, resident.stop(), recovery_s)
    finally:
        service.measure("stop")
        for process in (load, closed, service):
            process.stop()


def service_in_process(run: str | Path, config: ServeConfig) -> Callable[[str], Any]:
    """In a process: a service, until it is told to stop; says its URL, which processes answer, and how many
    of the replicas are running."""
    running = serving(run, config)
    url = running.__enter__()

    def told(what: str) -> Any:
        if what == "stop":
            running.__exit__(None, None, None)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which Ray would say at length
            return None
        if what == "processes":
            return [os.getpid()] if config.single_process else descendants(REPLICA)
        if what == "running":
            return _replicas_running()
        return url

    return told


def _replicas_running() -> int:
    """As Serve says it."""
    from ray import serve

    from rayrec.serve.on_ray.application import DEPLOYMENT
    from rayrec.serve.on_ray.serving import APPLICATION

    deployed = serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
    return deployed.replica_states.get("RUNNING", 0)


class _Resident:
    """Bytes that processes hold, sampled at the end of each part of the time."""

    def __init__(self, processes: list[int], seconds: float) -> None:
        assert processes, "nobody answers"
        self._processes, self._seconds = processes, seconds
        self._found: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(self._seconds / PARTS):
            self._found.append(sum(map(resident_bytes, self._processes)))

    def stop(self) -> list[int]:
        self._stopped.set()
        self._thread.join()
        return self._found


def _seconds_to_recover(url: str, body: dict[str, object], header: str) -> float:
    """From now to the last of some requests in a row that are answered in full."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    headers = {"Content-Type": "application/json", header: "recovery"}
    content = json.dumps(body).encode()
    began, in_a_row = time.perf_counter(), 0
    while in_a_row < IN_A_ROW:
        try:
            with opener.open(urllib.request.Request(url, content, headers), timeout=60) as answer:
                in_a_row = in_a_row + 1 if not json.load(answer)["degraded"] else 0
        except urllib.error.HTTPError:
            in_a_row = 0
    return time.perf_counter() - began


def _bars(name: str, plan: Plan, outcome: Outcome, resident: list[int], recovery_s: float) -> list[Bar]:
    accepted, refused = outcome.status == 200, np.isin(outcome.status, (429, 503))
    lag_s = float(np.percentile(outcome.lag_s, 99))
    statuses = ", ".join(
        f"{'lost' if status == LOST else status}: {count / len(accepted):.1%}"
        for status, count in sorted(Counter(outcome.status.tolist()).items())
    )
    _say(f"{name}: {plan.rate:.0f}/s for {plan.seconds:g} s; {statuses}")
    _say(
        f"{name}: answered p50 {_percentile_ms(outcome.seconds[accepted], 50):.0f} ms, p99 "
        f"{_percentile_ms(outcome.seconds[accepted], 99):.0f} ms, {(outcome.is_whole & accepted).sum()} of "
        f"{accepted.sum()} in full; refused p50 {_percentile_ms(outcome.seconds[refused], 50):.0f} ms, p99 "
        f"{_percentile_ms(outcome.seconds[refused], 99):.0f} ms, "
        f"{outcome.says_when[refused].sum()} of {refused.sum()} with Retry-After"
    )
    _say(
        f"{name}: resident {' '.join(f'{each / 2**20:.0f}' for each in resident)} MiB; in full again after "
        f"{recovery_s:.1f} s; the generator was {1e3 * lag_s:.0f} ms late (p99)"
    )
    others = len(accepted) - accepted.sum() - refused.sum()
    if others:
        _say(f"{name}: {others} requests were neither answered nor refused")
    part_N = np.minimum((outcome.due_s / plan.seconds * PARTS).astype(int), PARTS - 1)

    def ratios(limit_s: float, counted: np.ndarray) -> list[float]:
        if lag_s > MAX_LAG_S:
            _say(f"{name}: not measured, since the generator was late")
            return []
        parts = [outcome.seconds[counted & (part_N == part)] for part in range(PARTS)]
        return [limit_s / float(np.percentile(part, 99)) for part in parts if len(part)]

    quarter = resident[PARTS // 4]
    later = [quarter / each for each in resident[PARTS // 4 + 1 :]]
    return [
        Bar.of(f"{name}-deadline", ratios(DEADLINE_S, accepted), f"{DEADLINE_S:g} s", 1.0),
        Bar.of(f"{name}-refusal", ratios(REFUSAL_S, refused | (outcome.status == LOST)), "150 ms", 1.0),
        Bar.of(f"{name}-memory", later, "after a quarter", MEMORY_TARGET),
        Bar.once(f"{name}-recovery", RECOVERY_S / recovery_s, "5 s", 1.0),
    ]


def _percentile_ms(seconds: np.ndarray, percent: float) -> float:
    return 1e3 * float(np.percentile(seconds, percent)) if len(seconds) else float("nan")


def _say(text: str) -> None:
    log.print(text, highlight=False)
