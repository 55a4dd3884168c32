"""The `rayrec` command: arguments in, one call into the package, a table or a JSON line out."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayrec.platform.console import Answer, command, out, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from rayrec.samples.partitions import PartitionFunction

app = typer.Typer(
    name="rayrec",
    help="Generative recommendation on Ray: prepare, tokenize, train, evaluate, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Layout(StrEnum):
    auto = "auto"
    folder = "folder"
    movielens = "movielens"
    recbole = "recbole"
    s3rec = "s3rec"
    events = "events"


class SplitKind(StrEnum):
    leave_one_out = "leave_one_out"
    time = "time"


class Ties(StrEnum):
    shuffle = "shuffle"
    file = "file"


class Allow(StrEnum):
    duplicates = "duplicates"
    short_users = "short-users"
    cold_items = "cold-items"


class Vectors(StrEnum):
    interactions = "interactions"
    text = "text"
    both = "both"


class Collisions(StrEnum):
    extra_digit = "extra_digit"
    reassign = "reassign"


class EvaluationSplit(StrEnum):
    valid = "valid"
    test = "test"


class Which(StrEnum):
    best = "best"
    last = "last"


WhichOption = Annotated[Which, typer.Option("--snapshot", help="Which snapshot of the run.")]
RunArgument = Annotated[Path, typer.Argument(help="Folder that `rayrec train` wrote.")]


@command(app, "prepare")
def prepare_command(
    source: Annotated[Path, typer.Argument(help="Folder or file with the behaviour log.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the data set to write.")],
    layout: Annotated[
        Layout, typer.Option(help="Layout of the source; `auto` looks at its files.")
    ] = Layout.auto,
    split: Annotated[SplitKind, typer.Option(help="What is held out.")] = SplitKind.leave_one_out,
    ties: Annotated[Ties, typer.Option(help="Order of a user's events of one time.")] = Ties.shuffle,
    seed: Annotated[int, typer.Option(help="Orders events of one time.")] = 0,
    behavior: Annotated[
        list[str] | None, typer.Option(help="Keep only this behaviour; may be repeated.")
    ] = None,
    allow: Annotated[list[Allow] | None, typer.Option(help="Accept and count; may be repeated.")] = None,
    valid_start: Annotated[
        str | None, typer.Option(help="Split by time: first date (ISO) or UNIX second that validates.")
    ] = None,
    test_start: Annotated[
        str | None, typer.Option(help="Split by time: first date (ISO) or UNIX second that is tested.")
    ] = None,
    valid_fraction: Annotated[
        float | None, typer.Option(help="Split by time: part of the events that validates [0.1].")
    ] = None,
    test_fraction: Annotated[
        float | None, typer.Option(help="Split by time: part of the events that is tested [0.1].")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="ROLE=NAME of a column in an event log; may be repeated.")
    ] = None,
    text_column: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of items that is text, besides title, genres and the like; may be repeated."
        ),
    ] = None,
    time_unit: Annotated[str, typer.Option(help="Unit of numeric times: s, ms, us or ns.")] = "s",
    use_ray: Annotated[
        bool, typer.Option("--ray/--no-ray", help="Build the sequences on Ray Data or in this process.")
    ] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace a data set that is already there.")] = False,
) -> Answer:
    """Turn a behaviour log into a data set: checked, sorted, split."""
    from rayrec.samples.config import PrepareConfig
    from rayrec.samples.partitions import run_partitions_locally
    from rayrec.samples.prepare import prepare

    config = PrepareConfig.parse(
        {
            "layout": layout.value,
            "split": split.value,
            "ties": ties.value,
            "seed": seed,
            "behaviors": tuple(behavior) if behavior else None,
            "allow": frozenset(entry.value for entry in allow or ()),
            "valid_start": valid_start,
            "test_start": test_start,
            "valid_fraction": valid_fraction,
            "test_fraction": test_fraction,
            "columns": dict(_role(entry) for entry in column or ()),
            "text_columns": tuple(text_column or ()),
            "time_unit": time_unit,
            "overwrite": overwrite,
        },
        source="rayrec prepare",
    )
    with progress_bar("prepare") as update:

        def progress(phase: str, done: int, total: int) -> None:
            update(done, total)

        run_partitions = _run_partitions_on_cluster if use_ray else run_partitions_locally
        report = prepare(source, out_folder, config, run_partitions, progress)
    print_rows("Prepared", report.rows())
    return report.to_json()


def _run_partitions_on_cluster(
    table: pa.Table, key: str, num_partitions: int, function: PartitionFunction
) -> Iterator[pa.Table]:
    """Starts or joins Ray only now: by then the source has been read and checked."""
    from rayrec.platform.cluster import ClusterConfig, ray_cluster
    from rayrec.samples.ray_jobs import run_partitions_on_ray

    with ray_cluster(ClusterConfig(dashboard=False), cpus_needed=1):
        yield from run_partitions_on_ray(table, key, num_partitions, function)


def _role(entry: str) -> tuple[str, str]:
    role, equals, name = entry.partition("=")
    if not equals:
        raise InputError(f"--column {entry}: expected ROLE=NAME, as in user_id=customer")
    return role, name


@command(app, "tokenize")
def tokenize_command(
    data: Annotated[Path, typer.Argument(help="Data set that `rayrec prepare` wrote.")],
    to: Annotated[
        Path | None, typer.Option("--out", help="Folder of the registry [DATA/semantic_ids].")
    ] = None,
    vectors: Annotated[Vectors, typer.Option(help="What the codes are made of.")] = Vectors.interactions,
    levels: Annotated[int, typer.Option(help="Codes of an item.")] = 3,
    codebook_size: Annotated[int, typer.Option(help="Values a code may have.")] = 256,
    collisions: Annotated[
        Collisions, typer.Option(help="Items with the same codes: a further digit, or other codes.")
    ] = Collisions.extra_digit,
    text_weight: Annotated[float, typer.Option(help="Weight of text beside interactions.")] = 1.0,
    window: Annotated[int, typer.Option(help="Places between events that count as neighbours.")] = 5,
    dim: Annotated[int, typer.Option(help="Width of interaction vectors.")] = 64,
    components: Annotated[int, typer.Option(help="Principal components that are clustered.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the clustering.")] = 0,
) -> Answer:
    """Give every item of a data set its semantic ID."""
    from rayrec.pipelines.tokenize import TokenizeConfig, tokenize

    config = TokenizeConfig.parse(
        {
            "vectors": vectors.value,
            "num_levels": levels,
            "codebook_size": codebook_size,
            "collisions": collisions.value,
            "text_weight": text_weight,
            "window": window,
            "dim": dim,
            "components": components,
            "seed": seed,
        },
        source="rayrec tokenize",
    )
    with progress_bar("texts") as progress:
        report = tokenize(data, to, config, progress)
    facts = report.report
    rows = [
        ("registry", f"{report.path}, version {facts['version']}"),
        ("method", facts["method"]),
        ("items", f"{facts['num_items']:,}, of which {report.num_without_data:,} without any data"),
    ]
    for number, level in enumerate(facts["levels"], start=1):
        rows.append(
            (
                f"level {number}",
                f"{level['used']} of {level['size']} codes used, perplexity {level['perplexity']:.1f}, "
                f"{level['prefixes']:,} prefixes",
            )
        )
    rows += [(key.replace("_", " "), str(value)) for key, value in facts.items() if key not in _SHOWN]
    print_rows("Semantic IDs", rows)
    return {"path": str(report.path), "num_without_data": report.num_without_data, **facts}


_SHOWN = ("version", "method", "num_items", "levels")


@command(app, "train")
def train_command(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file that describes the run.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change a setting; may be repeated.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run [runs/<name of CONFIG>].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last snapshot.")] = False,
) -> Answer:
    """Train a model with the five-stage pipeline on Ray."""
    from dataclasses import asdict

    from rayrec.pipelines.config import RunConfig
    from rayrec.pipelines.train import train

    config = RunConfig.load(config_file, overrides or ())
    folder = run or Path("runs") / config_file.stem
    with progress_bar("train") as progress:
        result = train(config, folder, resume, on_step=lambda done, total, loss: progress(done, total))
    stages = result.stages
    print_rows(
        f"Trained: {folder}",
        [
            ("steps", f"{result.steps:,} ({result.epochs:g} epochs), {result.steps_per_s:.2f} a second"),
            ("loss of the last step", f"{result.final_loss:.6f}"),
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
            ("embedding rows", f"{stages['sparse_rows']:,.0f} in {stages['sparse_bytes'] / 2**20:,.1f} MiB"),
        ],
    )
    return asdict(result)


_STAGES = (
    ("sample readers", "read_busy_s", "read_waiting_s"),
    ("feature workers", "features_busy_s", "features_waiting_s"),
    ("parameter servers", "servers_busy_s", "servers_waiting_s"),
    ("trainers", "trainer_busy_s", "trainer_waiting_s"),
)


@command(app, "evaluate")
def evaluate_command(
    run: RunArgument,
    split: Annotated[
        EvaluationSplit, typer.Option(help="Held-out events to predict.")
    ] = EvaluationSplit.test,
    snapshot: WhichOption = Which.best,
) -> Answer:
    """Rank the whole catalogue for every user; popularity beside it."""
    from rayrec.pipelines.evaluate import evaluate

    with progress_bar("evaluate") as progress:
        report = evaluate(run, split.value, snapshot.value, on_batch=progress)
    table = Table(title=f"{report.num_users:,} users, {split.value} split, step {report.snapshot_step:,}")
    metrics = list(next(iter(report.results.values())))
    for heading in ["", *metrics]:
        table.add_column(heading, justify="right" if heading else "left")
    for name, estimates in report.results.items():
        cells = [f"{e.value:.4f}\n[dim]±{(e.high - e.low) / 2:.4f}[/dim]" for e in estimates.values()]
        table.add_row(name, *cells)
    out.print(table)
    return report.to_json()


@command(app, "recommend")
def recommend_command(
    run: RunArgument,
    user: Annotated[str, typer.Option(help="The user's id, as the source of the data writes it.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Items to recommend.")] = 10,
    snapshot: WhichOption = Which.best,
) -> Answer:
    """Recommend items to one user of the data set."""
    from dataclasses import asdict

    from rayrec.pipelines.recommender import Query, Recommender

    recommender = Recommender.load(run, snapshot.value)
    dataset = recommender.dataset
    history_ids, user_id = dataset.history_of(user), dataset.user_by_key(user)
    if history_ids is None or user_id is None:
        raise InputError(f"--user {user}: there is no such user in {dataset.root}; use an id of its source")
    (recommendations,) = recommender.recommend([Query(history_ids, user_id)], k)
    watched = [
        dataset.items.label(int(item)) for item in dataset.item_positions(history_ids[-10:]) if item >= 0
    ]
    print_rows(f"User {user}: the latest of {len(history_ids)} events", [("", title) for title in watched])
    table = Table("", "item", "title", "score", title="Recommended", title_justify="left")
    for place, item in enumerate(recommendations, start=1):
        table.add_row(str(place), item.item_key, escape(item.title or ""), f"{item.score:.3f}")
    out.print(table)
    return {"user": user, "items": [asdict(item) for item in recommendations]}


@command(app, "serve")
def serve_command(
    run: RunArgument,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the HTTP service.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the model that answer.")] = 1,
    snapshot: WhichOption = Which.best,
    device: Annotated[str | None, typer.Option(help="Device to answer on [that of the run].")] = None,
) -> Answer:
    """Answer requests over HTTP until interrupted."""
    from rayrec.serve.config import ServeConfig
    from rayrec.serve.launch import serve_run

    values = {
        "host": host,
        "port": port,
        "num_replicas": replicas,
        "snapshot": snapshot.value,
        "device": device,
    }
    config = ServeConfig.parse(values, source="rayrec serve")
    serve_run(run, config)
    return {"run": str(run), "host": host, "port": port}


@command(app, "bench")
def bench_command(
    name: Annotated[str, typer.Argument(help="Name of a benchmark; without one, they are listed.")] = "",
) -> Answer:
    """Measure what the project claims of itself, and say whether it holds.

    RAYREC_BENCH_DATA names a prepared data set to measure on, RAYREC_BENCH_PAIRS the interleaved
    measurements of each bar and RAYREC_BENCH_STEPS the training steps of one.
    """
    from rayrec.platform.checkout import load_benchmarks

    benchmarks = load_benchmarks()
    return benchmarks.run_bench(name, out)


@command(app, "doctor")
def doctor_command() -> Answer:
    """Say what is installed, which devices there are, and how to get what is missing."""
    from dataclasses import asdict

    from rayrec.platform.doctor import examine, is_healthy

    findings = examine()
    table = Table("", "", "found", title="RayRec's doctor", title_justify="left")
    marks = {"ok": "[green]ok[/green]", "optional": "[yellow]--[/yellow]", "missing": "[red]missing[/red]"}
    for finding in findings:
        table.add_row(finding.subject, marks[finding.status], escape(finding.detail))
    out.print(table)
    if not is_healthy(findings):
        raise InputError("something that every run needs is missing; see the table above")
    return {"findings": [asdict(finding) for finding in findings]}


def main() -> None:
    """Entry point of the `rayrec` command."""
    app()
