"""Value curves: what is fitted, what is refused, and what a file keeps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rayrec.platform.errors import InputError
from rayrec.serve.config.actions import ActionConfig, check_actions
from rayrec.serve.engine.value_curves import (
    FULL_EFFORT,
    ActionKey,
    ValueCurves,
    concave_over,
    version_of,
)

FEW, HALF = ActionKey(max_beams=2), ActionKey(max_beams=8)
CURVES = ValueCurves("beauty@40", (FEW, FULL_EFFORT), (5, 20), np.array([[0.9, 1], [0.6, 1], [0.3, 1]]))


def test_a_user_at_an_edge_is_in_the_bucket_above():
    assert [CURVES.of(events, FEW) for events in (0, 4, 5, 19, 20, 10_000)] == [0.9, 0.9, 0.6, 0.6, 0.3, 0.3]
    assert CURVES.of(7, FULL_EFFORT) == 1.0


def test_nothing_is_said_of_an_action_that_was_not_measured():
    assert CURVES.of(7, HALF) is None
    assert CURVES.of(7, FEW._replace(rank=False)) is None


def test_an_action_that_costs_more_and_finds_less_counts_as_the_cheaper_one():
    assert concave_over(np.array([1.0, 2.0, 3.0]), np.array([0.6, 0.5, 0.7])).tolist() == pytest.approx(
        [0.6, 0.65, 0.7]  # between its neighbors: a mixture of these finds as much at this cost
    )
    assert concave_over(np.array([1.0, 5.0]), np.array([0.6, 0.5])).tolist() == [0.6, 0.6]


def test_curves_are_concave_from_nothing_at_no_cost():
    # The first action gives 0.1 per second, the second 0.4: so half of the second is better.
    assert concave_over(np.array([1.0, 2.0]), np.array([0.1, 0.8])).tolist() == pytest.approx([0.4, 0.8])
    # What costs nothing is where the curve begins.
    assert concave_over(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.4, 0.8])).tolist() == [0.5, 0.5, 0.8]


@pytest.mark.parametrize("seed", range(20))
def test_fitted_curves_are_monotone_concave_and_no_less_than_measured(seed):
    random = np.random.default_rng(seed)
    costs_A, shares_A = random.random(6), random.random(6)

    fitted_A = concave_over(costs_A, shares_A)

    order_A = np.argsort(costs_A)
    slopes = np.diff(fitted_A[order_A], prepend=0) / np.diff(costs_A[order_A], prepend=0)
    assert (slopes >= 0).all()
    assert (np.diff(slopes) <= 1e-9).all()
    assert (fitted_A >= shares_A - 1e-12).all()
    assert fitted_A.max() == shares_A.max()


def test_curves_are_fitted_per_number_of_events():
    num_events_N = np.array([1, 2, 50, 60])
    masses_NA = np.array([[0.4, 0.5], [0.2, 0.25], [0.1, 0.4], [0.1, 0.4]])
    seconds_NA = np.tile([0.001, 0.004], (4, 1))

    curves = ValueCurves.fit(
        "run@1", [FEW, FULL_EFFORT], num_events_N, masses_NA, masses_NA[:, 1], seconds_NA, edges=[10]
    )

    assert curves.of(3, FEW) == pytest.approx(0.8)
    assert curves.of(55, FEW) == pytest.approx(0.25)
    assert curves.of(3, FULL_EFFORT) == curves.of(55, FULL_EFFORT) == 1.0


def test_a_bucket_without_requests_is_as_all_users():
    masses_NA = np.array([[0.2, 0.4], [0.4, 0.8]])
    curves = ValueCurves.fit(
        "run@1",
        [FEW, FULL_EFFORT],
        np.array([1, 2]),
        masses_NA,
        masses_NA[:, 1],
        np.tile([1.0, 4.0], (2, 1)),
        edges=[100],
    )

    assert curves.of(1000, FEW) == curves.of(1, FEW) == pytest.approx(0.5)


def test_buckets_have_enough_requests_to_say_something():
    num_events_N = np.repeat([1, 2, 3, 50], [100, 100, 90, 10])
    masses_NA = np.ones((300, 1))
    curves = ValueCurves.fit("run@1", [FEW], num_events_N, masses_NA, np.ones(300), masses_NA)

    assert curves.edges == (2, 3)
    few = ValueCurves.fit("run@1", [FEW], num_events_N[:5], masses_NA[:5], np.ones(5), masses_NA[:5])
    assert few.edges == ()


def test_what_is_no_mass_is_refused():
    with pytest.raises(InputError, match="mass: expected numbers from 0, found nan"):
        ValueCurves.fit(
            "run@1", [FEW], np.array([3]), np.array([[np.nan]]), np.array([1.0]), np.array([[1.0]])
        )
    with pytest.raises(InputError, match="no request was replayed"):
        ValueCurves.fit(
            "run@1", [FEW], np.zeros(0, dtype=np.int64), np.zeros((0, 1)), np.zeros(0), np.zeros((0, 1))
        )


def test_a_file_keeps_the_curves(tmp_path):
    path = tmp_path / "curves.json"
    path.write_text(CURVES.to_json())

    read = ValueCurves.load(path)

    assert (read.version, read.actions, read.edges) == (CURVES.version, CURVES.actions, CURVES.edges)
    assert read.shares_BA.tolist() == CURVES.shares_BA.tolist()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"format": 9}, "format 9, this version of RayRec reads 1"),
        (
            {"shares": [[0.9, 1], [0.6, 1], [1.3, 1]]},
            "bucket 2 has the share 1.3 for ActionKey",
        ),
        ({"shares": [[0.9, 1], [0.6, 1], [float("nan"), 1]]}, "bucket 2 has the share nan"),
        ({"shares": [[0.9, 1]]}, r"need shares of the shape \(3, 2\), found \(1, 2\)"),
        ({"shares": [[0.9], [0.6, 1]]}, "not complete"),
        ({"edges": [20, 5]}, r"the edges \[20, 5\] do not ascend"),
        ({"edges": [5, "x"]}, "expected int, found 'x'"),
        ({"actions": [{"beams": 3}]}, "an action has max_beams, max_events, rank, near_line, found beams"),
        ({"actions": [FULL_EFFORT._asdict()] * 2}, "an action is there twice"),
        ({"actions": [FEW._replace(max_beams=0)._asdict(), FEW._asdict()]}, "max_beams is 0"),
        ({"version": None}, "expected str, found None"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_what_is_wrong(tmp_path, changed, says):
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({**json.loads(CURVES.to_json()), **changed}))

    with pytest.raises(InputError, match=says) as refused:
        ValueCurves.load(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_something_else_is_refused(tmp_path):
    path = tmp_path / "curves.json"
    with pytest.raises(InputError, match="cannot be read"):
        ValueCurves.load(path)
    for text, says in (
        ("{", "not valid JSON"),
        ("[1]", "found something else"),
        ("{}", "found something else"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=says):
            ValueCurves.load(path)


def test_the_version_of_a_model_does_not_depend_on_where_its_run_lies():
    assert version_of("/data/runs/beauty", 40) == version_of("runs/beauty/", 40) == "beauty@40"


def test_actions_can_be_told_apart():
    check_actions([ActionConfig(name="full"), ActionConfig(name="half", max_beams=8)], "actions")
    with pytest.raises(ValueError, match="'full' and 'half' do the same"):
        check_actions([ActionConfig(name="full"), ActionConfig(name="half")], "actions")
    with pytest.raises(ValueError, match="two actions are called 'full'"):
        check_actions([ActionConfig(name="full"), ActionConfig(name="full", max_beams=8)], "actions")
