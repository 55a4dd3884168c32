"""Computing power by value against degradation levels that hold for everybody, with requests over HTTP.

Two services of one process each, of the model of `serve` with 100 beams, so that the model is most of the
work and not HTTP: one with the levels of `docs/operations/admission.yaml`, one with
`docs/operations/allocation.yaml`, whose curves are measured here first. Beams in these files are for a model
with 20, and are five times as many here. Requests come at random times that wait for no answer, and say in a
header what they are worth, by a Pareto law with the exponent 1.16: a fifth of the requests have four fifths
of the value. *Capacity* is what the service does at full effort with 32 requests in flight. The services take
turns; while one is measured, the other is idle. Bars:

* `value-live`: value served at 1.5 times the capacity over that of the levels, in five windows of 24 s each.
  An answer serves the share of its request's value that its action finds of what full effort finds; popular
  items and refusals serve nothing.
* `value-live-p99`: the 99th percentile of the levels' answers over that of ours, of the same windows.
* `value-live-answered`: the share of requests that are answered over that of the levels.
* `value-idle`: at half the capacity, the share of answers with nothing lowered, times the share of 50 users
  whose answers are those of a service without allocation, to the bit.
* `value-step-load`: after a step from 0.5 to 3 times the capacity and 5 s, 5 % over how far the mean load is
  from the budget. The load is that of the metric `rayrec_allocation_load`.
* `value-step-swing`: 10 % over the farthest that any second is from the mean.

It writes `benchmarks/quality/value-live.json` with the date. `RAYREC_BENCH_STEPS` is the length of a window,
in units of 0.8 s.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.harness import Bar, BenchOptions
from benchmarks.http_load import Window, windows
from benchmarks.open_load import Outcome, Plan, outcomes
from benchmarks.peer_process import SETTLE_S, PeerProcess
from benchmarks.quality_page import RECORDS
from benchmarks.serve import THREADS, K, bodies_of, free_port, trained_run
from benchmarks.serve_overload import service_in_process
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.samples.dataset.dataset import Dataset
from rayrec.serve.app.curve_replay import CurveReplay, LoggedRequests
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.value_curves import ActionKey, ValueCurves

OPERATIONS = CHECKOUT / "docs" / "operations"
LEVELS, ALLOCATION = OPERATIONS / "admission.yaml", OPERATIONS / "allocation.yaml"
RECORD = RECORDS / "value-live.json"
WINDOWS, SECONDS_PER_STEP = 5, 0.8
BEAMS, TIMES_BEAMS = 100, 5
IN_FLIGHT, CAPACITY_REQUESTS, REPLAYED = 32, 1_500, 512
EXPONENT, TIMEOUT_MS = 1.16, 500
SHARES = (1 / 8,) * 8
STEP_S, SAMPLE_S = 25.0, 0.25


def bench(options: BenchOptions) -> list[Bar]:
    with trained_run(options, BEAMS) as (data, run), TemporaryDirectory(prefix="rayrec-bench-") as folder:
        torch.set_num_threads(THREADS)
        curves = _curves(data, run, Path(folder) / "curves.json")
        ours = _read(ALLOCATION)
        ours["allocate"]["curves"] = str(Path(folder) / "curves.json")
        admissions = {"ours": AdmissionConfig.parse(ours), "levels": AdmissionConfig.parse(_read(LEVELS))}
        bodies = bodies_of(data, K)
        load: PeerProcess = PeerProcess(outcomes, (bodies,), settle_s=SETTLE_S)
        closed: PeerProcess = PeerProcess(windows, (bodies,), settle_s=SETTLE_S)
        services = {
            name: PeerProcess(service_in_process, (run, _config(admission)))
            for name, admission in [*admissions.items(), ("plain", AdmissionConfig())]
        }
        try:
            urls = {name: service.measure("url") for name, service in services.items()}
            closed.measure((urls["plain"] + "/v1/recommend", IN_FLIGHT, 200))  # thrown away
            capacity: Window = closed.measure((urls["plain"] + "/v1/recommend", IN_FLIGHT, CAPACITY_REQUESTS))
            _say(f"capacity {capacity.rate:.0f}/s")
            seconds = options.steps * SECONDS_PER_STEP
            bars, figures = _at_overload(load, urls, capacity.rate, seconds, curves)
            bars += _idle(load, urls, capacity.rate, seconds, bodies)
            bars += _step(load, urls["ours"], capacity.rate)
        finally:
            for service in services.values():
                service.measure("stop")
            for process in (load, closed, *services.values()):
                process.stop()
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "capacity": capacity.rate,
        "windows": figures,
        "bars": {bar.name: {"value": bar.value, "low": bar.low, "target": bar.target} for bar in bars},
    }
    RECORD.write_text(json.dumps(made, indent=2) + "\n")
    return bars


def _read(path: Path) -> Any:
    """Settings, with beams for this model."""
    values = yaml.safe_load(path.read_text())
    for step in values["degrade"]["steps"]:
        if step["do"] == "fewer_beams":
            step["to"] *= TIMES_BEAMS
    for action in values.get("allocate", {}).get("actions", ()):
        if "max_beams" in action:
            action["max_beams"] *= TIMES_BEAMS
    return values


def _config(admission: AdmissionConfig) -> ServeConfig:
    return ServeConfig(threads=THREADS, port=free_port(), single_process=True, admission=admission)


def _curves(data: Path, run: Path, path: Path) -> ValueCurves:
    """Of the actions of both configs."""
    recommender, dataset = Recommender.load(run), Dataset.open(data)
    users = dataset.users["user_key"].to_pylist()[:REPLAYED]
    queries = [query for user in users if (query := recommender.query_of_user(user)) is not None]
    steps = {step["do"]: step.get("to") for step in _read(LEVELS)["degrade"]["steps"]}
    beams, events = steps["fewer_beams"], steps["shorter_history"]
    keys = {
        *(
            ActionKey(each.get("max_beams"), each.get("max_events"))
            for each in _read(ALLOCATION)["allocate"]["actions"]
            if not each.get("popular")
        ),
        ActionKey(beams, events),
        ActionKey(beams),
        ActionKey(None, events),
    }
    actions = sorted(keys, key=str)
    replay = CurveReplay(recommender, actions)
    curves = replay.replay(LoggedRequests(queries, [K] * len(queries), 0), 32).fit(replay.version, actions)
    path.write_text(curves.to_json())
    for action, share in zip(actions, curves.shares_BA.mean(0), strict=True):
        _say(f"{action.max_beams or 'all'} beams, {action.max_events or 'all'} events: share {share:.3f}")
    return curves


def _at_overload(
    load: PeerProcess, urls: dict[str, str], capacity: float, seconds: float, curves: ValueCurves
) -> tuple[list[Bar], list[dict[str, Any]]]:
    figures = []
    for number in range(WINDOWS):
        found = {}
        for name in ("ours", "levels"):
            plan = _plan(urls[name], 1.5 * capacity, seconds, number)
            outcome: Outcome = load.measure(plan)
            answered = outcome.status == 200
            share_N = np.array([_share(curves, each) for each in outcome.degraded])
            found[name] = {
                "value served": float((outcome.value * share_N)[answered].sum() / outcome.value.sum()),
                "p99 ms": 1e3 * float(np.percentile(outcome.seconds[answered], 99)),
                "answered": float(answered.mean()),
                "whole": float((outcome.is_whole & answered).mean()),
                "late ms": 1e3 * float(np.percentile(outcome.lag_s, 99)),
            }
            _say(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in found[name].items()))
        figures.append(found)

    def ratios(what: str, inverse: bool = False) -> list[float]:
        pairs = [(each["ours"][what], each["levels"][what]) for each in figures]
        return [levels / ours if inverse else ours / levels for ours, levels in pairs]

    peer = "levels for everybody"
    return [
        Bar.of("value-live", ratios("value served"), peer, 1.15),
        Bar.of("value-live-p99", ratios("p99 ms", inverse=True), peer, 1.0),
        Bar.of("value-live-answered", ratios("answered"), peer, 1.0),
    ], figures


def _share(curves: ValueCurves, degraded: str) -> float:
    """Of full effort's mass that an answer with these steps has, for a user as most are."""
    steps = set(degraded.split(",")) - {""}
    if "popular_items" in steps:
        return 0.0
    actions = [each for each in curves.actions if _steps_of(each) == steps]
    return float(np.mean([curves.shares_BA[:, curves.actions.index(each)].mean() for each in actions]))


def _steps_of(action: ActionKey) -> set[str]:
    lowered = {"fewer_beams": action.max_beams, "shorter_history": action.max_events}
    return {step for step, most in lowered.items() if most is not None}


def _idle(
    load: PeerProcess, urls: dict[str, str], capacity: float, seconds: float, bodies: list[dict[str, object]]
) -> list[Bar]:
    time.sleep(5.0)  # the price falls
    outcome: Outcome = load.measure(_plan(urls["ours"], 0.5 * capacity, seconds, 99))
    whole = float(outcome.is_whole[outcome.status == 200].mean())
    answered = (outcome.status == 200).mean()
    _say(f"at half the capacity {whole:.2%} of the answers are whole, {answered:.2%} answered")
    time.sleep(2.0)
    equal = [_items(urls["ours"], body) == _items(urls["plain"], body) for body in bodies[:50]]
    _say(f"{sum(equal)} of {len(equal)} answers are those of a service without allocation, to the bit")
    return [Bar.once("value-idle", whole * float(np.mean(equal)), "everybody in full", 1.0)]


def _items(url: str, body: dict[str, object]) -> Any:
    headers = {"Content-Type": "application/json", "X-Request-Value": "0.001"}
    request = urllib.request.Request(url + "/v1/recommend", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)["items"]


def _step(load: PeerProcess, url: str, capacity: float) -> list[Bar]:
    load.measure(_plan(url, 0.5 * capacity, 10.0, 7))
    samples, stopped = list[tuple[float, float]](), threading.Event()
    began = time.perf_counter()
    watching = threading.Thread(target=_watch, args=(url, began, samples, stopped), daemon=True)
    watching.start()
    load.measure(_plan(url, 3.0 * capacity, STEP_S, 8))
    stopped.set()
    watching.join()
    times_N, loads_N = np.array(samples).T
    later = (times_N > SETTLE_S + 5.0) & (times_N < STEP_S)
    budget = float(yaml.safe_load(ALLOCATION.read_text())["allocate"].get("busy", 0.85))
    seconds = [loads_N[later & (times_N.astype(int) == second)] for second in range(int(STEP_S))]
    means = np.array([each.mean() for each in seconds if len(each)])
    off, swing = abs(means.mean() / budget - 1), np.abs(means / means.mean() - 1).max()
    _say(f"after the step: load {means.mean():.3f} of {budget}, by second {np.round(means, 2).tolist()}")
    return [
        Bar.once("value-step-load", 0.05 / max(off, 1e-6), "5 % of the budget", 1.0),
        Bar.once("value-step-swing", 0.10 / max(float(swing), 1e-6), "10 % of the mean", 1.0),
    ]


def _watch(url: str, began: float, samples: list[tuple[float, float]], stopped: threading.Event) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not stopped.wait(SAMPLE_S):
        with opener.open(url + "/metrics", timeout=10) as page:
            text = page.read().decode()
        line = next(each for each in text.splitlines() if each.startswith("rayrec_allocation_load "))
        samples.append((time.perf_counter() - began, float(line.split()[1])))


def _plan(url: str, rate: float, seconds: float, seed: int) -> Plan:
    return Plan(
        url + "/v1/recommend", rate, seconds, TIMEOUT_MS, SHARES, "X-Caller-Key", seed, values=EXPONENT
    )


def _say(text: str) -> None:
    log.print(text, highlight=False)
