"""How the ranks of a gang come together, and read versions, with actors that are plain objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.serve.on_ray import gang
from rayrec.serve.on_ray.dense import DensePart
from rayrec.serve.on_ray.ranks import Commands


class FakeRay:
    """Calls are made when their results are asked for."""

    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def get(self, promises, timeout):
        self.timeouts.append(timeout)
        return [promise() for promise in promises]

    def wait(self, promises, num_returns, timeout):
        return promises, []


def rank_that(**calls):
    """An actor whose methods return what they are given as, or raise it."""

    def method(outcome):
        def call():
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return SimpleNamespace(remote=lambda *arguments: call)

    return SimpleNamespace(**{name: method(outcome) for name, outcome in calls.items()})


@pytest.fixture
def fake_ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(gang, "ray", fake)
    return fake


def test_ranks_meet_when_all_actors_have_started(fake_ray, monkeypatch):
    waited_for = []

    def meet(store, device, num_ranks, rank):
        waited_for.extend(fake_ray.timeouts)
        return Commands()

    monkeypatch.setattr(gang, "meet", meet)

    _, pids = gang.joined([rank_that(ping=11, join=None), rank_that(ping=12, join=None)], HOST)

    assert waited_for == [gang.START_S]  # which is more than ranks that meet wait for each other
    assert pids == (11, 12)


def test_what_keeps_an_actor_from_starting_is_said_before_anybody_waits_for_it(fake_ray, monkeypatch):
    monkeypatch.setattr(gang, "meet", lambda *arguments: pytest.fail("there is nobody to meet"))
    broken = rank_that(ping=RayActorError(error_msg="no such folder: runs/a"), join=None)

    with pytest.raises(UnavailableError, match="no such folder: runs/a"):
        gang.joined([broken], HOST)


def test_what_a_rank_says_is_raised_where_the_first_one_only_misses_it(fake_ray, monkeypatch):
    def meet(*arguments):
        raise RuntimeError("timed out: 1 of 2 ranks are there")

    monkeypatch.setattr(gang, "meet", meet)

    with pytest.raises(InputError, match="this device has no nccl"):
        gang.joined([rank_that(ping=11, join=InputError("this device has no nccl"))], HOST)
    with pytest.raises(UnavailableError, match="1 of 2 ranks are there"):
        gang.joined([rank_that(ping=11, join=None)], HOST)


def test_a_version_that_one_rank_cannot_read_stays_with_none(fake_ray):
    forgotten = []
    broken = rank_that(read=InputError("version 9 is damaged"))
    broken.forget = SimpleNamespace(remote=forgotten.append)
    ranks = gang.Gang.__new__(gang.Gang)
    ranks.part, ranks._ranks = DensePart(lambda version: object()), [broken]

    with pytest.raises(InputError, match="version 9 is damaged"):
        ranks._read(9)

    assert ranks.part._read == {}
    assert forgotten == [9]
