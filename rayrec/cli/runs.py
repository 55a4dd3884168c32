"""`train`, `snapshot`, `runs`, `evaluate`, `export`: what is done with runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from rayrec.cli.app import app
from rayrec.cli.evaluation_tables import print_report
from rayrec.cli.run_options import (
    CANDIDATES,
    RANKING_OPTIONS,
    CandidatesOption,
    CombineOption,
    ConfigArgument,
    DataOption,
    EvaluationSplit,
    GeneratorWeightOption,
    ObjectiveOption,
    OnOption,
    OverridesOption,
    RankerOption,
    RunArgument,
    RunOrNeighborsArgument,
    WhichOption,
    check_data,
    check_run,
    ranking_of,
    refuse_without_effect,
)
from rayrec.platform.console import Answer, command, new_table, out, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help stays quick
    from rayrec.samples.dataset.manifest import Split


@command(app, "train")
def train_command(
    config_file: ConfigArgument,
    overrides: OverridesOption = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run (if not given, runs/ and the name of CONFIG).")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the run's last snapshot; RUN/config.yaml is what it began with."
        ),
    ] = False,
    resume_if_begun: Annotated[
        bool,
        typer.Option("--resume-if-begun", help="Continue the run if there is one, else begin it."),
    ] = False,
    snapshot: Annotated[
        str | None,
        typer.Option(help="To resume from: `last` (if not given), `previous`, `best`, or the name of one."),
    ] = None,
    local: Annotated[
        bool,
        typer.Option("--local", help="Train in this process, without Ray: same steps, same result, for pdb."),
    ] = False,
) -> Answer:
    """Train a model with the five-stage pipeline."""
    from dataclasses import asdict

    if snapshot is not None and not (resume or resume_if_begun):
        raise InputError("--snapshot says where to resume; it goes with --resume or --resume-if-begun")
    from rayrec.pipelines.config.run import RunConfig

    config = RunConfig.load(config_file, overrides or ())
    check_data(Path(config.data.path), config.model.kind)
    # What is wrong with the arguments is said before these take seconds to import.
    from rayrec.pipelines.training.placements import in_process, on_ray
    from rayrec.pipelines.training.train import train

    folder = run or Path("runs") / config_file.stem
    with progress_bar("train") as progress:
        result = train(
            config,
            folder,
            "if_begun" if resume_if_begun else resume,
            on_step=lambda done, total, loss: progress(done, total, f"loss {loss:.4f}"),
            snapshot=snapshot or "last",
            cluster=in_process if local else on_ray,
        )
    stages, epochs = result.stages, "epoch" if result.epochs == 1 else "epochs"
    print_rows(
        f"Trained: {folder} (next: rayrec evaluate {folder})",
        [
            ("steps", f"{result.steps:,} ({result.epochs:g} {epochs}), {result.steps_per_s:.2f} a second"),
            ("loss of the last step", f"{result.final_loss:.6f}"),
            ("not trained on", result.described_drops),
            (
                f"best {result.best_metric} (validation)",
                f"{result.best_value:.4f} after step {result.best_step:,}",
            ),
            *(
                (stage, f"busy {stages[busy]:.1f} s, waiting {stages[waiting]:.1f} s")
                for stage, busy, waiting in _STAGES
            ),
            (
                "waiting for rows, for updates",
                f"{stages['lookup_waiting_s']:.1f} s, {stages['update_waiting_s']:.1f} s",
            ),
            (
                "servers reading, updating",
                f"{stages['servers_lookup_s']:.1f} s, {stages['servers_update_s']:.1f} s",
            ),
            (
                "mfu",
                f"{stages['mfu']:.2%} of {stages['matrix_flops_per_s'] / 1e9:,.0f} GFLOP/s, "
                f"{stages['dense_mfu']:.2%} while dense compute is at work"
                if stages["model_flops"]
                else "not counted",
            ),
            (
                "rows asked for early, late",
                f"{stages['lookup_early_rows']:,.0f}, {stages['lookup_late_rows']:,.0f}",
            ),
            ("embedding rows", f"{stages['sparse_rows']:,.0f} in {stages['sparse_bytes'] / 2**20:,.1f} MiB"),
            *(
                (label, f"{stages[figure]:,.0f}")
                for label, figure in _FORGETTING
                if stages[figure]  # of interest only where it was asked for
            ),
        ],
    )
    return asdict(result)


_FORGETTING = (
    ("rows evicted", "sparse_rows_evicted"),
    ("gradients of ids not admitted", "sparse_gradients_not_admitted"),
    ("rows that trainers held", "cache_hits"),
)

_STAGES = (
    ("sample readers", "read_busy_s", "read_waiting_s"),
    ("feature workers", "features_busy_s", "features_waiting_s"),
    ("parameter servers", "servers_busy_s", "servers_waiting_s"),
    ("trainers", "trainer_busy_s", "trainer_waiting_s"),
)


@command(app, "snapshot")
def snapshot_command(
    run: RunArgument,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 600.0,
) -> Answer:
    """Let a run that is training write a snapshot now; it trains on meanwhile."""
    from rayrec.pipelines.runs.snapshot_requests import request_snapshot

    path = request_snapshot(run, timeout)
    print_rows("Snapshot", [("written", str(path))])
    return {"run": str(run), "snapshot": path.name}


@command(app, "runs")
def runs_command(
    folder: Annotated[Path, typer.Argument(help="Folder with the folders of runs.")] = Path("runs"),
) -> Answer:
    """List runs: how they stand, and why the last one stopped."""
    from dataclasses import asdict

    from rayrec.pipelines.runs.run_list import list_runs

    runs = list_runs(folder)
    headings = ("run", "state", "progress", "saved", "best", "rollbacks", "why it stopped")
    table = new_table("", headings, figures=("saved", "rollbacks"))
    for run in runs:
        best = "" if run.best_value is None else f"{run.best_value:.4f}"
        if best and run.metric is not None:
            best = f"{run.metric} {best}"
        progress = "" if run.step is None else f"{run.step:,}"
        if run.step is not None and run.total_steps:
            progress += f" of {run.total_steps:,} ({run.step / run.total_steps:.0%})"
        table.add_row(
            escape(run.name),
            run.condition,
            progress,
            f"{run.saved_steps:,}",
            best,
            str(run.num_rollbacks),
            escape(run.reason or ""),
        )
    out.print(table)
    return {"runs": [asdict(run) for run in runs]}


@command(app, "evaluate")
def evaluate_command(
    context: typer.Context,
    run: RunOrNeighborsArgument = None,
    split: Annotated[
        EvaluationSplit, typer.Option(help="Held-out events to predict.")
    ] = EvaluationSplit.test,
    snapshot: WhichOption = "best",
    data: DataOption = None,
    on: OnOption = None,
    ranker: RankerOption = None,
    candidates: CandidatesOption = CANDIDATES,
    objective: ObjectiveOption = None,
    combine: CombineOption = "sum",
    generator_weight: GeneratorWeightOption = 0.0,
    neighbors: Annotated[
        Path | None,
        typer.Option(help="Data set on which to judge what needs no training, without a run."),
    ] = None,
    candidates_with_neighbors: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Compare so many candidates of the recommender with half of them and as many neighbors.",
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="Judge neighbors beside a recommender, which takes time on a large catalog.")
    ] = True,
    max_users: Annotated[
        int | None,
        typer.Option(
            min=1, help="Judge only so many users: a sample by a hash of their ids, always the same."
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=10,
            help="Items of each list, and beams of a generative model at least \\[500, and of a generative "
            "model its beams].",
        ),
    ] = None,
    slices: Annotated[
        bool,
        typer.Option(
            "--slices", help="Print slices too: cold and warm items, head and tail, histories, behaviors."
        ),
    ] = False,
) -> Answer:
    """Rank the whole catalog for every user; popularity and neighbors beside it. Of ranking models: score
    impressions. Of language models: judge and answer records."""
    if (run is None) == (neighbors is None):
        raise InputError("give the folder of a run, or --neighbors and a data set, and not both")
    if on is not None and run is None:
        raise InputError(f"--on judges a run; judge what needs no training by --neighbors {on}")
    if on is not None and candidates_with_neighbors is not None:
        raise InputError("--candidates-with-neighbors compares on the run's own events; leave --on out")
    if candidates_with_neighbors is not None:
        if run is None:
            raise InputError("--candidates-with-neighbors compares those of a run; --neighbors has none")
        if max_users is not None or depth is not None:
            raise InputError(
                "--candidates-with-neighbors compares all users and so many items; leave --max-users and "
                "--depth out"
            )
        refuse_without_effect(
            context,
            {*RANKING_OPTIONS, "baselines", "slices"},
            "has no effect with --candidates-with-neighbors",
        )
        return _compare_candidates(run, split.value, snapshot, data, candidates_with_neighbors)
    if run is None:
        assert neighbors is not None
        why = "is about a run, and --neighbors judges without one"
        refuse_without_effect(context, {*RANKING_OPTIONS, "snapshot", "data", "baselines"}, why)
        from rayrec.pipelines.evaluation.evaluate import evaluate_data

        with progress_bar("evaluate") as progress:
            report = evaluate_data(
                neighbors, split.value, on_batch=progress, max_users=max_users, depth=depth
            )
    else:
        check_run(run)
        ranking = ranking_of(ranker, candidates, objective, combine, generator_weight)
        from rayrec.pipelines.evaluation.evaluate import evaluate

        with progress_bar("evaluate") as progress:
            report = evaluate(
                run,
                split.value,
                snapshot,
                on_batch=progress,
                data=data,
                ranking=ranking,
                baselines=baselines,
                max_users=max_users,
                depth=depth,
                on=on,
            )
    step = "" if run is None else f", step {report.snapshot_step:,}"
    print_report(report, step, slices)
    return report.to_json()


def _compare_candidates(run: Path, split: Split, snapshot: str, data: Path | None, number: int) -> Answer:
    from rayrec.pipelines.evaluation.evaluate_candidates import evaluate_candidates
    from rayrec.pipelines.inference.recommender import Recommender

    check_run(run)
    recommender = Recommender.load(run, snapshot, data=data)
    with progress_bar("evaluate") as progress:
        report = evaluate_candidates(recommender, split, number, on_batch=progress)
    figures = ("generated", "with neighbors", "ratio")
    title = f"Recall of {number} candidates, {report.count:,} users, {split} split"
    table = new_table(title, ("", *figures), figures)
    for group, estimates in report.results.items():
        cells = [
            f"{e.value:.4f}\n[dim]{e.low:.4f} to {e.high:.4f}[/dim]" if (e := estimates.get(name)) else ""
            for name in figures
        ]
        table.add_row(group if group == "all items" else f"{group} ({report.num_rare:,} users)", *cells)
    out.print(table)
    return report.to_json()


@command(app, "export")
def export_command(
    run: RunArgument,
    folder: Annotated[Path, typer.Argument(help="New folder for the model.")],
    snapshot: WhichOption = "best",
    data: DataOption = None,
) -> Answer:
    """Write a model for other programs: of Keras on TensorFlow as a SavedModel, of language as a folder of
    Hugging Face, of next items the vectors that it scores items by."""
    check_run(run)
    from rayrec.pipelines.inference.export import export_run

    exported = export_run(run, folder, snapshot, data)
    more = [("labels, in their order", ", ".join(exported.labels))] if exported.labels else []
    if exported.num_items is not None:
        more.append(("items", f"{exported.num_items:,}"))
    print_rows(
        f"Exported: {folder}",
        [("layout", exported.layout), ("after step", f"{exported.committed_step + 1:,}"), *more],
    )
    return {
        "run": str(run),
        "folder": str(folder),
        "layout": exported.layout,
        "snapshot_step": exported.committed_step + 1,
        "labels": list(exported.labels),
        "num_items": exported.num_items,
    }
