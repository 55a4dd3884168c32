"""The queue of batches in flight: none gets older than its bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.rl.rollout_queue import RolloutQueue, StaleRolloutsError


def test_batches_come_out_in_the_order_begun():
    queue: RolloutQueue[str] = RolloutQueue(capacity=3, max_staleness=2)
    for name in ("first", "second", "third"):
        queue.put(0, name)
    assert [queue.take(step) for step in range(3)] == ["first", "second", "third"]
    assert queue.observed_staleness == [0, 1, 2]


def test_without_lag_a_batch_is_begun_by_the_policy_of_its_step_alone():
    queue: RolloutQueue[str] = RolloutQueue(capacity=1, max_staleness=0)
    queue.put(0, "first")
    queue.take(0)
    assert not queue.may_begin(version=0)
    assert queue.may_begin(version=1)


def test_a_batch_that_would_be_too_old_at_its_turn_is_not_begun():
    queue: RolloutQueue[str] = RolloutQueue(capacity=10, max_staleness=1)
    queue.put(0, "first")
    queue.put(0, "second")
    assert not queue.may_begin(version=0)
    with pytest.raises(
        StaleRolloutsError, match=r"batch 2, sampled by version 0, .* age of 2 steps; the bound is 1"
    ):
        queue.put(0, "third")
    assert len(queue) == 2


def test_a_batch_that_became_too_old_is_not_learned_from():
    """The learner has taken steps that the queue knows nothing of."""
    queue: RolloutQueue[str] = RolloutQueue(capacity=2, max_staleness=1)
    queue.put(0, "first")
    with pytest.raises(StaleRolloutsError, match="batch 0, sampled by version 0, is 2 steps old"):
        queue.take(2)
    assert len(queue) == 1


def test_there_is_no_room_beyond_the_bound():
    queue: RolloutQueue[str] = RolloutQueue(capacity=1, max_staleness=5)
    queue.put(0, "first")
    assert not queue.may_begin(0)
    with pytest.raises(ValueError, match="holds 1 batches already"):
        queue.put(0, "second")


def test_a_version_that_does_not_exist_yet_is_refused():
    queue: RolloutQueue[str] = RolloutQueue(capacity=1, max_staleness=5)
    with pytest.raises(ValueError, match="does not exist yet"):
        queue.put(3, "first")
    with pytest.raises(LookupError):
        queue.take(0)


@given(
    lag=st.integers(0, 4),
    updates=st.integers(1, 3),
    capacity=st.integers(1, 6),
    sync_every=st.integers(1, 5),
    greed=st.lists(st.booleans(), min_size=1, max_size=60),
)
def test_whenever_rollouts_are_begun_and_weights_are_sent_the_bound_holds(
    lag, updates, capacity, sync_every, greed
):
    """A learner that takes whatever is there, while as many batches are begun as the queue allows."""
    bound = lag + updates - 1
    sync_every = min(sync_every, max((bound + 1) // updates, 1))
    queue: RolloutQueue[tuple[int, int]] = RolloutQueue(capacity, bound, updates_per_batch=updates)
    sent, begun, taken, ages = 0, 0, [], []
    for step, begins_more in enumerate(greed):
        while queue.may_begin(sent) and (begins_more or not len(queue)):
            queue.put(sent, (begun, sent))
            begun += 1
        number, sampled_by = queue.take(step * updates)
        taken.append(number)
        ages += [step * updates + update - sampled_by for update in range(updates)]
        if (step + 1) % sync_every == 0:
            sent = (step + 1) * updates
    assert taken == list(range(len(greed)))
    assert max(ages) == max(queue.observed_staleness) <= bound
    assert min(ages) >= 0


def test_the_updates_of_a_batch_make_it_older():
    with pytest.raises(ValueError, match="a bound from 3, for 4 updates per batch"):
        RolloutQueue(capacity=1, max_staleness=2, updates_per_batch=4)
    queue: RolloutQueue[str] = RolloutQueue(capacity=2, max_staleness=3, updates_per_batch=4)
    queue.put(0, "first")
    assert not queue.may_begin(0)
    queue.take(0)
    assert queue.observed_staleness == [3]
    assert queue.may_begin(4)
