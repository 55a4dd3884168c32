"""Which steps are in force at which load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.inference.answers import Budget
from rayrec.platform.errors import InputError
from rayrec.serve.config.admission import DegradeConfig, StepConfig
from rayrec.serve.engine.degradation import NOT_DEGRADED, DegradationPolicy

STEPS = [
    StepConfig(do="fewer_beams", to=20, enter=0.5, leave=0.4),
    StepConfig(do="shorter_history", to=50, enter=0.6, leave=0.4),
    StepConfig(do="no_ranking", enter=0.7, leave=0.5),
    StepConfig(do="cached_answer", enter=0.8, leave=0.6),
    StepConfig(do="popular_items", enter=0.9, leave=0.7),
]


def test_steps_are_entered_at_one_load_and_left_below_a_lower_one():
    policy = DegradationPolicy(STEPS)

    levels = []
    for load in (0.0, 0.49, 0.5, 0.45, 0.4, 0.39, 0.45, 0.65, 0.4, 0.39):
        policy.update(load)
        levels.append(policy.level)

    assert levels == [0, 0, 1, 1, 1, 0, 0, 2, 2, 0]


def test_a_step_keeps_those_before_it():
    policy = DegradationPolicy(STEPS)

    assert policy.update(0.1) is NOT_DEGRADED
    assert policy.update(0.65).budget == Budget(max_beams=20, max_events=50)
    assert policy.update(0.75).ranks is False
    cached = policy.update(0.85)
    popular = policy.update(5.0)

    assert (cached.takes_cached, cached.asks_model) == (True, True)
    assert (popular.takes_cached, popular.asks_model) == (True, False)
    assert (popular.budget, popular.ranks) == (Budget(max_beams=20, max_events=50), False)
    assert policy.at(5.0) == [step.do for step in STEPS]


def test_to_look_which_steps_are_in_force_enters_and_leaves_none():
    policy = DegradationPolicy(STEPS)
    policy.update(0.55)

    assert [policy.at(load) for load in (0.45, 0.65, 0.1)] == [
        ["fewer_beams"],
        ["fewer_beams", "shorter_history"],
        [],
    ]
    assert policy.level == 1


def test_a_later_step_of_the_same_kind_takes_its_place():
    steps = [
        StepConfig(do="fewer_beams", to=50, enter=0.5, leave=0.4),
        StepConfig(do="fewer_beams", to=10, enter=0.8, leave=0.6),
    ]
    assert DegradationPolicy(steps).update(0.9).budget == Budget(max_beams=10)


@given(loads=st.lists(st.floats(0, 1.5), min_size=1, max_size=50))
def test_a_step_is_in_force_from_entering_to_leaving_and_never_comes_and_goes_in_between(loads):
    policy, is_in_force = DegradationPolicy(STEPS), [False] * len(STEPS)
    for load in loads:
        policy.update(load)
        for place, step in enumerate(STEPS):
            if load >= step.enter:
                is_in_force[place] = True
            elif load < step.leave:
                is_in_force[place] = False
        assert policy.level == sum(is_in_force)
        assert policy.at(load) == [step.do for step in STEPS[: policy.level]]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"do": "fewer_beams", "enter": 0.5, "leave": 0.4}, "'fewer_beams' needs a number, as in to: 20"),
        (
            {"do": "no_ranking", "to": 3, "enter": 0.5, "leave": 0.4},
            "'no_ranking' takes no number, got to: 3",
        ),
        ({"do": "no_ranking", "enter": 0.5, "leave": 0.5}, "is entered at 0.5 and left below 0.5; leave it"),
        ({"do": "no_ranking", "enter": 1.5, "leave": 0.5}, "entered at 1.5 of the capacity, which never is"),
    ],
)
def test_steps_that_cannot_be_are_refused(values, sentence):
    with pytest.raises(InputError, match=sentence):
        DegradeConfig.parse({"steps": [values]})


def test_a_wait_may_be_longer_than_the_timeout():
    step = {"do": "no_ranking", "enter": 1.5, "leave": 0.5}
    assert DegradeConfig.parse({"by": "wait", "steps": [step]}).steps[0].enter == 1.5


@pytest.mark.parametrize(("enter", "leave"), [(0.4, 0.3), (0.9, 0.3)])
def test_steps_out_of_order_are_refused(enter, leave):
    steps = [
        {"do": "no_ranking", "enter": 0.5, "leave": 0.4},
        {"do": "popular_items", "enter": enter, "leave": leave},
    ]
    with pytest.raises(InputError, match=r"'popular_items' is entered .* order steps by load"):
        DegradeConfig.parse({"steps": steps})
