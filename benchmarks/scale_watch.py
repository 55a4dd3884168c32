"""What waiting for a thousand trainers costs the driver, whose watch hears of the first that dies.

A thousand calls are answered within a third of a second, in any order, by a few processes. Bars, of the
driver's processor time, submitting left out:

* `scale-watch`: that of `ray.get`, which hears of a death only when its turn comes, over the watch's.
* `scale-watch-one-by-one`: that of asking Ray for one object at a time over the watch's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from benchmarks.harness import Bar, BenchOptions
from rayrec.pipelines.cluster.watch import Watch
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.console import log

NUM_CALLS, NUM_PROCESSES, LASTS_S = 1_000, 4, 0.3


@ray.remote(num_cpus=0)
class Light:
    """A process in which many trainers are at work."""

    async def step(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 1


def bench(options: BenchOptions) -> list[Bar]:
    with ray_cluster(ClusterConfig(dashboard=False), NUM_PROCESSES):
        processes = [Light.options(max_concurrency=NUM_CALLS).remote() for _ in range(NUM_PROCESSES)]
        watch = Watch(processes[0], frozenset(), hang_timeout_s=60)

        def one_by_one(refs: Sequence[Any]) -> list[Any]:
            values: dict[Any, Any] = {}
            while waiting := [ref for ref in refs if ref not in values]:
                (ref,), _ = ray.wait(waiting, num_returns=1)
                values[ref] = ray.get(ref)
            return [values[ref] for ref in refs]

        def seconds(get: Callable[[list[Any]], list[Any]]) -> float:
            random = np.random.default_rng(0)
            refs = [
                processes[call % NUM_PROCESSES].step.remote(LASTS_S * random.random())
                for call in range(NUM_CALLS)
            ]
            began = time.process_time()
            get(refs)
            return time.process_time() - began

        ways = (watch.get, ray.get, one_by_one)
        for way in ways:
            seconds(way)  # thrown away
        measured: list[list[float]] = [[seconds(way) for way in ways] for _ in range(options.pairs)]
    for name, values in zip(("the watch", "ray.get", "one by one"), zip(*measured, strict=True), strict=True):
        log.print(f"{name}: {1e3 * statistics.median(values):.0f} ms", highlight=False)
    return [
        Bar.of("scale-watch", [plain / ours for ours, plain, _ in measured], "ray.get", 0.5),
        Bar.of("scale-watch-one-by-one", [single / ours for ours, _, single in measured], "one by one", 1.0),
    ]
