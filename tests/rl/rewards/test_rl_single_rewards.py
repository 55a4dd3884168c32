"""What each reward is worth, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.inference.answers import Query
from rayrec.platform.errors import InputError
from rayrec.rl.rewards.base import CandidateLists, Reward
from rayrec.rl.rewards.external import LearnedRanker
from rayrec.rl.rewards.item_facts import Novelty
from rayrec.rl.rewards.list_quality import Diversity, Validity
from rayrec.rl.rewards.logged_targets import Hit, PrefixMatch, RankPosition, positions
from tests.rl.rewards.rl_lists import CODES_IL, NUM_ITEMS, lists_of, permuted, some_lists

THIRD = 1.0 / math.log2(3.0)
"""0.63: gain in NDCG of the second position."""


def test_validity_is_1_for_items():
    assert Validity()(lists_of([[3, -1], [-1, 0]])).tolist() == [[1, 0], [0, 1]]


def test_a_hit_is_the_logged_item_and_nobody_hits_an_unknown_one():
    lists = lists_of([[3, 1, 3], [0, 1, 2], [4, -1, -1]], targets=[3, 4, -1])

    assert Hit()(lists).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_a_prefix_matches_as_far_as_leading_codes_are_those_of_the_target():
    # Item 2 shares its second code with item 0, but not the first: it has nothing in common.
    lists = lists_of([[0, 1, 2, -1], [0, 1, 2, 3]], targets=[0, -1])

    assert PrefixMatch(CODES_IL)(lists).tolist() == [[1, 0.5, 0, 0], [0, 0, 0, 0]]


def test_codes_behind_a_difference_do_not_count():
    codes_IL = np.array([[7, 1, 2, 3], [7, 1, 9, 3]])

    assert PrefixMatch(codes_IL)(lists_of([[1]], targets=[0])).tolist() == [[0.5]]


def test_the_target_is_rewarded_by_its_position_among_log_probabilities():
    lists = lists_of(
        [[1, 2, 3], [1, 2, 3], [1, 2, 3]], [[-3.0, -1.0, -2.0]] * 3, targets=[2, 3, 1]
    )  # at the positions 0, 1 and 2

    assert RankPosition()(lists) == pytest.approx(np.array([[0, 1, 0], [0, 0, THIRD], [0.5, 0, 0]]))


def test_an_item_drawn_twice_has_one_position():
    lists = lists_of([[4, 4, 1, 0, 1, -1]], [[-1.0, -1.0, -2.0, -3.0, -2.0, -9.0]])

    assert positions(lists)[0, :5].tolist() == [0, 0, 1, 2, 1]


def test_items_of_one_probability_keep_the_order_of_their_list():
    assert positions(lists_of([[2, 0, 1]], [[-1.0, -1.0, -1.0]])).tolist() == [[0, 1, 2]]


def test_the_penalty_falls_on_wrong_items_the_more_the_likelier_they_are():
    lists = lists_of([[1, 2, 3], [1, 2, 0], [1, 2, 3]], targets=[2, 4, -1])
    sum_ = 1.0 + THIRD + 0.5

    penalty_UG = RankPosition(penalty=True)(lists)

    assert penalty_UG == pytest.approx(
        np.array(
            [
                [-1.0 / sum_, 0, -0.5 / sum_],
                [-1.0 / sum_, -THIRD / sum_, -0.5 / sum_],
                [0, 0, 0],  # whose target is unknown
            ]
        )
    )
    assert -1.0 / sum_ == pytest.approx(-0.46928, abs=1e-5)


def test_the_penalty_may_be_only_for_lists_with_a_hit():
    lists = lists_of([[2, 1], [2, 1]], targets=[2, 0])
    sum_ = 1.0 + THIRD

    penalty_UG = RankPosition(penalty=True, only_with_hit=True)(lists)

    assert penalty_UG == pytest.approx(np.array([[0, -THIRD / sum_], [0, 0]]))


def test_a_list_with_fewer_candidates_is_penalized_as_much_in_sum():
    penalty_UG = RankPosition(penalty=True)(lists_of([[2, 1, 3], [2, -1, -1]], targets=[0, 0]))

    assert penalty_UG.sum(axis=1) == pytest.approx([-1.0, -1.0])


def test_lists_to_penalize_have_to_be_penalized():
    with pytest.raises(ValueError, match="set penalty"):
        RankPosition(only_with_hit=True)


def test_diversity_is_what_an_item_has_not_in_common_with_the_others():
    # Items 0 and 1 share one of two codes; item 2 shares none with them.
    lists = lists_of([[0, 1, 2], [0, 1, -1], [0, 0, 1], [0, -1, -1], [-1, -1, -1]])

    assert Diversity(CODES_IL)(lists) == pytest.approx(
        np.array([[0.75, 0.75, 1], [0.5, 0.5, 0], [0.25, 0.25, 0.5], [1, 0, 0], [0, 0, 0]])
    )


def test_novelty_counts_the_bits_of_an_item_as_share_of_the_most():
    # Of 8 events, 4, 2, 1, 1 and none: 1, 2, 3, 3 bits, and as many as with one.
    novelty = Novelty(np.array([4, 2, 1, 1, 0]))

    assert novelty.value_I == pytest.approx(np.array([1 / 3, 2 / 3, 1, 1, 1]))
    assert novelty(lists_of([[1, -1, 0]])) == pytest.approx(np.array([[2 / 3, 0, 1 / 3]]))


def test_one_item_with_all_events_leaves_nothing_new():
    assert Novelty(np.array([5])).value_I.tolist() == [0.0]


def test_novelty_without_training_events_is_refused():
    with pytest.raises(InputError, match="all 3 items have none"):
        Novelty(np.zeros(3, dtype=np.int64))


def test_a_learned_ranker_is_asked_for_all_candidates_and_says_nothing_of_missing_ones():
    asked: list[tuple[list[int], list[list[int]]]] = []

    def ranker(queries, items_UG):
        asked.append(([query.user_id for query in queries], items_UG.tolist()))
        return np.where(items_UG >= 0, items_UG * 0.1, np.nan)

    queries = [Query(np.array([1]), user_id=7), Query(np.array([2]), user_id=8)]
    reward_UG = LearnedRanker(ranker)(lists_of([[3, 1], [2, -1]], queries=queries))

    assert asked == [([7, 8], [[3, 1], [2, -1]])]
    assert reward_UG == pytest.approx(np.array([[0.3, 0.1], [0.2, 0]]))


def test_a_learned_ranker_leaves_nan_where_there_is_an_item():
    lists = lists_of([[3]], queries=[Query(np.array([1]))])

    assert np.isnan(LearnedRanker(lambda queries, items_UG: np.array([[np.nan]]))(lists)).all()


def test_a_learned_ranker_needs_queries():
    with pytest.raises(ValueError, match="needs the queries"):
        LearnedRanker(lambda queries, items_UG: np.zeros((1, 1)))(lists_of([[3]]))


def test_logged_items_have_the_place_that_their_probability_gives_them():
    lists = lists_of([[0, 1], [2, 3], [4, 5]], targets=[7, -1, 6], scenario_U=["a", "b", "c"])

    # Candidates have -1 and -2: the first target stands between them; the third one may not be sampled.
    logged = lists.with_targets(np.array([-1.5, -1.5, -np.inf]))

    assert logged.items_UG.tolist() == [[0, 1, 7], [2, 3, -1], [4, 5, -1]]
    assert logged.log_probs_UG[:, 2].tolist() == [-1.5, -np.inf, -np.inf]
    assert logged.scenario_U == lists.scenario_U
    assert Hit()(logged)[:, 2].tolist() == [1, 0, 0]
    assert RankPosition()(logged)[:, 2].tolist() == pytest.approx([1 / np.log2(3), 0, 0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"items_UG": np.zeros(3, dtype=np.int64)}, r"users by at least one candidate, got the shape \(3,\)"),
        ({"items_UG": np.zeros((2, 0), dtype=np.int64)}, r"got the shape \(2, 0\)"),
        ({"log_probs_UG": np.zeros((2, 2))}, r"must have the shape \(2, 3\) of the items, got \(2, 2\)"),
        ({"targets_U": np.zeros((2, 1), dtype=np.int64)}, r"one item of each user, got shape \(2, 1\)"),
        ({"targets_U": np.zeros(3, dtype=np.int64)}, "targets_U has 3 entries for the lists of 2 users"),
        ({"user_keys": ["a"]}, "user_keys has 1 entries for the lists of 2 users"),
        ({"scenario_U": ["a"]}, "scenario_U has 1 entries"),
    ],
)
def test_lists_of_other_shapes_are_refused(wrong, message):
    right = {
        "items_UG": np.zeros((2, 3), dtype=np.int64),
        "log_probs_UG": np.zeros((2, 3)),
        "targets_U": np.zeros(2, dtype=np.int64),
        "user_keys": ["a", "b"],
    }

    with pytest.raises(ValueError, match=message):
        CandidateLists(**{**right, **wrong})


REWARDS: dict[str, Callable[[], Reward]] = {
    "validity": Validity,
    "hit": Hit,
    "prefix_match": lambda: PrefixMatch(CODES_IL),
    "rank_position": RankPosition,
    "penalty": lambda: RankPosition(penalty=True),
    "penalty_with_hit": lambda: RankPosition(penalty=True, only_with_hit=True),
    "diversity": lambda: Diversity(CODES_IL),
    "novelty": lambda: Novelty(np.arange(1, NUM_ITEMS + 1)),
}

each_reward = pytest.mark.parametrize("make", REWARDS.values(), ids=REWARDS)


@each_reward
@given(lists=some_lists(), seed=st.integers(0, 99))
def test_permuting_users_permutes_their_rewards(make, lists, seed):
    order_U = np.random.default_rng(seed).permutation(lists.num_users)

    assert (make()(permuted(lists, order_U)) == make()(lists)[order_U]).all()


@each_reward
@given(lists=some_lists())
def test_rewards_are_bounded_finite_and_0_without_an_item(make, lists):
    reward_UG = make()(lists)

    assert reward_UG.shape == lists.items_UG.shape
    assert reward_UG.dtype == np.float64
    assert (np.abs(reward_UG) <= 1.0).all()
    assert (reward_UG[~lists.is_item_UG] == 0).all()


@each_reward
@given(lists=some_lists())
def test_equal_candidates_of_a_list_have_equal_rewards(make, lists):
    reward_UG = make()(lists)

    for items_G, reward_G in zip(lists.items_UG, reward_UG, strict=True):
        for item in set(items_G.tolist()):
            # Sums in another order may differ in their last bits.
            assert np.ptp(reward_G[items_G == item]) <= 1e-12


@given(lists=some_lists(known_targets=True))
def test_all_codes_match_of_hits_and_of_nothing_else(lists):
    prefix_UG, hit_UG = PrefixMatch(CODES_IL)(lists), Hit()(lists)

    assert ((prefix_UG == 1.0) == (hit_UG == 1.0)).all()


@given(lists=some_lists(known_targets=True))
def test_penalties_of_a_list_and_what_the_hit_would_cost_sum_to_one(lists):
    penalty_UG = RankPosition(penalty=True)(lists)
    gain_UG = np.where(lists.is_item_UG, 1 / np.log2(2.0 + positions(lists)), 0.0)
    of_hits_U = np.where(lists.is_hit_UG, gain_UG, 0.0).sum(axis=1) / np.maximum(gain_UG.sum(axis=1), 1e-9)

    assert -penalty_UG.sum(axis=1) + of_hits_U == pytest.approx(lists.is_item_UG.any(axis=1).astype(float))
