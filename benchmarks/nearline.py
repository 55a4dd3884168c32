"""What users with long histories cost.

Bars:

* `nearline-prefix-miss`: 1 ms over what the prefix cache takes for a user of 5,000 events of whom it has
  nothing, beside 1,000 users whom it has. The network is left out: it is the search that must not grow with
  the square of the history.
* `nearline-refresh-KIND`: users per second that a worker brings up to date in batches of 64, on one thread
  and with all that it reads and writes, over answers of single requests to the same model. An untrained lazy
  decoder, users of 2,000 events of whom all but the newest chunk is summarized before. The answers are with
  20 beams and with summaries that are there; refreshed `summaries` are of one chunk more, and `candidates`
  are of these and of a search for 1,000 items. The target is 5.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.untrained import untrained_run
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.past import KeysAndValues, Past
from rayrec.models.generative.prefix_cache import PrefixCache
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.nearline.config import KindName, NearlineConfig
from rayrec.pipelines.nearline.kinds import kinds_of
from rayrec.pipelines.nearline.product_store import ProductStore
from rayrec.pipelines.nearline.source import Arrivals
from rayrec.pipelines.nearline.worker import NearlineWorker
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log
from rayrec.samples.stores import open_values

REFRESHED, USER_EVENTS, BATCH, SINGLE, ALIKE = 256, 2_000, 64, 40, 10
MODEL: dict[str, Any] = {
    "name": "lazy_decoder",
    "beam_width": 20,
    "backbone": {"dim": 128, "num_layers": 2, "num_heads": 2, "feedforward_dim": 512},
    "long_history": {"chunk_events": 256, "summary_tokens": 8, "newest": 256},
}
NUM_ITEMS, NUM_EVENTS, NUM_KEPT, CALLS = 100_000, 5_000, 1_000, 50
LIMIT_S = 1e-3


class _NoNetwork:
    """Keeps one number of each event."""

    tokens_per_event = 1

    def read_on(self, batch: TensorBatch, past: Past) -> tuple[SimpleNamespace, Sequence[KeysAndValues]]:
        values = torch.zeros(len(batch.items_N), 1, 1)
        return SimpleNamespace(), [KeysAndValues(values, values)]


def bench(options: BenchOptions) -> list[Bar]:
    cache, random = PrefixCache[Any](_NoNetwork(), 1 << 30), np.random.default_rng(0)
    for _ in range(NUM_KEPT):
        cache.of(_user(random))
    ratios = [LIMIT_S / _miss_s(cache, random) for _ in range(options.pairs)]
    log.print(f"{1e3 * LIMIT_S / statistics.median(ratios):.2f} ms a miss", highlight=False)
    return [Bar.of("nearline-prefix-miss", ratios, "1 ms", 1.0), *_refresh(options)]


class _Users:
    """Events of users who are all due, in memory: an event store is not what is measured."""

    def __init__(self, histories: dict[int, Query], position: str) -> None:
        self.histories, self._position = histories, position

    def position(self) -> str:
        return self._position

    def after(self, position: str) -> Arrivals:
        users = [] if position == self._position else list(self.histories)
        return Arrivals(np.array(users, np.int64), np.zeros(len(users)), self._position)

    def all_users(self) -> Iterator[tuple[Int64Array, np.ndarray]]:
        yield np.array(list(self.histories), np.int64), np.zeros(len(self.histories))

    def queries(self, recommender: Recommender, users: Sequence[int]) -> tuple[list[str], list[Query]]:
        return [str(user) for user in users], [self.histories[user] for user in users]


def _refresh(options: BenchOptions) -> list[Bar]:
    torch.set_num_threads(1)
    with beauty_sized(options.data) as data, tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        recommender = Recommender.load(untrained_run(Path(folder) / "run", data, MODEL), "last")
        neighbors = NeighborRecommender(recommender.dataset)
        random, ids_I = np.random.default_rng(0), recommender.dataset.items.ids_I
        before = {user: Query(random.choice(ids_I, USER_EVENTS)) for user in range(REFRESHED)}
        after = {
            user: Query(np.append(query.history_ids, random.choice(ids_I, 256)))
            for user, query in before.items()
        }
        known = [
            replace(query, summaries=summaries)
            for query, summaries in zip(
                list(after.values())[:SINGLE],
                recommender.summarize(list(after.values())[:SINGLE]),
                strict=True,
            )
        ]
        alike = list[float]()
        rates: dict[KindName, list[float]] = {"summaries": [], "candidates": [], "neighbors": []}
        kinds: tuple[KindName, ...]
        for pair in range(options.pairs):
            began = time.perf_counter()
            for query in known:
                recommender.answer([query], 10)
            online = SINGLE / (time.perf_counter() - began)
            began = time.perf_counter()
            for query in known[:ALIKE]:
                recommender.answer([query], 1000)
            alike.append(ALIKE / (time.perf_counter() - began) / online)
            for kind, found in rates.items():
                place = Path(folder) / f"products-{pair}-{kind}"
                if kind != "neighbors":
                    _work(recommender, neighbors, before, place, ("summaries",))
                kinds = ("summaries", "candidates") if kind == "candidates" else (kind,)
                found.append(_work(recommender, neighbors, after, place, kinds) / online)
    for kind, found in rates.items():
        log.print(f"{kind}: {statistics.median(found):.2f} users for an answer online", highlight=False)
    ratio = statistics.median(rates["candidates"]) / statistics.median(alike)
    log.print(f"candidates: {ratio:.2f} users for an online answer of as many items", highlight=False)
    return [
        Bar.of(f"nearline-refresh-{kind}", found, "answers of single requests", 5.0)
        for kind, found in rates.items()
    ]


def _work(
    recommender: Recommender,
    neighbors: NeighborRecommender,
    histories: dict[int, Query],
    place: Path,
    products: tuple[KindName, ...],
) -> float:
    """Users per second of a worker that brings all of them up to date."""
    config = NearlineConfig(products=products, batch_users=BATCH, candidates=1000, search=1000)
    kinds = kinds_of(config, recommender, neighbors=neighbors)
    store = ProductStore(open_values(place, create=True))
    worker = NearlineWorker(
        recommender, kinds, _Users(histories, str(len(histories[0].history_ids))), store, config
    )
    began = time.perf_counter()
    worker.finish()
    took = time.perf_counter() - began
    assert worker.num_computed == len(histories) * len(products), "every user is due"
    store.close()
    return len(histories) / took


def _miss_s(cache: PrefixCache[Any], random: np.random.Generator) -> float:
    """Median of some users."""
    took = []
    for _ in range(CALLS):
        batch, began = _user(random), time.perf_counter()
        cache.of(batch)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _user(random: np.random.Generator) -> TensorBatch:
    items_N = random.integers(0, NUM_ITEMS, NUM_EVENTS)
    offsets_B1 = np.array([0, NUM_EVENTS])
    zeros_N = torch.zeros(NUM_EVENTS, dtype=torch.int64)
    layout = JaggedLayout.from_offsets(offsets_B1, torch.device("cpu"))
    return TensorBatch(layout, zeros_N, torch.tensor(items_N), None, None, inverse={}, rows={})
