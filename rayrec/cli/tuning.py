"""`tune`: a search for the settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rayrec.cli.app import app
from rayrec.cli.run_options import OverridesOption, check_data
from rayrec.platform.console import Answer, command, log, new_table, out, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.pipelines.tuning.search import Tried

_MOST_SHOWN = 10
"""Trials in the table, the best first; trials.csv has all."""


@command(app, "tune")
def tune_command(
    config_file: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file that describes the search.")
    ],
    overrides: OverridesOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the search (if neither here nor in CONFIG, runs/ and its name)."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the search in the folder: same trials, none twice."),
    ] = False,
    resume_if_begun: Annotated[
        bool,
        typer.Option("--resume-if-begun", help="Go on with the search if there is one, else begin it."),
    ] = False,
    local: Annotated[
        bool,
        typer.Option("--local", help="Train in this process, one trial after the other: same trials."),
    ] = False,
) -> Answer:
    """Search for the best settings of a run on validation users."""
    from dataclasses import asdict

    from rayrec.pipelines.tuning.config import TuningConfig
    from rayrec.pipelines.tuning.space import SearchSpace

    tuning = TuningConfig.load(config_file, overrides or ())
    if local and tuning.trial.actors:
        raise InputError("--local trains in this process, and trial.actors is set; leave one of the two out")
    # What is wrong with the arguments is said before torch and Ray take seconds to import.
    base = SearchSpace.of(tuning).base
    check_data(Path(base.data.path), base.model.kind)
    from rayrec.pipelines.tuning.running import trials_here, trials_on_ray
    from rayrec.pipelines.tuning.tune import tune

    to = folder or Path(tuning.folder or Path("runs") / config_file.stem)
    with progress_bar("tune") as progress:

        def on_trial(tried: Tried, best: Tried | None) -> None:
            done = tried.number + 1
            note = "" if best is None else f"best {best.outcome.value:.4f} of trial {best.number}"
            progress(done, tuning.trials, note)
            if tried.is_new:
                line = f"trial {tried.number}: {_told(tried)}"
                log.print(line, markup=False, highlight=False, soft_wrap=True)

        result = tune(
            tuning,
            to,
            "if_begun" if resume_if_begun else resume,
            open_trials=trials_here if local else trials_on_ray,
            on_trial=on_trial,
        )
    trials, metric = result.trials, result.metric
    out.print(_table(trials, metric, result.best, result.is_larger_better))
    states = [trial["state"] for trial in trials]
    cpu = [trial["cpu_minutes"] for trial in trials if trial["cpu_minutes"] is not None]
    print_rows(
        f"Tuned: {to / 'best.yaml'} (next: rayrec train {to / 'best.yaml'})",
        [
            (f"best {metric} (validation)", f"{result.best_value:.4f}, trial {result.best}"),
            *(
                (f"trial {number}, all validation users", f"{value:.4f}")
                for number, value in result.judged.items()
            ),
            (
                "trials",
                f"{states.count('complete')} complete, {states.count('pruned')} ended early, "
                f"{states.count('failed')} failed",
            ),
            ("minutes of all trials", f"{sum(trial['minutes'] for trial in trials):.1f}"),
            *([("CPU minutes of all trials", f"{sum(cpu):.1f}")] if cpu else []),
            *((f"weight of {key}", f"{share:.0%}") for key, share in result.importances.items()),
        ],
    )
    return asdict(result)


def _told(tried: Tried) -> str:
    outcome = tried.outcome
    if outcome.same_as is not None:
        return f"settings of trial {outcome.same_as}, not trained again"
    if outcome.state == "complete":
        return f"{outcome.value:.4f} in {outcome.minutes:.1f} minutes"
    return f"{'ended early' if outcome.state == 'pruned' else 'failed'}: {outcome.reason}"


def _table(trials: list[dict[str, Any]], metric: str, best: int, is_larger_better: bool) -> Table:
    """The winner, then the best trials in validation; those without a value are counted elsewhere."""
    keys = list(trials[0]["settings"])
    headings = ("trial", metric, *keys, "minutes")
    table = new_table("", headings, figures=(metric, "minutes"))
    complete = [trial for trial in trials if trial["state"] == "complete" and trial["same_as"] is None]
    sign = -1.0 if is_larger_better else 1.0
    complete.sort(key=lambda trial: (trial["trial"] != best, sign * trial["value"], trial["trial"]))
    for trial in complete[:_MOST_SHOWN]:
        table.add_row(
            str(trial["trial"]),
            f"{trial['value']:.4f}",
            *(escape(_shown(trial["settings"][key])) for key in keys),
            f"{trial['minutes']:.1f}",
        )
    return table


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
