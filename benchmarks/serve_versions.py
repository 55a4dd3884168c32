"""Versions while requests come: how soon one answers after it was published, how soon one is gone back to.

The model is that of `configs/beauty-sasrec-sparse.yaml`, whose items and users are rows, trained for a moment
with a snapshot now and then; each is published as a version that has the rows changed since the one before.
The service is one process that follows the store at its default pace; 8 connections ask it all the time.
Bars, ratios in one run:

* `serve-version-visible`: 10 s over the time from the call that publishes, writing included, to the first
  answer of the new version.
* `serve-version-rollback`: 2 s over the time from moving the pointer to the first answer of the one before.
* `serve-version-p99`: 99th percentile of a window without a new version over that of one with two of them.

`RAYREC_BENCH_STEPS` is the number of requests in a window, over 16.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.http_load import Window, windows
from benchmarks.peer_process import SETTLE_S, PeerProcess
from benchmarks.serve import REQUESTS_PER_STEP, THREADS, K, bodies_of, free_port, served
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.training.train import train
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.serve.config.serve import ServeConfig

CONNECTIONS = 8
VISIBLE_S, ROLLBACK_S = 10.0, 2.0
SNAPSHOT_STEPS = 20


def bench(options: BenchOptions) -> list[Bar]:
    with (
        beauty_sized(options.data) as data,
        tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder,
    ):
        run = _trained(data, Path(folder) / "run")
        store = VersionStore(Path(folder) / "store")
        publisher = Publisher(run, store)
        names = run.snapshot_names()

        def publish() -> int:
            name = names[len(store.numbers()) % len(names)]
            return publisher.publish(read_snapshot(run.snapshots / name)).number

        publish()
        config = ServeConfig(threads=THREADS, port=free_port(), single_process=True, timeout_s=60)
        load: PeerProcess = PeerProcess(windows, (bodies_of(data, K),), settle_s=SETTLE_S)
        service = PeerProcess(served, (store.url, config))
        try:
            return _measured(service.measure(None), load, store, publish, options)
        finally:
            load.stop()
            service.stop()


def _trained(data: Path, run: Path) -> RunFolder:
    config = RunConfig.load(
        CHECKOUT / "configs" / "beauty-sasrec-sparse.yaml",
        [
            f"data.path={data}",
            "training.epochs=1",
            "evaluation.max_users=500",
            f"snapshots.every_steps={SNAPSHOT_STEPS}",
            "snapshots.increments=1000",
            "snapshots.keep=1000",
            "cluster.dashboard=false",
        ],
    )
    log.print("serve-versions: training a model")
    train(config, run)
    return RunFolder.open(run)


def _measured(
    url: str, load: PeerProcess, store: VersionStore, publish: Callable[[], int], options: BenchOptions
) -> list[Bar]:
    asked = (f"{url}/v1/recommend", CONNECTIONS, options.steps * REQUESTS_PER_STEP)
    load.measure(asked)  # thrown away
    visible, rollback, p99s = [], [], []
    for _ in range(options.pairs):
        quiet: Window = load.measure(asked)
        found: list[Window] = []
        window = threading.Thread(target=lambda found=found: found.append(load.measure(asked)))
        window.start()
        began = time.perf_counter()
        number = publish()
        visible.append(_seconds_until(url, number, began))
        began = time.perf_counter()
        store.point_to(number - 1, is_held=False)
        rollback.append(_seconds_until(url, number - 1, began))
        window.join()
        store.point_to(number, is_held=False)
        _seconds_until(url, number, time.perf_counter())
        p99s.append(quiet.percentile(99) / found[0].percentile(99))
        log.print(
            f"serve-versions: visible after {visible[-1]:.2f} s, back after {rollback[-1]:.2f} s; p99 "
            f"{quiet.percentile(99) * 1e3:.0f} ms, {found[0].percentile(99) * 1e3:.0f} ms meanwhile",
            highlight=False,
        )
    return [
        Bar.of("serve-version-visible", [VISIBLE_S / each for each in visible], "10 s", 1.0),
        Bar.of("serve-version-rollback", [ROLLBACK_S / each for each in rollback], "2 s", 1.0),
        Bar.of("serve-version-p99", p99s, "no new version", 0.5),
    ]


def _seconds_until(url: str, number: int, began: float) -> float:
    """Until an answer is of this version."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    body = json.dumps({"k": 1}).encode()
    while True:
        request = urllib.request.Request(f"{url}/v1/recommend", body, {"Content-Type": "application/json"})
        with opener.open(request, timeout=60) as answer:
            if json.load(answer)["model"]["version"] == number:
                return time.perf_counter() - began
        time.sleep(0.01)
