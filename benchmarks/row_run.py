"""The runs of `benchmarks.parallel_rows`: on a cluster of two nodes, windows in turns; one line of JSON each.

python -m benchmarks.row_run DATA ADDRESS INTERFACE WINDOWS STEPS
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.shaped_link import moved_bytes
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training.pipeline import TrainingPipeline
from rayrec.pipelines.training.ray_stages import running_stages
from rayrec.platform.cluster import ray_cluster

VARIANTS = (
    ("sync", "float32"),
    ("sync", "bfloat16"),
    ("sync", "int8_row"),
    ("exact_prefetch", "float32"),
    ("exact_prefetch", "bfloat16"),
)
"""Mode and wire."""
BATCH, NEGATIVES, DIM = 64, 64, 64
ROLE, SERVERS, TRAINERS = "role", "servers", "trainers"
"""Label of the nodes, and its values."""


def config_of(data: str, address: str, wire: str, mode: str) -> RunConfig:
    """One trainer on one node, with all that feeds it; one server on the other node."""
    on_trainers, on_servers = {"labels": {ROLE: TRAINERS}}, {"labels": {ROLE: SERVERS}}
    return RunConfig.parse(
        {
            "data": {"path": data},
            "model": {
                "name": "sasrec",
                "item_matrix": "sparse",
                "loss": "bce",
                "negatives_per_event": NEGATIVES,
                "backbone": {
                    "dim": DIM,
                    "num_layers": 1,
                    "num_heads": 2,
                    "feedforward_dim": DIM,
                    "max_length": 16,
                },
            },
            "sparse": {
                "num_servers": 1,
                "optimizer": {"kind": "rowwise_adagrad", "lr": 0.02},
                "wire": wire,
            },
            "pipeline": {
                "mode": mode,
                "trainer_threads": 1,
                "cpus_per_actor": 0.1,
                "cpus_per_trainer": 0.1,
            },
            "placement": {
                "servers": on_servers,
                "trainers": on_trainers,
                "readers": on_trainers,
                "feature_workers": on_trainers,
            },
            "training": {"batch_size": BATCH, "epochs": 1000},
            "cluster": {"address": address},
        }
    )


class Windows:
    """Of one run."""

    def __init__(self, variant: dict[str, str], pipeline: TrainingPipeline, interface: str) -> None:
        self._variant, self._pipeline, self._interface = variant, pipeline, interface
        self._step = 0

    def window(self, steps: int) -> dict[str, Any]:
        """Train so many steps: seconds of each, and bytes both ways."""
        first, self._step = self._step, self._step + steps
        moved, started = moved_bytes(self._interface), time.perf_counter()
        for _ in self._pipeline.run(first, self._step):
            pass
        return self._variant | {
            "step_s": (time.perf_counter() - started) / steps,
            "moved": (moved_bytes(self._interface) - moved) / steps,
        }


def main(data: str, address: str, interface: str, num_windows: int, steps: int) -> None:
    """Print every window but the first of each run."""
    with ExitStack() as stack:
        runs: list[Windows] = []
        for mode, wire in VARIANTS:
            config = config_of(data, address, wire, mode)
            if not runs:
                stack.enter_context(ray_cluster(config.cluster, config.cpus_needed))
            assembly = assemble(config, checksums=False)
            stages = stack.enter_context(running_stages(f"rows-{mode}-{wire}", assembly))
            pipeline = TrainingPipeline(stages, config.pipeline.queue_depth)
            runs.append(Windows({"mode": mode, "wire": wire}, pipeline, interface))
        for window in range(num_windows + 1):
            for run in runs:
                found = run.window(steps)
                if window:
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
