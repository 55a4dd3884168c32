"""Figures of README's table stand as bars, made of what was kept of the rows."""

from __future__ import annotations

import pytest

from benchmarks.harness import Bar, BenchOptions
from benchmarks.quality_bars import CODES, ON_SERVERS, bench
from benchmarks.quality_page import README_METHODS
from benchmarks.quality_pairs import Line
from benchmarks.quality_rows import METHODS
from rayrec.pipelines.evaluation.compare import Evaluated
from rayrec.pipelines.evaluation.lists import CO_VISITATION, MODEL
from tests.benchmarks.test_quality_page import positions


def row(name: str, *places: int) -> Line:
    return Line(name, [Evaluated(name, MODEL, positions(10 * list(places)))])


@pytest.fixture
def bars(monkeypatch) -> dict[str, Bar]:
    """Of 40 users: all find their target by the best row, 30 by SASRec, 20 by neighbors."""
    beauty = {
        CO_VISITATION: row("neighbors", 0, 0, 99, 99),
        "sasrec-content": row("content", 0, 0, 0, 0),
        "sasrec": row("sasrec", 0, 0, 0, 99),
        "sasrec-servers": row("servers", 0, 99, 99, 99),
        "hybrid": row("hybrid", 0, 0, 0, 99),
        "hybrid-servers": row("hybrid-servers", 0, 0, 0, 99),
        "light": row("light", 99, 0, 0, 99),
    }
    monkeypatch.setattr(
        "benchmarks.quality_bars.lines_of", lambda dataset, _: beauty if dataset == "beauty" else {}
    )
    return {bar.name: bar for bar in bench(BenchOptions())}


def test_every_row_of_the_readme_has_a_bar(bars):
    assert {f"quality-{method}" for method in README_METHODS} <= set(bars)
    assert bars["quality-sasrec-content"].value == 2.0
    assert bars["quality-light"].value == 1.0
    assert bars["quality-bsarec"].value is None


def test_wanted_figures_are_those_of_the_best_rows(bars):
    assert bars["quality-wanted-best"].value == pytest.approx(1.0 / 0.105)
    assert bars["quality-wanted-codes"].value == pytest.approx(0.5 / 0.085)
    assert bars["quality-best-over-sasrec"].value == pytest.approx(4 / 3)
    assert bars["quality-wanted-sports"].ok is None


def test_rows_on_servers_fail_where_these_users_show_a_loss(bars):
    assert bars["quality-servers-hybrid"].ok
    assert not bars["quality-servers-sasrec"].ok
    assert bars["quality-servers-generative"].ok is None


def test_names_are_those_of_methods():
    assert set(CODES) | set(ON_SERVERS) | set(ON_SERVERS.values()) <= set(METHODS)
