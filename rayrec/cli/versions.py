"""`publish`, `versions`, `rollback`: what serves of a run, and going back."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from rayrec.cli.app import app
from rayrec.cli.run_options import check_run
from rayrec.platform.console import Answer, command, log, new_table, out
from rayrec.platform.errors import InputError
from rayrec.platform.memory import human_size

if TYPE_CHECKING:
    from rayrec.pipelines.versions.manifest import ModelVersion

StoreArgument = Annotated[
    str, typer.Argument(help="Folder, or URL such as s3://bucket/models/mine, with published versions.")
]


class RowsOption(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8_row = "int8_row"


@command(app, "publish")
def publish_command(
    run: Annotated[Path, typer.Argument(help="Folder that `rayrec train` wrote.")],
    store: StoreArgument,
    snapshot: Annotated[
        str | None, typer.Option(help="Of the run: best, last, previous, or the name of one \\[best].")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data set with the catalog: the run's, or a later one with further items. Without "
            "--snapshot and --rows, weights and rows stay those of the run's version that serves "
            "\\[as of that version, if it is a later one; else the run's]."
        ),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="Newest versions that stay in the store.")] = 10,
    min_overlap: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of a few users' items that the version before gave, at least."
        ),
    ] = 0.0,
    other_catalog: Annotated[
        bool, typer.Option("--other-catalog", help="The catalog is meant to be another than the store's.")
    ] = False,
    canary: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of the users that it answers at first, as a canary \\[all of them]."
        ),
    ] = None,
    rows: Annotated[
        RowsOption | None,
        typer.Option(help="What rows of tables are rounded to: half of the bytes, or a quarter \\[float32]."),
    ] = None,
) -> Answer:
    """Publish a run's model; services that follow the store answer with it at once, or as a canary."""
    check_run(run)
    from rayrec.pipelines.runs.run_folder import RunFolder
    from rayrec.pipelines.runs.snapshots import read_snapshot
    from rayrec.pipelines.versions.canary import Canaries, CanarySettings
    from rayrec.pipelines.versions.publisher import Publisher
    from rayrec.pipelines.versions.store import VersionStore

    folder, versions = RunFolder.open(run), VersionStore(store)
    canaries, settings = Canaries(versions), None
    if canary is not None:
        settings = CanarySettings.parse({"share": canary}, source="--canary")
        canaries.check_start()
    publisher = Publisher(
        folder,
        versions,
        min_overlap=min_overlap,
        other_catalog=other_catalog,
        rows=(rows or RowsOption.float32).value,
        data=data,
    )

    def published() -> ModelVersion:
        if data is not None and snapshot is None and rows is None:
            version = publisher.publish_catalog()
            if version is not None:
                return version
        return publisher.publish(read_snapshot(folder.chosen_snapshot(snapshot or "best")))

    if settings is None:
        version = published()
    else:
        # Held before it is published, or it would answer everybody meanwhile.
        with canaries.baseline_held() as was_held:
            version = published()
            canaries.start(version.number, settings, was_held)
    versions.keep_newest(keep)
    size = human_size(sum(bundle.num_bytes for bundle in version.bundles))
    of_rows = ""
    if version.segments:
        of_rows = f", {human_size(version.row_bytes)} of it rows as {version.segments[0].rows}"
    after = f"after {version.step + 1:,} steps"
    out.print(f"Version {version.number}: {version.run} {after}, {size}{of_rows}", markup=False)
    if version.overlap is not None:
        out.print(
            f"{version.overlap:.0%} of what {len(version.probes)} users get, the version before gave them too"
        )
    pointer = versions.current()
    assert pointer is not None
    if settings is not None:
        of_users = f"{100 * settings.share:.3g} % of the users"
        out.print(f"It is a canary for {of_users}, beside version {pointer.version}, which is held")
    elif pointer.version != version.number:
        log.print(
            f"version {pointer.version} serves on, which was gone back to; "
            f"`rayrec rollback {store} --undo` lets the newest serve",
            markup=False,
        )
    return {"version": version.number, "serving": pointer.version, "row_bytes": version.row_bytes}


@command(app, "versions")
def versions_command(store: StoreArgument) -> Answer:
    """List what was published, and which version serves."""
    from rayrec.pipelines.versions.catalog import num_items
    from rayrec.pipelines.versions.store import VersionStore

    versions = VersionStore(store)
    serving = versions.serving().number
    pointer = versions.current()
    assert pointer is not None
    headings = ("", "version", "published", "run", "steps", "weights of", "rows", "changes", "items")
    table = new_table("", headings, figures=[name for name in headings if name not in ("", "run")])
    found = [versions.version(number) for number in versions.numbers()]
    items = [num_items(versions, version) for version in found]
    for version, count in zip(found, items, strict=True):
        published = datetime.fromtimestamp(version.published_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        mark = ("held" if pointer.is_held else "serves") if version.number == serving else ""
        weights = f"{version.weights_step + 1:,}"
        changes = str(max(len(version.segments) - 1, 0))
        cells = [mark, str(version.number), published, escape(version.run), f"{version.step + 1:,}", weights]
        shown = "unknown" if count is None else f"{count:,}"
        table.add_row(*cells, human_size(version.row_bytes), changes, shown)
    out.print(table)
    return {
        "serving": serving,
        "is_held": pointer.is_held,
        "versions": [
            {
                "version": each.number,
                "published_at": each.published_at,
                "step": each.step + 1,
                "row_bytes": each.row_bytes,
                "items": count,
            }
            for each, count in zip(found, items, strict=True)
        ],
    }


@command(app, "rollback")
def rollback_command(
    store: StoreArgument,
    to: Annotated[int | None, typer.Option(help="Version to go to \\[the one before].")] = None,
    undo: Annotated[
        bool,
        typer.Option(
            "--undo",
            help="Let the newest version serve that was not taken back as a canary, and those that come.",
        ),
    ] = False,
) -> Answer:
    """Let an older version serve, and stay although newer ones come. A canary that runs is stopped."""
    from rayrec.pipelines.versions.canary import Canaries
    from rayrec.pipelines.versions.store import VersionStore

    if undo and to is not None:
        raise InputError("--to and --undo say different things; give one of them")
    versions = VersionStore(store)
    serving, numbers, canaries = versions.serving().number, versions.numbers(), Canaries(versions)
    if undo:
        to = canaries.let_newest_serve()
        out.print(f"Version {to} serves now, and those that come")
        if newer := [str(number) for number in sorted(canaries.taken_back()) if number > to]:
            log.print(
                f"taken back as canaries: {', '.join(newer)}; `rayrec rollback {store} --to {newer[-1]}` "
                "lets that one serve all the same",
                markup=False,
            )
        return {"serving": to, "before": serving, "is_held": False}
    if to is None:
        earlier = [number for number in numbers if number < serving]
        if not earlier:
            raise InputError(f"{store}: version {serving} serves, and there is none before it")
        to = earlier[-1]
    canaries.go_back(to)
    out.print(f"Version {to} serves now, whatever comes; --undo lets go of it")
    return {"serving": to, "before": serving, "is_held": True}
