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

from rayrec.pipelines.config import RunConfig
from rayrec.pipelines.evaluate import evaluate
from rayrec.pipelines.train import train
from tests import simulated_npu
from tests.data import small_dataset
from tests.forked_workers import forked_workers
from tests.runs import SPARSE_SASREC

ROOT = Path(__file__).parents[2]
DEVICES = ("cpu", simulated_npu.NAME, *(["cuda"] if torch.cuda.is_available() else []))


def settings(data: Path, device: str) -> RunConfig:
    values: dict[str, Any] = {
        "device": device,
        "data": {"path": str(data)},
        "model": SPARSE_SASREC,
        "sparse": {"num_servers": 1, "optimizer": {"kind": "adam", "lr": 0.03}},
        "pipeline": {"trainer_threads": 1, "cpus_per_actor": 0.1, "cpus_per_trainer": 0.1},
        "training": {"batch_size": 8, "epochs": 2},
    }
    return RunConfig.parse(values)


def main(folder: Path) -> None:
    data = small_dataset(folder / "source").root
    # Processes of the cluster import the device before they know the driver's path.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with forked_workers() as interpreter, mock.patch.object(sys, "executable", interpreter):
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=torch.cuda.device_count(),
            resources={"NPU": 1},
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"worker_process_setup_hook": "tests.simulated_npu.register"},
        )
        report = tell(folder, data)
        ray.shutdown()
    (folder / "report.json").write_text(json.dumps(report))


def tell(folder: Path, data: Path) -> dict[str, Any]:
    losses: dict[str, list[float]] = {device: [] for device in DEVICES}
    recall: dict[str, float] = {}
    for device, of_device in losses.items():
        run = folder / "runs" / device
        train(settings(data, device), run, on_step=lambda done, total, loss: of_device.append(loss))  # noqa: B023
        recall[device] = evaluate(run).results["model"]["recall@10"].value
    return {"losses": losses, "recall": recall}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
