"""How far two models agree, and how good each is, with intervals over paired requests."""

import numpy as np
import pytest

from rayrec.pipelines.metrics.agreement import agreement

NOBODY = frozenset()


def test_outputs_are_compared_in_order_first_and_as_sets():
    first = [("a", "b"), ("a", "b"), ("a", "b"), (), ("a",)]
    second = [("a", "b"), ("b", "a"), ("a", "c"), (), ()]

    found = agreement(first, second, [NOBODY] * 5)

    assert found["equal"].value == 2 / 5
    assert found["equal first"].value == 3 / 5
    assert found["overlap"].value == pytest.approx((1 + 1 + 1 / 2 + 1 + 0) / 5)
    assert not any(name.startswith("accuracy") for name in found)


def test_accuracy_is_over_the_requests_whose_answer_is_known():
    first = [("a", "b"), ("c",), ("d",)]
    second = [("b",), ("c",), ("e",)]

    found = agreement(first, second, [frozenset("a"), frozenset("cx"), NOBODY])

    assert found["accuracy A"].value == 1.0
    assert found["accuracy B"].value == 0.5
    assert found["accuracy B - A"].value == -0.5


def test_an_interval_over_pairs_is_as_narrow_as_the_models_are_alike():
    random = np.random.default_rng(0)
    right = random.random(1000) < 0.9
    first = [("right",) if each else ("wrong",) for each in right]
    second = list(first)
    for place in np.flatnonzero(right)[:4]:
        second[place] = ("wrong",)

    found = agreement(first, second, [frozenset({"right"})] * 1000)

    of_difference, alone = found["accuracy B - A"], found["accuracy A"]
    assert of_difference.value == pytest.approx(-0.004)
    assert of_difference.low < -0.004 < of_difference.high <= 0
    assert of_difference.high - of_difference.low < 0.5 * (alone.high - alone.low)
    assert found["equal"].value == 0.996


def test_nothing_is_compared_with_nothing():
    with pytest.raises(ValueError, match="0, 0 and 0 answers"):
        agreement([], [], [])
