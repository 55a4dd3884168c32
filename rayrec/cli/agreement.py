"""`agree`: how far two models answer the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rayrec.cli.app import app
from rayrec.cli.runs import check_served
from rayrec.platform.console import Answer, command, out
from rayrec.platform.errors import InputError

SIDE = "Folder that `rayrec train` wrote, a store of published versions, or the URL of a service."


@command(app, "agree")
def agree_command(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    *,
    requests: Annotated[
        Path,
        typer.Option(
            help="JSONL file of requests, with the fields of POST /v1/recommend; `expected`, an item or a "
            "list of them, says what would be right."
        ),
    ],
    device_a: Annotated[str | None, typer.Option(help="Device of A, of a run or version.")] = None,
    device_b: Annotated[str | None, typer.Option(help="Device of B, likewise.")] = None,
    token_file_a: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the token of A, of a service.")
    ] = None,
    token_file_b: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Likewise of B.")
    ] = None,
    differences: Annotated[
        Path | None, typer.Option(help="JSONL file to write requests to that were answered differently.")
    ] = None,
) -> Answer:
    """Compare the answers of two runs, services or devices to the same requests."""
    import json

    from rayrec.pipelines.metrics.agreement import agreement
    from rayrec.platform.files import write_atomically
    from rayrec.serve.app.answering import answers_of, read_asked

    if differences is not None and not differences.absolute().parent.is_dir():
        raise InputError(f"--differences {differences}: there is no such folder; make it first")
    asked = read_asked(requests)
    for side in (a, b):
        if "://" not in side:
            check_served(side)
    tokens = [None if file is None else file.read_text().strip() for file in (token_file_a, token_file_b)]
    # One after the other: two models need not fit at once.
    first = answers_of(a, device_a, tokens[0])(asked)
    second = answers_of(b, device_b, tokens[1])(asked)
    figures = agreement(first, second, [one.expected for one in asked])
    if differences is not None:
        lines = [
            json.dumps({"request": one.where, "a": left, "b": right})
            for one, left, right in zip(asked, first, second, strict=True)
            if left != right
        ]
        write_atomically(differences, "".join(f"{line}\n" for line in lines).encode())

    num_known = sum(bool(one.expected) for one in asked)
    table = Table("", "share", "95 %", title_justify="left")
    table.title = f"{len(asked):,} requests, of {num_known:,} of which a right answer is known"
    for name, found in figures.items():
        table.add_row(name, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}")
    out.print(table)
    return {
        "a": a,
        "b": b,
        "requests": len(asked),
        "known": num_known,
        "figures": {name: found._asdict() for name, found in figures.items()},
    }
