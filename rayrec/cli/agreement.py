"""`agree`: how far two models answer the same."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import check_new_file, check_served
from rayrec.platform.console import Answer, command, new_table, out
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rayrec.serve.app.answering import Output
    from rayrec.serve.app.asked import Asked

SIDE = (
    "Folder that `rayrec train` wrote, a store of published versions, a folder with a language model, or the "
    "URL of a service."
)
SHOWN = 3
"""Failed requests that are printed."""


class PrecisionOption(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


TokenFileOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="File with the token of this service.")
]
DeviceOption = Annotated[str | None, typer.Option(help="Device, of what is computed here \\[the run's].")]
SidePrecisionOption = Annotated[
    PrecisionOption | None,
    typer.Option(help="Of products of matrices, of what is computed here \\[float32]."),
]
ModelOption = Annotated[
    str | None, typer.Option(help="Name of the language model, of a service with several.")
]


@command(app, "agree")
def agree_command(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    *,
    requests: Annotated[
        Path,
        typer.Option(
            help="JSONL file of requests with the fields of POST /v1/recommend, or of texts, with messages "
            "or a prompt; `expected`, one or a list, says what would be right."
        ),
    ],
    device_a: DeviceOption = None,
    device_b: DeviceOption = None,
    precision_a: SidePrecisionOption = None,
    precision_b: SidePrecisionOption = None,
    model_a: ModelOption = None,
    model_b: ModelOption = None,
    token_file_a: TokenFileOption = None,
    token_file_b: TokenFileOption = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a text at most, where its request does not say.")
    ] = 128,
    differences: Annotated[
        Path | None, typer.Option(help="JSONL file to write requests to that were answered differently.")
    ] = None,
) -> Answer:
    """Compare the answers of two runs, services, devices or precisions to the same requests."""
    from rayrec.pipelines.inference.text_answers import TextRequest
    from rayrec.pipelines.metrics.agreement import Failed, agreement
    from rayrec.platform.files import write_atomically
    from rayrec.serve.app.answering import Side, answers_of
    from rayrec.serve.app.asked import read_asked

    if differences is not None:
        check_new_file("--differences", differences)
    asked = read_asked(requests)
    of_texts = isinstance(asked[0].request, TextRequest)
    tokens = [None if file is None else file.read_text().strip() for file in (token_file_a, token_file_b)]
    sides = [
        Side(what, device, None if precision is None else precision.value, token, model, max_tokens)
        for what, device, precision, token, model in zip(
            (a, b), (device_a, device_b), (precision_a, precision_b), tokens, (model_a, model_b), strict=True
        )
    ]
    for side, file, name in zip(sides, (token_file_a, token_file_b), "ab", strict=True):
        if not side.is_service and file is not None:
            raise InputError(
                f"--token-file-{name}: {side.what} is no service and asks for no token; leave it out"
            )
        if not side.is_service and not (of_texts and (Path(side.what) / "config.json").is_file()):
            check_served(side.what)
    # One after the other: two models need not fit at once.
    first, second = (answers_of(side, of_texts)(asked) for side in sides)
    figures = agreement(
        [None if isinstance(one, Failed) else one for one in first],
        [None if isinstance(one, Failed) else one for one in second],
        [one.expected for one in asked],
        are_lists=not of_texts,
    )
    failed = [[one for one in outputs if isinstance(one, Failed)] for outputs in (first, second)]
    if differences is not None:
        write_atomically(differences, _differences(asked, first, second).encode())

    num_known = sum(bool(one.expected) for one in asked)
    title = f"{len(asked):,} requests, of {num_known:,} of which a right answer is known"
    table = new_table(title, ("", "share", "95 %"), ("share", "95 %"))
    for name, found in figures.items():
        table.add_row(name, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}")
    out.print(table)
    for name, outputs, reasons in zip("AB", (first, second), failed, strict=True):
        if not reasons:
            continue
        out.print(f"{name} failed to answer {len(reasons):,} requests, which count as different and wrong:")
        named = [one.where for one, output in zip(asked, outputs, strict=True) if isinstance(output, Failed)]
        for where, reason in list(zip(named, reasons, strict=True))[:SHOWN]:
            out.print(f"  {where}: {reason.reason}", markup=False)
    return {
        "a": a,
        "b": b,
        "requests": len(asked),
        "known": num_known,
        "failed": {"a": len(failed[0]), "b": len(failed[1])},
        "figures": {name: found._asdict() for name, found in figures.items()},
    }


def _differences(asked: Sequence[Asked], first: Sequence[Output], second: Sequence[Output]) -> str:
    """Lines of the requests that were answered differently, or not at all."""
    from rayrec.pipelines.metrics.agreement import Failed

    lines = []
    for one, left, right in zip(asked, first, second, strict=True):
        if left == right and not isinstance(left, Failed):
            continue
        line: dict[str, object] = {"request": one.where}
        for name, output in (("a", left), ("b", right)):
            if isinstance(output, Failed):
                line |= {name: None, f"{name}_failed": output.reason}
            else:
                line[name] = output
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)
