"""The joining loop, with stand-ins for the actors whose calls it submits; they answer through Ray's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from rayrec.actors.feature_worker import BatchSummary
from rayrec.actors.trainer import TrainerReport
from rayrec.pipelines.cluster.watch import Watch
from rayrec.pipelines.training.pipeline import BatchError, TrainingPipeline
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.errors import InputError
from rayrec.platform.ray_errors import root_cause
from rayrec.samples.base.intervals import Interval, Intervals
from rayrec.samples.reading.read_plan import AssignedPart, BatchPlan, ReadPart, Window

pytestmark = pytest.mark.ray


class Method:
    """What `actor.method` is: something with `remote` and `options`."""

    def __init__(self, answer: Any) -> None:
        self.remote = answer

    def options(self, num_returns: int) -> Method:
        return Method(lambda *arguments: self.remote(num_returns, *arguments))


class StepPlan:
    """Windows of one row; step t reads row t."""

    spec: Any = None

    def batch(self, step: int) -> BatchPlan:
        return BatchPlan(step, 0, (ReadPart(Window(0, step, (), step, 1, seed=0), step, step + 1),))

    def window_after(self, window: Window, num_readers: int) -> None:
        return None


@dataclass
class Calls:
    """Stages whose calls are noted in order; every answer is there at once."""

    num_trainers: int = 1
    num_readers: int = 1
    log: list[tuple[Any, ...]] = field(default_factory=list)
    train_answers: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(trainer, step) to another answer than a report."""
    prefetch_answers: dict[tuple[int, int], Any] = field(default_factory=dict)
    summaries: dict[int, Any] = field(default_factory=dict)
    """Step to another answer of the feature worker than a summary."""
    clocks: list[str] = field(default_factory=list)
    """What the actors were told of their clocks."""

    def stages(self) -> Stages:
        members: Any = {
            "readers": [self._reader(member) for member in range(self.num_readers)],
            "feature_workers": [self._actor(compute=self._compute)],
            "servers": [self._actor(begin_snapshot=self._begin_snapshot)],
            "trainers": [self._trainer(rank) for rank in range(self.num_trainers)],
        }
        monitor = self._actor(accounts=lambda: ray.put({}))
        watch = Watch(monitor, frozenset(), hang_timeout_s=60.0)
        return Stages(plan=StepPlan(), **members, watch=watch)

    def _actor(self, **methods: Any) -> Any:
        for name in ("start_clock", "stop_clock"):
            methods[name] = lambda name=name: self._turn(name)
        return type("Actor", (), {name: Method(answer) for name, answer in methods.items()})()

    def _turn(self, clock: str) -> Any:
        self.clocks.append(clock)
        return ray.put(None)

    def _reader(self, member: int) -> Any:
        def read(reading: AssignedPart) -> Any:
            self.log.append(("read", member, reading.part.start))
            return reading.part.start

        return self._actor(read=read)

    def _compute(self, num_returns: int, step: int, *parts: int) -> Any:
        assert parts == (step,)
        summary = BatchSummary(Intervals.of([Interval("file", step, step + 1)]))
        shares = [((step, rank),) for rank in range(num_returns - 1)]
        return [self.summaries.get(step) or ray.put(summary), *shares]

    def _begin_snapshot(self, step: int) -> Any:
        self.log.append(("begin_snapshot", step))
        return ray.put(None)

    def _trainer(self, rank: int) -> Any:
        def prefetch(shares: tuple[tuple[int, int]]) -> Any:
            (share,) = shares
            assert share[1] == rank
            self.log.append(("prefetch", rank, share[0]))
            return self.prefetch_answers.get((rank, share[0])) or ray.put(None)

        def train(shares: tuple[tuple[int, int]]) -> Any:
            ((step, _),) = shares
            self.log.append(("train", rank, step))
            report = TrainerReport(
                step, loss_sum=3.0 * (rank + 1), num_targets=6, counts={"unknown_items": rank}
            )
            return self.train_answers.get((rank, step)) or ray.put(report)

        def noted(name: str) -> Callable[[], Any]:
            def call() -> Any:
                self.log.append((name, rank))
                return ray.put(name)

            return call

        others = {name: noted(name) for name in ("drain", "dense_weights", "dense_optimizer_state")}
        return self._actor(prefetch=prefetch, train=train, **others)


@pytest.mark.parametrize("queue_depth", [2, 3, 7])
def test_no_more_batches_are_begun_than_the_queue_holds(ray_cluster, queue_depth):
    calls = Calls()
    reported, most = 0, 0

    for result in TrainingPipeline(calls.stages(), queue_depth).run(0, 12):
        begun = sum(name == "read" for name, *_ in calls.log)
        most = max(most, begun - reported)
        assert result.step == reported
        reported += 1

    assert reported == 12
    assert most == queue_depth


def test_a_batch_is_announced_before_the_one_before_it_is_trained(ray_cluster):
    calls = Calls()

    list(TrainingPipeline(calls.stages(), queue_depth=4).run(5, 8))

    of_trainer = [call for call in calls.log if call[0] != "read"]
    assert of_trainer == [
        ("prefetch", 0, 5),
        ("prefetch", 0, 6),
        ("train", 0, 5),
        ("prefetch", 0, 7),
        ("train", 0, 6),
        ("train", 0, 7),
        ("drain", 0),
    ]


def test_readers_take_turns_by_windows_and_every_trainer_gets_its_share(ray_cluster):
    calls = Calls(num_trainers=2, num_readers=3)

    results = list(TrainingPipeline(calls.stages(), queue_depth=2).run(0, 4))

    assert [call for call in calls.log if call[0] == "read"] == [
        ("read", 0, 0),
        ("read", 1, 1),
        ("read", 2, 2),
        ("read", 0, 3),
    ]
    assert [call for call in calls.log if call[0] == "drain"] == [("drain", 0), ("drain", 1)]
    assert [result.loss for result in results] == [(3.0 + 6.0) / 6] * 4
    assert results[0].counts == {"unknown_items": 1}


def test_no_steps_is_no_work(ray_cluster):
    calls = Calls()

    assert list(TrainingPipeline(calls.stages(), queue_depth=2).run(3, 3)) == []
    assert calls.log == [("drain", 0)]


def test_clocks_run_while_batches_are_trained(ray_cluster):
    calls = Calls(num_trainers=2)
    pipeline = TrainingPipeline(calls.stages(), queue_depth=2).run(0, 3)

    next(pipeline)
    assert calls.clocks == ["start_clock"] * 5  # a reader, a feature worker, a server, two trainers
    list(pipeline)
    assert calls.clocks == ["start_clock"] * 5 + ["stop_clock"] * 5


def test_a_prefetch_that_fails_is_the_runs_error(ray_cluster):
    """Even if the trainer could go on: what it then trains on is nothing that was asked for."""

    @ray.remote
    def fails() -> None:
        raise ConnectionError("no way to the server")

    calls = Calls(num_trainers=2, prefetch_answers={(1, 2): fails.remote()})
    pipeline = TrainingPipeline(calls.stages(), queue_depth=2).run(0, 5)
    assert [next(pipeline).step, next(pipeline).step] == [0, 1]

    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        next(pipeline)

    assert repr(root_cause(raised.value)) == repr(ConnectionError("no way to the server"))


def test_one_trainers_error_is_not_held_up_by_another_that_waits_for_it(ray_cluster):
    """Trainers meet in a collective: when one has failed, the others hang."""

    @ray.remote
    def fails() -> None:
        raise FloatingPointError("the loss is nan")

    @ray.remote
    def hangs() -> None:
        time.sleep(600)

    hanging = hangs.remote()
    calls = Calls(num_trainers=2, train_answers={(0, 1): hanging, (1, 1): fails.remote()})
    pipeline = TrainingPipeline(calls.stages(), queue_depth=3).run(0, 5)
    assert next(pipeline).step == 0

    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        next(pipeline)

    ray.cancel(hanging, force=True)
    assert repr(root_cause(raised.value)) == repr(FloatingPointError("the loss is nan"))


def test_a_batch_that_cannot_be_made_ends_the_run_behind_the_step_before_it(ray_cluster):
    """The trainers never hear of it, nor of later ones, whose features may be there."""

    @ray.remote
    def fails() -> None:
        raise InputError("train/part-3.parquet: a row group cannot be decoded")

    calls = Calls(num_trainers=2, summaries={3: fails.remote()})
    pipeline = TrainingPipeline(calls.stages(), queue_depth=4).run(0, 9)
    done = [next(pipeline).step for _ in range(3)]

    with pytest.raises(BatchError) as raised:
        next(pipeline)

    assert done == [0, 1, 2]
    assert isinstance(raised.value.reason, InputError)
    assert {call[2] for call in calls.log if call[0] in ("prefetch", "train")} == {0, 1, 2}
    assert calls.log[-2:] == [("drain", 0), ("drain", 1)]  # every step before it is committed


def test_servers_hear_of_a_cut_before_the_step_is_trained_and_trainers_give_their_state_right_after(
    ray_cluster,
):
    calls = Calls(num_trainers=2)

    results = list(TrainingPipeline(calls.stages(), queue_depth=4).run(0, 5, lambda step: step == 2))

    begun = calls.log.index(("begin_snapshot", 2))
    assert calls.log[begun + 1 : begun + 7] == [
        ("train", 0, 2),
        ("train", 1, 2),
        ("drain", 0),
        ("drain", 1),
        ("dense_weights", 0),
        ("dense_optimizer_state", 0),
    ]
    assert calls.log.index(("train", 0, 3)) > begun
    assert [result.step for result in results if result.snapshot is not None] == [2]
    pending = results[2].snapshot
    assert pending is not None
    assert pending.step == 2
    assert ray.get([*pending.drained, pending.weights]) == ["drain", "drain", "dense_weights"]


def test_a_step_says_which_rows_it_has_consumed(ray_cluster):
    results = TrainingPipeline(Calls().stages(), queue_depth=3).run(4, 6)

    assert [list(result.rows) for result in results] == [
        [Interval("file", 4, 5)],
        [Interval("file", 5, 6)],
    ]
