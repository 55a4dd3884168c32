"""Do the frameworks, and another library, make the same ranking model of the same impressions?

    python -m benchmarks.synthetic_impressions data/synthetic --rows 1000000 --ids-per-column 100
    python -m benchmarks.ctr_quality configs/synthetic-dlrm.yaml [--steps 200] [--set KEY=VALUE ...]

Trains, of a recipe of DLRM without dropout and its data:

* DLRM in PyTorch and the one of `examples/keras_dlrm.py` in Keras on TensorFlow, both through the actors,
  with the same initial weights: how far apart are the losses of the first steps, and the test AUC?
* DCN-v2 of ours through the actors, and torch-rechub's in a plain loop with Adam on the very same batches.

Each is tested with the weights of its epoch of the best AUC on validation rows. A framework or library that
is not installed is left out, and said. For a data set of
`benchmarks.synthetic_impressions`, the best possible AUC is shown as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.table import Table
from torch import nn

from benchmarks.ctr_peers import CROSS_LAYERS, rechub_model
from examples import keras_dlrm
from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate_scorer import SCORED, evaluate_scorer
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.impressions import ImpressionTask, Scored, labeled_rows
from rayrec.pipelines.training.train import train
from rayrec.platform.arrays import Int64Array
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log, out
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import FEATURE_TABLE
from rayrec.samples.impressions.batches import ImpressionBatch
from rayrec.samples.impressions.features import ImpressionFeatures
from rayrec.samples.reading.read_plan import ReadPlan
from rayrec.samples.reading.reader import SampleReader

TORCH, KERAS, OURS, RECHUB = "DLRM, PyTorch", "DLRM, Keras", "DCN-v2, RayRec", "DCN-v2, torch-rechub"
RECHUB_LEARNING_RATES = (1e-3, 3e-4)
"""The one with the better AUC on validation rows counts."""


@dataclass(frozen=True)
class Trained:
    """What came of a model."""

    losses: list[float]
    """Of each step."""
    figures: dict[str, Estimate]
    """Of the test rows."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ctr_quality")
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="of which losses are compared")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args(arguments)
    config = RunConfig.load(given.config, tuple(given.overrides))
    _show(compare(config), given.steps, _best_possible(config))


def compare(config: RunConfig) -> dict[str, Trained]:
    """What came of each model whose framework or library is installed.

    Raises:
        InputError: the recipe is not one of DLRM without dropout, whose draws no two frameworks share.
    """
    if config.model.name != "dlrm" or config.model.dropout:
        raise InputError("expected a recipe of DLRM with model.dropout 0")
    trained: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory(prefix="ctr-quality-") as folder:
        for name, measured in _models(config, Path(folder)).items():
            trained[name] = measured()
            log.print(f"{name}: AUC {trained[name].figures['auc'].value:.4f}", highlight=False)
    return trained


def _models(config: RunConfig, folder: Path) -> dict[str, Callable[[], Trained]]:
    models = {TORCH: lambda: _through_actors(config, folder / "torch")}
    if _is_there("tensorflow"):
        models[KERAS] = lambda: _through_actors(_in_keras(config, folder), folder / "keras")
    if _is_there("torch_rechub"):
        dcn = _as_dcn(config)
        models[OURS] = lambda: _through_actors(dcn, folder / "dcn")
        models[RECHUB] = lambda: _best_of_rechub(assemble(dcn))
    return models


def _is_there(module: str) -> bool:
    is_there = importlib.util.find_spec(module) is not None
    if not is_there:
        log.print(f"{module} is not installed, and left out")
    return is_there


def _in_keras(config: RunConfig, folder: Path) -> RunConfig:
    """The same run with Keras's model, which begins with the weights that PyTorch's begins with."""
    assembly = assemble(config)
    assert isinstance(assembly.task, ImpressionTask)
    spec = assembly.task.program(assembly.dense_optimizer())
    program = spec.build(ProgramPlacement(HOST.torch, config.seed))
    weights = folder / "initial.npz"
    np.savez(weights, **keras_dlrm.from_torch(program.weights()))
    model = config.model
    return _with_model(
        config,
        {
            "name": "keras",
            "builder": "benchmarks.ctr_quality:build_keras",
            "folder": str(CHECKOUT),
            "dim": model.dim,
            "arguments": {
                "bottom_dims": list(model.bottom_dims),
                "hidden_dims": list(model.hidden_dims),
                "weights": str(weights),
            },
        },
    )


def build_keras(schema: Any, dim: int, weights: str, **dims: Any) -> Any:
    """The builder of `examples/keras_dlrm.py`, with weights of a file."""
    model = keras_dlrm.build(schema, dim, **dims)
    with np.load(weights) as values:
        for variable in model.trainable_variables:
            variable.assign(values[variable.path])
    return model


def _as_dcn(config: RunConfig) -> RunConfig:
    model = config.model
    return _with_model(
        config,
        {
            "name": "dcn_v2",
            "dim": model.dim,
            "num_cross_layers": CROSS_LAYERS,
            "structure": "parallel",
            "hidden_dims": list(model.hidden_dims),
        },
    )


def _with_model(config: RunConfig, model: dict[str, Any]) -> RunConfig:
    return RunConfig.parse(config.model_dump(mode="json") | {"model": model})


def _through_actors(config: RunConfig, run: Path) -> Trained:
    losses: list[float] = []
    train(config, run, on_step=lambda done, total, loss: losses.append(loss))
    return Trained(losses, evaluate_scorer(Scorer.load(run), "test").results[SCORED])


def _best_of_rechub(assembly: Assembly) -> Trained:
    tried = [_rechub(assembly, rate) for rate in RECHUB_LEARNING_RATES]
    return max(tried, key=lambda found: found[0])[1]


def _rechub(assembly: Assembly, learning_rate: float) -> tuple[float, Trained]:
    """Best AUC on validation rows, and what the weights of that epoch make of the test rows."""
    torch.manual_seed(assembly.config.seed)
    plan = assembly.plan
    assert isinstance(plan, ReadPlan)
    peer = RechubLoop(assembly, learning_rate)
    best, found, losses = -1.0, {}, []
    for epoch in range(assembly.config.training.epochs):
        losses += peer.train(range(plan.first_step(epoch), plan.first_step(epoch + 1)))
        auc = peer.figures("valid")["auc"].value
        log.print(f"  rate {learning_rate:g}, epoch {epoch + 1}: validation AUC {auc:.4f}", highlight=False)
        if auc > best:
            best, found = auc, peer.figures("test")
    return best, Trained(losses, found)


class RechubLoop:
    """torch-rechub's DCN-v2 with Adam, on the batches that our trainer gets."""

    def __init__(self, assembly: Assembly, learning_rate: float) -> None:
        assert isinstance(assembly.task, ImpressionTask)
        assert isinstance(assembly.features, ImpressionFeatures)
        self._task, self._features, self._plan = assembly.task, assembly.features, assembly.plan
        self._reader = SampleReader(self._plan.spec)
        self._batch_size = assembly.config.evaluation.batch_size
        schema = self._task.schema
        self._names = [*schema.numbers, *schema.ids]
        seen = [self._ids_BC(batch) for batch in self._all_batches(assembly.total_steps or 0)]
        self._rows_of = [pd.Index(pd.unique(ids_C)) for ids_C in np.concatenate(seen).T]
        self._model: nn.Module = rechub_model(
            list(schema.numbers),
            {column: len(index) for column, index in zip(schema.ids, self._rows_of, strict=True)},
            assembly.config.model.dim,
            assembly.config.model.hidden_dims,
        )
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=learning_rate)

    def train(self, steps: range) -> list[float]:
        self._model.train()
        return [self._step(self._training_batch(step)) for step in steps]

    def _step(self, batch: ImpressionBatch) -> float:
        loss = nn.functional.binary_cross_entropy(
            self._model(self._inputs(batch)), torch.from_numpy(batch.labels_BT[:, 0])
        )
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    @torch.no_grad()
    def figures(self, split: Any) -> dict[str, Estimate]:
        self._model.eval()
        scored = Scored(self._task.schema.labels)
        for labeled in self._labeled(split):
            predicted_B = self._model(self._inputs(self._features.scoring(labeled.step, labeled.rows)))
            scored.add(labeled, predicted_B.numpy()[:, None])
        return scored.figures()

    def _all_batches(self, total_steps: int) -> Iterator[ImpressionBatch]:
        yield from map(self._training_batch, range(total_steps))
        for split in ("valid", "test"):
            for labeled in self._labeled(split):
                yield self._features.scoring(labeled.step, labeled.rows)

    def _labeled(self, split: Any) -> Iterator[Any]:
        task = self._task
        return labeled_rows(task.dataset, task.schema, self._features, split, self._batch_size)

    def _training_batch(self, step: int) -> ImpressionBatch:
        (batch,) = self._features.training(step, self._reader.read_batch(self._plan.batch(step)))
        return batch

    @staticmethod
    def _ids_BC(batch: ImpressionBatch) -> Int64Array:
        lookup = batch.lookups[FEATURE_TABLE]
        ids = lookup.ids_M[lookup.inverse]
        return ids.reshape(batch.num_rows, batch.num_id_columns)

    def _inputs(self, batch: ImpressionBatch) -> dict[str, torch.Tensor]:
        columns = [torch.from_numpy(column_B.copy()) for column_B in batch.numbers_BF.T]
        for ids_B, index in zip(self._ids_BC(batch).T, self._rows_of, strict=True):
            columns.append(torch.from_numpy(index.get_indexer(pd.Index(ids_B))))
        return dict(zip(self._names, columns, strict=True))


def _best_possible(config: RunConfig) -> float | None:
    task = assemble(config).task
    assert isinstance(task, ImpressionTask)
    return task.dataset.manifest.extra.get("bayes_auc")


def _show(trained: dict[str, Trained], steps: int, best_possible: float | None) -> None:
    table = Table("model", "AUC", "log loss", "steps")
    for name, found in trained.items():
        auc, loss = found.figures["auc"], found.figures["log_loss"]
        table.add_row(
            name,
            f"{auc.value:.4f} [{auc.low:.4f}, {auc.high:.4f}]",
            f"{loss.value:.4f}",
            f"{len(found.losses)}",
        )
    out.print(table)
    if best_possible is not None:
        out.print(f"Best possible AUC of these test rows: {best_possible:.4f}")
    for one, other in ((TORCH, KERAS), (OURS, RECHUB)):
        if one in trained and other in trained:
            apart = trained[one].figures["auc"].value - trained[other].figures["auc"].value
            out.print(f"{one} less {other}: AUC {apart:+.4f}")
    if KERAS in trained:
        curves = [np.array(trained[name].losses[:steps]) for name in (TORCH, KERAS)]
        out.print(
            f"Losses of the first {steps} steps differ by at most {np.abs(np.subtract(*curves)).max():.2g}"
        )


if __name__ == "__main__":
    main()
