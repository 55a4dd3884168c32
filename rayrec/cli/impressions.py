"""`impressions`: data sets for ranking models."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayrec.cli.app import app
from rayrec.cli.data import ResumeOption, TimeUnitOption, chosen_ray, preparing_cluster
from rayrec.platform.console import Answer, command, log, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.samples.impressions.config import ImpressionsConfig
    from rayrec.samples.impressions.division import Progress
    from rayrec.samples.impressions.report import ImpressionsReport


class ImpressionLayout(StrEnum):
    criteo = "criteo"
    avazu = "avazu"
    table = "table"
    movielens = "movielens"
    deskdrop = "deskdrop"


class ImpressionSplitKind(StrEnum):
    auto = "auto"
    files = "files"
    order = "order"
    time = "time"
    random = "random"


@command(app, "impressions")
def impressions_command(
    source: Annotated[str, typer.Argument(help="Folder or file with the impressions, or its URL.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the data set to write.")],
    layout: Annotated[ImpressionLayout, typer.Option(help="Layout of the source.")],
    label: Annotated[
        list[str] | None, typer.Option(help="Table: column of 0, 1 or nothing to predict; may be repeated.")
    ] = None,
    number: Annotated[
        list[str] | None, typer.Option(help="Table: column of numbers; may be repeated.")
    ] = None,
    id_: Annotated[
        list[str] | None,
        typer.Option("--id", help="Table: COLUMN or COLUMN:SPACE of ids; may be repeated."),
    ] = None,
    list_: Annotated[
        list[str] | None,
        typer.Option("--list", help="Table: COLUMN or COLUMN:SPACE of lists of ids; may be repeated."),
    ] = None,
    list_separator: Annotated[
        str, typer.Option(help="Table: between the elements of lists in text files.")
    ] = "|",
    group: Annotated[str | None, typer.Option(help="Table: column to group by, usually the user.")] = None,
    time: Annotated[str | None, typer.Option(help="Table: column of the time.")] = None,
    time_unit: TimeUnitOption = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Table: COLUMN or COLUMN:NAME to keep for operations of a run, not read by models; may be "
            "repeated."
        ),
    ] = None,
    positive_rating: Annotated[
        float, typer.Option(help="MovieLens: the lowest rating that is positive.")
    ] = 4.0,
    history_length: Annotated[
        int, typer.Option(help="MovieLens, Deskdrop: most items in a history, the newest.")
    ] = 50,
    history_events: Annotated[
        str,
        typer.Option(
            help="MovieLens: films of a history, `liked` or `all`; to rerank for a recommender: all."
        ),
    ] = "liked",
    origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Table: COLUMN=user, item, history, user.NAME or item.NAME: what it is when the items of a "
            "recommender are ranked; may be repeated."
        ),
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="Feature of the layout to leave out; may be repeated.")
    ] = None,
    held_out_of: Annotated[
        Path | None,
        typer.Option(
            help="MovieLens, Deskdrop: hold out what this data set of `rayrec prepare` holds out, so that "
            "the model can rerank for recommenders trained on it."
        ),
    ] = None,
    split: Annotated[
        ImpressionSplitKind, typer.Option(help="What is held out; `auto` depends on the source.")
    ] = ImpressionSplitKind.auto,
    valid_fraction: Annotated[float, typer.Option(help="Part of the rows that is for validation.")] = 0.1,
    test_fraction: Annotated[float, typer.Option(help="Part of the rows that is for testing.")] = 0.1,
    valid_start: Annotated[
        str | None,
        typer.Option(help="Split by time: where validation begins, ISO date or UNIX seconds."),
    ] = None,
    test_start: Annotated[
        str | None, typer.Option(help="Split by time: where testing begins, ISO date or UNIX seconds.")
    ] = None,
    min_count: Annotated[int, typer.Option(help="Ids seen less often in training rows share one id.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of a random split.")] = 0,
    use_ray: Annotated[
        bool | None,
        typer.Option(
            "--ray/--no-ray",
            help="Prepare in tasks on Ray, a file each, or in this process; if not given, on Ray for many "
            "large files and where RAY_ADDRESS names a cluster.",
        ),
    ] = None,
    resume: ResumeOption = False,
    spill: Annotated[
        Path | None,
        typer.Option(
            help="On Ray: folder for the rows between the passes, which take about what the data set takes "
            "\\[beside OUT]; all nodes have to see it."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing data set of impressions.")] = False,
) -> Answer:
    """Turn impressions into a data set for ranking models: checked, hashed, split."""
    from rayrec.samples.impressions.config import ImpressionsConfig

    config = ImpressionsConfig.parse(
        {
            "layout": layout.value,
            "labels": tuple(label or ()),
            "numbers": tuple(number or ()),
            "ids": spaces_of("--id", id_),
            "lists": spaces_of("--list", list_),
            "list_separator": list_separator,
            "group": group,
            "time": time,
            "time_unit": time_unit,
            "kept": spaces_of("--keep", keep),
            "positive_rating": positive_rating,
            "history_length": history_length,
            "history_events": history_events,
            "origins": _origins_of(origin),
            "leave_out": tuple(leave_out or ()),
            "held_out_of": None if held_out_of is None else str(held_out_of),
            "split": split.value,
            "valid_fraction": valid_fraction,
            "test_fraction": test_fraction,
            "valid_start": valid_start,
            "test_start": test_start,
            "min_count": min_count,
            "seed": seed,
            "overwrite": overwrite,
        },
        source="rayrec impressions",
    )
    use_ray = chosen_ray(use_ray, resume, spill)
    with progress_bar("impressions") as update:

        def progress(phase: str, done: int, total: int | None) -> None:
            update(done, total, phase)

        report = _prepared(source, out_folder, config, use_ray, progress, resume, spill)
    print_rows("Impressions", report.rows())
    return report.to_json()


_MANY_BYTES = 2 << 30
"""Of several files, from which Ray is worth its start."""


def _prepared(
    source: str,
    out: Path,
    config: ImpressionsConfig,
    use_ray: bool | None,
    progress: Progress,
    resume: bool,
    spill: Path | None,
) -> ImpressionsReport:
    from rayrec.platform.remote_files import located
    from rayrec.samples.dataset.dataset_folder import IMPRESSIONS
    from rayrec.samples.impressions.distributed import finished_impressions, prepare_impressions_distributed
    from rayrec.samples.impressions.layouts import load_impressions
    from rayrec.samples.impressions.prepare import prepare_impressions
    from rayrec.samples.prepare.writer import check_target

    # Before Ray starts.
    if resume and (report := finished_impressions(source, out, config)) is not None:
        return report
    check_target(out, IMPRESSIONS, config.overwrite)
    if use_ray is None:
        files = load_impressions(located(source), config).files
        is_large = len(files) > 1 and sum(file.stat().st_size for file in files) >= _MANY_BYTES
        use_ray = bool(files) and ("RAY_ADDRESS" in os.environ or is_large)
    if not use_ray:
        return prepare_impressions(source, out, config, progress)
    with preparing_cluster():
        from rayrec.platform.ray_tasks import run_tasks_on_ray

        return prepare_impressions_distributed(source, out, config, run_tasks_on_ray, progress, resume, spill)


@app.command(
    "synthetic-impressions",
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def synthetic_impressions_command() -> None:
    """Say what this command of 0.1 is called now."""
    log.print(
        "rayrec: synthetic-impressions is called `python -m benchmarks.synthetic_impressions` now, in a "
        "checkout of the repository"
    )
    raise typer.Exit(2)


def spaces_of(flag: str, entries: list[str] | None) -> dict[str, str]:
    """COLUMN:SPACE, or COLUMN for a space of the same name, as column -> space.

    Raises:
        InputError: a name is empty, or a column is there twice.
    """
    spaces: dict[str, str] = {}
    for entry in entries or ():
        column, colon, space = entry.partition(":")
        if not column or (colon and not space):
            raise InputError(f"{flag} {entry}: expected COLUMN or COLUMN:SPACE, as in item or history:item")
        if column in spaces:
            raise InputError(f"{flag} {entry}: the column {column} is named twice; keep one of them")
        spaces[column] = space or column
    return spaces


def _origins_of(entries: list[str] | None) -> dict[str, str]:
    """COLUMN=ORIGIN as column -> origin.

    Raises:
        InputError: an entry has another form, or a column is there twice.
    """
    origins: dict[str, str] = {}
    for entry in entries or ():
        column, equals, origin = entry.partition("=")
        if not (column and equals and origin):
            raise InputError(f"--origin {entry}: expected COLUMN=ORIGIN, as in price=item.price")
        if column in origins:
            raise InputError(f"--origin {entry}: the column {column} is named twice; keep one of them")
        origins[column] = origin
    return origins
