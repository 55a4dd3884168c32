"""What questions to the graph of users and items cost, beside the event store, igraph, and limits.

A log of 200,000 users and 100,000 items with 4 million events (RAYREC_BENCH_ROWS is their number), items by
Zipf's law; all of it in memory, one thread. Bars:

* `graph-hops`: two hops of 10 x 10 neighbors of 512 items, against the same by two reads of the event store,
  the newest 10 events of each key.
* `graph-walks`: steps of random walks per second, against igraph's `random_walk` on the same edges. Ours are
  counted by item, igraph's are lists.
* `graph-ingest`: edges appended per second of one core in batches of 10,000, over 500,000.
* `graph-p99`: 20 ms over the 99th percentile of the time of these two hops, while another thread appends
  20,000 edges a second.
* `graph-memory`: 48 bytes over the bytes of an edge, both directions.
* `graph-bounded`: four times the events, 20 kept of each node: 4/3 of what 20 edges of every node take, over
  the bytes of the graph. Runs that are not merged yet may hold a third more.

`graph-growth` repeats hops and ingest with 1 to 50 million edges, and draws the picture of them in
`docs/images/graph-growth.svg` where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log
from rayrec.samples.graph import ANY_TIME, GraphConfig, Histories, TemporalGraph, Walks, hops, walked
from rayrec.samples.stores import EventBatch, StoreManifest, open_store
from rayrec.samples.stores.batches import TimeWindow
from rayrec.samples.stores.store import KeyValueEvents

NUM_USERS, NUM_ITEMS, NUM_EVENTS = 200_000, 100_000, 4_000_000
SEEDS, FAN_OUT = 512, 10
BATCH, ARRIVALS_PER_S = 10_000, 20_000
GROWTH = (1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000)
PICTURE = Path(__file__).parents[1] / "docs/images/graph-growth.svg"

MOST = 20
"""Edges of a node, of a bounded graph."""

Events = tuple[Int64Array, Int64Array, Int64Array]


def events_of(number: int) -> Events:
    """(users, items, times), in the order of time."""
    random = np.random.default_rng(0)
    users_E = random.integers(0, NUM_USERS, number)
    items_E = (NUM_ITEMS * random.random(number) ** 3).astype(np.int64)  # few are popular
    return users_E, items_E, np.sort(random.integers(0, 10**9, number))


def graph_of(events: Events) -> TemporalGraph:
    graph = TemporalGraph()
    graph.append(*events)
    return graph


class Questions:
    """Items that are asked about, other ones each time."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(1)

    def items(self, number: int = SEEDS) -> Int64Array:
        return (NUM_ITEMS * self._random.random(number) ** 3).astype(np.int64)


def two_hops(graph: TemporalGraph, items_B: Int64Array) -> None:
    hops(graph, "item", items_B, np.full(len(items_B), ANY_TIME), (FAN_OUT, FAN_OUT))


def bench(options: BenchOptions) -> list[Bar]:
    events = events_of(options.rows or NUM_EVENTS)
    graph, questions = graph_of(events), Questions()
    two_hops(graph, questions.items())
    with TemporaryDirectory(prefix="rayrec-bench-") as folder:
        bars = [_hops_of_store(Path(folder), events, graph, questions, options.pairs)]
    bars.append(_walks(events, graph, questions, options.pairs))
    rates = [_ingest(events, 500_000) / 500_000 for _ in range(options.pairs)]
    bars.append(Bar.of("graph-ingest", rates, "500,000 edges/s of one core", 1.0))
    seconds = [_p99(graph, questions) for _ in range(options.pairs)]
    log.print(f"p99 of two hops while edges arrive: {max(seconds) * 1000:.1f} ms at most", highlight=False)
    bars.append(Bar.of("graph-p99", [0.020 / each for each in seconds], "20 ms", 1.0))
    per_edge = graph.state.num_bytes / graph.state.num_edges
    log.print(f"{per_edge:.1f} bytes per edge", highlight=False)
    bars.append(Bar.once("graph-memory", 48 / per_edge, "48 bytes per edge, both directions", 1.0))
    bars.append(_bounded(events))
    return bars


def _bounded(events: Events) -> Bar:
    graph = TemporalGraph(GraphConfig(max_edges_per_node=MOST))
    users_E, items_E, times_E = events
    for again in range(4):  # the same users and items, later
        for start in range(0, len(users_E), 10 * BATCH):
            part = slice(start, start + 10 * BATCH)
            graph.append(users_E[part], items_E[part], times_E[part] + again * 10**9)
    num_bytes, num_edges = graph.state.num_bytes, 4 * len(users_E)
    log.print(f"{num_edges:,} edges, {MOST} of a node: {num_bytes / 1e6:.0f} MB", highlight=False)
    num_nodes = len(np.unique(users_E)) + len(np.unique(items_E))
    most = num_nodes * (18 * MOST + 16)  # neighbor, time and kind of an edge; id and offset of a node
    return Bar.once("graph-bounded", 4 / 3 * most / num_bytes, f"{MOST} edges of every node", 1.0)


def bench_growth(options: BenchOptions) -> list[Bar]:
    rows = []
    two_hops(graph_of(events_of(1000)), Questions().items())  # compiles
    for number in GROWTH[: options.rows or len(GROWTH)]:
        events, questions = events_of(number), Questions()
        started = time.process_time()
        graph = graph_of(events)
        built = number / (time.process_time() - started)
        two_hops(graph, questions.items())
        took = []
        for _ in range(50):
            items_B, started = questions.items(), time.perf_counter()
            two_hops(graph, items_B)
            took.append(time.perf_counter() - started)
        median, p99 = np.percentile(took, [50, 99]) * 1000
        rows.append(
            {
                "edges": number,
                "edges_per_core_second": round(built),
                "hops_ms": round(float(median), 2),
                "hops_p99_ms": round(float(p99), 2),
                "bytes_per_edge": round(graph.state.num_bytes / graph.state.num_edges, 1),
            }
        )
        log.print(json.dumps(rows[-1]), highlight=False)
        del graph
    _draw(rows)
    slowdown = rows[-1]["hops_ms"] / rows[0]["hops_ms"]
    more = rows[-1]["edges"] / rows[0]["edges"]
    return [Bar.once("graph-growth", more / slowdown, f"{more:.0f} x the edges, time of hops", 10.0)]


def _draw(rows: list[dict[str, float]]) -> None:
    """Time of two hops, and bytes of an edge, by the number of edges."""
    if importlib.util.find_spec("matplotlib") is None:
        log.print("matplotlib is not installed: no picture; pip install 'rayrec[bench]'")
        return
    from matplotlib.figure import Figure

    millions = [row["edges"] / 1e6 for row in rows]
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    times, memory = figure.subplots(1, 2)
    times.plot(millions, [row["hops_ms"] for row in rows], marker="o", label="median")
    times.plot(millions, [row["hops_p99_ms"] for row in rows], marker="^", linestyle="--", label="p99")
    times.legend()
    memory.plot(millions, [row["bytes_per_edge"] for row in rows], marker="o")
    for axes, title in ((times, "Two hops, ms"), (memory, "Bytes per edge, both directions")):
        axes.set(title=title, xlabel="million edges", xscale="log", ylim=(0, None))
    figure.savefig(PICTURE, metadata={"Date": None})


def _hops_of_store(
    folder: Path, events: Events, graph: TemporalGraph, questions: Questions, pairs: int
) -> Bar:
    sides = {}
    for by, (keys_E, others_E) in {"user": events[:2], "item": events[1::-1]}.items():
        manifest = StoreManifest(name="bench", time_unit="s", by=by)
        store = open_store(folder / "store", create=manifest, by=by)
        order_E = np.argsort(keys_E, kind="stable")
        for part in np.array_split(order_E, max(1, len(order_E) // 200_000)):
            store.append(EventBatch(keys_E[part], events[2][part], others_E[part]))
        sides[by] = store

    def rate(question: object) -> float:
        number, started = 0, time.perf_counter()
        while time.perf_counter() - started < 0.5:
            question(questions.items())  # type: ignore[operator]
            number += 1
        return number / (time.perf_counter() - started)

    def by_store(items_B: Int64Array) -> None:
        _newest(sides["user"], _newest(sides["item"], items_B))

    def show(a: float, b: float) -> None:
        log.print(f"two hops: {1000 / a:.1f} ms, two reads of the store {1000 / b:.1f}", highlight=False)

    ratios = interleaved(
        lambda: rate(lambda items_B: two_hops(graph, items_B)), lambda: rate(by_store), pairs, show
    )
    for store in sides.values():
        store.close()
    return Bar.of("graph-hops", ratios, "two reads of the event store", 5.0)


def _newest(store: KeyValueEvents, keys_B: Int64Array) -> Int64Array:
    keys_K = np.unique(keys_B)
    forever_K = np.full(len(keys_K), ANY_TIME)
    found = store.get_many(keys_K, ["items"], TimeWindow(forever_K, forever_K, FAN_OUT))
    starts_K = np.maximum(found.offsets_K1[1:] - FAN_OUT, found.offsets_K1[:-1])
    lengths_K = found.offsets_K1[1:] - starts_K
    place = np.arange(FAN_OUT)
    at = (starts_K[:, None] + place)[place < lengths_K[:, None]]
    newest: Int64Array = found.columns["items"][at]
    return newest


def _walks(events: Events, graph: TemporalGraph, questions: Questions, pairs: int) -> Bar:
    peer = "igraph's random_walk"
    if importlib.util.find_spec("igraph") is None:
        log.print("igraph is not installed: pip install 'rayrec[bench]'")
        return Bar.of("graph-walks", [], peer, 5.0)
    import igraph

    users_E, items_E, _ = events
    edges = np.stack([users_E, items_E + NUM_USERS], axis=1)
    other = igraph.Graph(NUM_USERS + NUM_ITEMS, edges)
    steps, settings = 1000, Walks(steps=1000, restart=0.0)

    def ours() -> float:
        number, started = 0, time.perf_counter()
        while time.perf_counter() - started < 0.5:
            items_B = questions.items(20)
            asked = Histories(items_B, np.arange(len(items_B) + 1), np.full(len(items_B), ANY_TIME))
            walked(graph, asked, 50, settings)
            number += len(items_B)
        return 2 * steps * number / (time.perf_counter() - started)  # from an item to a user to an item

    def theirs() -> float:
        number, started = 0, time.perf_counter()
        while time.perf_counter() - started < 0.5:
            for item in questions.items(20).tolist():
                other.random_walk(NUM_USERS + item, 2 * steps, stuck="return")
                number += 1
        return 2 * steps * number / (time.perf_counter() - started)

    def show(a: float, b: float) -> None:
        log.print(f"walks: {a / 1e6:.2f} M hops/s, igraph {b / 1e6:.2f}", highlight=False)

    ours()
    return Bar.of("graph-walks", interleaved(ours, theirs, pairs, show), peer, 5.0)


def _ingest(events: Events, number: int) -> float:
    """Edges per second of one core, of `number` that arrive in batches."""
    graph, started = TemporalGraph(), time.process_time()
    for start in range(0, number, BATCH):
        graph.append(*(column[start : start + BATCH] for column in events))
    return number / (time.process_time() - started)


def _p99(graph: TemporalGraph, questions: Questions, seconds: float = 4.0) -> float:
    """99th percentile of two hops, while edges arrive."""
    is_over, random = threading.Event(), np.random.default_rng(2)
    clock = [10**9 + int(graph.state.num_edges)]

    def arrive() -> None:
        pause, number = 0.05, int(ARRIVALS_PER_S * 0.05)
        while not is_over.wait(pause):
            users_E, items_E = random.integers(0, NUM_USERS, number), questions.items(number)
            graph.append(users_E, items_E, np.full(number, clock[0]) + np.arange(number))
            clock[0] += number

    thread = threading.Thread(target=arrive)
    thread.start()
    took, started = [], time.perf_counter()
    while time.perf_counter() - started < seconds:
        items_B, began = questions.items(), time.perf_counter()
        two_hops(graph, items_B)
        took.append(time.perf_counter() - began)
    is_over.set()
    thread.join()
    return float(np.percentile(took, 99))
