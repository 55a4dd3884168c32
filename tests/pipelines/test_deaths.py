"""What the driver makes of an error that tells of nobody's death."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rayrec.pipelines.cluster import deaths
from rayrec.pipelines.cluster.deaths import death_behind

pytestmark = pytest.mark.ray

OF_COLLECTIVE = RuntimeError("Connection closed by peer")


@ray.remote(num_cpus=0)
class Busy:
    """Gives no answer for a while, and dies then, as calls to the actors of a lost node do."""

    def die_after(self, seconds: float) -> None:
        time.sleep(seconds)
        os._exit(1)

    def stats(self) -> None:
        pass


@pytest.fixture
def dies_late(ray_cluster, monkeypatch) -> Iterator[Any]:
    monkeypatch.setattr(deaths, "DEATH_KNOWN_S", 0.1)
    actor = Busy.options(name="run/trainer-1").remote()
    ray.get(actor.stats.remote())
    actor.die_after.remote(1.0)
    yield actor
    ray.kill(actor)


@pytest.mark.slow
def test_while_a_node_takes_no_connection_rays_word_is_waited_for(dies_late, monkeypatch):
    monkeypatch.setattr(deaths, "_a_node_is_gone", lambda: True)

    assert str(death_behind(OF_COLLECTIVE, [dies_late])).startswith("run/trainer-1 died")


def test_while_all_nodes_are_there_a_busy_actor_is_not_waited_for(dies_late):
    assert death_behind(OF_COLLECTIVE, [dies_late]) is None


def test_errors_of_the_program_are_nobodys_death(ray_cluster):
    assert death_behind(ValueError("a wrong value"), []) is None


def test_a_node_that_takes_no_connection_is_gone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        monkeypatch.setattr(ray, "nodes", lambda: [node])
        assert not deaths._a_node_is_gone()
    assert deaths._a_node_is_gone()
    monkeypatch.setattr(ray, "nodes", lambda: [node | {"Alive": False}])
    assert not deaths._a_node_is_gone()
