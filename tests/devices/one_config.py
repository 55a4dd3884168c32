"""One run on the CPU and on the simulated NPU, through Ray's actors: its config differs by one line.

A program of its own, since a device is registered for good, in every process of the cluster:

    python -m tests.devices.one_config FOLDER     what came of it is in FOLDER/report.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
from ray.cluster_utils import Cluster

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.training.train import train
from tests.helpers import simulated_npu
from tests.helpers.data import small_dataset
from tests.helpers.forked_workers import forked_workers
from tests.helpers.runs import SPARSE_SASREC
from tests.helpers.several_nodes import places_of

ROOT = Path(__file__).parents[2]
ACCELERATED = {"kind": "accelerated"}
"""Labels of the node that has accelerators."""
NUM_ACTORS = 4  # a server, a reader, a feature worker, a trainer
DEVICES = ("cpu", simulated_npu.NAME, *(["cuda"] if torch.cuda.is_available() else []))


def settings(data: Path, device: str) -> RunConfig:
    values: dict[str, Any] = {
        "device": device,
        "data": {"path": str(data)},
        "model": SPARSE_SASREC,
        "sparse": {"num_servers": 1, "optimizer": {"kind": "adam", "lr": 0.03}},
        "pipeline": {"trainer_threads": 1, "cpus_per_actor": 0.1, "cpus_per_trainer": 0.1},
        "training": {"batch_size": 8, "epochs": 2},
        # Servers and trainers go by what they need; the others say where they do not belong.
        "placement": {
            stage: {"labels": {"kind": "!accelerated"}} for stage in ("readers", "feature_workers")
        },
    }
    return RunConfig.parse(values)


def main(folder: Path) -> None:
    data = small_dataset(folder / "source").root
    # Processes of the cluster import the device before they know the driver's path.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with forked_workers() as interpreter, mock.patch.object(sys, "executable", interpreter):
        small = {"object_store_memory": 80 * 2**20}
        head = {"num_cpus": 3, "num_gpus": 0, "include_dashboard": False, **small}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        node = cluster.add_node(
            num_cpus=1,
            num_gpus=torch.cuda.device_count(),
            resources={"NPU": 1},
            labels=ACCELERATED,
            **small,
        )
        cluster.wait_for_nodes()
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"worker_process_setup_hook": "tests.helpers.simulated_npu.register"},
        )
        report = tell(folder, data, node.node_id)
        ray.shutdown()
        cluster.shutdown()
    (folder / "report.json").write_text(json.dumps(report))


def tell(folder: Path, data: Path, accelerated: str) -> dict[str, Any]:
    """
    Args:
        accelerated: Ray's id of the node that has accelerators.
    """
    losses: dict[str, list[float]] = {device: [] for device in DEVICES}
    there: dict[str, list[str]] = {}
    """Actors on that node."""
    recall: dict[str, float] = {}

    def train_on(device: str) -> None:
        def on_step(done: int, total: int, loss: float) -> None:
            if not losses[device]:
                places = places_of(device, NUM_ACTORS)
                there[device] = [actor for actor, node in places.items() if node == accelerated]
            losses[device].append(loss)

        train(settings(data, device), folder / "runs" / device, on_step=on_step)

    for device in DEVICES:
        train_on(device)
        recall[device] = evaluate(folder / "runs" / device).results["model"]["recall@10"].value
    return {"losses": losses, "recall": recall, "on the accelerated node": there}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
