"""Trainers that groups call get calls in the order of the driver, and it gets answers in that of ranks."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from rayrec.actors.leading import Leader
from rayrec.pipelines.training.trainer_calls import FAN_OUT, ByGroup, EachTrainer, tree


def reached(below: list[list[range]], group: int) -> list[int]:
    return [group, *(each for part in below[group] for each in reached(below, part.start))]


@pytest.mark.parametrize("num_groups", [1, 2, 8, 9, 10, 64, 73, 500])
def test_every_group_is_called_once_and_in_order_by_one_that_calls_few(num_groups):
    below = tree(num_groups)

    assert reached(below, 0) == list(range(num_groups))
    assert max(map(len, below)) <= FAN_OUT
    for parts in below:
        for part in parts:
            assert reached(below, part.start) == list(part)


class Later:
    """A stand-in for the handle of an actor with threads: its calls begin in any order."""

    def __init__(self, instance: Any, pool: ThreadPoolExecutor) -> None:
        self._instance, self._pool = instance, pool

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._instance, name)

        def remote(*arguments: Any) -> Any:
            done = threading.Event()
            answer: list[Any] = []

            def call() -> None:
                try:
                    answer.append(method(*arguments))
                except Exception as error:
                    answer.append(error)
                done.set()

            timer = threading.Timer(random.random() / 100, lambda: self._pool.submit(call))
            timer.start()
            return done, answer

        return type("Method", (), {"remote": staticmethod(remote)})


class NotedTrainer:
    """Its calls come in the order in which they were made."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            done = threading.Event()
            done.set()
            return done, [(name, self.rank)]

        return type("Method", (), {"remote": staticmethod(remote)})


def kept(promises: list[Any]) -> list[Any]:
    """As `ray.get`: the first error ends the wait for the others."""
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        for done, answer in promises:
            if done.is_set() and isinstance(answer[0], Exception):
                raise answer[0]
        if all(done.is_set() for done, _ in promises):
            return [answer for _, (answer,) in promises]
        time.sleep(0.001)
    raise TimeoutError("nothing comes")


@pytest.mark.parametrize(("num_trainers", "group_size"), [(2, 2), (5, 2), (9, 4), (30, 2)])
def test_trainers_get_calls_in_the_drivers_order_whichever_comes_first(monkeypatch, num_trainers, group_size):
    monkeypatch.setattr(ray, "get", kept)
    monkeypatch.setattr(ray, "put", lambda value: value)
    random.seed(num_trainers)
    trainers = [NotedTrainer(rank) for rank in range(num_trainers)]
    starts = range(0, num_trainers, group_size)
    with ThreadPoolExecutor(100) as pool:
        leaders = [Leader(range(first, min(first + group_size, num_trainers))) for first in starts]
        calls = ByGroup([Later(leader, pool) for leader in leaders], trainers, group_size, kept)
        promised = []
        for step in range(6):
            for group, leader in enumerate(leaders):
                leader.take(step, f"step {step} of group {group}")
            promised += [calls.prefetch(step, []), calls.train(step, [])]
            if step == 4:  # a worker that has started again
                leaders[0].take(2, "step 2 again")
            if step == 3:
                promises = calls.ask("drain", range(num_trainers))
                (weights,) = kept(calls.ask("dense_weights", [num_trainers - 1]))
        for number, promise in enumerate(promised):
            answers = calls.answers(kept(promise))
            assert answers == [(("prefetch", "train")[number % 2], rank) for rank in range(num_trainers)]
        assert calls.answers(kept(calls.each("drain"))) == [("drain", rank) for rank in range(num_trainers)]
    assert kept(promises) == [("drain", rank) for rank in range(num_trainers)]
    assert weights == ("dense_weights", num_trainers - 1)
    for rank, trainer in enumerate(trainers):
        expected: list[Any] = []
        for step in range(6):
            share = f"step {step} of group {rank // group_size}"
            expected += [("prefetch", share), ("train", share)]
            expected += [("drain",)] if step == 3 else []
            expected += [("dense_weights",)] if step == 3 and rank == num_trainers - 1 else []
        expected.append(("drain",))
        assert trainer.calls == expected


def test_what_a_trainer_raises_the_driver_hears(monkeypatch):
    monkeypatch.setattr(ray, "get", kept)
    monkeypatch.setattr(ray, "put", lambda value: value)
    trainers = [NotedTrainer(rank) for rank in range(4)]

    def fails(share: str) -> Any:
        done = threading.Event()
        done.set()
        return done, [ValueError("a gradient is not finite")]

    def waits(share: str) -> Any:
        return threading.Event(), []

    trainers[3].train = type("Method", (), {"remote": staticmethod(fails)})
    for rank in (0, 1, 2):  # for the one that has failed
        trainers[rank].train = type("Method", (), {"remote": staticmethod(waits)})
    with ThreadPoolExecutor(20) as pool:
        leaders = [Leader(range(first, first + 2)) for first in (0, 2)]
        for leader in leaders:
            leader.take(0, "a batch")
        calls = ByGroup([Later(leader, pool) for leader in leaders], trainers, 2, kept)
        with pytest.raises(ValueError, match="a gradient is not finite"):
            kept(calls.train(0, []))


def test_each_trainer_gets_the_object_of_its_group():
    trainers = [NotedTrainer(rank) for rank in range(3)]
    calls = EachTrainer(trainers, group_size=2)

    assert calls.num_objects == 2
    assert calls.answers(kept(calls.train(0, ["a", "b"]))) == [("train", rank) for rank in range(3)]
    assert [trainer.calls for trainer in trainers] == [[("train", "a")], [("train", "a")], [("train", "b")]]
    assert kept(calls.ask("drain", [2])) == [("drain", 2)]
