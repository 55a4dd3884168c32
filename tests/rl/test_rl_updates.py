"""What the updates of a batch learn from: equal shares, none of them empty."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from rayrec.rl.config import RlConfig
from rayrec.rl.controller import SingleController
from rayrec.rl.learner import BatchTotals
from rayrec.rl.list_metrics import EvaluatedLists
from rayrec.rl.prompts import Prompts
from rayrec.rl.rollouts import ChunkSummary
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


class Learner:
    """The handle of a learner that remembers what it is asked to learn from."""

    def __init__(self) -> None:
        self.calls: list[tuple[BatchTotals, tuple]] = []
        self.update = SimpleNamespace(remote=lambda totals, *parts: self.calls.append((totals, parts)))


class Controller(SingleController):
    """Workers that only remember; a chunk stands for its rollouts, rewards and log-probabilities."""

    is_colocated = True

    def __init__(self, num_learners: int = 1) -> None:
        self._learners = [Learner() for _ in range(num_learners)]
        self.chunks: list[Prompts] = []

    def sample(self, chunks, weights):
        self.chunks = list(chunks)
        return self.chunks

    def score(self, rollouts):
        size = len(rollouts)
        return ChunkSummary(0, size, size, size, size, 0.0, {}, 0, ()), rollouts

    def reference_log_probs(self, rollouts):
        return list(rollouts)

    def get(self, promises):
        return list(promises)


def shares(num_users: int, updates: int, chunk_users: int, learners: int = 1):
    """(sizes of chunks, users of every update) as the workers see them."""
    config = RlConfig.parse(
        {
            "init_from": "run",
            "rewards": {"parts": [{"kind": "hit"}]},
            "learner": {"updates_per_batch": updates},
            "rollout": {"chunk_users": chunk_users},
        }
    )
    controller = Controller(learners)
    stream = SimpleNamespace(read_on=lambda step, read: (prompts_of(num_users), read + 1))
    training = PolicyTraining(config, controller, stream)
    batch = training._source.complete(training._source.begin(0, 0, None))
    found = []
    for update in range(updates):
        chunks = training._share_of(batch.learned, update)
        totals = training._totals(chunks)
        controller.update(totals, [each.scored for each in chunks], [each.reference for each in chunks])
        calls = [learner.calls[update] for learner in controller._learners]
        users = []
        for total, parts in calls:
            chunks, of_reference = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            assert chunks == of_reference
            assert total.num_groups == totals.num_groups
            users += [each.samples.user_ids_B.tolist() for each in chunks]
        found.append(sorted(chain.from_iterable(users)))
        assert totals.num_groups == len(found[-1])
    return [len(chunk) for chunk in controller.chunks], found


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


class Weighed(SingleController):
    """Rollout workers of their own, and a learner whose weights are asked for."""

    is_colocated = False

    def __init__(self) -> None:
        self.num_asked = 0
        self.evaluated: list[str] = []

    def weights(self):
        self.num_asked += 1
        return f"weights {self.num_asked}"

    def evaluate(self, prompts, weights, lists):
        self.evaluated.append(weights)
        return []


def test_a_policy_is_evaluated_with_weights_that_were_sent_if_they_are_new(monkeypatch):
    monkeypatch.setattr(EvaluatedLists, "concatenate", lambda parts: parts)
    config = RlConfig.parse({"init_from": "run", "rewards": {"parts": [{"kind": "hit"}]}})
    controller = Weighed()
    training = PolicyTraining(config, controller, SimpleNamespace())
    training.evaluate([], lists=None)
    assert controller.evaluated == ["weights 1"]
    training.step += 1  # by now, the learner has others
    training.evaluate([], lists=None)
    assert controller.evaluated[1:] == ["weights 2"]
