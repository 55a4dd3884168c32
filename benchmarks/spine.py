"""Does the spine waste the machine? Five stages of Ray actors against one plain loop.

Steps per second of the pipeline with one trainer, divided by those of `examples/one_file_trainer.py`: the
same model, global batch and data set, the same number of threads for dense compute. Bars:

* `sasrec` and `generative`: against the file as it is. The first has no sparse table, in the second every
  event brings rows of its item and its codes from the parameter servers and gradients back.
* `sasrec-same-softmax`: against the file with our softmax over the catalog put in, which is faster
  than torch's. What is left is what the actors cost.

How it is measured. Both sides are started, and one window of steps is run and thrown away: start-up,
compilation, first touch of every page. Then windows alternate. A window of the pipeline lasts from the
first call to the moment when the servers have committed its last step, so filling and draining the
pipeline count against it. The side that waits has no work: the peer blocks on a pipe in a process of
its own, the actors wait for calls. Reading the data set into memory is start-up for the peer; our reader
decodes and shuffles its windows while training. Validation and snapshots are in neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.peer_process import SETTLE_S, PeerProcess, steps_per_second
from examples import one_file_trainer
from rayrec.models.base.linear_cross_entropy import linear_cross_entropy
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.training.pipeline import TrainingPipeline
from rayrec.pipelines.training.ray_stages import running_stages
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.cluster import ray_cluster
from rayrec.platform.console import log
from rayrec.platform.processors import num_processors

TARGET = 0.60


def bench(options: BenchOptions) -> list[Bar]:
    with beauty_sized(options.data) as data:
        # Both before anything runs: what is missing shows at once.
        sasrec, generative = (
            assemble(_config(name, data, *more))
            # SASRec with ties as stored, as its peers have them; the generative model with a row per item
            # beside those of the codes, so that the servers have work.
            for name, *more in (
                ("beauty-sasrec", "data.redraw_ties=false"),
                (
                    "beauty-light",
                    "data.redraw_ties=false",
                    "model.softmax=codes",
                    "model.item_embedding=true",
                    "model.decoder_dim=512",
                ),
            )
        )
        with running(sasrec) as stages:
            ours = PipelineWindows(stages, sasrec.config, options.steps)
            bars = [
                _bar("sasrec", ours, sasrec.config, options),
                _bar("sasrec-same-softmax", ours, sasrec.config, options, our_softmax=True),
            ]
        with running(generative) as stages:
            ours = PipelineWindows(stages, generative.config, options.steps)
            bars.append(_bar("generative", ours, generative.config, options))
    return bars


class PipelineWindows:
    """Windows of a running pipeline, one after the other."""

    def __init__(self, stages: Stages, config: RunConfig, num_steps: int) -> None:
        self._pipeline = TrainingPipeline(stages, config.pipeline.queue_depth)
        self._num_steps = num_steps
        self._step = 0

    def rate(self) -> float:
        """Steps per second over the next window."""
        first, self._step = self._step, self._step + self._num_steps
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        for _ in self._pipeline.run(first, self._step):
            pass
        return self._num_steps / (time.perf_counter() - started)

    def against(
        self, peer: PeerProcess, options: BenchOptions, show: Callable[[float, float], None]
    ) -> list[float]:
        """Ratios of our rate to the peer's, in windows that take turns; the peer is stopped."""

        def theirs() -> float:
            return peer.rate(options.steps)

        try:
            interleaved(self.rate, theirs, repeats=1)  # thrown away
            return interleaved(self.rate, theirs, options.pairs, show)
        finally:
            peer.stop()


def _one_file(config: dict[str, Any], our_softmax: bool) -> Callable[[int], float]:
    """In the peer's process: the one-file trainer."""
    torch.set_num_threads(config["pipeline"]["trainer_threads"])
    if our_softmax:
        one_file_trainer.SasRec = SasRecWithOurSoftmax  # type: ignore[misc]  # where the file looks it up
    _, losses, _ = one_file_trainer.start(config)
    return steps_per_second(losses)


class SasRecWithOurSoftmax(one_file_trainer.SasRec):
    """The one file's model with RayRec's loss over the catalog."""

    def forward(self, batch: one_file_trainer.Batch) -> Tensor:
        context_ND = self.backbone(functional.embedding(batch.items_N, self.items_ID), batch)
        return linear_cross_entropy(context_ND, self.items_ID, batch.targets_N)


def _bar(
    name: str, ours: PipelineWindows, config: RunConfig, options: BenchOptions, our_softmax: bool = False
) -> Bar:
    args = (config.model_dump(mode="json"), our_softmax)
    peer = PeerProcess(_one_file, args, settle_s=SETTLE_S)

    def show(a: float, b: float) -> None:
        log.print(f"{name}: {a:.2f} steps/s, one file {b:.2f}, ratio {a / b:.3f}", highlight=False)

    ratios = ours.against(peer, options, show)
    threads = config.pipeline.trainer_threads
    return Bar.of(f"spine-{name}", ratios, f"one-file trainer, {threads} threads", TARGET)


@contextmanager
def running(assembly: Assembly) -> Iterator[Stages]:
    """The actors of a run, on a cluster of its own unless one is joined."""
    config = assembly.config
    with (
        ray_cluster(config.cluster, config.cpus_needed),
        running_stages(f"bench-{config.model.name}", assembly) as stages,
    ):
        yield stages


def _config(name: str, data: Path, *more: str) -> RunConfig:
    return RunConfig.load(
        CHECKOUT / "configs" / f"{name}.yaml",
        [
            f"data.path={data}",
            "pipeline.num_trainers=1",
            f"pipeline.trainer_threads={min(2, num_processors())}",
            "cluster.dashboard=false",
            *more,
        ],
    )
