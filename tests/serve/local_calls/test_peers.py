"""Which replica answers, and what becomes of a call whose replica is full, leaves or ends."""

import asyncio
import random

import pytest

from rayrec.serve.local_calls.connection import LostError
from rayrec.serve.local_calls.listener import LeavingError, Listener, RefusedError
from rayrec.serve.local_calls.peers import Address, Peers

LIMIT_S = 20


class Node:
    """Replicas that listen, and a way around that notes what comes to it."""

    def __init__(self, folder):
        self._folder = folder / "own"
        self.addresses, self.listeners, self.computed = [], {}, []
        self.held = asyncio.Event()

    async def add(self, name, behavior="answer"):
        async def answer(method, arguments, context):
            if behavior == "full":
                raise RefusedError
            if behavior == "leaving":
                raise LeavingError
            self.computed.append(name)
            if method == "wait":
                await self.held.wait()
            if behavior == "fail":
                raise LostError("of a replica that this one had asked")
            return name, arguments

        path = self._folder / f"{name}.sock"
        listener = Listener(path, answer)
        await listener.start()
        self.listeners[name] = listener
        self.addresses.append(Address(name, "here", str(path)))

    async def learn(self):
        return list(self.addresses)

    async def around(self, method, arguments):
        self.computed.append("around")
        return "around", arguments

    def peers(self):
        return Peers("here", self.learn, self.around, draw=random.Random(0))

    def close(self):
        for listener in self.listeners.values():
            listener.close()


def on_node(folder, work):
    async def run():
        node = Node(folder)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await work(node)
        finally:
            node.close()

    return asyncio.run(run())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_the_first_call_goes_around_and_later_ones_by_the_socket(tmp_path):
    async def work(node):
        await node.add("a")
        peers = node.peers()
        first = await peers.call("any", 1, repeatable=True)
        await until(lambda: peers.metrics()["local_calls_replicas"] == 1)
        second = await peers.call("any", 2, repeatable=True)
        peers.close()
        return first, second, peers.counts.around, peers.counts.by_socket

    assert on_node(tmp_path, work) == (("around", (1,)), ("a", (2,)), 1, 1)


def test_replicas_of_a_node_get_equal_shares_of_calls_that_are_under_way(tmp_path):
    async def work(node):
        for name in "abcd":
            await node.add(name)
        peers = node.peers()
        await peers.learn()
        calls = [asyncio.ensure_future(peers.call("wait", repeatable=True)) for _ in range(400)]
        await until(lambda: len(node.computed) == 400)
        node.held.set()
        await asyncio.gather(*calls)
        peers.close()
        return [node.computed.count(name) for name in "abcd"]

    shares = on_node(tmp_path, work)
    assert min(shares) > 90  # of 100; choices of one at random would leave some 85


def test_calls_are_shared_with_other_nodes_as_soon_as_there_are_several_at_once(tmp_path):
    async def work(node):
        await node.add("a")
        node.addresses += [Address(f"far{number}", "elsewhere", "/nowhere") for number in range(3)]
        peers = node.peers()

        async def around(method, arguments):
            node.computed.append("around")
            await node.held.wait()

        peers._around = around
        await peers.learn()
        for _ in range(10):
            assert await peers.call("any", repeatable=True) == ("a", ())
        alone = list(node.computed)
        node.computed.clear()
        calls = [asyncio.ensure_future(peers.call("wait", repeatable=True)) for _ in range(100)]
        await until(lambda: len(node.computed) == 100)
        node.held.set()
        await asyncio.gather(*calls)
        peers.close()
        return alone, node.computed.count("a")

    alone, at_once = on_node(tmp_path, work)
    assert alone == ["a"] * 10
    assert 20 <= at_once <= 30


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("behavior", ["full", "leaving"])
def test_what_a_replica_did_not_begin_goes_around(tmp_path, behavior, repeatable):
    async def work(node):
        await node.add("a", behavior)
        peers = node.peers()
        await peers.learn()
        answer = await peers.call("any", 1, repeatable=repeatable)
        left = peers.metrics()["local_calls_replicas"]
        peers.close()
        return answer, node.computed, left

    answer, computed, left = on_node(tmp_path, work)
    assert answer == ("around", (1,))
    assert computed == ["around"]
    assert left == (1 if behavior == "full" else 0)


def test_what_a_replica_began_and_did_not_answer_is_computed_again_only_where_it_may_be(tmp_path):
    async def work(node):
        await node.add("a")
        await node.add("b")
        peers = node.peers()
        await peers.learn()
        may = [asyncio.ensure_future(peers.call("wait", number, repeatable=True)) for number in range(4)]
        must_not = [asyncio.ensure_future(peers.call("wait", 9, repeatable=False)) for _ in range(4)]
        await until(lambda: len(node.computed) == 8)
        node.listeners["a"].close()
        node.addresses = [each for each in node.addresses if each.replica == "b"]
        lost = node.computed.count("a")
        await until(lambda: peers.counts.lost == lost)
        node.held.set()
        answers = await asyncio.gather(*may)
        others = await asyncio.gather(*must_not, return_exceptions=True)
        peers.close()
        return answers, others, lost, node.computed

    answers, others, lost, computed = on_node(tmp_path, work)
    assert [arguments for _, arguments in answers] == [(0,), (1,), (2,), (3,)]
    repeated = sum(name == "around" for name, _ in answers)
    failed = sum(isinstance(each, LostError) for each in others)
    assert repeated + failed == lost
    assert computed.count("around") == repeated


def test_a_socket_without_a_process_is_passed_over_until_it_is_gone(tmp_path):
    async def work(node):
        await node.add("a")
        await node.add("b")
        peers = node.peers()
        await peers.learn()
        node.listeners["a"].close()
        await asyncio.sleep(0)
        names = {(await peers.call("any", repeatable=True))[0] for _ in range(20)}
        await peers.learn()  # the address is still told, and nobody is there
        names |= {(await peers.call("any", repeatable=True))[0] for _ in range(20)}
        peers.close()
        return names

    assert on_node(tmp_path, work) <= {"b", "around"}


def test_replicas_that_come_and_go_are_learned_and_answers_under_way_still_come(tmp_path):
    async def work(node):
        await node.add("a")
        peers = node.peers()
        await peers.learn()
        under_way = asyncio.ensure_future(peers.call("wait", repeatable=True))
        await until(lambda: node.computed == ["a"])
        await node.add("b")
        del node.addresses[0]
        await peers.learn()
        names = {(await peers.call("any", repeatable=True))[0] for _ in range(10)}
        node.held.set()
        answer = await under_way
        peers.close()
        return names, answer

    assert on_node(tmp_path, work) == ({"b"}, ("a", ()))


def test_the_socket_of_a_replica_that_does_not_say_where_it_is_is_used_for_a_while(tmp_path, monkeypatch):
    async def work(node):
        await node.add("a")
        peers = node.peers()
        await peers.learn()
        node.addresses[0] = Address("", "", None)
        await peers.learn()
        kept, _ = await peers.call("any", repeatable=True)
        monkeypatch.setattr("rayrec.serve.local_calls.peers.KEPT_S", 0.0)
        await node.add("b")
        await peers.learn()
        later = list(peers._here)
        peers.close()
        return kept, later

    assert on_node(tmp_path, work) == ("a", ["b"])


def test_what_a_replica_raises_is_raised_and_not_computed_again(tmp_path):
    async def work(node):
        await node.add("a", "fail")
        peers = node.peers()
        await peers.learn()
        with pytest.raises(LostError, match="that this one had asked"):
            await peers.call("any", repeatable=True)
        peers.close()
        return node.computed

    assert on_node(tmp_path, work) == ["a"]


def test_who_cannot_be_asked_where_replicas_are_is_asked_around_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("rayrec.serve.local_calls.peers.LEARN_AGAIN_S", 0.0)

    async def work(node):
        await node.add("a")
        tries = 0

        async def learn():
            nonlocal tries
            tries += 1
            if tries == 1:
                raise RuntimeError("starts still")
            return node.addresses

        peers = Peers("here", learn, node.around)
        names = []
        while "a" not in names:
            names.append((await peers.call("any", repeatable=True))[0])
            await asyncio.sleep(0.001)
        peers.close()
        return names[0], tries

    assert on_node(tmp_path, work) == ("around", 2)
