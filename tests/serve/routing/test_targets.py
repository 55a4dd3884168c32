"""Who is answered by which target, and who moves when weights change."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.serve.config.services import RoutingConfig
from rayrec.serve.routing.targets import Routed, Router
from tests.helpers.examples import examples

NUM_USERS = 2000
SIGMAS = 5.0


def targets(weights: dict[str, float], experiment: str = "colors", **settings: object) -> np.ndarray:
    """Of users 0, 1, 2, ..."""
    router = Router(RoutingConfig(experiment=experiment, weights=weights, **settings))
    return np.array([router.target_of(user) for user in range(NUM_USERS)])


def shares(weights: dict[str, float]) -> dict[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def assert_share(measured: float, expected: float) -> None:
    assert abs(measured - expected) <= SIGMAS * math.sqrt(expected * (1 - expected) / NUM_USERS) + 1e-9


@examples(24)
@given(
    weights=st.dictionaries(
        st.text("abcde", min_size=1, max_size=2), st.floats(0.1, 10), min_size=1, max_size=4
    ),
    experiment=st.text("xyz", min_size=1, max_size=3),
)
def test_shares_are_those_of_the_weights(weights, experiment):
    found = targets(weights, experiment)
    for name, share in shares(weights).items():
        assert_share((found == name).mean(), share)


def test_a_user_stays_in_every_process_and_whatever_the_type_of_the_key():
    # Written down, with the salt that it was computed with: another hash would move every user of a running
    # experiment.
    router = Router(RoutingConfig(experiment="colours", weights={"red": 1, "green": 1, "blue": 2}))

    assert [router.target_of(user) for user in ("ann", "bob", "cid", "dan", 7)] == [
        "red",
        "green",
        "blue",
        "red",
        "blue",
    ]
    assert router.target_of(7) == router.target_of("7")


@examples(16)
@given(before=st.floats(0.1, 4), after=st.floats(0.1, 4))
def test_only_as_many_users_move_as_the_weight_of_one_target_says(before, after):
    old, new = {"a": before, "b": 1.0, "c": 2.0}, {"a": after, "b": 1.0, "c": 2.0}
    was, now = targets(old), targets(new)

    moved = was != now
    # From or to the target that has changed, in one direction, and never between the others.
    assert (now[moved] == "a").all() if after >= before else (was[moved] == "a").all()
    assert_share(moved.mean(), abs(shares(new)["a"] - shares(old)["a"]))


def test_where_all_weights_change_few_more_move_than_have_to():
    old, new = {"a": 2.0, "b": 3.0, "c": 5.0}, {"a": 3.0, "b": 3.0, "c": 4.0}
    apart = 0.1

    moved = (targets(old) != targets(new)).mean()

    assert moved <= 2 * apart / (1 + apart) + SIGMAS * math.sqrt(0.2 / NUM_USERS)


def test_a_new_target_takes_its_share_and_a_removed_one_gives_its_own_away():
    two, three = targets({"a": 1, "b": 1}), targets({"a": 1, "b": 1, "c": 2})
    assert set(three[two != three]) == {"c"}


def test_two_experiments_are_independent_and_one_is_the_same_everywhere():
    first, second = targets({"on": 1, "off": 3}, "one"), targets({"on": 1, "off": 3}, "two")
    assert_share(((first == "on") & (second == "on")).mean(), 1 / 16)
    assert (first == targets({"on": 1, "off": 3}, "one")).all()


def test_the_order_and_the_scale_of_weights_do_not_matter():
    assert (targets({"a": 1, "b": 3}) == targets({"b": 30, "a": 10})).all()


def test_a_weight_of_zero_gets_nobody():
    assert set(targets({"a": 1, "b": 0})) == {"a"}
    assert set(targets({"a": 1, "b": 0}, by="random")) == {"a"}


def test_at_random_a_user_does_not_stay_and_the_seed_says_what_is_drawn():
    weights = {"a": 1.0, "b": 3.0}
    router = Router(RoutingConfig(experiment="colors", weights=weights, by="random"))
    drawn = np.array([router.target_of("ann") for _ in range(NUM_USERS)])

    assert_share((drawn == "a").mean(), 0.25)
    assert (drawn == targets(weights, by="random")).all()
    assert (drawn != targets(weights, by="random", seed=1)).any()


def test_whoever_is_nobody_goes_by_the_fallback_or_is_drawn():
    router = Router(RoutingConfig(experiment="colors", weights={"a": 1, "b": 1}))

    by_session = {router.target_of(None, "session 1") for _ in range(50)}
    drawn = {router.target_of(None) for _ in range(50)}

    assert len(by_session) == 1
    assert drawn == {"a", "b"}
    assert {router.target_of(None, f"session {number}") for number in range(50)} == {"a", "b"}
    assert router.target_of("ann", "session 1") == router.target_of("ann", "session 2")


def test_requests_are_sent_to_their_target_and_counted():
    router = Router(RoutingConfig(experiment="colors", weights={"a": 1, "b": 1}))

    async def from_a(request: dict) -> str:
        return f"a: {request['user']}"

    async def from_b(request: dict) -> str:
        raise ValueError("b is broken")

    routed = Routed(router, {"a": from_a, "b": from_b}, lambda request: (request["user"], None))

    async def ask_all() -> list[object]:
        return await asyncio.gather(*(routed({"user": user}) for user in range(20)), return_exceptions=True)

    answers = asyncio.run(ask_all())

    for user, answer in enumerate(answers):
        assert str(answer) == (f"a: {user}" if router.target_of(user) == "a" else "b is broken")
    assert routed.num_sent["a"] == sum(isinstance(answer, str) for answer in answers)
    assert sum(routed.num_sent.values()) == 20


@pytest.mark.parametrize("weights", [{}, {"a": 0}])
def test_weights_without_anybody_are_refused(weights):
    with pytest.raises(InputError, match=r"routing\.weights: none of .* is above 0"):
        RoutingConfig.parse({"experiment": "e", "weights": weights})
