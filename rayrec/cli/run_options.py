"""Options and checks that several commands about runs have in common."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayrec.platform.errors import InputError

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help stays quick
    from rayrec.pipelines.config.ranking import RankingConfig


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
CANDIDATES = 100
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
        if objective or combine != "sum" or generator_weight or candidates != CANDIDATES:
            raise InputError(
                "--candidates, --objective, --combine and --generator-weight say how a ranking model "
                "ranks; name one with --ranker"
            )
        return None
    weights: dict[str, float] = {}
    for entry in objective or ():
        label, _, weight = entry.rpartition("=")
        if label in weights:
            raise InputError(f"--objective {entry}: {label} is named twice; keep one of them")
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


RANKING_OPTIONS = frozenset({"ranker", "candidates", "objective", "combine", "generator_weight"})
"""Parameters of `ranking_of`."""


def given_options(context: typer.Context) -> set[str]:
    """Names of the parameters that stand on the command line, those of every command aside."""
    of_all = {"json_line", "debug"}
    return {name for name in context.params.keys() - of_all if _is_given(context, name)}


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_without_effect(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options that would change nothing: each is a misunderstanding, not a detail.

    Args:
        names: of the command's parameters.
        why: such an option has no effect, as what follows its name in a sentence.

    Raises:
        InputError: one of them is given; names the first as it is typed.
    """
    for name in sorted(names):
        if _is_given(context, name):
            raise InputError(f"{_typed(context, name)} {why}; leave it out")


def _typed(context: typer.Context, name: str) -> str:
    option = next(each for each in context.command.params if each.name == name)
    # --no-ray, of --ray/--no-ray.
    is_off = context.params[name] is False and option.secondary_opts
    return str((option.secondary_opts if is_off else option.opts)[0])


def check_new_file(option: str, path: Path) -> None:
    """Refuse a place for a file before what it is to hold is computed.

    Raises:
        InputError: the folder is not there, or has a folder of this name.
    """
    if not path.absolute().parent.is_dir():
        raise InputError(f"{option} {path}: there is no such folder; make it first")
    if path.is_dir():
        raise InputError(f"{option} {path}: is a folder; expected a file to write")


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


def refuse_of_runs(context: typer.Context, store: str) -> None:
    """Refuse options that say which state of a run is meant; in a store of versions, a pointer does.

    Raises:
        InputError: as `refuse_without_effect`.
    """
    why = f"is of runs, and {store} holds versions, of which the one that serves is taken"
    refuse_without_effect(context, {"snapshot", "data"}, why)


def check_served(run: str) -> None:
    """Refuse what holds neither a run nor versions before torch and Ray are imported.

    Raises:
        InputError: names it.
    """
    from rayrec.pipelines.versions.store import VersionStore

    if not (Path(run) / "run.json").is_file() and not VersionStore.is_there(run):
        check_run(Path(run))
