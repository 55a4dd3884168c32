"""What is left of an error that passed through real actors."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from rayrec.actors.spawning import ActorRole, RayHost
from rayrec.platform.errors import InputError
from rayrec.platform.ray_errors import ActorDeathError, root_cause

pytestmark = pytest.mark.ray

SENTENCE = "data/train.parquet: not a readable Parquet file; prepare the data again"


def member_class() -> type:
    """Defined in a function, so that it travels to processes that cannot import tests."""

    class Member:
        def __init__(self, role: ActorRole, fails: bool = False) -> None:
            if fails:
                raise InputError(SENTENCE)

        def end_process(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def take(self, value: object) -> object:
            return value

        def ask(self, others: list) -> object:
            return ray.get(others[0].take.remote(1))

    return Member


@pytest.fixture
def members(ray_cluster):
    started = []

    def start(member: int, fails: bool = False):
        started.append(RayHost("errors").spawn(member_class(), "member", member, (fails,), {"num_cpus": 0}))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


def cause_of(ref) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # of any class: this is what is tested
        ray.get(ref, timeout=60)
    return root_cause(raised.value)


def test_a_constructors_error_comes_out_as_itself_along_every_way(members):
    broken, other = members(0, fails=True), members(1)

    refs = [broken.take.remote(1), other.take.remote(broken.take.remote(1)), other.ask.remote([broken])]

    assert [repr(cause_of(ref)) for ref in refs] == [repr(InputError(SENTENCE))] * 3


def test_a_death_is_one_sentence_that_names_the_actor_along_every_way(members):
    dying, other = members(2), members(3)
    ended = dying.end_process.remote()

    causes = [
        cause_of(ref)
        for ref in (ended, dying.take.remote(1), other.take.remote(ended), other.ask.remote([dying]))
    ]

    for cause in causes:
        assert type(cause) is ActorDeathError
        assert str(cause).startswith(
            "errors/member-2 died: its process was killed, ran out of memory or crashed"
        )
        assert "\n" not in str(cause)


def test_an_actor_that_was_ended_by_ray_says_so(members):
    ended = members(4)
    ray.get(ended.take.remote(1))
    ray.kill(ended)

    def still_answers() -> bool:  # for a moment it may: Ray only tells its process to end
        try:
            ray.get(ended.take.remote(1))
        except ray.exceptions.RayActorError:
            return False
        return True

    while still_answers():
        pass
    assert str(cause_of(ended.take.remote(1))).startswith("errors/member-4 died: it was killed by `ray.kill`")


def test_other_errors_stay_as_they_are():
    error = KeyError("a")

    assert root_cause(error) is error
