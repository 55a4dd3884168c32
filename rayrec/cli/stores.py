"""`data store`, `data keys`, `data graph`: histories in a store, samples that name them, a graph of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.app import data_app
from rayrec.cli.data import Names, TimeFormat, TimeUnitOption, names_of, once, role_of
from rayrec.platform.console import Answer, command, print_rows, progress_bar

Store = Annotated[
    str, typer.Argument(metavar="STORE", help="Folder (LMDB), or URL: redis://host:port/0#name, rediss://.")
]


@command(data_app, "store")
def store_command(
    source: Annotated[
        Path, typer.Argument(help="Log of events, as `rayrec prepare` reads it, or a folder of its files.")
    ],
    store: Store,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the log; a store holds one log (default: the name of SOURCE)."),
    ] = None,
    column: Annotated[list[str] | None, typer.Option(help="ROLE=NAME of a column; may be repeated.")] = None,
    names: Names = None,
    time_format: TimeFormat = None,
    time_unit: TimeUnitOption = None,
    by: Annotated[
        str, typer.Option(help="Side to build: `user`, what users did; `item`, who met each item.")
    ] = "user",
    keep: Annotated[
        list[str] | None, typer.Option(help="Further column of numbers to store; may be repeated.")
    ] = None,
) -> Answer:
    """Add a log of events to an event store; files that it already has are skipped."""
    from dataclasses import asdict

    from rayrec.samples.stores.build import StoreBuildConfig, build_store

    config = StoreBuildConfig.parse(
        {
            "name": name,
            "columns": once("--column", map(role_of, column or ())),
            "names": names_of(names),
            "time_format": time_format,
            "time_unit": time_unit,
            "by": by,
            "keep": tuple(keep or ()),
        },
        source="rayrec data store",
    )
    with progress_bar("store") as update:
        report = build_store(source, store, config, lambda phase, done, total: update(done, total))
    print_rows("Stored", report.rows())
    return asdict(report)


@command(data_app, "keys")
def keys_command(
    store: Store,
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the samples.")],
) -> Answer:
    """Write the samples of a store: user, item and time of every event that has one before it."""
    from dataclasses import asdict

    from rayrec.samples.stores import open_store
    from rayrec.samples.stores.key_samples import write_key_samples

    opened = open_store(store)
    try:
        with progress_bar("samples") as update:
            report = write_key_samples(opened, out_folder, lambda samples: update(samples, samples))
    finally:
        opened.close()
    print_rows("Samples", report.rows())
    return asdict(report)


@command(data_app, "graph")
def graph_command(
    source: Annotated[str, typer.Argument(help="Event store (folder or URL), or prepared data set.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the graph.")],
    period_days: Annotated[
        float | None, typer.Option(min=0, help="Length of a segment in time \\[one segment].")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Forget edges that are so much older than the newest.")
    ] = None,
    max_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Keep so many newest edges of each user, and of each item: for serving."),
    ] = None,
) -> Answer:
    """Make a graph of users and items, or add to one what its source has since; for `join_neighbors`."""
    from rayrec.samples.graph.build import build_graph

    report = build_graph(source, folder, period_days, keep_days, max_per_node)
    print_rows(
        f"Graph: {folder}",
        [
            ("edges", f"{report.edges:,}; {report.added:,} came new, before any were forgotten"),
            ("segments", f"{report.segments}"),
            ("bytes per edge", f"{report.bytes_per_edge:.1f}"),
            ("from", report.first),
            ("to", report.last),
        ],
    )
    return report._asdict()
