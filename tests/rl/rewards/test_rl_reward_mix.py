"""Several rewards in one number, and what happens when one of them fails."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.rl.rewards.base import CandidateLists, RewardError
from rayrec.rl.rewards.list_quality import Diversity, Validity
from rayrec.rl.rewards.logged_targets import Hit, PrefixMatch, RankPosition
from rayrec.rl.rewards.mix import LARGEST, Moments, RewardMix, WeightedReward
from tests.rl.rewards.rl_lists import CODES_IL, Told, lists_of, permuted, some_lists

TWO = lists_of([[0, 1]])
FOUR = lists_of([[0, 1], [2, 3]])


def failure(mix: RewardMix, lists: CandidateLists) -> RewardError:
    with pytest.raises(RewardError) as raised:
        mix.mix(lists)
    return raised.value


def test_the_total_is_the_weighted_sum_and_parts_are_as_they_were():
    mix = RewardMix(
        [WeightedReward("a", Told([[1, 2]]), weight=0.5), WeightedReward("b", Told([[3, 5]]), weight=-1.0)]
    )

    mixed = mix.mix(TWO)

    assert mixed.total_UG.tolist() == [[-2.5, -4.0]]
    assert {name: part.tolist() for name, part in mixed.parts.items()} == {"a": [[1, 2]], "b": [[3, 5]]}
    assert {name: part.tolist() for name, part in mixed.weighted.items()} == {
        "a": [[0.5, 1]],
        "b": [[-3, -5]],
    }
    assert mixed.metrics == {
        "a.mean": 1.5,
        "a.std": 0.5,
        "b.mean": 4.0,
        "b.std": 1.0,
        "total.mean": -3.25,
        "total.std": 0.75,
    }


def test_a_scenario_may_have_a_weight_of_its_own():
    mix = RewardMix([WeightedReward("a", Told([[1, 2]] * 3), weight=1.0, by_scenario={"search": 10.0})])
    items = [[0, 1]] * 3

    said = mix.mix(lists_of(items, scenario_U=["home", "search", "feed"]))

    assert said.total_UG.tolist() == [[1, 2], [10, 20], [1, 2]]
    assert mix.mix(lists_of(items)).total_UG.tolist() == [[1, 2]] * 3


def test_a_part_without_weight_has_metrics_and_adds_nothing():
    mix = RewardMix([WeightedReward("a", Told([[1, 2]])), WeightedReward("b", Told([[3, 5]]), weight=0.0)])

    mixed = mix.mix(TWO)

    assert mixed.total_UG.tolist() == [[1, 2]]
    assert list(mixed.weighted) == ["a"]
    assert mixed.metrics["b.mean"] == 4.0


def test_standard_is_measured_by_all_candidates_so_far():
    told = Told([[0, 2]])
    mix = RewardMix([WeightedReward("a", told, weight=3.0, normalize="standard")])

    # 0 and 2: mean 1, std 1.
    assert mix.mix(TWO).total_UG.tolist() == [[-3, 3]]

    # 0, 2, 4, 2: mean 2, variance (4 + 0 + 4 + 0) / 4 = 2.
    told.reward = [[4, 2]]
    second = mix.mix(TWO)

    assert second.total_UG == pytest.approx(np.array([[3 * 2 / 2**0.5, 0]]))
    assert second.parts["a"].tolist() == [[4, 2]]
    assert second.metrics["a.std"] == 1.0  # of the batch, as it is


def test_candidates_that_are_all_alike_are_worth_0_when_normalized():
    mix = RewardMix([WeightedReward("a", Told([[0.1, 0.1], [0.1, 0.1]]), normalize="standard")])

    for _ in range(3):
        assert mix.mix(FOUR).total_UG == pytest.approx(np.zeros((2, 2)), abs=1e-12)


def test_missing_candidates_count_in_no_moment_and_no_figure():
    mix = RewardMix([WeightedReward("a", Told([[0, 2, 0]]), normalize="standard")])

    mixed = mix.mix(lists_of([[3, 4, -1]]))

    # Mean 1 and std 1 are those of the two items; the 0 of the missing one is normalized by them.
    assert mixed.total_UG.tolist() == [[-1, 1, -1]]
    assert (mixed.metrics["a.mean"], mixed.metrics["a.std"]) == (1.0, 1.0)
    assert mixed.is_item_UG.tolist() == [[True, True, False]]


def test_lists_without_any_candidate_change_nothing():
    mix = RewardMix([WeightedReward("a", Told([[0, 2]]), normalize="standard")])
    mix.mix(TWO)
    before = mix.state()

    mixed = mix.mix(lists_of([[-1, -1]]))

    assert mix.state() == before
    assert (mixed.metrics["a.mean"], mixed.metrics["total.std"]) == (0.0, 0.0)


def test_lists_that_do_not_teach_are_measured_by_those_before():
    told = Told([[0, 2]])
    mix = RewardMix([WeightedReward("a", told, normalize="standard")])
    mix.mix(TWO)
    before = mix.state()

    told.reward = [[5, 1]]
    mixed = mix.mix(TWO, learns=False)

    assert mixed.total_UG.tolist() == [[4, 0]]
    assert mix.state() == before


def test_a_resumed_mix_goes_on_as_the_first_would():
    def mix_of(told: Told) -> RewardMix:
        return RewardMix([WeightedReward("a", told, normalize="standard"), WeightedReward("b", Validity())])

    told = Told([[0.1, 0.7], [0.3, 0.4]])
    first = mix_of(told)
    first.mix(FOUR)
    kept = json.loads(json.dumps(first.state()))
    second = mix_of(told)
    second.load(kept)
    told.reward = [[0.9, 0.2], [1.3, 0.5]]

    assert set(kept) == {"a.count", "a.mean", "a.squares"}
    assert (first.mix(FOUR).total_UG == second.mix(FOUR).total_UG).all()
    assert first.state() == second.state()


def test_the_state_of_other_parts_is_refused():
    mix = RewardMix([WeightedReward("a", Validity(), normalize="standard")])
    other = RewardMix([WeightedReward("b", Validity(), normalize="standard")])

    with pytest.raises(InputError, match=r"other rewards .*a\.count, .*b\.count"):
        mix.load(other.state())


batches = st.lists(st.lists(st.floats(-1e3, 1e3), max_size=20), min_size=1, max_size=6).filter(any)


@given(batches)
def test_running_moments_are_those_of_all_numbers_at_once(values):
    moments = Moments()
    for batch in values:
        moments = moments.with_batch(np.array(batch, dtype=np.float64))
    whole = np.concatenate([np.array(batch, dtype=np.float64) for batch in values])

    assert moments.count == len(whole)
    assert moments.mean == pytest.approx(whole.mean(), abs=1e-9)
    assert moments.std == pytest.approx(whole.std(), abs=1e-6)


def test_moments_of_large_numbers_keep_their_small_differences():
    moments = Moments()
    for _ in range(1000):
        moments = moments.with_batch(np.array([1e6, 1e6 + 1.0]))

    assert moments.std == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_reward_user_and_item(value):
    mix = RewardMix(
        [
            WeightedReward("fine", Told([[1, 2], [3, 4]]), normalize="standard"),
            WeightedReward("bad", Told([[0, 0], [0, value]])),
        ]
    )
    before = mix.state()

    error = failure(mix, FOUR)

    assert (error.reward, error.user_key, error.position, error.item) == ("bad", "u1", 1, 3)
    assert str(error).startswith(
        "the reward 'bad' of user 'u1', catalog item 3 at position 1 of the list: it is "
    )
    assert mix.state() == before


def test_the_first_of_several_samples_is_named_and_a_missing_candidate_is_called_so():
    mix = RewardMix([WeightedReward("bad", Told([[0, np.nan], [np.nan, 0]]))])

    error = failure(mix, lists_of([[0, -1], [2, 3]]))

    assert (error.user_key, error.position, error.item) == ("u0", 1, -1)
    assert "no item at position 1" in str(error)


def test_a_weight_that_overflows_is_refused():
    mix = RewardMix(
        [
            WeightedReward("fine", Told([[1, 2]]), normalize="standard"),
            WeightedReward("vast", Told([[0.0, 1e99]]), weight=1e300),
        ]
    )
    before = mix.state()

    error = failure(mix, TWO)

    assert (error.reward, error.position) == ("vast", 1)
    assert "with its weight, it is inf" in str(error)
    assert mix.state() == before


def test_two_rewards_whose_sum_would_overflow_are_refused_by_the_first():
    mix = RewardMix([WeightedReward("a", Told([[0, 1e308]])), WeightedReward("b", Told([[0, 1e308]]))])

    error = failure(mix, TWO)

    assert (error.reward, error.user_key, error.position) == ("a", "u0", 1)
    assert "it is 1e+308" in str(error)


@pytest.mark.parametrize("value", [1e200, -1e200])
def test_a_number_whose_square_would_overflow_spoils_no_moments(value):
    told = Told([[0, 2]])
    mix = RewardMix([WeightedReward("a", told, normalize="standard")])
    mix.mix(TWO)
    before = mix.state()
    told.reward = [[value, 0]]

    error = failure(mix, TWO)

    assert (error.reward, error.position) == ("a", 0)
    assert mix.state() == before
    told.reward = [[4, 2]]
    assert mix.mix(TWO).total_UG == pytest.approx(np.array([[2**0.5, 0]]))


def test_the_largest_rewards_that_are_taken_have_finite_moments_and_figures():
    mix = RewardMix([WeightedReward("a", Told([[-LARGEST, LARGEST]]), normalize="standard")])

    mixed = mix.mix(TWO)

    assert mixed.total_UG.tolist() == [[-1, 1]]
    assert mixed.metrics["a.std"] == pytest.approx(LARGEST)


@pytest.mark.parametrize("reward", [[1.0, 2.0], [[1.0], [2.0]], 3.0, [[[1.0, 2.0]]]])
def test_another_shape_is_refused(reward):
    told = Told([[0, 1]])
    mix = RewardMix([WeightedReward("a", told, normalize="standard")])
    mix.mix(TWO)
    before = mix.state()
    told.reward = reward

    error = failure(mix, TWO)

    shape = np.shape(reward)
    assert f"it has the shape {shape}, and the lists of 1 users with 2 candidates need (1, 2)" in str(error)
    assert mix.state() == before


class FailsFor:
    """Fails wherever there is a certain item."""

    def __init__(self, item: int) -> None:
        self.item, self.num_calls = item, 0

    def __call__(self, lists: CandidateLists) -> Any:
        self.num_calls += 1
        if (lists.items_UG == self.item).any():
            raise KeyError(self.item)
        return np.zeros(lists.items_UG.shape)


@pytest.mark.parametrize("user", [0, 1, 37, 63])
def test_the_user_whose_list_makes_a_reward_fail_is_found_in_few_calls(user):
    items = np.zeros((64, 2), dtype=np.int64)
    items[user:] = 9  # this one and all after it
    reward = FailsFor(9)
    mix = RewardMix([WeightedReward("fine", Validity(), normalize="standard"), WeightedReward("bad", reward)])
    before = mix.state()

    error = failure(mix, lists_of(items.tolist()))

    assert (error.reward, error.user_key, error.position) == ("bad", f"u{user}", None)
    assert str(error) == f"the reward 'bad' of user 'u{user}': KeyError: 9"
    assert reward.num_calls <= 1 + 6 + 1
    assert isinstance(error.__cause__, KeyError)
    assert mix.state() == before


def test_a_failure_that_no_user_is_the_reason_of_names_none():
    def wants_all(lists: CandidateLists) -> Any:
        if lists.num_users == 2:
            raise OSError("the service is gone")
        return np.zeros(lists.items_UG.shape)

    error = failure(RewardMix([WeightedReward("a", wants_all)]), FOUR)

    assert error.user_key is None
    assert str(error) == "the reward 'a': OSError: the service is gone"


def test_what_is_no_numbers_is_refused():
    error = failure(RewardMix([WeightedReward("a", lambda lists: [["much", "more"]])]), TWO)  # type: ignore[arg-type]

    assert "ValueError: could not convert string to float" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        RewardError("a", "it is nan", "u1", 3, 17),
        RewardError("a", "it is nan", "u1", 3),
        RewardError("a", "KeyError: 1", "u1"),
        RewardError("a", "gone"),
    ],
)
def test_errors_travel_between_processes(error):
    again = pickle.loads(pickle.dumps(error))

    assert isinstance(again, RewardError)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_what_a_reward_keeps_for_itself_is_not_changed_by_the_mix():
    kept = np.array([[1.0, 3.0]])
    mix = RewardMix([WeightedReward("a", lambda lists: kept, normalize="standard")])

    mixed = mix.mix(TWO)
    mixed.parts["a"][0, 0] = 99.0

    assert kept.tolist() == [[1, 3]]


def test_a_reward_cannot_change_the_lists_that_are_learned_from():
    items_UG = np.array([[4, 2]])
    lists = dataclasses.replace(lists_of(items_UG), items_UG=items_UG)

    def sorting(lists):
        lists.items_UG.sort(axis=1)
        return np.zeros(lists.items_UG.shape)

    with pytest.raises(RewardError, match="read-only"):
        RewardMix([WeightedReward("a", sorting)]).mix(lists)

    assert items_UG.tolist() == [[4, 2]]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one part"),
        ([WeightedReward("a", Validity(), weight=0.0)], "got 1 without"),
        ([WeightedReward("a", Validity()), WeightedReward("a", Validity())], "must differ"),
        ([WeightedReward("total", Validity())], "must differ from each other and from 'total'"),
    ],
)
def test_mixes_that_mean_nothing_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        RewardMix(parts)


@given(lists=some_lists(), seed=st.integers(0, 99))
def test_permuting_users_permutes_their_totals(lists, seed):
    def mix() -> RewardMix:
        return RewardMix(
            [
                WeightedReward("hit", Hit(), by_scenario={"search": 2.0}),
                WeightedReward("prefix", PrefixMatch(CODES_IL), 0.5, normalize="standard"),
                WeightedReward("rank", RankPosition(penalty=True)),
                WeightedReward("diversity", Diversity(CODES_IL), 0.1, {"home": 0.0}, "standard"),
            ]
        )

    order_U = np.random.default_rng(seed).permutation(lists.num_users)

    # Moments are sums over all users, which their order changes in the last bits.
    assert mix().mix(permuted(lists, order_U)).total_UG == pytest.approx(
        mix().mix(lists).total_UG[order_U], abs=1e-9
    )


def test_lists_that_are_compared_over_time_are_measured_by_nothing_that_moves():
    mix = RewardMix(
        [WeightedReward("novelty", lambda lists: lists.items_UG * 1.0, 2.0, normalize="standard")]
    )
    lists = lists_of([[1, 2], [3, 4]])
    before = mix.mix(lists, learns=False, normalizes=False).total_UG
    mix.mix(lists_of([[50, 60], [70, 90]]))
    after = mix.mix(lists, learns=False, normalizes=False).total_UG
    assert before.tolist() == after.tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert mix.mix(lists, learns=False).total_UG.tolist() != before.tolist()
