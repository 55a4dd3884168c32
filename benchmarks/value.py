"""What it costs that requests want different things, and to decide what each gets.

The model and the users are those of `serve`; one process, without HTTP. Bars:

* `value-mixed-k`: requests per second where each wants some number of items from 10 to 20, over those where
  each wants 15: as many items in all. All have as many beams, so they are to be computed in the same batches.
* `value-mixed-actions`: requests per second where each has 5, 10 or 20 beams, over the rate at which as many
  of each are answered that come apart.
* `value-decision`: 50 µs over the time in which an action is chosen by value.
* `value-deny-lists`: requests per second as in `value-mixed-k`, where each also denies items of its own, over
  those where none does.

Lines without a bar say the rates where a quarter read no more than 5, 10 or 20 events, and for 900 to 1000
items: more than there are beams.

`RAYREC_BENCH_STEPS` is the number of batches in a window.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.serve import BEAMS, THREADS, bodies_of, trained_run
from rayrec.pipelines.inference.answers import Budget
from rayrec.platform.console import log
from rayrec.samples.dataset.dataset import Dataset
from rayrec.serve.app.loading import load_service
from rayrec.serve.config.allocation import AllocateConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.allocation import Allocator, Facts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.degradation import DegradationLevel
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import DegradedRequest
from rayrec.serve.wire.schemas import ModelInfo, RecommendAnswer, RecommendRequest

IN_FLIGHT = 32
LEAST_ITEMS = 10
MEAN_ITEMS = (LEAST_ITEMS + BEAMS) // 2
MANY_ITEMS = (900, 1000)
DENIED = 20
BUDGETS = (5, 10, 20)
ACTIONS = (5, 10, 20)
"""By their beams."""
DECISION_S, DECISIONS = 50e-6, 5_000


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
        items = np.array(Dataset.open(data).items.keys.to_pylist())

        def alike(k: int) -> Iterator[RecommendRequest]:
            return (RecommendRequest.model_validate({**body, "k": k}) for body in bodies)

        def mixed(
            least: int = LEAST_ITEMS, most: int = BEAMS, denying: float = 0, with_budget: float = 0
        ) -> Iterator[RecommendRequest]:
            for body in bodies:
                wanted = {**body, "k": int(random.integers(least, most + 1))}
                if random.random() < denying:
                    wanted["filter"] = {"deny": items[random.integers(len(items), size=DENIED)].tolist()}
                request = RecommendRequest.model_validate(wanted)
                if random.random() < with_budget:
                    budget = Budget(max_events=int(random.choice(BUDGETS)))
                    request = DegradedRequest.of(request, DegradationLevel(budget))
                yield request

        def of_actions(beams: tuple[int, ...]) -> Iterator[RecommendRequest]:
            for body in bodies:
                request = RecommendRequest.model_validate({**body, "k": min(ACTIONS)})
                budget = Budget(max_beams=int(random.choice(beams)))
                yield DegradedRequest.of(request, DegradationLevel(budget))

        def rate(requests: Iterator[RecommendRequest], num_batches: int = options.steps) -> float:
            return _rate(batcher, service, requests, num_batches * IN_FLIGHT)

        def show(of_mixed: float, of_one: float) -> None:
            log.print(f"mixed k: {of_mixed:.0f} requests/s, one k: {of_one:.0f}", highlight=False)

        def show_denying(of_denying: float, of_none: float) -> None:
            log.print(f"deny lists: {of_denying:.0f} requests/s, none: {of_none:.0f}", highlight=False)

        try:
            rate(alike(MEAN_ITEMS))
            sizes.clear()
            ratios = interleaved(lambda: rate(mixed()), lambda: rate(alike(MEAN_ITEMS)), options.pairs, show)
            log.print(f"{np.mean(sizes):.1f} requests a batch")
            mixed_ratios = interleaved(
                lambda: rate(of_actions(ACTIONS)),
                lambda: len(ACTIONS) / sum(1 / rate(of_actions((beams,))) for beams in ACTIONS),
                options.pairs,
                lambda both, apart: log.print(
                    f"mixed actions: {both:.0f} requests/s, apart: {apart:.0f}", highlight=False
                ),
            )
            denying = interleaved(
                lambda: rate(mixed(denying=1.0)), lambda: rate(mixed()), options.pairs, show_denying
            )
            log.print(f"mixed k and budgets: {rate(mixed(with_budget=0.25)):.0f} requests/s", highlight=False)
            many, one = rate(mixed(*MANY_ITEMS), 2), rate(alike(sum(MANY_ITEMS) // 2), 2)
            log.print(f"above the beams: mixed k {many:.1f} requests/s, one k {one:.1f}", highlight=False)
        finally:
            batcher.close()
        return [
            Bar.of("value-mixed-k", ratios, "the same requests for as many items each", 0.95),
            Bar.of("value-mixed-actions", mixed_ratios, "the same requests, those of one action apart", 0.95),
            Bar.of("value-deny-lists", denying, "the same requests without deny lists", 0.85),
            Bar.of(
                "value-decision", [DECISION_S / _decision_s() for _ in range(options.pairs)], "50 µs", 1.0
            ),
        ]


def _decision_s() -> float:
    """Seconds of a decision while power is short."""
    config = AllocateConfig.parse(
        {"actions": [{"name": "full"}, *({"name": f"b{n}", "max_beams": n} for n in ACTIONS)], "curves": "-"}
    )
    shares, costs = [1.0, 0.5, 0.8, 0.95], [1e-3, 5e-4, 7e-4, 9e-4]
    allocator = Allocator(config, lambda *_: shares, lambda: costs, lambda: 0.0, time.monotonic)
    allocator.price.value = 500.0
    facts = [Facts(f"user {number}", 20, number << 44) for number in range(DECISIONS)]
    model = ModelInfo(run="run", step=1)
    began = time.perf_counter()
    for each in facts:
        allocator.decide(each, "1.5", model)
    return (time.perf_counter() - began) / DECISIONS


def _rate(
    batcher: Batcher[RecommendRequest, RecommendAnswer],
    service: RecommendationService,
    requests: Iterator[RecommendRequest],
    number: int,
) -> float:
    """Requests per second, with as many in flight all the time."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    made = iter(list(itertools.islice(requests, number)))  # which takes time of its own

    def submit() -> None:
        request = next(made)
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
