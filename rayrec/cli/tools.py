"""`bench` and `doctor`: what the project claims, and what this machine has."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayrec.cli.app import app
from rayrec.platform.console import Answer, command, out
from rayrec.platform.errors import InputError


@command(app, "bench")
def bench_command(
    name: Annotated[str, typer.Argument(help="Name of a benchmark; without one, they are listed.")] = "",
) -> Answer:
    """Measure what the project claims of itself, and say whether it holds.

    RAYREC_BENCH_DATA names a prepared data set to measure on, RAYREC_BENCH_PAIRS the interleaved
    measurements of each bar, RAYREC_BENCH_STEPS the training steps of one, RAYREC_BENCH_ROWS the rows of
    a table where there is one.
    """
    from rayrec.platform.checkout import load_benchmarks

    benchmarks = load_benchmarks()
    return benchmarks.run_bench(name, out)


@command(app, "doctor")
def doctor_command(
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile kernels into numba's cache, a minute or two: first runs start sooner."
        ),
    ] = False,
) -> Answer:
    """Say what is installed, which devices there are, and how to get what is missing."""
    from dataclasses import asdict

    from rayrec.platform.doctor import examine, is_healthy

    findings = examine()
    table = Table("", "", "found", title="RayRec's doctor", title_justify="left")
    marks = {"ok": "[green]ok[/green]", "optional": "[yellow]--[/yellow]", "missing": "[red]missing[/red]"}
    for finding in findings:
        table.add_row(finding.subject, marks[finding.status], escape(finding.detail))
    out.print(table)
    if not is_healthy(findings):
        raise InputError("something that every run needs is missing; see the table above")
    if compiles:
        from rayrec.pipelines.training.compiled_ahead import compile_kernels

        compile_kernels()
    return {"findings": [asdict(finding) for finding in findings]}
