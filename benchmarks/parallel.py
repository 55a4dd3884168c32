"""What trainers on two nodes send each other, over a shaped link of 1 Gbit/s between two network namespaces.

A small llama, replicated; each trainer is a process with one thread, gloo carries the sums of gradients. Both
go through the same variants in turns. Bars:

* `parallel-hidden`: share of the time in which sums of dense gradients are waited for, that buckets sent
  while backward goes on take away from one bucket sent when it has ended; the same losses to the bit.
* `parallel-step`: steps per second with these buckets over those with one.
* `parallel-dense-bytes`: 0.51 over the bytes that the kernel has sent with `training.reduce_dtype: bfloat16`,
  of those with float32.
* `parallel-dense-step`: steps per second with bfloat16 over those with float32; nothing is claimed of it.
* `parallel-rows-...`: rows and gradients between trainers and servers; see `benchmarks.parallel_rows`, which
  can be measured alone as `rayrec bench parallel-rows`.

Without root, or without iproute2, they are not measured. `RAYREC_BENCH_STEPS` are steps of a window,
`RAYREC_BENCH_PAIRS` windows of each variant.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks import parallel_rows
from benchmarks.harness import Bar, BenchOptions
from benchmarks.shaped_link import shaped_link, why_not
from rayrec.platform.console import log

MEGABITS = 1_000
HIDDEN, BYTES = 0.5, 0.51


def bench(options: BenchOptions) -> list[Bar]:
    return [*dense_bars(options), *parallel_rows.bench(options)]


def dense_bars(options: BenchOptions) -> list[Bar]:
    if (reason := why_not()) is not None:
        log.print(f"not measured: {reason}")
        names = {
            "parallel-hidden": HIDDEN,
            "parallel-step": 1.0,
            "parallel-dense-bytes": 1.0,
            "parallel-dense-step": 0.0,
        }
        return [Bar(name, None, None, reason, target, None) for name, target in names.items()]
    found = windows(options.pairs, options.steps)
    assert found["late"][0]["losses"] == found["buckets"][0]["losses"], "buckets change no bit"

    def ratios(of: Callable[[dict[str, Any], dict[str, Any]], float], ours: str, peer: str) -> list[float]:
        return [of(one, other) for one, other in zip(found[ours], found[peer], strict=True)]

    for name, some in found.items():
        medians = {key: statistics.median(one[key] for one in some) for key in ("waited_s", "wall_s", "sent")}
        log.print(
            f"{name}: {1e3 * medians['wall_s']:.0f} ms a step, of which {1e3 * medians['waited_s']:.0f} ms "
            f"in sums; {medians['sent'] / 1e6:.1f} MB sent",
            highlight=False,
        )
    return [
        Bar.of(
            "parallel-hidden",
            ratios(lambda ours, late: 1 - ours["waited_s"] / late["waited_s"], "buckets", "late"),
            "waiting with one bucket after backward",
            HIDDEN,
        ),
        Bar.of(
            "parallel-step",
            ratios(lambda ours, late: late["wall_s"] / ours["wall_s"], "buckets", "late"),
            "one bucket after backward",
            1.0,
        ),
        Bar.of(
            "parallel-dense-bytes",
            ratios(lambda half, full: BYTES * full["sent"] / half["sent"], "bfloat16", "buckets"),
            f"{BYTES} of float32's bytes",
            1.0,
        ),
        Bar.of(
            "parallel-dense-step",
            ratios(lambda half, full: full["wall_s"] / half["wall_s"], "bfloat16", "buckets"),
            "float32 gradients",
            0.0,
        ),
    ]


def windows(num_windows: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """What a trainer measured, by variant: seconds of a step, of which waited, and bytes sent."""
    with shaped_link(MEGABITS) as ends:
        trainers = [
            subprocess.Popen(
                end.command(
                    sys.executable,
                    "-m",
                    "benchmarks.dense_trainer",
                    *(str(rank), ends[0].address, end.interface, str(num_windows), str(steps)),
                ),
                stdout=subprocess.PIPE,
                env=os.environ | end.environment | {"OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank, end in enumerate(ends)
        ]
        try:
            printed, _ = trainers[0].communicate()
            if trainers[0].returncode != 0 or trainers[1].wait() != 0:
                raise RuntimeError("a trainer failed; its error is above")
        finally:
            for trainer in trainers:
                trainer.kill()
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in printed.splitlines():
        window = json.loads(line)
        found[window.pop("variant")].append(window)
    return found
