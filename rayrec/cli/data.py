"""`prepare`: turns a behavior log into a data set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayrec.cli.app import app
from rayrec.platform.console import Answer, command, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from rayrec.samples.prepare.partitions import PartitionFunction


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
    str | None, typer.Option("--time-unit", help="Unit of numeric times: s, ms, us or ns [s].")
]


@command(app, "prepare")
def prepare_command(
    source: Annotated[Path, typer.Argument(help="Folder or file with the behavior log.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the data set to write.")],
    layout: Annotated[
        str,
        typer.Option(
            help="Layout of the source: folder, movielens, recbole, splits, s3rec, events, or one that an "
            "installed package adds; `auto` looks at its files."
        ),
    ] = "auto",
    layout_setting: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a layout that has settings; may be repeated.")
    ] = None,
    split: Annotated[SplitKind, typer.Option(help="What is held out.")] = SplitKind.leave_one_out,
    ties: Annotated[Ties, typer.Option(help="Order of a user's events with the same time.")] = Ties.shuffle,
    seed: Annotated[int, typer.Option(help="Seed for the order of ties.")] = 0,
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
            help="Build the sequences with Ray Data, or in this process; if not given, with Ray for large "
            "logs and where RAY_ADDRESS names a cluster.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace an existing data set and its semantic IDs.")
    ] = False,
) -> Answer:
    """Turn a behavior log into a data set: checked, sorted, split."""
    from rayrec.samples.base.config import PrepareConfig
    from rayrec.samples.prepare.partitions import run_partitions_locally
    from rayrec.samples.prepare.prepare import prepare

    config = PrepareConfig.parse(
        {
            "layout": layout,
            "layout_settings": dict(_setting_of(entry) for entry in layout_setting or ()),
            "split": split.value,
            "ties": ties.value,
            "seed": seed,
            "behaviors": tuple(behavior) if behavior else None,
            "allow": frozenset(entry.value for entry in allow or ()),
            "valid_start": valid_start,
            "test_start": test_start,
            "valid_fraction": valid_fraction,
            "test_fraction": test_fraction,
            "columns": dict(role_of(entry) for entry in column or ()),
            "text_columns": tuple(text_column or ()),
            "names": names_of(names),
            "time_format": time_format,
            "clean": clean,
            "time_unit": time_unit,
            "overwrite": overwrite,
        },
        source="rayrec prepare",
    )
    with progress_bar("prepare") as update:

        def progress(phase: str, done: int, total: int) -> None:
            update(done, total)

        def run_partitions(
            table: pa.Table, key: str, num_partitions: int, function: PartitionFunction
        ) -> Iterator[pa.Table]:
            on_ray = use_ray
            if on_ray is None:
                on_ray = len(table) >= _LARGE_LOG or "RAY_ADDRESS" in os.environ
            run = _run_partitions_on_cluster if on_ray else run_partitions_locally
            return run(table, key, num_partitions, function)

        report = prepare(source, out_folder, config, run_partitions, progress)
    print_rows("Prepared", report.rows())
    return report.to_json()


_LARGE_LOG = 5_000_000
"""Events from which Ray is worth its start, which takes as long as one process needs for about a million:
reading and checking stay in this process, and only the sequences are built in parallel."""


def _run_partitions_on_cluster(
    table: pa.Table, key: str, num_partitions: int, function: PartitionFunction
) -> Iterator[pa.Table]:
    """Starts or joins Ray only now: by then the source has been read and checked."""
    from rayrec.platform.cluster import ClusterConfig, ray_cluster
    from rayrec.samples.prepare.ray_jobs import run_partitions_on_ray

    with ray_cluster(ClusterConfig(dashboard=False), cpus_needed=1):
        yield from run_partitions_on_ray(table, key, num_partitions, function)


def names_of(names: str | None) -> tuple[str, ...] | None:
    """NAME,NAME,... as names."""
    return None if names is None else tuple(name.strip() for name in names.split(","))


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
