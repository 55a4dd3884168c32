"""`prepare`: turns a behavior log into a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayrec.cli.app import app
from rayrec.platform.console import Answer, command, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.samples.base.config import PrepareConfig
    from rayrec.samples.prepare.prepare import Progress
    from rayrec.samples.prepare.report import PrepareReport


class SplitKind(StrEnum):
    leave_one_out = "leave_one_out"
    time = "time"


class Targets(StrEnum):
    first = "first"
    last = "last"
    random = "random"


class Ties(StrEnum):
    shuffle = "shuffle"
    file = "file"


class Allow(StrEnum):
    duplicates = "duplicates"
    short_users = "short-users"
    cold_items = "cold-items"
    missing_ids = "missing-ids"
    bad_times = "bad-times"
    repeated_descriptions = "repeated-descriptions"
    unmatched_ids = "unmatched-ids"
    ids_alike = "ids-alike"


Names = Annotated[
    str | None,
    typer.Option(help="Names of the columns of a text file that has no line of names: NAME,NAME,..."),
]
TimeFormat = Annotated[str | None, typer.Option(help="How dates are written, if not in ISO 8601: %d/%m/%Y.")]
TimeUnitOption = Annotated[
    str | None, typer.Option("--time-unit", help="Unit of numeric times: s, ms, us or ns \\[s].")
]


ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="On Ray: go on with what an interrupted preparation has done, if there is one."
    ),
]


@command(app, "prepare")
def prepare_command(
    source: Annotated[str, typer.Argument(help="Folder or file with the behavior log, or its URL.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the data set to write.")],
    layout: Annotated[
        str,
        typer.Option(
            help="Layout of the source: folder, movielens, recbole, splits, s3rec, lists, events, or one "
            "that an installed package adds; `auto` looks at its files."
        ),
    ] = "auto",
    layout_setting: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a layout that has settings; may be repeated.")
    ] = None,
    split: Annotated[SplitKind, typer.Option(help="What is held out.")] = SplitKind.leave_one_out,
    targets: Annotated[
        Targets, typer.Option(help="Split by time: which event of a user in a period is predicted.")
    ] = Targets.first,
    ties: Annotated[Ties, typer.Option(help="Order of a user's events with the same time.")] = Ties.shuffle,
    seed: Annotated[int, typer.Option(help="Seed for the order of ties and random targets.")] = 0,
    behavior: Annotated[
        list[str] | None, typer.Option(help="Keep only this behavior; may be repeated.")
    ] = None,
    allow: Annotated[
        list[Allow] | None, typer.Option(help="Accept these rows and count them; may be repeated.")
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Accept and count all of them.")] = False,
    valid_start: Annotated[
        str | None,
        typer.Option(help="Split by time: where validation begins, ISO date or UNIX seconds."),
    ] = None,
    test_start: Annotated[
        str | None, typer.Option(help="Split by time: where testing begins, ISO date or UNIX seconds.")
    ] = None,
    valid_fraction: Annotated[
        float | None, typer.Option(help="Split by time: part of the events that is for validation [0.1].")
    ] = None,
    test_fraction: Annotated[
        float | None, typer.Option(help="Split by time: part of the events that is for testing [0.1].")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="ROLE=NAME of a column that is not recognized; may be repeated.")
    ] = None,
    names: Names = None,
    time_format: TimeFormat = None,
    text_column: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of items that is text, besides title, genres and the like; may be repeated."
        ),
    ] = None,
    time_unit: TimeUnitOption = None,
    use_ray: Annotated[
        bool | None,
        typer.Option(
            "--ray/--no-ray",
            help="Prepare in tasks on Ray, whose memory does not grow with the log, or in this process; if "
            "not given, on Ray for large logs and where RAY_ADDRESS names a cluster.",
        ),
    ] = None,
    resume: ResumeOption = False,
    spill: Annotated[
        Path | None,
        typer.Option(
            help="On Ray: folder for the tables between the passes, which take some 50 bytes an event "
            "\\[beside OUT]; all nodes have to see it."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace an existing data set and its semantic IDs.")
    ] = False,
) -> Answer:
    """Turn a behavior log into a data set: checked, sorted, split."""
    from rayrec.samples.base.config import PrepareConfig

    config = PrepareConfig.parse(
        {
            "layout": layout,
            "layout_settings": once("--layout-setting", map(_setting_of, layout_setting or ())),
            "split": split.value,
            "targets": targets.value,
            "ties": ties.value,
            "seed": seed,
            "behaviors": tuple(behavior) if behavior else None,
            "allow": frozenset(entry.value for entry in allow or ()),
            "valid_start": valid_start,
            "test_start": test_start,
            "valid_fraction": valid_fraction,
            "test_fraction": test_fraction,
            "columns": once("--column", map(role_of, column or ())),
            "text_columns": tuple(text_column or ()),
            "names": names_of(names),
            "time_format": time_format,
            "clean": clean,
            "time_unit": time_unit,
            "overwrite": overwrite,
        },
        source="rayrec prepare",
    )
    use_ray = chosen_ray(use_ray, resume, spill)
    with progress_bar("prepare") as update:

        def progress(phase: str, done: int, total: int) -> None:
            update(done, total, phase)

        report = _prepared(source, out_folder, config, use_ray, progress, resume, spill)
    print_rows("Prepared", report.rows())
    return report.to_json()


_LARGE_LOG = 5_000_000
"""Events from which Ray is worth its start, which takes as long as one process needs for about a million."""


def _prepared(
    source: str,
    out: Path,
    config: PrepareConfig,
    use_ray: bool | None,
    progress: Progress,
    resume: bool,
    spill: Path | None,
) -> PrepareReport:
    from rayrec.samples.dataset.dataset_folder import HISTORIES
    from rayrec.samples.prepare.distributed.run import (
        about_events,
        finished_preparation,
        prepare_distributed,
    )
    from rayrec.samples.prepare.prepare import prepare
    from rayrec.samples.prepare.writer import check_target

    # Before Ray starts.
    if resume and (report := finished_preparation(source, out, config)) is not None:
        return report
    check_target(out, HISTORIES, config.overwrite)
    if use_ray is False:
        return prepare(source, out, config, progress=progress)
    num_events = about_events(source, config)
    if use_ray is None:
        use_ray = "RAY_ADDRESS" in os.environ or (num_events or 0) >= _LARGE_LOG
    if not use_ray:
        return prepare(source, out, config, progress=progress)
    if num_events is None and (resume or spill is not None):
        raise InputError(
            f"{source}: a source of this layout is read by one process; leave --resume and --spill out"
        )
    with preparing_cluster():
        if num_events is None:
            from rayrec.samples.prepare.ray_jobs import run_partitions_on_ray

            return prepare(source, out, config, run_partitions_on_ray, progress)
        from rayrec.platform.ray_tasks import run_tasks_on_ray

        return prepare_distributed(source, out, config, run_tasks_on_ray, progress, resume, spill)


_OBJECT_STORE_BYTES = 512 << 20
"""Of a cluster that is started here: plans and counters go through it, not the log."""


def chosen_ray(use_ray: bool | None, resume: bool, spill: Path | None) -> bool | None:
    """What is asked for: --resume and --spill are of preparation on Ray.

    Raises:
        InputError: they come with --no-ray.
    """
    if use_ray is False and (resume or spill is not None):
        raise InputError("--resume and --spill belong to preparation on Ray; leave them or --no-ray out")
    return True if resume or spill is not None else use_ray


@contextmanager
def preparing_cluster() -> Iterator[None]:
    """A cluster for tasks of preparation, inside the block."""
    from rayrec.platform.cluster import ClusterConfig, ray_cluster

    with ray_cluster(ClusterConfig(dashboard=False, object_store_bytes=_OBJECT_STORE_BYTES), cpus_needed=1):
        yield


def names_of(names: str | None) -> tuple[str, ...] | None:
    """NAME,NAME,... as names."""
    return None if names is None else tuple(name.strip() for name in names.split(","))


def once(flag: str, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names and values of an option that may be repeated.

    Raises:
        InputError: a name is there twice, of which only the last would count.
    """
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise InputError(f"{flag} {name}={value}: {name} is named twice; keep one of them")
        found[name] = value
    return found


def role_of(entry: str) -> tuple[str, str]:
    """ROLE=NAME as (role, name)."""
    role, equals, name = entry.partition("=")
    if not equals:
        raise InputError(f"--column {entry}: expected ROLE=NAME, as in user_id=customer")
    return role, name


def _setting_of(entry: str) -> tuple[str, str]:
    """NAME=VALUE as (name, value)."""
    name, equals, value = entry.partition("=")
    if not equals:
        raise InputError(f"--layout-setting {entry}: expected NAME=VALUE, as in user=customer")
    return name, value
