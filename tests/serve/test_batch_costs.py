"""What batches are expected to take, by their size and width, and how that follows what they took."""

from __future__ import annotations

import pytest

from rayrec.serve.engine.batch_costs import BatchCosts, CostsByWidth

CHEAPER_TOGETHER = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}


def test_the_size_of_most_requests_per_second_is_best():
    assert BatchCosts(CHEAPER_TOGETHER).best_size(100, float("inf")) == 8
    assert BatchCosts(CHEAPER_TOGETHER).best_size(100, 1.5) == 3
    assert BatchCosts(CHEAPER_TOGETHER).best_size(100, 0.1) == 1
    assert BatchCosts({1: 1.0, 2: 1.5, 4: 10.0}).best_size(4, float("inf")) == 2


def test_costs_follow_what_batches_take():
    costs = BatchCosts(CHEAPER_TOGETHER)

    for _ in range(200):
        costs.observe(3, 5.0)

    assert costs.of(3) == pytest.approx(5.0, rel=0.01)
    assert costs.of(1) == 1.0
    assert costs.best_size(100, float("inf")) == 8


def test_where_one_batch_in_ten_takes_longer_there_is_time_for_it():
    costs = BatchCosts({1: 1.0})
    assert costs.caution == 1.0
    for _ in range(20):
        costs.observe(1, 0.5 * costs.of(1))
    assert costs.caution == 1.0
    for place in range(50):
        costs.observe(1, (1.0 if place % 5 else 1.5) * costs.of(1))
    assert costs.caution == pytest.approx(1.5)


def test_one_stall_changes_little():
    costs = BatchCosts(CHEAPER_TOGETHER)
    for _ in range(50):
        costs.observe(4, 1.6)
    costs.observe(4, 100.0)

    assert costs.of(4) == pytest.approx(1.76)
    assert costs.caution == pytest.approx(1.0)


def test_a_size_that_is_not_computed_any_more_does_not_keep_an_old_cost_for_ever():
    costs = BatchCosts({1: 1.0, 2: 1.2, 4: 100.0})
    assert costs.best_size(4, float("inf")) == 2
    for _ in range(100):
        costs.observe(2, 1.2)
    assert costs.best_size(4, float("inf")) == 4

    slow = BatchCosts({1: 50.0, 2: 60.0, 4: 1.6})
    slow.observe(4, 1.6)
    assert (slow.of(1), slow.of(2)) == (1.6, 1.6)
    fast = BatchCosts({1: 1.0, 2: 1.0, 4: 1.0})
    for _ in range(100):
        fast.observe(1, 5.0)
    assert fast.of(4) == pytest.approx(5.0, rel=0.01)


def test_a_single_request_has_to_be_measured():
    with pytest.raises(ValueError, match="single request"):
        BatchCosts({2: 1.0})


def seconds(costs: BatchCosts) -> dict[int, float]:
    return {size: pytest.approx(value) for size, value in costs.seconds_by_size.items()}


def test_costs_of_one_width_leave_those_of_others():
    costs = CostsByWidth(BatchCosts(CHEAPER_TOGETHER, width=16))
    for _ in range(30):
        costs.observe(1024, 1, 20.0)

    assert costs.at(16).seconds_by_size == CHEAPER_TOGETHER
    assert costs.at(1024).of(1) == pytest.approx(20.0)


def test_a_width_that_was_not_seen_is_taken_for_no_more_than_those_beside_it():
    costs = CostsByWidth(BatchCosts({1: 1.0, 4: 1.6}, width=16))

    assert seconds(costs.at(64)) == {1: 4.0, 4: 6.4}  # times as wide
    assert seconds(costs.at(8)) == {1: 1.0, 4: 1.6}
    assert seconds(costs.at(0)) == {1: 1.0, 4: 1.6}
    costs.observe(64, 1, 2.0)
    costs.observe(0, 1, 0.001)
    assert costs.at(32).of(1) == pytest.approx(2.0)  # the wider one's, rather than twice the narrower one's
    assert costs.at(128).of(1) == pytest.approx(4.0)
    assert costs.at(8).of(1) == pytest.approx(1.0)  # what asks no model is no measure


def test_the_first_batch_of_a_width_says_what_others_of_it_take_at_most():
    costs = CostsByWidth(BatchCosts({1: 1.0, 2: 1.2, 8: 4.0}, width=1))
    costs.observe(4, 2, 2.4)  # half of what was guessed

    assert seconds(costs.at(4)) == {1: 2.0, 2: 2.4, 8: 9.6}  # four of two, one after the other
    costs.observe(2, 2, 100.0)  # a stall, which is not believed
    assert seconds(costs.at(2)) == {1: 4.0, 2: 4.8, 8: 16.0}


def by_width() -> CostsByWidth:
    costs = CostsByWidth(BatchCosts({1: 0.01, 2: 0.012, 8: 0.024}, width=16))
    costs.observe(64, 1, 0.02)
    return costs


def test_a_batch_of_several_widths_takes_what_its_parts_take():
    costs = by_width()

    assert costs.of([16, 64, 16]) == pytest.approx(costs.at(16).of(2) + costs.at(64).of(1))
    assert costs.of([16] * 3) == costs.at(16).of(3)


def test_the_best_batch_of_several_widths_is_that_of_most_requests_per_second():
    costs = by_width()
    for widths in ([16, 64, 16, 16, 16], [64, 16], [16, 16, 64, 64], [16, 16, 16]):
        for budget_s in (0.001, 0.03, 0.04, 1.0):
            rates = {
                size: size / costs.of(widths[:size])
                for size in range(1, len(widths) + 1)
                if costs.of(widths[:size]) <= budget_s
            }
            best = max(rates, key=lambda size: (round(rates[size], 9), size)) if rates else 1
            assert costs.best_size(widths, budget_s) == best, (widths, budget_s)


def test_what_a_batch_of_several_widths_took_is_that_of_all_of_them():
    costs = by_width()
    before = {width: costs.at(width).of(1) for width in (16, 64)}
    expected = costs.of([16, 64])

    costs.observe_batch([16, 64], 2 * expected)

    assert costs.at(16).of(1) > before[16]
    assert costs.at(64).of(1) > before[64]
    costs = by_width()
    costs.observe_batch([16, 64], expected)
    assert {width: costs.at(width).of(1) for width in (16, 64)} == pytest.approx(before)
