"""Tables of an evaluation: the metrics that are read most; --json has all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from rayrec.platform.console import new_table, out

if TYPE_CHECKING:
    from rayrec.pipelines.metrics.estimate import Estimate
    from rayrec.pipelines.metrics.evaluation_report import EvaluationReport, RankingDetails

SHOWN = ("recall@1", "recall@5", "recall@10", "recall@50", "recall@500", "ndcg@10", "mrr@10")
"""Of recommenders."""


def print_report(report: EvaluationReport, step: str = "", slices: bool = False) -> None:
    """Print an evaluation.

    Args:
        step: what the title says of the snapshot.
        slices: of recommenders, their first list by slices of the users as well.
    """
    metrics = SHOWN if report.ranking is not None else tuple(next(iter(report.results.values())))
    split = f"{report.split} split" + ("" if report.on is None else f" of {report.on}")
    table = new_table(f"{report.count:,} {report.unit}, {split}{step}", ("", *metrics), metrics)
    for name, estimates in report.results.items():
        cells = [
            _cell(estimates[metric], report.num_judged.get(metric)) if metric in estimates else "-"
            for metric in metrics
        ]
        table.add_row(escape(name), *cells)
    out.print(table)
    for name, number in report.not_whole.items():
        out.print(f"{name.replace('_', ' ')}: {number:,}")
    if report.ranking is not None:
        _print_lists(report.ranking)
        if report.ranking.num_repeats:
            out.print(
                f"{report.ranking.num_repeats:,} users have their target in their history: lists without "
                "seen items cannot have it."
            )
        if report.ranking.num_left_out:
            out.print(
                f"{report.ranking.num_left_out:,} users are left out: their target is no later than the "
                "newest event of the run's own data set."
            )
        if slices:
            _print_slices(report.ranking, next(iter(report.results)))


def _print_lists(ranking: RankingDetails) -> None:
    figures = ("items", "coverage", "novelty, bits", "diversity")
    table = new_table("Lists, and their first ten items", ("", *figures), figures)
    for name, metrics in ranking.lists.items():
        table.add_row(
            escape(name),
            f"{ranking.positions.header.lists[name].depth:,}",
            f"{metrics.coverage:.4f}",
            *("-" if each is None else _cell(each) for each in (metrics.novelty, metrics.diversity)),
        )
    out.print(table)


def _print_slices(ranking: RankingDetails, name: str) -> None:
    """The slices of one list, of which the others are in the JSON."""
    metrics = list(next(iter(ranking.slices.values())).results[name])
    figures = ("users", *metrics)
    table = new_table(f"{name}, by slices of the users", ("", *figures), figures)
    for title, each in ranking.slices.items():
        cells = [_cell(each.results[name][metric]) for metric in metrics]
        table.add_row(escape(title), f"{each.num_users:,}", *cells)
    out.print(table)
    for title, each in ranking.slices.items():
        out.print(f"{title}: {each.rule}", markup=False)
    if ranking.empty_slices:
        out.print(f"No user: {', '.join(ranking.empty_slices)}", markup=False)


def _cell(estimate: Estimate, num_judged: int | None = None) -> str:
    return f"{estimate.value:.4f}\n[dim]{_spread(estimate, num_judged)}[/dim]"


def _spread(estimate: Estimate, num_judged: int | None) -> str:
    """What stands below a figure: half of its interval, and over how many it is where these are not all."""
    # Resamples of records that are all alike are alike, which says nothing of others.
    half = (estimate.high - estimate.low) / 2
    said = f"±{half:.4f}" if half else "all alike"
    return said if num_judged is None else f"{said}, of {num_judged:,}"
