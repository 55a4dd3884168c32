"""`rl`: reinforcement learning from a supervised run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import ConfigArgument, OverridesOption, check_run
from rayrec.platform.console import Answer, command, print_rows, progress_bar

_SHOWN = ("reward", "recall@1", "recall@10", "recall@50", "ndcg@10")


@command(app, "rl")
def rl_command(
    config_file: ConfigArgument,
    overrides: OverridesOption = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/ and the name of CONFIG).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last snapshot.")] = False,
    local: Annotated[
        bool,
        typer.Option("--local", help="Train in this process, without Ray: same steps, same result, for pdb."),
    ] = False,
) -> Answer:
    """Fine-tune a generative model with rewards; compares it with the supervised model on test users."""
    from dataclasses import asdict

    from rayrec.rl.config import RlConfig

    config = RlConfig.load(config_file, overrides or ())
    check_run(Path(config.init_from))
    # What is wrong with the arguments is said before these take seconds to import.
    from rayrec.pipelines.training.placements import in_process, on_ray
    from rayrec.rl.run import train_policy

    folder = run or Path("runs") / config_file.stem
    with progress_bar("rl") as progress:
        result = train_policy(
            config,
            folder,
            resume,
            on_step=lambda report, total: progress(report.step, total),
            cluster=in_process if local else on_ray,
        )
    report = result.report
    print_rows(
        f"Trained by rewards: {folder}",
        [
            ("steps", f"{result.steps:,}"),
            (f"best {result.best_metric} (validation)", _best(result.best_value, result.best_step)),
            ("temperature of lists", "{before:g} before, {after:g} after".format(**report["temperature"])),
            *_changes("all users", report["all"]),
            *(_changes("users held out", report["held_out"]) if "held_out" in report else []),
            *(
                (f"{name} of lists, before and after", _pair(report["all"]["diversity"], name))
                for name in ("distance", "coverage")
            ),
            *(
                (f"seconds in {name}", f"{seconds:.1f}")
                for name, seconds in sorted(result.seconds.items())
                if seconds >= 0.05
            ),
        ],
    )
    return asdict(result)


def _best(value: float, step: int) -> str:
    return f"{value:.4f} after step {step:,}" if step else f"{value:.4f}, that of the supervised policy"


def _changes(group: str, report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name in (*_SHOWN, *(name for name in report["change"] if name.startswith("reward/"))):
        before, after = (report[when][name]["value"] for when in ("before", "after"))
        rows.append((f"{name}, {group}", _change(before, after, report["change"][name])))
    for behavior, found in report["recall@10 by behavior"].items():
        name = f"recall@10 of {behavior}, {group} ({found['num_users']:,})"
        rows.append((name, _change(found["before"], found["after"], found["change"])))
    return rows


def _change(before: float, after: float, change: dict[str, float]) -> str:
    shown = f"{before:.4f} to {after:.4f}"
    if math.isnan(change["value"]):
        return shown  # of 0, there is no relative change
    return f"{shown}: {change['value']:+.1%} ({change['low']:+.1%} to {change['high']:+.1%})"


def _pair(diversity: dict[str, Any], name: str) -> str:
    return f"{diversity['before'][name]:.3f} to {diversity['after'][name]:.3f}"
