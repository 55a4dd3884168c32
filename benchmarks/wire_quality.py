"""Does a model recommend as well whose rows and gradients travel in fewer bytes? Some minutes of one core.

SASRec on MovieLens 100K, its items on two parameter servers: trained with `sparse.wire` float32, bfloat16
and int8_row, with the same seeds. Leave-one-out, the whole catalog ranked, items of the history left
out. Bars:

* `wire-quality-bfloat16`, `wire-quality-int8`: the upper end of the 95 % interval of recall@10 over that with
  float32, at least 1: no loss that these users show. The interval is a bootstrap over users, who are paired;
  a user's score is the mean over the seeds.

RAYREC_BENCH_DATA is a folder with the source `movielens-100k`. It writes `benchmarks/quality/wire.json` with
the date.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Bar, BenchOptions
from benchmarks.quality_page import RECORDS
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, target_places, user_scores
from rayrec.pipelines.quantization.comparison import Pair
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.console import log
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.reader import evaluation_batches

RECORD = RECORDS / "wire.json"
SOURCE, METRIC = "movielens-100k", "recall@10"
SEEDS = (0, 1)
NARROW = {"bfloat16": "wire-quality-bfloat16", "int8_row": "wire-quality-int8"}
"""Bars by format."""
PEER = "recall@10 with float32"


def bench(options: BenchOptions) -> list[Bar]:
    if options.data is None:
        return [Bar.of(name, [], PEER, 1.0) for name in NARROW.values()]
    with TemporaryDirectory(prefix="rayrec-bench-") as folder:
        data = Path(folder) / "data"
        prepare(options.data / SOURCE, data, PrepareConfig(allow=frozenset({"duplicates"})))
        scores = {
            wire: np.stack([_scores(data, Path(folder), wire, seed) for seed in SEEDS])
            for wire in ("float32", *NARROW)
        }
    pairs = {wire: Pair.of(scores["float32"].mean(axis=0), scores[wire].mean(axis=0)) for wire in NARROW}
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "metric": METRIC,
        "seeds": {
            wire: dict(zip(SEEDS, of_wire.mean(axis=1), strict=True)) for wire, of_wire in scores.items()
        },
        "against float32": {wire: pair.to_json() for wire, pair in pairs.items()},
    }
    RECORD.write_text(json.dumps(made, indent=2) + "\n")
    return [Bar.once(NARROW[wire], pair.ratio.high, PEER, 1.0) for wire, pair in pairs.items()]


def _scores(data: Path, folder: Path, wire: str, seed: int) -> np.ndarray:
    """[U] of each user of the test split."""
    run = folder / f"{wire}-{seed}"
    train(_config(data, wire, seed), run, cluster=in_process)
    recommender, dataset = Recommender.load(run, "last"), Dataset.open(data)
    places = []
    for samples in evaluation_batches(dataset, "test", 512):
        assert samples.targets_B is not None, "of a split"
        found = recommender.recommend_samples(samples, LIST_LENGTH, exclude_seen=True)
        places.append(target_places(found.items_BK, dataset.item_positions(samples.targets_B)))
    score_U: np.ndarray = user_scores(np.concatenate(places))[METRIC]
    log.print(f"{wire}, seed {seed}: {METRIC} {score_U.mean():.4f}", highlight=False)
    return score_U


def _config(data: Path, wire: str, seed: int) -> RunConfig:
    backbone = {"dim": 64, "num_layers": 2, "num_heads": 2, "feedforward_dim": 128, "max_length": 50}
    return RunConfig.parse(
        {
            "seed": seed,
            "data": {"path": str(data)},
            "model": {
                "name": "sasrec",
                "item_matrix": "sparse",
                "num_negatives": 512,
                "backbone": backbone | {"dropout": 0.3},
            },
            "sparse": {"num_servers": 2, "optimizer": {"kind": "adam", "lr": 0.001}, "wire": wire},
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 32, "epochs": 20, "optimizer": {"learning_rate": 0.001}},
            "evaluation": {"every_epochs": 20},
        }
    )
