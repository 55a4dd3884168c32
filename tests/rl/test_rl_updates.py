"""What the updates of a batch learn from: shares that are as equal as they can be, and none that is empty."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from rayrec.rl.config import RlConfig
from rayrec.rl.prompts import Prompts
from rayrec.rl.rollouts import RolloutSummary
from rayrec.rl.training import PolicyTraining
from rayrec.samples.base.batches import SampleBatch


def prompts_of(num_users: int) -> Prompts:
    users_U = np.arange(num_users)
    samples = SampleBatch(
        step=0,
        row_keys_B=users_U,
        user_ids_B=users_U,
        item_ids_N=users_U,
        offsets_B1=np.arange(num_users + 1),
        targets_B=users_U,
    )
    return Prompts(samples, users_U)


class Group:
    """Learners, or whoever draws: it remembers what it was told."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.told: list[tuple] = []

    def __len__(self) -> int:
        return self._size

    def each(self, method, arguments):
        self.told += arguments
        return []

    def spread(self, method, pieces, num_returns=1):
        self.told += pieces
        return [(piece, piece) if num_returns == 2 else piece for piece in pieces]

    def rank_zero(self, method, *arguments, num_returns=1):
        return arguments * num_returns


def shares(num_users: int, updates: int, chunk_users: int, learners: int = 1):
    """Users of the chunks of every update, as those who draw and the learners are told of them."""
    config = RlConfig.parse(
        {
            "init_from": "run",
            "rewards": {"parts": [{"kind": "hit"}]},
            "learner": {"updates_per_batch": updates},
            "rollout": {"chunk_users": chunk_users},
        }
    )
    controller = SimpleNamespace(
        is_colocated=True,
        learner=Group(learners),
        rollouts=Group(1),
        rewards=Group(1),
        reference=Group(1),
    )
    stream = SimpleNamespace(step=lambda step: prompts_of(num_users))
    training = PolicyTraining(config, controller, stream)
    training._begin(0)
    chunks = [chunk for (chunk, _) in controller.rollouts.told]
    drawn = [RolloutSummary(len(chunk), len(chunk), len(chunk), 0.0, 0) for chunk in chunks]
    batch = SimpleNamespace(rewarded=chunks, reference=[f"of {chunk.chunk}" for chunk in chunks])
    found = []
    for update in range(updates):
        told = training._shares(batch, drawn, update)
        assert len(told) == learners
        users = [
            each.samples.user_ids_B.tolist() for totals, *parts in told for each in parts[: len(parts) // 2]
        ]
        found.append(sorted(chain.from_iterable(users)))
        assert {totals.num_groups for totals, *_ in told} == {len(found[-1])}
    return [len(chunk) for chunk in chunks], found


@pytest.mark.parametrize(("num_users", "updates", "chunk_users"), [(410, 4, 64), (277, 4, 64), (9, 2, 3)])
def test_updates_have_equal_shares(num_users, updates, chunk_users):
    sizes, found = shares(num_users, updates, chunk_users)
    assert sorted(chain.from_iterable(found)) == list(range(num_users))
    # Each has as many chunks, whose sizes differ by one.
    assert max(map(len, found)) - min(map(len, found)) <= len(sizes) // updates
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= chunk_users


def test_by_hand():
    sizes, found = shares(num_users=10, updates=2, chunk_users=3)
    assert sizes == [3, 3, 2, 2]
    assert found == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]


@pytest.mark.parametrize("num_users", [1, 3, 4, 5, 7])
def test_no_update_is_without_users(num_users):
    _, found = shares(num_users, updates=4, chunk_users=64)
    assert all(found)
    assert {user for users in found for user in users} == set(range(num_users))


def test_learners_share_an_update():
    _, found = shares(num_users=20, updates=2, chunk_users=5, learners=2)
    assert found == [[*range(5), *range(10, 15)], [*range(5, 10), *range(15, 20)]]


def test_a_policy_is_judged_by_the_weights_that_were_sent():
    config = RlConfig.parse({"init_from": "run", "rewards": {"parts": [{"kind": "hit"}]}})
    asked: list[str] = []

    def weights(method):
        asked.append(method)
        return f"weights {len(asked)}"

    drawing = Group(1)
    controller = SimpleNamespace(
        is_colocated=False, learner=SimpleNamespace(rank_zero=weights), rollouts=drawing
    )
    training = PolicyTraining(config, controller, SimpleNamespace())
    training._judged = lambda drawn: None
    training.judge(["somebody"], lists=None)
    assert (asked, drawing.told) == (["weights"], [("somebody", "weights 1", None)])
    training.step += 1  # the learner has others by now
    training.judge(["somebody"], lists=None)
    assert drawing.told[1] == ("somebody", "weights 2", None)
