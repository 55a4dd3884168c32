"""`train`, `snapshot`, `runs`, `evaluate`, `export`, `recommend`: what is done with runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from rayrec.cli.app import app
from rayrec.cli.evaluation_tables import print_report
from rayrec.platform.console import Answer, command, log, new_table, out, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help stays quick
    from rayrec.pipelines.config.ranking import RankingConfig
    from rayrec.pipelines.inference.answers import Control, Recommendation
    from rayrec.pipelines.inference.item_filter import FilterMasks
    from rayrec.pipelines.inference.neighbors import NeighborRecommender
    from rayrec.pipelines.inference.ranking_stage import RankingStage
    from rayrec.pipelines.inference.recommender import Recommender
    from rayrec.platform.event_labels import Part
    from rayrec.samples.dataset.manifest import Split


class EvaluationSplit(StrEnum):
    valid = "valid"
    test = "test"


WhichOption = Annotated[
    str,
    typer.Option(
        "--snapshot", help="Of the run: `best` in validation, `last`, `previous`, or the name of one."
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        help="Where the run's data set lies, if it was moved; or a later one with further items, where the "
        "model can tell what they are."
    ),
]
OnOption = Annotated[
    Path | None,
    typer.Option(
        help="A later data set of the same log: judge on the events that it holds out, such as the next "
        "day's, instead of those of the run's own."
    ),
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file that describes the run.")]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=c",
        help="Change a setting to a value in YAML (`x=3`, `x=[1,2]`, `x=null`); may be repeated.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(help="Folder that `rayrec train` wrote.")]
RunOrNeighborsArgument = Annotated[
    Path | None, typer.Argument(help="Folder that `rayrec train` wrote; none with --neighbors.")
]


RankerOption = Annotated[
    Path | None,
    typer.Option(help="Folder of a run of a ranking model: it ranks the items that this run gives."),
]
CandidatesOption = Annotated[int, typer.Option(min=1, help="Items that a ranking model ranks.")]
ObjectiveOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LABEL=WEIGHT",
        help="What a ranking model ranks by: weights of its labels; may be repeated \\[its only label].",
    ),
]
CombineOption = Annotated[
    str, typer.Option(help="How labels are put together: `sum`, or `product` of powers.")
]
GeneratorWeightOption = Annotated[
    float, typer.Option(help="How much the score of this run is added to what a ranking model says.")
]


def ranking_of(
    ranker: Path | None, candidates: int, objective: list[str] | None, combine: str, generator_weight: float
) -> RankingConfig | None:
    """The ranking stage that options ask for.

    Raises:
        InputError: an option has no meaning.
    """
    from rayrec.pipelines.config.ranking import RankingConfig

    if ranker is None:
        if objective or combine != "sum" or generator_weight:
            raise InputError(
                "--objective, --combine and --generator-weight say how a ranking model ranks; name one with "
                "--ranker"
            )
        return None
    weights = {}
    for entry in objective or ():
        label, _, weight = entry.rpartition("=")
        try:
            weights[label] = float(weight)
        except ValueError:
            label = ""
        if not label:
            raise InputError(f"--objective {entry}: expected LABEL=WEIGHT, as in click=1")
    return RankingConfig.parse(
        {
            "run": str(ranker.resolve()),
            "candidates": candidates,
            "objective": weights,
            "combine": combine,
            "generator_weight": generator_weight,
        },
        source="--ranker",
    )


def check_run(run: Path) -> None:
    """Refuse a folder that holds no run before torch is imported, which takes seconds.

    Raises:
        InputError: names the folder.
    """
    if not (run / "run.json").is_file():
        from rayrec.pipelines.runs.run_folder import RunFolder

        RunFolder.open(run)


def check_data(path: Path, model_kind: str = "next_item") -> None:
    """Refuse a folder that holds no data set before torch is imported.

    Args:
        model_kind: of the model that is to read it, which decides what could make one.

    Raises:
        InputError: names the folder.
    """
    from rayrec.samples.dataset.dataset_folder import HISTORIES, IMPRESSIONS, TEXT, kind_of, manifest_values

    if kind_of(path) is None:
        manifest_values(path, {"impressions": IMPRESSIONS, "language": TEXT}.get(model_kind, HISTORIES))


def check_served(run: str) -> None:
    """Refuse what holds neither a run nor versions before torch and Ray are imported.

    Raises:
        InputError: names it.
    """
    from rayrec.pipelines.versions.store import VersionStore

    if not (Path(run) / "run.json").is_file() and not VersionStore.is_there(run):
        check_run(Path(run))


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
    run: RunOrNeighborsArgument = None,
    split: Annotated[
        EvaluationSplit, typer.Option(help="Held-out events to predict.")
    ] = EvaluationSplit.test,
    snapshot: WhichOption = "best",
    data: DataOption = None,
    on: OnOption = None,
    ranker: RankerOption = None,
    candidates: CandidatesOption = 100,
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
        return _compare_candidates(run, split.value, snapshot, data, candidates_with_neighbors)
    if run is None:
        assert neighbors is not None
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


@command(app, "recommend")
def recommend_command(
    run: RunOrNeighborsArgument = None,
    *,
    user: Annotated[str, typer.Option(help="The user's id, as the source of the data writes it.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Items to recommend.")] = 10,
    behavior: Annotated[
        str | None, typer.Option(help="Behavior that is wanted, of models with instructions.")
    ] = None,
    scenario: Annotated[str | None, typer.Option(help="Scenario that the items are for, likewise.")] = None,
    trigger_item: Annotated[
        str | None, typer.Option(help="Id of the item that the user is looking at, likewise.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Item that may be recommended, and no others; several times.")
    ] = None,
    deny: Annotated[list[str] | None, typer.Option(help="Item that may not; several times.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="COLUMN=VALUE that items of the catalog have; one of several values of a column."),
    ] = None,
    among: Annotated[
        list[str] | None, typer.Option(help="Item to score, each exactly, and no others; several times.")
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help="COLUMN=VALUE:LEAST-MOST items of a category in the list, either of the two may be left "
            "out; several times."
        ),
    ] = None,
    diversity: Annotated[
        float,
        typer.Option(min=0, max=1, help="How much an item counts for being unlike those before it."),
    ] = 0.0,
    beams: Annotated[
        str | None,
        typer.Option(
            help="Prefixes that a generative model keeps: a number, or one per code of an item, as 128,64,32."
        ),
    ] = None,
    beam_margin: Annotated[
        float | None,
        typer.Option(help="Drop prefixes whose log-probability is so much below that of the best."),
    ] = None,
    snapshot: WhichOption = "best",
    data: DataOption = None,
    ranker: RankerOption = None,
    candidates: CandidatesOption = 100,
    objective: ObjectiveOption = None,
    combine: CombineOption = "sum",
    generator_weight: GeneratorWeightOption = 0.0,
    neighbors: Annotated[
        Path | None, typer.Option(help="Data set whose neighbors answer, without a run and a model.")
    ] = None,
) -> Answer:
    """Recommend items to one user of the data set."""
    from dataclasses import asdict, replace

    if (run is None) == (neighbors is None):
        raise InputError("give the folder of a run, or --neighbors and a data set, and not both")
    parts: dict[Part, str | None] = {
        "scenario": scenario,
        "behavior": behavior,
        "trigger_item": trigger_item,
    }
    ranking = ranking_of(ranker, candidates, objective, combine, generator_weight)
    stage, wanted = None, {}
    if run is None:
        assert neighbors is not None
        if ranking is not None or any(parts.values()):
            raise InputError("--neighbors answers without a model: it takes no ranker and no instruction")
        if among or quota or diversity:
            raise InputError(
                "--neighbors answers without a model: it takes no --among, --quota and --diversity"
            )
        if beams is not None or beam_margin is not None:
            raise InputError("--neighbors answers without a model: it takes no --beams and --beam-margin")
        from rayrec.pipelines.inference.neighbors import NeighborRecommender
        from rayrec.samples.dataset.dataset import Dataset
        from rayrec.samples.graph import graph_of_dataset

        dataset = Dataset.open(neighbors)
        recommender: Recommender | NeighborRecommender
        recommender = NeighborRecommender(dataset, graph_of_dataset(dataset, "all"))
    else:
        check_run(run)
        from rayrec.pipelines.inference.ranking_stage import RankingStage
        from rayrec.pipelines.inference.recommender import Recommender

        recommender = Recommender.load(run, snapshot, data=data)
        dataset = recommender.dataset
        stage = None if ranking is None else RankingStage.load(recommender, ranking)
        wanted = recommender.instruction_of(parts)
    from rayrec.pipelines.inference.answers import Wanted
    from rayrec.pipelines.inference.item_filter import FilterMasks, ItemFilter

    query = recommender.query_of_user(user)
    if query is None:
        raise InputError(f"--user {user}: there is no such user in {dataset.root}; use an id of its source")
    allowed_I = None
    masks = FilterMasks(dataset)
    if allow or deny or where or among:
        values: dict[str, list[str]] = {}
        for each in where or []:
            column, sign, value = each.partition("=")
            if not sign:
                raise InputError(f"--where {each}: expected COLUMN=VALUE")
            values.setdefault(column, []).append(value)
        for option, keys in (("--allow", allow or []), ("--deny", deny or []), ("--among", among or [])):
            if unknown := [key for key in keys if dataset.position_by_key(key) is None]:
                raise InputError(
                    f"{option} {unknown[0]}: there is no such item in {dataset.root}; use an id of its source"
                )
        kept = ItemFilter(tuple(allow) if allow else None, tuple(deny or ()), where=values)
        allowed = masks.allowed(kept)
        if allowed.unknown_value is not None:
            raise InputError(allowed.unknown_value)
        allowed_I = allowed.allowed_I
        if among:
            allowed_I = allowed_I & masks.allowed(ItemFilter(allow=tuple(among))).allowed_I
    asked = replace(query, instruction=wanted, allowed_I=allowed_I)
    control = control_of(masks, among, quota or [], diversity, k)
    if control is None and beams is None and beam_margin is None:
        (answer,) = (stage or recommender).answer([asked], k)
    else:
        source = cast("Recommender | RankingStage", stage or recommender)
        registry = recommender.semantic_ids if isinstance(recommender, Recommender) else None
        num_codes = 0 if registry is None or not source.num_beams(1) else registry.codes_IL.shape[1]
        widths, margin = beams_of(beams, beam_margin, k, num_codes, bool(among))
        as_told = Wanted(k, control=control, beams=widths, beam_margin=margin)
        (answer,) = source.answer_each([asked], [as_told])
    recommendations = answer.items
    history_ids = query.history_ids
    watched = [
        dataset.items.label(int(item)) for item in dataset.item_positions(history_ids[-10:]) if item >= 0
    ]
    history = new_table(f"User {user}: the latest of {len(history_ids)} events", ("item",))
    for label in watched:
        history.add_row(escape(label))
    out.print(history)
    labels = () if stage is None else stage.scorer.labels
    figures = ("score", "objective", *labels) if labels else ("score",)
    table = new_table("Recommended", ("", "item", "title", *figures), figures)
    for place, item in enumerate(recommendations, start=1):
        cells = [str(place), escape(item.item_key), escape(item.title or ""), f"{item.score:.3f}"]
        if item.ranking is not None:
            ranked = [item.ranking.score, *(item.ranking.probabilities[label] for label in labels)]
            cells += [f"{figure:.3f}" for figure in ranked]
        table.add_row(*cells)
    out.print(table)
    if allowed_I is not None and len(recommendations) < k:
        num_left = int(allowed_I.sum())
        log.print(
            f"{len(recommendations)} of {k} items: --allow, --deny, --where and --among leave {num_left:,}"
        )
    if answer.control is not None:
        for place in answer.control.unmet_quotas:
            log.print(f"--quota {(quota or [])[place]}: there are too few such items for the list")
    told: Answer = {"user": user, "items": [_told(item) for item in recommendations]}
    return told if answer.control is None else {**told, "control": asdict(answer.control)}


def beams_of(
    beams: str | None, margin: float | None, k: int, num_codes: int, has_candidates: bool
) -> tuple[tuple[int, ...] | None, float | None]:
    """Beams by level and their margin, from the options; None of what they do not say.

    Args:
        num_codes: of an item; 0 of a model that has no beams.
        has_candidates: whether candidates are given.

    Raises:
        InputError: the options are no beams, or none that this model and these items can be found with.
    """
    if beams is None and margin is None:
        return None, None
    if not num_codes:
        raise InputError("--beams, --beam-margin: this run's model scores every item; leave them out")
    if has_candidates:
        raise InputError("--beams, --beam-margin: --among scores its items exactly; leave out one of the two")
    if margin is not None and not 0 < margin < float("inf"):
        raise InputError(f"--beam-margin {margin}: expected a number above 0")
    if beams is None:
        return None, margin
    numbers = beams.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise InputError(f"--beams {beams}: expected a number from 1, or several with commas between them")
    widths = tuple(map(int, numbers))
    if len(widths) > num_codes:
        raise InputError(f"--beams {beams}: {len(widths)} numbers, and an item has {num_codes} codes")
    if widths[-1] < k:
        raise InputError(f"--beams {beams}: {widths[-1]} after the last code find no {k} items (-k)")
    return widths, margin


def control_of(
    masks: FilterMasks, among: list[str] | None, quotas: list[str], diversity: float, k: int
) -> Control | None:
    """What the options ask of a list besides good items; None: nothing.

    Raises:
        InputError: a quota that is none, or several that need more items than the list has.
    """
    from rayrec.pipelines.inference.answers import Control, Quota
    from rayrec.pipelines.inference.item_filter import ItemFilter

    if not (among or quotas or diversity):
        return None
    wanted = []
    for each in quotas:
        category, at_least, at_most = quota_of(each)
        found = masks.allowed(ItemFilter(where=category))
        if found.unknown_value is not None:
            raise InputError(f"--quota {each}: {found.unknown_value}")
        wanted.append(Quota(found.allowed_I, at_least, at_most))
    if (needed := sum(each.at_least for each in wanted)) > k:
        raise InputError(f"--quota: at least {needed} items in all are more than the {k} of the list (-k)")
    return Control(tuple(wanted), diversity, len(among) if among else None)


def _told(item: Recommendation) -> dict[str, Any]:
    from dataclasses import asdict

    # A position is of one catalog, and an id of all.
    return {name: value for name, value in asdict(item).items() if name != "position"}


def quota_of(said: str) -> tuple[dict[str, list[str]], int, int | None]:
    """(Columns and values of the category, least items, most items) of a text as COLUMN=VALUE:LEAST-MOST.

    Raises:
        InputError: it is another text.
    """
    category, _, counts = said.rpartition(":")
    column, sign, value = category.partition("=")
    least, dash, most = counts.partition("-")
    numbers = [each for each in (least, most) if each]
    if not (sign and dash and numbers and all(each.isdecimal() for each in numbers)):
        raise InputError(f"--quota {said}: expected COLUMN=VALUE:LEAST-MOST, such as genre=Drama:1-3")
    at_least, at_most = int(least or 0), int(most) if most else None
    if at_most is not None and at_least > at_most:
        raise InputError(f"--quota {said}: {at_least} items at least are more than {at_most} at most")
    return {column: [value]}, at_least, at_most
