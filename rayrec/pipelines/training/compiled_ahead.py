"""`rayrec doctor --compile`: kernels are compiled before anybody waits for them.

numba compiles a kernel when it is first called, and keeps it in a cache. Of a new installation, each process
of the first run compiles the same ones at once, half a minute of each. Two runs of a made-up log, in one
process, call most of them with the types that runs have; two more those of `sparse.wire`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.samples.prepare.prepare import prepare

_USERS, _ITEMS, _EVENTS = 40, 30, 8
_BACKBONE = {"dim": 8, "num_layers": 1, "num_heads": 1, "feedforward_dim": 8, "max_length": 4}
_RUNS: tuple[dict[str, Any], ...] = (
    {"model": {"name": "gnn"}, "sparse": {"optimizer": {"kind": "adam", "lr": 0.01}}},
    {
        "model": {"name": "sasrec"},
        "sparse": {"optimizer": {"kind": "rowwise_adagrad", "lr": 0.01}, "cache_rows": 16},
        "pipeline": {"num_trainers": 2},
    },
    {"model": {"name": "sasrec"}, "sparse": {"wire": "bfloat16"}},
    {"model": {"name": "sasrec"}, "sparse": {"wire": "int8_row"}},
)


def compile_kernels() -> None:
    """Have the kernels of training, evaluation and neighbors compiled, where they are not in the cache."""
    with tempfile.TemporaryDirectory(prefix="rayrec-kernels-") as temporary:
        folder = Path(temporary)
        events = [(user, (user + 7 * n) % _ITEMS, n) for user in range(_USERS) for n in range(_EVENTS)]
        names = ("user_id", "item_id", "timestamp")
        (folder / "log").mkdir()
        log = pa.table(dict(zip(names, map(list, zip(*events, strict=True)), strict=True)))
        pq.write_table(log, folder / "log" / "interactions.parquet")
        prepare(folder / "log", folder / "data")
        for number, settings in enumerate(_RUNS):
            model = {"backbone": _BACKBONE, "item_matrix": "sparse", "num_negatives": 8} | settings["model"]
            further = {"data": {"path": str(folder / "data")}, "training": {"batch_size": 8, "epochs": 1}}
            run = folder / f"run-{number}"
            train(RunConfig.parse(settings | further | {"model": model}), run, cluster=in_process)
            evaluate(run)
