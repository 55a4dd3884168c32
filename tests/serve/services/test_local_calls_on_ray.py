"""Replicas of Ray Serve call each other by sockets: the same answers, also when one is killed."""

import asyncio
import os
import signal

import pytest
from ray import serve
from ray.serve.config import ProxyLocation

from rayrec.serve.on_ray.application import QUIET
from rayrec.serve.on_ray.callees import HandleCallee, LocalCallee
from rayrec.serve.on_ray.replica_socket import LocalReplica

pytestmark = pytest.mark.ray

NAME = "local-calls"


class Callee(LocalReplica):
    async def same(self, *values):
        return values

    async def fail(self):
        raise KeyError("as it is")

    async def pid(self):
        return os.getpid()

    async def slowly(self, number):
        await asyncio.sleep(0.3)
        return number, os.getpid()

    def __del__(self):
        self.close_socket()


class Caller:
    def __init__(self, handle):
        self._local, self._handle = LocalCallee(handle), HandleCallee(handle)

    async def replicas(self):
        await self._local.peers.learn()
        return [(each.node, each.path is not None) for each in await self._local._learn()]

    async def compared(self, *values):
        """The answers of both ways, and how many calls went by sockets."""
        ways = [await way.call("same", *values, repeatable=True) for way in (self._local, self._handle)]
        return *ways, self._local.peers.counts.by_socket

    async def failed(self):
        errors = []
        for way in (self._local, self._handle):
            try:
                await way.call("fail", repeatable=True)
            except Exception as error:
                errors.append((type(error).__name__, isinstance(error, KeyError)))
        return errors

    async def while_one_is_killed(self, num_calls):
        pid = await self._local.call("pid", repeatable=True)
        calls = [
            asyncio.ensure_future(self._local.call("slowly", number, repeatable=True))
            for number in range(num_calls)
        ]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*calls)
        return pid, answers, self._local.peers.counts.lost


@pytest.fixture(scope="module")
def caller(ray_cluster):
    def deployed(replica, **options):
        return serve.deployment(
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=64,
            health_check_period_s=1,
            logging_config=QUIET,
            **options,
        )(replica)

    serve.start(proxy_location=ProxyLocation.Disabled, logging_config=QUIET)
    application = deployed(Caller).bind(deployed(Callee, num_replicas=2).bind())
    yield serve.run(application, name=NAME, route_prefix=None)
    serve.shutdown()


@pytest.mark.slow
def test_answers_and_errors_are_those_of_the_handle(caller):
    replicas = caller.replicas.remote().result()
    by_socket, by_handle, num_by_socket = caller.compared.remote(b"x", "ä", [1, None]).result()

    assert [has_socket for _, has_socket in replicas] == [True, True]  # Ray has the names that are used
    assert len({node for node, _ in replicas}) == 1
    assert by_socket == by_handle == (b"x", "ä", [1, None])
    assert num_by_socket == 1
    assert [is_one for _, is_one in caller.failed.remote().result()] == [True, True]


@pytest.mark.slow
def test_calls_of_a_replica_that_is_killed_are_answered_by_another_one(caller):
    caller.replicas.remote().result()

    pid, answers, num_lost = caller.while_one_is_killed.remote(20).result()

    assert [number for number, _ in answers] == list(range(20))
    assert pid not in {answered_by for _, answered_by in answers}
    assert num_lost >= 8  # of the 20, about a half
