"""`compare`: two methods by the positions that evaluations have written."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from rayrec.cli.app import app
from rayrec.cli.run_options import EvaluationSplit, OnOption, WhichOption
from rayrec.platform.console import Answer, command, new_table, out, progress_bar

if TYPE_CHECKING:
    from rayrec.pipelines.evaluation.compare import Comparison, Evaluated
    from rayrec.pipelines.metrics.estimate import Estimate

SIDE = (
    "Run, or several seeds with commas between them or as a quoted pattern ('runs/sasrec-*'); also a data "
    "set whose neighbors were evaluated, a file of positions, or a report or record that names one."
)
ListOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Which list of the evaluation, such as `neighbors, Swing` \\[`model`, and of neighbors "
        "`neighbors, co-visitation`].",
    ),
]


@command(app, "compare")
def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    *,
    metric: Annotated[str, typer.Option(help="recall, ndcg or mrr at a cutoff.")] = "recall@10",
    split: Annotated[
        EvaluationSplit, typer.Option(help="Held-out events that were predicted.")
    ] = EvaluationSplit.test,
    snapshot: WhichOption = "best",
    list_a: ListOption = None,
    list_b: ListOption = None,
    slices: Annotated[
        bool, typer.Option("--slices", help="By items, lengths of histories and behaviors as well.")
    ] = False,
    max_users: Annotated[
        int | None, typer.Option(min=1, help="Of evaluations with --max-users, how many these were.")
    ] = None,
    on: OnOption = None,
) -> Answer:
    """Compare two methods on the same users, each of one run or of several seeds."""
    from rayrec.pipelines.evaluation.compare import Sources, check_metric, compare, evaluated, expanded
    from rayrec.samples.dataset.dataset import Dataset

    check_metric(metric)
    later = None if on is None else Dataset.open(on)
    with progress_bar("evaluate") as progress:
        sources = Sources(metric, split.value, snapshot, max_users, later, progress)
        of_a, of_b = (
            [evaluated(where, name, sources) for where in expanded(said, glob.glob)]
            for said, name in ((a, list_a), (b, list_b))
        )
    found = compare(of_a, of_b, metric, slices)
    _print(found, a, b)
    return {"a": a, "b": b, **found.to_json()}


def _print(found: Comparison, a: str, b: str) -> None:
    figures = ("users", "A", "B", "B - A", "B / A", "only A", "only B")
    table = new_table(f"{found.metric}, {found.split} split of {found.dataset}", ("", *figures), figures)
    for name, each in found.estimates.items():
        ratio = "" if each.ratio is None else _with_interval(each.ratio, ".3f")
        table.add_row(
            escape(name),
            f"{each.num_users:,}",
            _with_interval(each.a),
            _with_interval(each.b),
            _with_interval(each.difference, "+.4f"),
            ratio,
            f"{each.only_a:,.0f}",
            f"{each.only_b:,.0f}",
        )
    out.print(table)
    for side, said, runs in (("A", a, found.a), ("B", b, found.b)):
        info = runs[0].info
        out.print(
            f"{side}: {said}, {_seeds(runs)}, list {runs[0].name!r}: "
            f"{info.depth} items, {info.search}; seen items {info.seen_items}",
            markup=False,
        )
    whole = next(iter(found.estimates.values()))
    uneven = "" if whole.mcnemar_p is None else f" McNemar: p = {whole.mcnemar_p:.2g}."
    cutoff = found.metric.partition("@")[2]
    out.print(
        f"Intervals: 95 %, paired bootstrap over {found.over}. Only A, only B: users whose target one of the "
        f"two alone has in its first {cutoff} items.{uneven}"
    )
    if found.num_left_out:
        out.print(
            f"{found.num_left_out:,} users are left out: their target is no later than what a run knows."
        )
    if found.sliced_by:
        out.print(f"Cold, head and tail items: by the training data of {found.sliced_by}.", markup=False)
    if found.empty_slices:
        out.print(f"No user: {escape(', '.join(found.empty_slices))}")


def _seeds(runs: Sequence[Evaluated]) -> str:
    """How many a side has, and which runs these are where there are several."""
    if len(runs) > 1:
        return f"{len(runs)} seeds ({', '.join(one.where for one in runs)})"
    return "not trained" if runs[0].needs_no_training else "1 seed"


def _with_interval(estimate: Estimate, form: str = ".4f") -> str:
    return f"{estimate.value:{form}}\n[dim]{estimate.low:{form}} to\n{estimate.high:{form}}[/dim]"
