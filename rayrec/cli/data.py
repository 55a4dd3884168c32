"""`prepare`: turns a behavior log into a data set."""

from __future__ import annotations

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


@command(app, "prepare")
def prepare_command(
    source: Annotated[Path, typer.Argument(help="Folder or file with the behavior log.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the data set to write.")],
    layout: Annotated[
        str,
        typer.Option(
            help="Layout of the source: folder, movielens, recbole, s3rec, events, or one that an installed "
            "package adds; `auto` looks at its files."
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
        bool, typer.Option("--ray/--no-ray", help="Build the sequences with Ray Data, or in this process.")
    ] = True,
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
    from rayrec.samples.prepare.ray_jobs import run_partitions_on_ray

    with ray_cluster(ClusterConfig(dashboard=False), cpus_needed=1):
        yield from run_partitions_on_ray(table, key, num_partitions, function)


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
