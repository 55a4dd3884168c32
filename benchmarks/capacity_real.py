"""The planner against steps of this machine: calibrated on eight configurations, held to sixteen others.

A DLRM on sampled impressions (400,000 rows, 16 columns of 50,000 ids, Zipf 1.1) trains for some seconds in
every configuration, by the actors of `rayrec train` on a cluster of this machine. Configurations differ in
servers (1 to 4), trainers (1 and 2), widths, batches, modes, transports and dense layers; none is both
calibrated on and predicted. They come in a random order, so that other work on the machine does not hit one
kind of them, and of each the window with the shortest steps counts. A prediction is told how many cores other
work had left in that window. Bars:

* `capacity-real-median`: 15 % over the median error of predicted steps.
* `capacity-real-worst`: 40 % over the largest one.
* `capacity-real-rank`: Spearman's rank correlation of predicted and measured steps over 0.9.
* `capacity-real-bottleneck`: configurations whose busiest stage is named rightly over 14 of 16. The stages
  are reading, features, the exchange with servers, dense compute and the driver.
* `capacity-real-linear`: the median error of "every trainer does as many rows a second as in the calibration"
  over twice that of the planner.

It takes a quarter of an hour on a quiet machine, and writes `benchmarks/quality/capacity-real.json` with the
date, every configuration's figures, and how busy the machine was. What was measured lies beside it until
then, so that a bench that is ended goes on where it was. `RAYREC_BENCH_PAIRS`: rounds through all
configurations, one for every 9.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bar, BenchOptions
from benchmarks.quality_page import RECORDS
from benchmarks.synthetic_impressions import synthetic_impressions
from rayrec.pipelines.capacity.calibrate import Variant, measure
from rayrec.pipelines.capacity.calibration import Calibration, calibrated, machine_of, measured_from
from rayrec.pipelines.capacity.costs import Measured
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.console import log
from rayrec.platform.devices import get_device
from rayrec.platform.health.burn_in import kind_of
from rayrec.platform.processors import num_processors

RECORD = RECORDS / "capacity-real.json"
PART = RECORD.with_suffix(".part")
ROWS, COLUMNS, IDS = 400_000, 16, 50_000
SEED = 33
MEDIAN, WORST, RANK, RIGHT, OF = 0.15, 0.40, 0.9, 14, 16
BETTER = 2.0
"""Times as good as the rule of thumb."""

_EXACT, _SYNC, _STALE = "exact_prefetch", "sync", "bounded_stale"
_RAY, _AUTO = "ray", "auto"
CALIBRATED = (
    Variant(2, 1, 16, 1024, _EXACT, _AUTO),
    Variant(1, 1, 64, 1024, _SYNC, _RAY),
    Variant(4, 1, 16, 4096, _STALE, _AUTO),
    Variant(2, 2, 64, 4096, _EXACT, _RAY),
    Variant(1, 2, 32, 2048, _SYNC, _AUTO, (512, 512)),
    Variant(3, 1, 128, 512, _EXACT, _AUTO),
    Variant(4, 2, 16, 256, _STALE, _RAY),
    Variant(1, 1, 64, 2048, _EXACT, _AUTO, (1024, 512)),
)
PREDICTED = (
    Variant(2, 1, 32, 1024, _EXACT, _AUTO),
    Variant(1, 1, 16, 512, _SYNC, _AUTO),
    Variant(4, 1, 32, 2048, _EXACT, _RAY),
    Variant(2, 1, 64, 1024, _STALE, _AUTO),
    Variant(1, 1, 128, 1024, _EXACT, _AUTO),
    Variant(2, 1, 16, 4096, _EXACT, _AUTO),
    Variant(4, 1, 64, 512, _SYNC, _AUTO),
    Variant(1, 2, 16, 2048, _EXACT, _AUTO),
    Variant(2, 2, 32, 1024, _SYNC, _RAY),
    Variant(4, 2, 64, 2048, _STALE, _AUTO),
    Variant(3, 2, 16, 4096, _EXACT, _RAY),
    Variant(2, 2, 128, 512, _SYNC, _AUTO),
    Variant(1, 1, 16, 128, _SYNC, _RAY),
    Variant(4, 1, 16, 128, _EXACT, _RAY),
    Variant(1, 1, 32, 1024, _EXACT, _AUTO, (512, 256)),
    Variant(2, 2, 16, 1024, _STALE, _AUTO, (1024, 256)),
)


def bench(options: BenchOptions) -> list[Bar]:
    began, load = time.time(), os.getloadavg()
    with TemporaryDirectory() as folder:
        data = Path(folder) / "impressions"
        synthetic_impressions(data, ROWS, COLUMNS, IDS)
        measured = _measured(base_config(data), max(1, options.pairs // 9))
    cores = float(num_processors())
    calibration = calibrated(
        [measured[each.label] for each in CALIBRATED],
        cores,
        kind_of(get_device("cpu").torch),
        datetime.now(tz=UTC).date().isoformat(),
    )
    compared = compare(calibration, [measured[each.label] for each in PREDICTED])
    bars = _bars(compared)
    _record(calibration, compared, bars, {"seconds": time.time() - began, "load_before": load})
    return bars


def base_config(data: Path) -> RunConfig:
    """The run that configurations are variants of."""
    return RunConfig.parse(
        {
            "data": {"path": str(data)},
            "model": {"name": "dlrm", "dim": 16, "bottom_dims": [64], "hidden_dims": [128, 64]},
            "sparse": {"optimizer": {"kind": "rowwise_adagrad", "lr": 0.05}, "init_scale": 0.1},
            "cluster": {"dashboard": False},
        }
    )


def _measured(config: RunConfig, rounds: int) -> dict[str, Measured]:
    """Every configuration's fastest window, by label."""
    order, found = [*CALIBRATED, *PREDICTED], dict[str, Measured]()
    shuffled, done = random.Random(SEED), set[tuple[int, str]]()
    if PART.exists():
        for line in PART.read_text().splitlines():
            kept = json.loads(line)
            done.add((kept["round"], kept["measured"]["label"]))
            _keep(found, measured_from(kept["measured"]))
    for number in range(rounds):
        shuffled.shuffle(order)
        left = [variant for variant in order if (number, variant.label) not in done]
        if not left:
            continue
        for each in measure(config, left, _say):
            with PART.open("a") as part:
                part.write(json.dumps({"round": number, "measured": asdict(each)}) + "\n")
            _keep(found, each)
    return found


def _keep(found: dict[str, Measured], each: Measured) -> None:
    before = found.get(each.label)
    if before is None or each.times.step_s < before.times.step_s:
        found[each.label] = each


def _say(done: int, total: int, label: str) -> None:
    log.print(f"capacity-real: {done + 1} of {total}: {label}", highlight=False)


def compare(calibration: Calibration, others: Sequence[Measured]) -> list[dict[str, Any]]:
    """Predictions beside what was measured, and beside the rule of thumb."""
    per_trainer = statistics.median(
        each.workload.rows_per_trainer / each.times.step_s for each in calibration.windows
    )
    found = []
    for each in others:
        machine = machine_of(each, calibration.cores)
        plan = calibration.plan(each.workload, machine)
        low, high = calibration.step_range(each.workload, machine)
        linear_s = each.workload.rows / each.workload.num_trainers / per_trainer
        found.append(
            {
                "configuration": each.label,
                "measured_s": each.times.step_s,
                "predicted_s": plan.seconds,
                "low_s": low,
                "high_s": high,
                "linear_s": linear_s,
                "error": plan.seconds / each.times.step_s - 1,
                "linear_error": linear_s / each.times.step_s - 1,
                "bottleneck": each.times.bottleneck(),
                "predicted_bottleneck": plan.bottleneck,
                "stages_s": plan.stages,
                "measured": each.times.to_dict(),
                "spread": each.spread,
                "settings": each.settings,
            }
        )
    return found


def _bars(compared: Sequence[dict[str, Any]]) -> list[Bar]:
    from scipy.stats import spearmanr  # takes a second to import

    errors = [abs(each["error"]) for each in compared]
    linear = statistics.median(abs(each["linear_error"]) for each in compared)
    rank = float(
        spearmanr([each["predicted_s"] for each in compared], [each["measured_s"] for each in compared])[0]
    )
    right = sum(each["bottleneck"] == each["predicted_bottleneck"] for each in compared)
    median = statistics.median(errors)
    log.print(
        f"capacity-real: errors {median:.1%} (median), {max(errors):.1%} (worst), "
        f"rank correlation {rank:.3f}, bottleneck {right} of {len(compared)}, linear in cards {linear:.1%}",
        highlight=False,
    )
    measured = "measured steps"
    return [
        Bar.once("capacity-real-median", MEDIAN / median, measured, 1.0),
        Bar.once("capacity-real-worst", WORST / max(errors), measured, 1.0),
        Bar.once("capacity-real-rank", rank / RANK, measured, 1.0),
        Bar.once("capacity-real-bottleneck", right / len(compared) * OF / RIGHT, "busiest stages", 1.0),
        Bar.once("capacity-real-linear", linear / median / BETTER, "linear in cards", 1.0),
    ]


def _record(
    calibration: Calibration, compared: Sequence[dict[str, Any]], bars: Sequence[Bar], about: dict[str, Any]
) -> None:
    made = {
        "date": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        **about,
        "load_after": os.getloadavg(),
        "bars": [asdict(bar) for bar in bars],
        "predicted": list(compared),
        "calibration": calibration.to_dict(),
    }
    RECORD.write_text(json.dumps(made, indent=1) + "\n")
    PART.unlink(missing_ok=True)
