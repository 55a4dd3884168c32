"""Two policies compared user by user.

Axes: U users, K positions of a list, T temperatures, I items.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from rayrec.rl.evaluation import Comparison, best_temperature, worsened
from rayrec.rl.list_metrics import EvaluatedLists, SampledLists, diversity, relative_change, summarized
from rayrec.rl.rewards.config import RewardsConfig
from rayrec.rl.rewards.mix import TOTAL


def rewards(*parts: dict) -> RewardsConfig:
    return RewardsConfig.parse({"parts": parts})


def evaluated(positions_U, rewards_UT=None, behavior_U=None, top_UK=None) -> EvaluatedLists:
    num_users = len(positions_U)
    rewards_UT = np.ones((num_users, 1)) if rewards_UT is None else np.array(rewards_UT, dtype=float)
    return EvaluatedLists(
        user_ids_U=np.arange(num_users),
        positions_U=np.array(positions_U),
        top_UK=np.zeros((num_users, 2), dtype=np.int64) if top_UK is None else np.array(top_UK),
        behavior_U=np.full(num_users, -1) if behavior_U is None else np.array(behavior_U),
        rewards={TOTAL: rewards_UT, "hit": rewards_UT / 2},
    )


def test_scores_of_a_user_depend_on_the_position_of_the_target():
    scores = evaluated([0, 2, 9, 10, 50]).scores()
    assert scores["recall@1"].tolist() == [1, 0, 0, 0, 0]
    assert scores["recall@10"].tolist() == [1, 1, 1, 0, 0]
    assert scores["recall@50"].tolist() == [1, 1, 1, 1, 0]
    assert scores["ndcg@5"].tolist() == pytest.approx([1, 0.5, 0, 0, 0])
    assert (scores["reward"].mean(), scores["reward/hit"].mean()) == (1.0, 0.5)


def test_the_temperature_is_that_of_the_best_lists(caplog):
    lists = evaluated([0, 0], [[0.1, 0.5, 0.2], [0.0, 0.4, 0.5]])
    assert best_temperature(lists, (0.5, 0.7, 1.0), "the policy") == 0.7
    assert not caplog.records


def test_a_best_temperature_at_the_edge_of_those_tried_is_reported(caplog):
    assert best_temperature(evaluated([0], [[0.1, 0.3]]), (1.0, 0.5), "the policy") == 0.5
    assert (
        "lists of the policy have the highest reward at 0.5, the lowest of evaluation.temperatures"
        in caplog.text
    )
    caplog.clear()
    assert best_temperature(evaluated([0], [[0.1]]), (1.0,), "the policy") == 1.0
    assert not caplog.records


def test_a_change_of_the_same_users_is_surer_than_either_figure():
    random = np.random.default_rng(0)
    before_U = (random.random(2_000) < 0.1).astype(float)
    after_U = before_U.copy()
    after_U[np.flatnonzero(before_U == 0)[:20]] = 1.0
    change = relative_change(after_U, before_U)
    assert change.value == pytest.approx(20 / before_U.sum())
    assert 0 < change.low < change.value < change.high
    alone = summarized(before_U)
    assert change.high - change.low < (alone.high - alone.low) / alone.value


def test_from_nothing_there_is_no_relative_change():
    assert all(math.isnan(value) for value in relative_change(np.ones(3), np.zeros(3)))


def test_a_penalty_that_shrinks_is_a_gain():
    """Of rewards below 0, such as rank_position with its penalty; half of them is half of the way to 0."""
    before_U = -np.array([0.2, 0.4, 0.6, 0.8])
    gain = relative_change(before_U / 2, before_U)
    assert gain == pytest.approx((0.5, 0.5, 0.5))
    assert relative_change(before_U * 2, before_U) == pytest.approx((-1.0, -1.0, -1.0))
    report = {"change": {"reward/rank_position": gain._asdict()}}
    assert not worsened(report, rewards({"kind": "rank_position", "penalty": True}))


def test_a_cost_that_grows_is_worse_and_one_that_shrinks_is_not():
    before_U = np.array([0.2, 0.4, 0.6, 0.8])
    grown, shrunk = (relative_change(before_U * times, before_U)._asdict() for times in (2.0, 0.5))
    cost = rewards({"kind": "hit"}, {"kind": "novelty", "weight": -1.0})
    both = rewards({"kind": "hit"}, {"kind": "novelty", "weight": -1.0, "by_scenario": {"home": 1.0}})

    assert not worsened({"change": {"reward/novelty": shrunk}}, cost)
    (sentence,) = worsened({"change": {"reward/novelty": grown}}, cost)
    assert sentence.startswith("reward/novelty is worse than")
    assert "+100.0%" in sentence
    assert len(worsened({"change": {"reward": shrunk, "reward/hit": shrunk}}, cost)) == 2
    for change in (grown, shrunk):
        assert not worsened({"change": {"reward/novelty": change}}, both)


def test_diversity_by_hand():
    codes_IL = np.array([[0, 0], [0, 1], [1, 1], [1, 1]])
    # Half of the codes, none; and of the second list, which has one item, nothing.
    found = diversity(np.array([[0, 1, 2], [3, -1, -1]]), codes_IL, num_items=4)
    assert found["distance"] == pytest.approx(1 - 0.5 / 3)
    assert found["coverage"] == 1.0


def test_what_became_worse_is_reported_unless_it_may_be_chance():
    before, after = evaluated([0] * 300 + [60] * 300), evaluated([0] * 150 + [20] * 150 + [60] * 300)
    report = Comparison(before, after, np.zeros((4, 2), dtype=int)).report()
    sentences = worsened(report, rewards({"kind": "hit"}))
    assert any(
        sentence.startswith("recall@10 is worse than") and "-50.0%" in sentence for sentence in sentences
    )
    assert not any(sentence.startswith(("recall@50", "reward")) for sentence in sentences)


def test_users_are_told_apart_by_what_they_did():
    before = evaluated([0, 60, 60, 60], behavior_U=[0, 0, 1, -1])
    after = evaluated([0, 60, 3, 3], behavior_U=[0, 0, 1, -1])
    report = Comparison(before, after, np.zeros((4, 2), dtype=int), ["VIEW", "LIKE", "SHARE"]).report()
    found = report["recall@10 by behavior"]
    assert set(found) == {"VIEW", "LIKE"}
    assert (found["VIEW"]["before"], found["VIEW"]["after"], found["VIEW"]["num_users"]) == (0.5, 0.5, 2)
    assert (found["LIKE"]["before"], found["LIKE"]["after"]) == (0.0, 1.0)


def test_parts_of_users_make_the_whole():
    parts = [evaluated([0, 1], behavior_U=[0, 1]), evaluated([2], behavior_U=[1])]
    whole = EvaluatedLists.concatenate(parts)
    assert whole.positions_U.tolist() == [0, 1, 2]
    assert whole.some(whole.behavior_U == 1).positions_U.tolist() == [1, 2]
    assert whole.rewards[TOTAL].shape == (3, 1)


class Users(SimpleNamespace):
    """Prompts, as far as metrics read them."""

    def __len__(self) -> int:
        return len(self.targets_U)


def test_a_list_with_free_places_is_worth_what_its_items_are_worth():
    """Otherwise a list of one penalty would be better than one of three."""
    users = Users(
        targets_U=np.array([5, 5, 5]), samples=SimpleNamespace(user_ids_B=np.arange(3)), target_labels={}
    )
    items_UK = np.array([[1, 2, 3], [1, -1, -1], [-1, -1, -1]])
    sampled = SampledLists(users, items_UK, ((items_UK, np.zeros((3, 3))),))

    found = sampled.evaluated(lambda items_UK, _: {TOTAL: np.where(items_UK >= 0, -1.0, 7.0)})

    np.testing.assert_array_equal(found.rewards[TOTAL][:, 0], [-1.0, -1.0, 0.0])
