"""`data cursor`: what a run has consumed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayrec.cli.app import data_app
from rayrec.platform.console import Answer, command, out


@command(data_app, "cursor")
def cursor_command(
    run: Annotated[Path, typer.Argument(help="Folder that `rayrec train` wrote.")],
    snapshot: Annotated[str, typer.Option(help="`last`, `previous`, `best`, or the name of one.")] = "last",
    files: Annotated[bool, typer.Option("--files", help="Show every file, too.")] = False,
) -> Answer:
    """Show which rows a run has trained on, by epoch."""
    from dataclasses import asdict

    from rayrec.pipelines.tasks.consumed_rows import consumed_rows

    consumed = consumed_rows(run, snapshot)
    heading = f"{consumed.run}, {consumed.snapshot}: {consumed.steps:,} steps"
    table = Table(title=escape(heading), title_justify="left")
    for index, name in enumerate(("epoch", "files", "consumed", "unreadable", "of rows")):
        table.add_column(name, justify="right" if index else "left")
    for epoch in consumed.epochs:
        counts = (epoch.files, epoch.consumed, epoch.unreadable, epoch.rows)
        table.add_row(str(epoch.epoch), *map(_count, counts))
    out.print(table)
    if consumed.unknown is not None:
        out.print(f"how many rows there are is not known: {consumed.unknown}", markup=False)
    answer = asdict(consumed)
    if not files:
        del answer["files"]
        return answer
    by_file = Table(title="Files", title_justify="left")
    for name in ("epoch", "file", "consumed", "unreadable", "of rows"):
        by_file.add_column(name, justify="left" if name in ("epoch", "file") else "right")
    for line in consumed.files:
        row_counts = (line.consumed, line.unreadable, line.rows)
        by_file.add_row(str(line.epoch), escape(line.file), *map(_count, row_counts))
    out.print(by_file)
    return answer


def _count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"
