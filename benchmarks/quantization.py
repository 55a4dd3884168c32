"""Quantized products and runs: how fast, how near, and where scales are needed.

One thread, and measurements in turns. Bars:

* `products-W-rows-N`: layers of a feed-forward block of width W, int8 by rows (w8a8), against float32. The
  target of 2 is that of CPUs with VNNI. Without, products of int8 take two instructions more, and are at most
  about twice as fast: there the bar says what is reached, and its target is to be no slower.
* `end-to-end-256`: answers of a whole recommender of width 256 to 64 users, likewise; with VNNI 1.3.
* `outliers`: a model with planted outliers, which SmoothQuant is made for: divergence of plainly rounded
  first choices by that of smoothed ones.
* `DATA-awq-kl`: divergence of plainly rounded int4 by that with AWQ's scales and clipping.
* `DATA-recall-SCHEME`, `DATA-overlap-SCHEME`: recall@10 by that of the run that was quantized; overlap@10.

The last three are of the run in RAYREC_BENCH_RUN, trained on real data: `configs/movielens-generative.yaml`,
say. Without it, a network that nobody has trained is quantized on a synthetic data set, which says whether
all of it works and nothing of quality: its bars have no target.

`python -m benchmarks.quantization RUN FILE` writes the dated record of a run, with what rows of its tables
lose where a version has them in 8 bits; `--max-users 2000` and `--scheme w8a8` (which may be repeated)
compare less. Records are in `benchmarks/quality/quantization`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.untrained import untrained_run
from rayrec.models.quantization.network import QuantizationPlan, quantize
from rayrec.models.quantization.observers import observed
from rayrec.pipelines.evaluation.held_out import HeldOut, model_batches
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.quantization.comparison import compare, divergence
from rayrec.pipelines.quantization.quantize import QuantizationReport, QuantizationRequest, quantize_run
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.console import log
from rayrec.platform.devices import HOST, has_wide_int8_products
from rayrec.platform.files import write_json

WIDTHS, ROWS = (256, 512, 1024), (64, 512)
BATCH = 64
WIDE: dict[str, Any] = {
    "name": "prefix_decoder",
    "backbone": {"dim": 256, "num_layers": 4, "num_heads": 4, "feedforward_dim": 1024, "max_length": 50},
}
PLANNED: dict[str, QuantizationPlan] = {
    "w8a8": QuantizationPlan("w8a8"),
    "w8a8_static": QuantizationPlan("w8a8_static"),
    "w4a16": QuantizationPlan("w4a16"),
    "w4a16 plain": QuantizationPlan("w4a16", scales=False),
    "fp8": QuantizationPlan("fp8"),
}
LEAST_RECALL = {"w8a8": 0.995, "w4a16": 0.98}
LEAST_OVERLAP = {"w8a8": 0.97}
OUTLIERS, NUM_OUTLIERS = 100.0, 4


def bench(options: BenchOptions) -> list[Bar]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    given = os.environ.get("RAYREC_BENCH_RUN")
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-bench-")))
            data = stack.enter_context(beauty_sized(options.data))
            wide = untrained_run(folder / "wide", data, WIDE)
            bars = [*_products(options), _end_to_end(wide, folder, options), _outliers(wide)]
            run = wide if given is None else Path(given)
            reports = quantized_runs(run, folder, None if given else 512)
            return bars + _quality(run.name if given else "untrained", reports, claims=given is not None)
    finally:
        torch.set_num_threads(threads)


def _target(of_vnni: float) -> float:
    return of_vnni if has_wide_int8_products(HOST.torch) else 1.0


@torch.inference_mode()
def _products(options: BenchOptions) -> list[Bar]:
    bars = []
    for width in WIDTHS:
        plain, block = _block(width), _block(width)
        with observed(block) as observers:
            block(torch.randn(256, width))
        quantize(block, observers, PLANNED["w8a8"])
        for rows in ROWS:
            x = torch.randn(rows, width)
            ratios = interleaved(_rate(partial(block, x)), _rate(partial(plain, x)), options.pairs)
            bars.append(Bar.of(f"products-{width}-rows-{rows}", ratios, "float32", _target(2.0)))
    return bars


def _block(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))


def _rate(call: Callable[[], Any], least_s: float = 0.1) -> Callable[[], float]:
    """Calls a second, over so many seconds at least."""

    def measure() -> float:
        call()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < least_s:
            call()
            count += 1
        return count / (time.perf_counter() - began)

    return measure


def _end_to_end(run: Path, folder: Path, options: BenchOptions) -> Bar:
    request = QuantizationRequest(PLANNED["w8a8"], calibrate=64, max_users=64)
    quantize_run(run, folder / "wide-w8a8", request, "last")
    before, after = Recommender.load(run, "last"), Recommender.load(folder / "wide-w8a8")
    (samples,) = model_batches(before, HeldOut(before.dataset, "test", BATCH), BATCH)

    def asked(recommender: Recommender) -> Callable[[], float]:
        return _rate(lambda: recommender.recommend_samples(samples, 10, exclude_seen=True), least_s=0.5)

    ratios = interleaved(asked(after), asked(before), options.pairs)
    return Bar.of("end-to-end-256", ratios, "float32", _target(1.3))


@torch.inference_mode()
def _outliers(run: Path) -> Bar:
    """A few inputs of every layer a hundred times as large, by norms and weights that cancel."""
    found = {
        name: _divergence_with_outliers(run, plan)
        for name, plan in (
            ("plain", QuantizationPlan("w8a8", scales=False)),
            ("smooth", QuantizationPlan("w8a8")),
        )
    }
    log.print(f"planted outliers: divergence {found['plain']:.2e} rounded, {found['smooth']:.2e} smoothed")
    return Bar.once("outliers", found["plain"] / found["smooth"], "plain rounding", 4.0)


def _divergence_with_outliers(run: Path, plan: QuantizationPlan) -> float:
    recommender = Recommender.load(run, "last")
    network = recommender.network
    for module in network.modules():
        for norm, layers in getattr(type(module), "norm_readers", ()):
            module.get_submodule(norm).weight[:NUM_OUTLIERS] *= OUTLIERS  # type: ignore[operator, index]
            for layer in layers:
                module.get_submodule(layer).weight[:, :NUM_OUTLIERS] /= OUTLIERS  # type: ignore[operator, index]
    (samples,) = model_batches(recommender, HeldOut(recommender.dataset, "valid", 256), 256)
    before = recommender.first_log_probs(samples)
    with observed(network) as observers:
        recommender.recommend_samples(samples, 10, exclude_seen=True)
    quantize(network, observers, plan)
    after = recommender.first_log_probs(samples)
    assert before is not None
    assert after is not None
    return float(np.mean(divergence(before, after)))


def quantized_runs(
    run: Path, folder: Path, max_users: int | None, schemes: Sequence[str] = tuple(PLANNED)
) -> dict[str, QuantizationReport]:
    """A report for each scheme."""
    found = {}
    for name in schemes:
        request = QuantizationRequest(PLANNED[name], max_users=max_users)
        which = "best" if json.loads((run / "run.json").read_text())["best"] else "last"
        found[name] = quantize_run(run, folder / f"of-{name.replace(' ', '-')}", request, which)
        comparison = found[name].to_json()
        log.print(
            f"{name}: recall@10 times {found[name].comparison.metrics['recall@10'].ratio.value:.4f}, "
            f"overlap@10 {comparison['overlap@10']['value']:.4f}, "
            f"KL {comparison['kl_of_first_codes']['value']:.2e}"
        )
    return found


def rows_in_8_bits(run: Path, folder: Path, max_users: int | None) -> dict[str, Any]:
    """A run beside its version with 8-bit rows: bytes of rows, and how near the answers are."""
    source = RunFolder.open(run)
    if not source.config.model.tables:
        return {}
    snapshot = read_snapshot(source.chosen_snapshot("last"))
    bytes_of = {}
    for rows in ("float32", "int8_row"):
        store = VersionStore(str(folder / f"versions-{rows}"))
        version = Publisher(source, store, rows=rows).publish(snapshot)  # type: ignore[arg-type]
        bytes_of[rows] = version.row_bytes
    served = Recommender(load_version(store, version).model)
    found = compare(Recommender.load(run, "last"), served, "test", BATCH, max_users)
    recall = found.metrics["recall@10"].ratio.value
    log.print(f"rows in 8 bits: recall@10 times {recall:.4f}, overlap@10 {found.overlap.value:.4f}")
    return {"rows_in_8_bits": {"bytes": bytes_of, **found.to_json()}}


def _quality(name: str, reports: dict[str, QuantizationReport], claims: bool) -> list[Bar]:
    kl = {
        scheme: reports[scheme].to_json()["kl_of_first_codes"]["value"] for scheme in ("w4a16 plain", "w4a16")
    }
    bars = [
        Bar.once(
            f"{name}-awq-kl",
            kl["w4a16 plain"] / kl["w4a16"],
            "plain rounding",
            1.0 if claims else 0.0,
        )
    ]
    for scheme, least in LEAST_RECALL.items():
        found = reports[scheme].comparison.metrics["recall@10"]
        if not claims or found.before.value == 0:
            continue
        bars.append(Bar.once(f"{name}-recall-{scheme}", found.ratio.value, "float32", least))
    for scheme, least in LEAST_OVERLAP.items():
        value = reports[scheme].to_json()["overlap@10"]["value"]
        bars.append(Bar.once(f"{name}-overlap-{scheme}", value, "float32", least if claims else 0.0))
    return bars


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.quantization")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--max-users", type=int, help="the first so many, by a hash of their ids")
    parser.add_argument("--scheme", action="append", choices=PLANNED, help="may be repeated; else all")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        reports = quantized_runs(given.run, Path(folder), given.max_users, given.scheme or tuple(PLANNED))
        rows = rows_in_8_bits(given.run, Path(folder), given.max_users)
    config = RunFolder.open(given.run).config
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "vnni": has_wide_int8_products(HOST.torch),
        "threads": 1,
        "data": Path(config.data.path).name,
        "model": config.model.model_dump(mode="json", exclude_defaults=True),
        "epochs": config.training.epochs,
        "schemes": {name: report.to_json() for name, report in reports.items()},
        **rows,
    }
    write_json(given.out, record)


if __name__ == "__main__":
    main()
