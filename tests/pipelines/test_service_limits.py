"""The queue and a service's controller agree on replicas through files."""

import pytest

from rayrec.pipelines.cluster.service_limits import FRESH_S, Limit, ReplicaState, ServiceLimits
from rayrec.platform.errors import InputError


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def limits(tmp_path, clock):
    return ServiceLimits(tmp_path, clock)


def has(limits, num_replicas, target, maximum, at=1000.0):
    limits.report(ReplicaState(at, num_replicas, target, wish=4, maximum=maximum))


def test_a_limit_outlives_both_and_is_done_when_the_replicas_are_gone(limits, tmp_path, clock):
    has(limits, 4, 4, maximum=4)
    assert not limits.allow(2, "job a needs the room")
    assert ServiceLimits(tmp_path, clock).limit() == Limit(2, "job a needs the room", 1000.0)
    has(limits, 4, 2, maximum=2)  # told, and two are ending
    assert not limits.allow(2, "job a needs the room")
    has(limits, 2, 2, maximum=2)
    assert limits.allow(2, "job a needs the room")


def test_few_replicas_are_no_proof_while_the_controller_does_not_know_the_limit(limits):
    has(limits, 1, 1, maximum=4)
    assert not limits.allow(2)


def test_a_limit_that_is_given_again_is_not_written_again(limits, clock):
    limits.allow(2, "why")
    clock.now = 1500.0
    limits.allow(2, "why")
    assert limits.limit().at == 1000.0


def test_a_controller_that_is_not_there_has_said_nothing(limits, clock):
    has(limits, 1, 1, maximum=1)
    clock.now += FRESH_S + 1
    assert limits.state() is None
    assert not limits.allow(2)


def test_a_controller_is_not_believed_for_long_after_the_clock_was_put_back(limits, clock):
    has(limits, 1, 1, maximum=1)
    clock.now -= 1.0  # clocks of machines differ
    assert limits.state() is not None
    clock.now -= FRESH_S
    assert limits.state() is None
    assert not limits.allow(2)


def test_without_a_limit_there_is_none(limits):
    limits.allow(2)
    assert limits.allow(None)
    assert limits.limit() is None
    assert limits.allow(None)


def test_of_a_service_that_has_ended_nothing_is_left_for_the_next_one(limits):
    limits.allow(2)
    has(limits, 2, 2, maximum=2)
    limits.forget()
    assert (limits.limit(), limits.state()) == (None, None)
    limits.forget()


def test_deployments_do_not_share_limits(limits):
    limits.allow(2, deployment="dense.new")
    assert limits.limit() is None
    assert limits.limit(deployment="dense.new").maximum == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"maximum": 1}', "\xff"])
def test_a_damaged_file_limits_nothing(limits, tmp_path, content):
    limits.allow(2)
    (path,) = tmp_path.rglob("*.limit.json")
    path.write_text(content, encoding="latin-1")
    assert limits.limit() is None


def test_nobody_is_left_no_replica_and_names_stay_in_the_folder(limits):
    with pytest.raises(InputError, match="0 replicas of 'recommend' would answer nobody"):
        limits.allow(0)
    with pytest.raises(InputError, match=r"'\.\./x' is no name"):
        limits.allow(1, deployment="../x")
