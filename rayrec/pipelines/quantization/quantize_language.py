"""A run of a language model to a folder of quantized weights, in the layout that vLLM and transformers read.

    run ─► adapters merged ─► inputs of every layer, on records of `valid` ─► numbers
                              the same records of a split, by both networks ◄────┘
                              report ─► OUT, or a refusal

Axes: R records, K targets of a batch, V tokens of the vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayrec.models.language.adapters import merge_adapters
from rayrec.models.language.text_program import TextProgram
from rayrec.models.quantization.linear import quantized_layers
from rayrec.models.quantization.network import quantize
from rayrec.models.quantization.observers import InputObserver, observed
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.writer import TextWriter, write_network
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.text_metrics import mean, ratio
from rayrec.pipelines.quantization.comparison import Pair
from rayrec.pipelines.quantization.quantize import (
    OnStage,
    QuantizationReport,
    QuantizationRequest,
    check_loss,
    kernels_of,
    num_bytes,
)
from rayrec.pipelines.quantization.quantized_run import REPORT
from rayrec.pipelines.tasks.language import TextValidation
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.manifest import Split
from rayrec.samples.text.batches import TextBatch

LOSS = "loss"
"""Per token that is learned; a model that loses something has more of it."""


@dataclass(frozen=True)
class TextComparison:
    """Of the records of a split."""

    split: Split
    num_users: int
    """Records."""
    metrics: dict[str, Pair]
    top_moved: Estimate
    """Share of the targets before which another token is the likeliest."""
    kl: Estimate
    """Divergence of the next token after quantization from that before, in nats, by target."""
    ms_per_batch: dict[str, float]
    """Medians, `before` and `after`, of judging `batch_size` records, in turns."""
    batch_size: int

    def to_json(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "num_records": self.num_users,
            "metrics": {name: pair.to_json() for name, pair in self.metrics.items()},
            "top_1_moved": self.top_moved._asdict(),
            "kl_of_next_tokens": self.kl._asdict(),
            "ms_per_batch": self.ms_per_batch,
            "batch_size": self.batch_size,
        }


def quantize_language_run(
    run: str | Path,
    out: Path,
    request: QuantizationRequest,
    which: str = "best",
    device: str | None = None,
    data: str | Path | None = None,
    on_stage: OnStage | None = None,
) -> QuantizationReport:
    """Quantize a run of a language model, and write its network and tokenizer as a folder.

    Args: as `quantize.quantize_run`; `calibrate` and `max_users` are records.

    Raises:
        InputError: as there.
    """
    if out.exists():
        raise InputError(f"{out}: is there already; give another folder, or remove it")
    tell = on_stage or (lambda stage, done, total: None)
    model = TrainedModel.load(run, which, device, data)
    before, after = TextWriter(model), TextWriter(model)
    for split in ("valid", request.split):
        before.task.check_split(split)
    network = after.program.model.network
    if after.task.model.lora is not None:
        merge_adapters(network)
    plain = {name: each.numel() * each.element_size() for name, each in network.state_dict().items()}
    observers, num_calibrated = _calibrated(after, request, tell)
    settings = quantize(network, observers, request.plan, lambda done, total: tell("quantize", done, total))
    comparison = _compared(before, after, request, tell)
    made = {
        f"{name}.{part}": each
        for name, layer in quantized_layers(network)
        for part, each in layer.named_parameters()
    }
    layers = {name for name, _ in quantized_layers(network)}
    others = sum(size for name, size in plain.items() if name.rpartition(".")[0] not in layers)
    of_layers = {"before": sum(plain.values()) - others, "after": num_bytes(made)}
    report = QuantizationReport(
        run=before.run,
        snapshot_step=before.committed_step + 1,
        settings=settings,
        kernels=kernels_of(network),
        num_calibrated=num_calibrated,
        metric=LOSS,
        comparison=comparison,
        layer_bytes=of_layers,
        weight_bytes={when: size + others for when, size in of_layers.items()},
    )
    check_loss(report, request.most_loss, out)
    task = after.task
    write_network(out, network, task.tokenizer, task.vocabulary, False, after.made, settings)
    (out / REPORT).write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return report


def _calibrated(
    writer: TextWriter, request: QuantizationRequest, tell: OnStage
) -> tuple[dict[str, InputObserver], int]:
    """(Observers of every layer of the network while records of `valid` are judged, how many records)."""
    done = 0
    with observed(writer.program.model.network) as observers:
        for batch in _judged(writer, "valid", request.calibrate):
            writer.program.log_likelihoods(batch, {})
            done += len(batch.row_keys_B)
            tell("calibrate", done, request.calibrate)
    return observers, done


def _judged(writer: TextWriter, split: Split, most: int | None) -> Iterator[TextBatch]:
    for question in TextValidation(writer.task, split, most).batches():
        if question.what == "judge":
            yield writer.features.judged(question.step, question.rows)


def _compared(
    before: TextWriter, after: TextWriter, request: QuantizationRequest, tell: OnStage
) -> TextComparison:
    programs, total = (before.program, after.program), before.task.dataset.manifest.rows[request.split]
    total = total if request.max_users is None else min(total, request.max_users)
    losses: tuple[list[np.ndarray], ...] = ([], [])
    ms: tuple[list[float], ...] = ([], [])
    targets, divergences, moved, done = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), 0
    for batch in _judged(before, request.split, request.max_users):
        for program, loss, times in zip(programs, losses, ms, strict=True):
            began = time.perf_counter()
            loss.append(-program.log_likelihoods(batch, {}).astype(np.float64))
            times.append(1000 * (time.perf_counter() - began))
        targets.append(batch.targets_B.astype(np.float64))
        for kl_K, is_moved_K in _token_by_token(*programs, batch):
            divergences.append(kl_K)
            moved.append(is_moved_K)
        done += len(batch.row_keys_B)
        tell("compare", done, total)
    targets_R, (first_R, second_R) = np.concatenate(targets), map(np.concatenate, losses)
    pair = Pair(
        before=ratio(first_R, targets_R),
        after=ratio(second_R, targets_R),
        difference=ratio(second_R - first_R, targets_R),
        ratio=ratio(second_R, first_R),
        more_is_better=False,
    )
    return TextComparison(
        split=request.split,
        num_users=done,
        metrics={LOSS: pair},
        top_moved=mean(np.concatenate(moved)),
        kl=mean(np.concatenate(divergences)),
        ms_per_batch={
            name: float(np.median(times[1:] or times))
            for name, times in zip(("before", "after"), ms, strict=True)
        },
        batch_size=before.task.config.evaluation.batch_size,
    )


def _token_by_token(
    before: TextProgram, after: TextProgram, batch: TextBatch
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """([P] divergence, [P] 1 where the likeliest token is another) of the targets, part after part."""
    parts = zip(before.target_log_probs(batch, {}), after.target_log_probs(batch, {}), strict=True)
    for first_PV, second_PV in parts:
        kl_P = (first_PV.exp() * (first_PV - second_PV)).sum(1)
        is_moved_P = first_PV.argmax(1) != second_PV.argmax(1)
        yield kl_P.double().cpu().numpy(), is_moved_P.double().cpu().numpy()
