"""How long may OpenMP's idle threads spin? Training with two threads, alone and beside other work.

Between two parallel loops, a thread waits for the next one. As torch installs it, it spins for so long that
it hardly ever sleeps; `rayrec.platform.processors` lets it sleep after tenths of a millisecond. Steps per
second of the same training in two processes, of which one has our setting and one that of libgomp:

* `idle-threads-alone`: nothing beside.
* `idle-threads-beside`: beside a process on every processor that computes without a pause.

`RAYREC_BENCH_STEPS` is the number of steps in a window.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.peer_process import SETTLE_S, PeerProcess
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.platform.processors import SPIN_COUNT, SPIN_VARIABLE, num_processors

AS_INSTALLED = "300000"
"""libgomp's count, some milliseconds, where nothing is set and there are no more threads than processors."""
THREADS = 2
FIRST_STEPS = 5
"""Which are not measured: everything is made then."""
TARGETS = {"alone": 0.95, "beside": 1.3}


def bench(options: BenchOptions) -> list[Bar]:
    with beauty_sized(options.data) as data:
        sides = {
            count: PeerProcess(windows, (str(data),), {SPIN_VARIABLE: count}, SETTLE_S)
            for count in (SPIN_COUNT, AS_INSTALLED)
        }
        ours, installed = sides.values()
        try:
            bars = []
            for name, others in (("alone", 0), ("beside", num_processors())):

                def show(a: float, b: float, name: str = name) -> None:
                    log.print(
                        f"idle-threads-{name}: {a:.2f} steps/s, as installed {b:.2f}, ratio {a / b:.2f}"
                    )

                with busy(others):
                    ratios = interleaved(
                        lambda: ours.rate(options.steps),
                        lambda: installed.rate(options.steps),
                        options.pairs,
                        show,
                    )
                peer = f"threads that spin as libgomp's do, {others} busy processes"
                bars.append(Bar.of(f"idle-threads-{name}", ratios, peer, TARGETS[name]))
            return bars
        finally:
            for side in sides.values():
                side.stop()


class _EnoughError(Exception):
    """The window is over."""


def windows(data: str) -> Callable[[int], float]:
    """Steps per second of a training that begins again for each window."""
    config = RunConfig.load(
        CHECKOUT / "configs" / "beauty-generative.yaml",
        [f"data.path={data}", f"pipeline.trainer_threads={THREADS}", "cluster.dashboard=false"],
    )

    def measure(num_steps: int) -> float:
        times: list[float] = []

        def on_step(done: int, total: int | None, seconds: float) -> None:
            times.append(time.perf_counter())
            if len(times) > FIRST_STEPS + num_steps:
                raise _EnoughError

        with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder, suppress(_EnoughError):
            train(config, Path(folder) / "run", on_step=on_step, cluster=in_process)
        return num_steps / (times[-1] - times[FIRST_STEPS])

    return measure


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute while the block lasts."""
    # Not by multiprocessing, whose processes would first import torch for some seconds.
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
