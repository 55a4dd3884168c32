"""What it costs that requests want different things.

The model and the users are those of `serve`; one process, without HTTP. One bar:

* `value-mixed-k`: requests per second where each wants some number of items from 10 to 20, over those where
  each wants 15: as many items in all. All have as many beams, so they are to be computed in the same batches.

`RAYREC_BENCH_STEPS` is the number of batches in a window.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.serve import BEAMS, THREADS, bodies_of, trained_run
from rayrec.platform.console import log
from rayrec.serve.app.loading import load_service
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest

IN_FLIGHT = 32
LEAST_ITEMS = 10
MEAN_ITEMS = (LEAST_ITEMS + BEAMS) // 2


def bench(options: BenchOptions) -> list[Bar]:
    with trained_run(options) as (data, run):
        torch.set_num_threads(THREADS)
        service = load_service(str(run), ServeConfig(threads=THREADS), None)
        service.warm_up()
        sizes = list[int]()
        batcher = Batcher[RecommendRequest, RecommendAnswer](
            service.recommend_all,
            service.measured_costs(IN_FLIGHT),
            max_waiting=2 * IN_FLIGHT,
            on_batch=lambda num_requests, seconds: sizes.append(num_requests),
        )
        bodies, random = itertools.cycle(bodies_of(data, MEAN_ITEMS)), np.random.default_rng(0)

        def rate(num_items: Callable[[], int]) -> float:
            requests = (RecommendRequest.model_validate({**body, "k": num_items()}) for body in bodies)
            return _rate(batcher, service, requests, options.steps * IN_FLIGHT)

        def show(mixed: float, one: float) -> None:
            log.print(f"mixed k: {mixed:.0f} requests/s, one k: {one:.0f}", highlight=False)

        def mixed() -> float:
            return rate(lambda: int(random.integers(LEAST_ITEMS, BEAMS + 1)))

        try:
            rate(lambda: MEAN_ITEMS)
            sizes.clear()
            ratios = interleaved(mixed, lambda: rate(lambda: MEAN_ITEMS), options.pairs, show)
        finally:
            batcher.close()
        log.print(f"{np.mean(sizes):.1f} requests a batch")
        return [Bar.of("value-mixed-k", ratios, "the same requests for as many items each", 0.95)]


def _rate(
    batcher: Batcher[RecommendRequest, RecommendAnswer],
    service: RecommendationService,
    requests: Iterator[RecommendRequest],
    number: int,
) -> float:
    """Requests per second, with as many in flight all the time."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def submit() -> None:
        request = next(requests)
        future = batcher.submit(request, group=service.group_of(request), width=service.width_of(request))
        future.add_done_callback(lambda _: done.put(None))

    began = time.perf_counter()
    for _ in range(IN_FLIGHT):
        submit()
    for _ in range(number - IN_FLIGHT):
        done.get()
        submit()
    for _ in range(IN_FLIGHT):
        done.get()
    return number / (time.perf_counter() - began)
