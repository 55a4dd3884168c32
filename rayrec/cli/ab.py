"""`ab`: two variants of a service compared by its request log."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from rayrec.cli.app import app
from rayrec.platform.console import Answer, command, new_table, out
from rayrec.platform.console import log as console

if TYPE_CHECKING:
    from rayrec.pipelines.metrics.estimate import Estimate


class ByOption(StrEnum):
    target = "target"
    version = "version"


@command(app, "ab")
def ab_command(
    requests: Annotated[
        str, typer.Argument(metavar="LOG", help="Folder or URL that `rayrec serve --request-log` wrote.")
    ],
    events: Annotated[
        str | None,
        typer.Option(help="Folder or URL of the log of events, for what users did \\[without outcomes]."),
    ] = None,
    by: Annotated[
        ByOption | None,
        typer.Option(help="What tells variants apart \\[targets where there are several, else versions]."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Target or version to compare with \\[the one of most requests].")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="That is compared \\[of the others the one of most requests].")
    ] = None,
    window: Annotated[
        float, typer.Option(min=1, help="Seconds after a request, in which its user's events count.")
    ] = 3600,
    share: Annotated[
        float,
        typer.Option(min=0.001, max=0.999, help="Of the users of both, that the variant was to get."),
    ] = 0.5,
    resamples: Annotated[int, typer.Option(min=100, help="Bootstrap resamples of users.")] = 999,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
) -> Answer:
    """Compare two variants by a service's log: errors, latency and outcomes, with intervals over users."""
    from rayrec.pipelines.metrics.ab_test import compared, sample_ratio
    from rayrec.serve.events.ab_log import read_ab_log

    log = read_ab_log(requests, None if by is None else by.value, baseline, variant, events, window)
    found = compared(*log.rows, log.num_users, resamples, seed)
    ratio = sample_ratio(*log.num_began, share)
    figures = (f"{log.by} {log.baseline}", f"{log.by} {log.variant}", "difference")
    table = new_table("", ("", *figures), figures)
    num_requests = [len(rows.users_R) for rows in log.rows]
    num_users = [len(set(rows.users_R.tolist())) for rows in log.rows]
    table.add_row("requests", *(f"{count:,}" for count in num_requests), "")
    table.add_row("users", *(f"{count:,}" for count in num_users), "")
    for name, each in found.items():
        table.add_row(name, *(_said(one) for one in (each.baseline, each.variant, each.difference)))
    out.print(table)
    console.print(
        f"from {log.since:%Y-%m-%d %H:%M:%S} to {log.until:%Y-%m-%d %H:%M:%S} UTC, when both answered"
    )
    if log.num_left_out:
        console.print(f"{log.num_left_out:,} requests before and after it are left out")
    if log.num_shared_users:
        console.print(f"{log.num_shared_users:,} of {log.num_users:,} users have seen both")
    if ratio.is_off:
        console.print(
            f"[bold]warning:[/bold] {escape(log.variant)} got {ratio.found:.1%} of the users, and "
            f"{ratio.expected:.1%} were expected (p = {ratio.p_value:.1g}): name the share that it was to "
            "get (--share), or find what keeps users from one of the two before you trust a difference"
        )
    return {
        "by": log.by,
        "baseline": log.baseline,
        "variant": log.variant,
        "requests": dict(zip((log.baseline, log.variant), num_requests, strict=True)),
        "users": dict(zip((log.baseline, log.variant), num_users, strict=True)),
        "left_out": log.num_left_out,
        "shared_users": log.num_shared_users,
        "sample_ratio": {
            "expected": ratio.expected,
            "found": ratio.found,
            "p_value": ratio.p_value,
            "is_off": ratio.is_off,
        },
        "metrics": {
            name: {
                "baseline": _plain(each.baseline),
                "variant": _plain(each.variant),
                "difference": _plain(each.difference),
            }
            for name, each in found.items()
        },
    }


def _said(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.value:.4g} (-)"
    return f"{estimate.value:.4g} ({estimate.low:.4g} to {estimate.high:.4g})"


def _plain(estimate: Estimate) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {name: None if math.isnan(value) else value for name, value in estimate._asdict().items()}
