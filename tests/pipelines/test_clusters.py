"""Shares of requests whose users are drawn."""

import numpy as np
import pytest

from rayrec.pipelines.metrics.clusters import GroupedShare, difference, student
from rayrec.pipelines.metrics.proportions import Z_95, newcombe


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # Of 97.5 %: tables of Student's t, and for half a degree a table's formula, by numerical integration.
    [(0.5, 164.558), (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, quantile):
    assert student(Z_95, freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize(
    ("z", "freedom", "quantile"),
    # 99.5 % of one degree, 99.95 % of two and of five.
    [(2.575829, 1, 63.657), (3.290527, 2, 31.599), (3.290527, 5, 6.869), (Z_95, 1e9, 1.960)],
)
def test_quantiles_of_other_shares_are_those_of_the_tables(z, freedom, quantile):
    assert student(z, freedom) == pytest.approx(quantile, abs=6e-4)


def test_next_to_no_freedom_is_an_interval_of_everything():
    for freedom in (1e-300, 1e-16, 1e-3, 0.05):
        assert student(Z_95, freedom) == 1e6
    after, before = (GroupedShare(np.array([2.0, 0.0]), np.array([900.0, rest])) for rest in (1e-9, 1.0))
    found = difference(after, before)
    assert (found.low, found.high) == pytest.approx((-1.0, 1.0), abs=0.01)


def test_one_user_with_most_of_the_requests_makes_the_interval_wide():
    even, one = np.full(10, 100.0), np.array([910.0] + [10.0] * 9)
    spread, dominated = (
        difference(GroupedShare(0.1 * each, each), GroupedShare(0.05 * even, even)) for each in (even, one)
    )
    assert spread.value == pytest.approx(dominated.value)
    freedom = GroupedShare(one, one).num_groups - 1
    assert 0.2 < freedom < 0.21
    assert dominated.high - dominated.low > 5 * (spread.high - spread.low)
    # With freedom 9: as of shares that are independent, wider by 2.262 / 1.96.
    assert spread == pytest.approx(newcombe((100, 1000), (50, 1000), 2.2622), abs=1e-4)
