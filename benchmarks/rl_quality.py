"""Rows of the table of reinforcement learning in docs/benchmarks/quality.md, on Amazon Beauty.

    python -m benchmarks.rl_quality --supervised RUN [--algorithm sa_gcpo] [--seed 0] [--control]
    python -m benchmarks.rl_quality --finished RUN ...     runs of `rayrec rl` that have ended
    python -m benchmarks.rl_quality                        write the page again

RUN of the first is a run of configs/beauty-generative.yaml. The config is configs/beauty-rl.yaml; `--control`
leaves out the rewards and keeps the NLL term: the likelihood of the same events, by the same code. The result
is a record in benchmarks/quality/rl/, and the table is made of the records alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality_page import RL_RECORDS, write_page
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import progress_bar
from rayrec.rl.config import RlConfig
from rayrec.rl.run import train_policy
from rayrec.rl.run_folder import RL_CONFIG, RL_EVALUATION


def config_of(supervised: Path, algorithm: str, seed: int, control: bool) -> RlConfig:
    overrides = [f"init_from={supervised}", f"algorithm.name={algorithm}", f"seed={seed}"]
    if control:
        overrides.append("learner.reward_weight=0")
    return RlConfig.load(CHECKOUT / "configs" / "beauty-rl.yaml", overrides)


def record_of(run: Path) -> tuple[str, dict[str, Any]]:
    """(name, record) of a run that has ended."""
    config = RlConfig.load(run / RL_CONFIG)
    report = json.loads((run / RL_EVALUATION).read_text())
    settings = config.model_dump(mode="json", exclude={"init_from", "device", "placement"})
    method = "control" if config.learner.reward_weight == 0 else config.algorithm.name
    return f"beauty-{method}-{config.seed}", {**report, "method": method, "settings": settings}


def write_record(run: Path) -> None:
    name, record = record_of(run)
    RL_RECORDS.mkdir(parents=True, exist_ok=True)
    (RL_RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rl_quality")
    parser.add_argument("--supervised", type=Path, help="run of configs/beauty-generative.yaml")
    parser.add_argument("--algorithm", default="sa_gcpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="without rewards")
    parser.add_argument("--finished", type=Path, nargs="*", default=[], help="runs that have ended")
    options = parser.parse_args(arguments)
    for run in options.finished:
        write_record(run)
    if options.supervised is not None:
        config = config_of(options.supervised, options.algorithm, options.seed, options.control)
        with tempfile.TemporaryDirectory(prefix="rayrec-rl-") as folder, progress_bar("rl") as progress:
            run = Path(folder) / "run"
            train_policy(config, run, on_step=lambda report, total: progress(report.step, total))
            write_record(run)
    write_page()


if __name__ == "__main__":
    main()
