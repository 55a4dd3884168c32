"""How soon an event that is posted to one process is in the answers of another.

Two services in processes of their own (`rayrec serve --single-process`), both with `events` and `neighbors`
over one event store with both sides. Each post has two events of a new visitor: an item that no catalog
knows, and one of the catalog. It goes to one service by HTTP; from the answer to it on, the other one is
asked for neighbors of the unknown item, 5 ms after each answer, until it names the other item. Nothing but
the graph can say that. The model is an untrained SASRec of Beauty's size, which is not asked. Posts begin at
random moments of the 0.2 s (`poll_s`) between two readings of the feed. The first ones count, too: an
answer that waits for a compiler is a late one. Bars, over the 99th percentile of the seconds:

* `graph-fresh`: 1 s, of an LMDB store.
* `graph-fresh-redis`: 1 s, of Redis, where `redis-server` is installed.

`RAYREC_BENCH_STEPS` is the number of posts, over 4.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import PeerProcess
from benchmarks.serve import free_port, served
from benchmarks.untrained import untrained_run
from rayrec.platform.console import log
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import TemporalGraph
from rayrec.samples.graph.sources import config_of_store
from rayrec.samples.stores import StoreManifest, open_store
from rayrec.serve.config.serve import ServeConfig

LIMIT_S, POSTS_PER_STEP = 1.0, 4
ASK_EVERY_S, WITHIN_S = 0.005, 60.0
MODEL = {"name": "sasrec", "backbone": {"dim": 32, "num_layers": 1, "num_heads": 2, "max_length": 50}}


def bench(options: BenchOptions) -> list[Bar]:
    with beauty_sized(options.data) as data, tempfile.TemporaryDirectory(prefix="rayrec-bench-") as name:
        folder, posts = Path(name), POSTS_PER_STEP * options.steps
        run = untrained_run(folder / "run", data, MODEL)
        found = [_bar("graph-fresh", "LMDB", delays(run, data, str(folder / "events"), posts))]
        if shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None:
            log.print("graph-fresh-redis: not measured, redis-server or its client is missing (make redis)")
            return [*found, Bar.of("graph-fresh-redis", [], "1 s", 1.0)]
        with _redis(folder) as url:
            return [*found, _bar("graph-fresh-redis", "Redis", delays(run, data, url, posts))]


def _bar(name: str, store: str, delays_s: list[float]) -> Bar:
    p50, p99 = np.percentile(delays_s, (50, 99))
    log.print(
        f"{name}: {store}, {len(delays_s)} posts, in the other's answers after {p50:.2f} s (median), "
        f"{p99:.2f} s (p99), {max(delays_s):.2f} s (longest)",
        highlight=False,
    )
    return Bar.once(name, LIMIT_S / float(p99), f"{LIMIT_S:g} s over p99 of {p99:.2f} s", 1.0)


def delays(run: Path, data: Path, store: str, num_posts: int) -> list[float]:
    """Seconds from the answer to a post to the first answer of the other process that knows it.

    Args:
        store: where there is none yet.

    Raises:
        RuntimeError: an event did not arrive at all.
    """
    dataset, random = Dataset.open(data), np.random.default_rng(0)
    items = dataset.items.keys.to_pylist()
    graph = str(_make_store(dataset, store, run.parent))
    settings: dict[str, Any] = {
        "page": False,
        "snapshot": "last",
        "events": {"store": store, "by_item": True},
        "neighbors": {"graph": graph},
    }
    configs = [ServeConfig.parse({"port": free_port(), **settings}) for _ in range(2)]
    services = [PeerProcess(served, (str(run), config)) for config in configs]
    try:
        one, other = (service.measure(None) for service in services)
        found = []
        for post in range(num_posts):
            time.sleep(random.uniform(0, 0.2))
            named = items[random.integers(len(items))]
            unknown = _key(dataset, "item", post)
            told = [
                {"user_id": _key(dataset, "user", post), "item_id": item, "timestamp": time.time() - 10 + n}
                for n, item in enumerate((unknown, named))
            ]
            _post(f"{one}/v1/events", told)
            found.append(_seconds_until(other, unknown, named))
        return found
    finally:
        for service in services:
            service.stop()


def _seconds_until(url: str, unknown: str | int, named: str | int) -> float:
    """From now to the answer that names an item beside another one."""
    began = time.perf_counter()
    while (took := time.perf_counter() - began) < WITHIN_S:
        answer = _post(f"{url}/v1/recommend", {"history": [unknown], "k": 1})
        if answer["source"] == "neighbors" and [item["item_id"] for item in answer["items"]] == [named]:
            return time.perf_counter() - began
        time.sleep(ASK_EVERY_S)
    raise RuntimeError(f"{url}: an event is not in its answers {took:.0f} s after it was posted elsewhere")


def _key(dataset: Dataset, side: str, number: int) -> str | int:
    """That no data set has, of the kind that it has."""
    if dataset.manifest.id_kinds[side] == "string":
        return f"fresh-{number}"
    return 2**40 + number


def _make_store(dataset: Dataset, address: str, folder: Path) -> Path:
    """An empty store with both sides, and a graph of it, whose folder is the value."""
    made = StoreManifest(name=dataset.manifest.name, id_kinds=dataset.manifest.id_kinds)
    open_store(address, create=made).close()
    open_store(address, create=made.model_copy(update={"by": "item"}), by="item").close()
    graph = Path(tempfile.mkdtemp(prefix="graph-", dir=folder)) / "graph"
    TemporalGraph(config_of_store(made)).save(graph)
    return graph


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """URL of a server that keeps nothing."""
    port = free_port()
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


def _post(url: str, body: object) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)
