"""The curve that learning rates follow."""

import pytest

from rayrec.platform.schedule import RateSchedule


def test_rates_warm_up_then_stay():
    schedule = RateSchedule(warmup_steps=4)

    assert [schedule.factor(step) for step in (0, 1, 3, 4, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_rates_fall_along_a_cosine():
    schedule = RateSchedule(cosine_steps=100)

    assert [schedule.factor(step) for step in (0, 25, 50, 75, 100, 120)] == pytest.approx(
        [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0, 0.0]
    )
