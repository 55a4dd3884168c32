"""A run of a recommender to a quantized one: calibrate, quantize, compare, and write what is good enough.

run ─► inputs of every layer, on users of `valid` ─► scales and numbers ─► loaded as any run is ─┐
 └────────────────────────────────────────────► the same users of a split, by both ◄─────────────┘
                                                   └─► report ─► OUT, or a refusal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from rayrec.models.base.config import QuantizationConfig
from rayrec.models.program.frozen_base import FrozenBase
from rayrec.models.quantization.linear import quantized_layers
from rayrec.models.quantization.network import QuantizationPlan, quantize
from rayrec.models.quantization.observers import InputObserver, observed
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.held_out import HeldOut, model_batches
from rayrec.pipelines.inference.item_ranker import give_catalog, item_ranker_of
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH
from rayrec.pipelines.quantization.comparison import Pair, compare, divergence
from rayrec.pipelines.quantization.quantized_run import write_quantized_run
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.next_item import check_split
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.manifest import Split

OnStage = Callable[[str, int, int], None]
"""Called with (stage, done, of how many)."""


@dataclass(frozen=True)
class QuantizationRequest:
    """What is asked for."""

    plan: QuantizationPlan
    calibrate: int = 512
    """Users of `valid` whose histories are read for scales, the first in the order of a hash of their ids."""
    split: Split = "test"
    """On which both models are compared."""
    max_users: int | None = None
    """That are compared at most."""
    batch_size: int = 256
    most_loss: float | None = None
    """Share of the run's metric that may be lost; what loses more is not written. None: anything."""


class Compared(Protocol):
    """What `comparison.Comparison` says of users, or `quantize_language.TextComparison` of records."""

    @property
    def metrics(self) -> dict[str, Pair]: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class QuantizationReport:
    """What came of it."""

    run: str
    snapshot_step: int
    settings: QuantizationConfig
    kernels: Mapping[str, int]
    """That compute the layers on this machine, with how many each."""
    num_calibrated: int
    metric: str
    """That `most_loss` is about."""
    comparison: Compared
    layer_bytes: Mapping[str, int]
    """`before`, `after`: of the layers that are quantized."""
    weight_bytes: Mapping[str, int]
    """Of all dense weights."""

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "snapshot_step": self.snapshot_step,
            "quantization": self.settings.model_dump(mode="json"),
            "kernels": dict(self.kernels),
            "calibrated": self.num_calibrated,
            "metric": self.metric,
            **self.comparison.to_json(),
            "bytes": {"quantized_layers": dict(self.layer_bytes), "dense_weights": dict(self.weight_bytes)},
        }


def quantize_run(
    run: str | Path,
    out: Path,
    request: QuantizationRequest,
    which: str = "best",
    device: str | None = None,
    data: str | Path | None = None,
    on_stage: OnStage | None = None,
) -> QuantizationReport:
    """Quantize a run of a recommender, and write the result beside its report as a run.

    Args:
        out: folder that is made.
        which: snapshot, as `RunFolder.chosen_snapshot` knows it.
        device: on which both models are compared; None: the run's.
        data: where the run's data set lies now, if it was moved.
        on_stage: told how far it is.

    Raises:
        InputError: the run is of another kind, is quantized already, or has adapters; the data is another;
            the plan does not fit the network or the device; or more is lost than allowed. Nothing is written.
    """
    if out.exists():
        raise InputError(f"{out}: is there already; give another folder, or remove it")
    source = RunFolder.open(Path(run))
    check_can_be_quantized(source)
    tell = on_stage or (lambda stage, done, total: None)
    model = TrainedModel.load(run, which, device, data)
    if model.assembly.task.reads_items_of(model.state):
        raise InputError(
            f"{source.path}: was trained on an earlier data set than {data}; quantize it with that one, "
            "and serve the result with the later one"
        )
    before = Recommender(model)
    observers, num_calibrated = _calibrated(model, before, request, tell)
    program = item_ranker_of(model)
    if FrozenBase(program.model).names:
        raise InputError(
            f"{source.path}: its network has adapters beside a frozen base, which a quantized one has no "
            "room for; merge them first (rayrec export)"
        )
    give_catalog(program, model)
    settings = quantize(
        program.model,
        observers,
        request.plan,
        lambda done, total: tell("quantize", done, total),
        _divergence(before, Recommender(model, program), request),
    )
    weights = {name: each.detach().cpu().numpy() for name, each in program.model.named_parameters()}
    quantized = _with_weights(model, source, settings, weights)
    ranker = item_ranker_of(quantized)
    give_catalog(ranker, quantized)
    after = Recommender(quantized, ranker)
    comparison = compare(
        before,
        after,
        request.split,
        request.batch_size,
        request.max_users,
        lambda done, total: tell("compare", done, total),
        # As validation does: else what is lost of the run's metric would be told of other lists.
        source.config.evaluation.exclude_seen,
    )
    report = QuantizationReport(
        run=source.name,
        snapshot_step=model.state.committed_step + 1,
        settings=settings,
        kernels=kernels_of(ranker.model),
        num_calibrated=num_calibrated,
        metric=model.assembly.task.metric,
        comparison=comparison,
        layer_bytes={
            "before": _bytes_of(model.weights, settings.modules),
            "after": _bytes_of(weights, settings.modules),
        },
        weight_bytes={"before": num_bytes(model.weights), "after": num_bytes(weights)},
    )
    check_loss(report, request.most_loss, out)
    write_quantized_run(
        out,
        source,
        read_snapshot(source.chosen_snapshot(which)),
        _config_of(source, settings, data),
        model.assembly,
        weights,
        report.to_json(),
    )
    return report


def check_can_be_quantized(source: RunFolder) -> None:
    """Refuse runs without anything to quantize.

    Raises:
        InputError: names the run, and why.
    """
    model = source.config.model
    if model.quantization is not None:
        raise InputError(
            f"{source.path}: is quantized already ({model.quantization.scheme}); quantize the run that it "
            f"was made of, {source.state.get('quantized_from', 'whose weights are float32')}"
        )
    if model.kind == "impressions":
        raise InputError(
            f"{source.path}: {model.name!r} ranks what is shown; recommenders and language models can be "
            "quantized"
        )


def _calibrated(
    model: TrainedModel, recommender: Recommender, request: QuantizationRequest, tell: OnStage
) -> tuple[dict[str, InputObserver], int]:
    """(Observers of every layer while users of `valid` are answered, how many users)."""
    check_split(recommender.dataset, "valid")
    total = min(request.calibrate, recommender.dataset.num_evaluated("valid"))
    exclude_seen = model.assembly.task.config.evaluation.exclude_seen
    done = 0
    with observed(recommender.network) as observers:
        for samples in model_batches(
            recommender, HeldOut(recommender.dataset, "valid", total), request.batch_size
        ):
            recommender.recommend_samples(samples, LIST_LENGTH, exclude_seen=exclude_seen)
            done += samples.num_rows
            tell("calibrate", done, total)
    return observers, done


def _divergence(
    before: Recommender, now: Recommender, request: QuantizationRequest
) -> Callable[[], float] | None:
    """Of first choices for the users that scales are chosen by; None of a model that has no distribution.

    They are of `valid`: what is reported later is of other events.
    """
    batches = list(
        model_batches(before, HeldOut(before.dataset, "valid", request.calibrate), request.batch_size)
    )
    expected = [before.first_log_probs(samples) for samples in batches]

    def measure() -> float:
        found = []
        for samples, first in zip(batches, expected, strict=True):
            second = now.first_log_probs(samples)
            assert first is not None
            assert second is not None
            found.append(divergence(first, second))
        return float(np.mean(np.concatenate(found)))

    return None if any(each is None for each in expected) else measure


def _config_of(source: RunFolder, settings: QuantizationConfig, data: str | Path | None) -> RunConfig:
    config = source.config
    if data is not None:
        config = config.with_data(data).with_absolute_paths()
    return config.model_copy(update={"model": config.model.model_copy(update={"quantization": settings})})


def _with_weights(
    model: TrainedModel, source: RunFolder, settings: QuantizationConfig, weights: Mapping[str, np.ndarray]
) -> TrainedModel:
    """The same model with quantized weights, through the door by which every run is loaded."""
    held = model.assembly.config
    config = held.model_copy(update={"model": held.model.model_copy(update={"quantization": settings})})
    assembly = assemble(config, checksums=False, columns=source.columns)
    return replace(model, assembly=assembly, weights=weights)


def kernels_of(model: nn.Module) -> dict[str, int]:
    """Names of the kernels that compute a network's layers, with how many each."""
    found: dict[str, int] = {}
    for _, layer in quantized_layers(model):
        found[layer.kernel] = found.get(layer.kernel, 0) + 1
    return found


def _bytes_of(weights: Mapping[str, np.ndarray], layers: tuple[str, ...]) -> int:
    return num_bytes({name: each for name, each in weights.items() if name.rpartition(".")[0] in layers})


def num_bytes(weights: Mapping[str, Any]) -> int:
    """Of arrays or tensors."""
    return sum(each.nbytes for each in weights.values())


def check_loss(report: QuantizationReport, most_loss: float | None, out: Path) -> None:
    """Refuse what loses more of the run's metric than is allowed.

    Raises:
        InputError: says how much; nothing was written.
    """
    pair = report.comparison.metrics.get(report.metric)
    if most_loss is None or pair is None or pair.loss <= most_loss:
        return
    raise InputError(
        f"{out}: not written: {report.metric} goes from {pair.before.value:.4f} to {pair.after.value:.4f}, "
        f"a loss of {pair.loss:.2%}, and --most-loss allows {most_loss:.2%}; take more bits, smaller groups, "
        "or more users to calibrate on"
    )
