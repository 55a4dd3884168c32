"""Which requests are computed together, in which order, and what each of them gets."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher, DeadlineError, TooManyWaitingError

CHEAPER_TOGETHER = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}


class Device:
    """Computes when it is let; notes what came together."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []
        self.now = 0.0
        self._free = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)

    def compute(self, requests: Sequence[object]) -> list[object]:
        self.batches.append(list(requests))
        self._entered.release()
        assert self._free.acquire(timeout=10)
        return [ValueError(str(each)) if each == "bad" else f"answer to {each}" for each in requests]

    def wait_until_busy(self) -> None:
        assert self._entered.acquire(timeout=10)

    def free(self, times: int = 1) -> None:
        self._free.release(times)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def start(device: Device) -> Iterator[Callable[..., Batcher]]:
    """A batcher whose device is busy with the request "first"."""
    started: list[Batcher] = []

    def begin(costs: dict[int, float] = CHEAPER_TOGETHER, max_waiting: int = 100) -> Batcher:
        batcher = Batcher(device.compute, BatchCosts(costs), max_waiting, clock=lambda: device.now)
        started.append(batcher)
        batcher.submit("first")
        device.wait_until_busy()
        return batcher

    yield begin
    device.free(100)
    for batcher in started:
        batcher.close()


def results(futures: Sequence[Future]) -> list[object]:
    return [future.result(timeout=10) for future in futures]


def test_what_waits_while_the_device_computes_goes_together(device, start):
    batcher = start()
    waiting = [batcher.submit(name) for name in "abc"]
    device.free(2)

    assert results(waiting) == ["answer to a", "answer to b", "answer to c"]
    assert device.batches == [["first"], ["a", "b", "c"]]


def test_a_batch_has_at_most_the_largest_size_that_was_measured(device, start):
    batcher = start({1: 1.0, 2: 1.1})
    waiting = [batcher.submit(name) for name in "abc"]
    device.free(3)

    results(waiting)
    assert device.batches == [["first"], ["a", "b"], ["c"]]


def test_the_earliest_deadline_comes_first(device, start):
    batcher = start({1: 1.0})
    waiting = [batcher.submit(name, timeout_s=timeout) for name, timeout in (("a", 30), ("b", 10), ("c", 20))]
    device.free(4)

    results(waiting)
    assert device.batches == [["first"], ["b"], ["c"], ["a"]]


def test_a_higher_priority_comes_first_and_among_equals_who_came_first(device, start):
    batcher = start({1: 1.0})
    waiting = [
        batcher.submit(name, timeout_s=timeout, priority=priority)
        for name, timeout, priority in (
            ("low", 10, 3), ("a", 30, 2), ("b", 30, 2), ("high", 40, 1), ("soon", 20, 2)
        )
    ]  # fmt: skip
    device.free(6)

    results(waiting)
    assert device.batches == [["first"], ["high"], ["soon"], ["a"], ["b"], ["low"]]


def test_no_priority_makes_late_what_waits(device, start):
    batcher = start({1: 1.0})
    waiting = [batcher.submit("low", timeout_s=3.5, priority=3)]
    waiting.append(
        batcher.submit("high", timeout_s=50, priority=1)
    )  # behind "first"; then comes "low", in time
    with pytest.raises(DeadlineError):
        batcher.submit("too many", timeout_s=50, priority=1)
    waiting.append(batcher.submit("after", timeout_s=50, priority=3))
    device.free(4)

    results(waiting)
    assert device.batches == [["first"], ["high"], ["low"], ["after"]]


def test_no_more_go_together_than_the_first_deadline_allows(device, start):
    batcher = start({1: 1.0, 8: 5.0})
    waiting = [
        batcher.submit(name, timeout_s=timeout) for name, timeout in (("a", 2.0), ("b", 50), ("c", 50))
    ]
    device.free(3)

    results(waiting)
    assert device.batches[1] == ["a", "b"]


def test_groups_are_not_mixed(device, start):
    batcher = start()
    waiting = [batcher.submit(name, group=group) for name, group in (("a", 1), ("b", 2), ("c", 1))]
    device.free(3)

    results(waiting)
    assert device.batches == [["first"], ["a", "c"], ["b"]]


def test_what_is_too_late_is_refused_and_not_computed(device, start):
    batcher = start()
    late, in_time = batcher.submit("late", timeout_s=5), batcher.submit("in time", timeout_s=50)
    device.now = 4.5  # it would take 1
    device.free(2)

    assert results([in_time]) == ["answer to in time"]
    with pytest.raises(DeadlineError):
        late.result(timeout=10)
    assert device.batches == [["first"], ["in time"]]


def test_what_would_be_too_late_behind_the_others_is_told_at_once(device, start):
    batcher = start({1: 1.0})
    waiting = [batcher.submit(name, timeout_s=3.5) for name in "ab"]  # done at 2 and 3, after "first"

    with pytest.raises(DeadlineError, match="3 requests are in flight"):
        batcher.submit("c", timeout_s=3.5)
    patient = batcher.submit("d", timeout_s=4.5)
    device.free(4)

    assert results([*waiting, patient]) == ["answer to a", "answer to b", "answer to d"]


def test_time_that_the_batch_in_flight_has_taken_already_counts(device, start):
    batcher = start({1: 1.0})
    device.now = 0.9
    soon = batcher.submit("soon", timeout_s=1.2)  # the first is done in 0.1
    device.free(2)

    assert results([soon]) == ["answer to soon"]


def test_who_is_in_a_hurry_does_not_make_those_before_late(device, start):
    batcher = start({1: 1.0})
    waiting = [batcher.submit(name, timeout_s=3.5) for name in "ab"]

    with pytest.raises(DeadlineError):
        batcher.submit("hurry", timeout_s=2.5)
    device.free(3)

    assert results(waiting) == ["answer to a", "answer to b"]


def test_one_that_is_late_already_keeps_nobody_out(device, start):
    batcher = start({1: 1.0})
    late = batcher.submit("late", timeout_s=2.5)
    device.now = 2.0
    there = batcher.submit("there", timeout_s=50)
    device.free(3)

    assert results([there]) == ["answer to there"]
    with pytest.raises(DeadlineError):
        late.result(timeout=10)


def test_other_groups_are_time_of_their_own(device, start):
    batcher = start()  # two together take 1.2, one after the other 2
    first = batcher.submit("a", group=1, timeout_s=2.3)
    together = batcher.submit("b", group=1, timeout_s=2.4)

    with pytest.raises(DeadlineError):
        batcher.submit("c", group=2, timeout_s=2.5)
    device.free(3)

    assert results([first, together]) == ["answer to a", "answer to b"]


def test_wide_requests_do_not_make_narrow_ones_too_late():
    now = 0.0
    entered, may_compute = threading.Semaphore(0), threading.Semaphore(30)

    def compute(requests: Sequence[float]) -> list[float]:
        nonlocal now
        entered.release()
        assert may_compute.acquire(timeout=10)
        now += sum(requests)
        return list(requests)

    batcher = Batcher(compute, BatchCosts({1: 0.01}, width=16), max_waiting=10, clock=lambda: now)
    for _ in range(30):
        assert batcher.submit(0.2, "wide", width=1024).result(timeout=10) == 0.2
        assert entered.acquire(timeout=10)
    batcher.submit(0.01, "narrow", width=16)
    assert entered.acquire(timeout=10)
    there = batcher.submit(0.01, "narrow", timeout_s=0.05, width=16)
    with pytest.raises(DeadlineError):
        batcher.submit(0.2, "wide", timeout_s=0.15, width=1024)
    may_compute.release(3)

    assert there.result(timeout=10) == 0.01
    batcher.close()


def test_costs_that_have_grown_too_high_are_found_out():
    """After a slow while nobody would be in time by the costs; one is tried, and they fall again."""
    now = 0.0
    stalls = [100.0] * 70

    def compute(requests: Sequence[str]) -> list[str]:
        nonlocal now
        now += stalls.pop() if stalls else 0.01
        return list(requests)

    batcher = Batcher(compute, BatchCosts({1: 0.01}), max_waiting=10, clock=lambda: now)
    for _ in range(len(stalls)):
        assert batcher.submit("stalls").result(timeout=10) == "stalls"
    assert batcher.costs.at(1).of(1) > 5

    assert [batcher.submit("next", timeout_s=5).result(timeout=10) for _ in range(30)] == ["next"] * 30
    assert batcher.costs.at(1).of(1) < 1
    batcher.close()


def test_too_few_answers_are_an_error_and_the_next_are_computed():
    batcher = Batcher(lambda requests: [] if "few" in requests else requests, BatchCosts({1: 1e-6}), 10)

    with pytest.raises(ValueError, match="0 answers to 1 requests"):
        batcher.submit("few").result(timeout=10)
    assert batcher.submit("whole").result(timeout=10) == "whole"
    batcher.close()


def test_an_error_is_that_of_one_request(device, start):
    batcher = start()
    waiting = [batcher.submit(name) for name in ("a", "bad", "c")]
    device.free(2)

    assert results([waiting[0], waiting[2]]) == ["answer to a", "answer to c"]
    with pytest.raises(ValueError, match="bad"):
        waiting[1].result(timeout=10)


def test_an_error_of_the_computation_is_that_of_all_and_the_next_are_computed():
    def compute(requests: Sequence[str]) -> list[str]:
        if "broken" in requests:
            raise RuntimeError("no device")
        return list(requests)

    batcher = Batcher(compute, BatchCosts({1: 1e-6}), max_waiting=10)

    with pytest.raises(RuntimeError, match="no device"):
        batcher.submit("broken").result(timeout=10)
    assert batcher.submit("whole").result(timeout=10) == "whole"
    batcher.close()


@pytest.mark.parametrize(
    ("costs", "follows", "full_batches", "queue_wait_s"),
    [
        ({1: 1.0, 2: 1.2}, False, 1 / 3, 0.75),  # of first, ab and c
        ({1: 1.0, 2: 1.2}, True, 0.0, 0.5),  # one message, which no other one waits for
        ({1: 1.0}, False, 0.0, 0.75),  # batches do not pay: no size is full
    ],
)
def test_the_load_is_of_batches_that_leave_others_waiting(
    device, start, costs, follows, full_batches, queue_wait_s
):
    batcher = start(costs)
    waiting = [batcher.submit("a")] + [batcher.submit(name, follows=follows) for name in "bc"]
    device.now = 1.0
    device.free(4)
    results(waiting)
    batcher.close()
    load = batcher.load
    assert load.full_batches == pytest.approx(full_batches)
    assert load.queue_wait_s == pytest.approx(queue_wait_s)
    assert load.work == pytest.approx(4 * BatchCosts(costs).least_s)


def test_a_meter_that_fails_keeps_no_answer_back():
    def fail(num_requests: int, seconds: float) -> None:
        raise RuntimeError("no meter")

    batcher = Batcher(lambda requests: requests, BatchCosts({1: 1e-6}), max_waiting=10, on_batch=fail)

    assert [batcher.submit(name).result(timeout=10) for name in "ab"] == ["a", "b"]
    batcher.close()


def test_more_than_may_wait_are_refused(device, start):
    batcher = start(max_waiting=3)
    waiting = [batcher.submit(name) for name in "ab"]

    with pytest.raises(TooManyWaitingError, match="3 requests"):
        batcher.submit("c")
    device.free(2)
    results(waiting)
    device.free()
    assert results([batcher.submit("d")]) == ["answer to d"]


def test_a_wait_is_estimated_by_what_is_in_flight_and_what_batches_take(device, start):
    batcher = start()
    assert (batcher.in_flight, batcher.wait_s()) == (1, 1.0)
    waiting = [batcher.submit(name) for name in "abcdefghijklmno"]

    assert batcher.in_flight == 16
    assert batcher.wait_s() == pytest.approx(2 * 2.4)  # two batches of eight
    batcher.submit("wide", "another", width=4)
    assert batcher.wait_s() == pytest.approx(2 * 2.4 + 4 * 1.0)
    device.free(100)
    results(waiting)
    batcher.close()
    assert (batcher.in_flight, batcher.wait_s()) == (0, 0.0)


def test_one_that_is_cancelled_is_not_computed(device, start):
    batcher = start()
    gone, there = batcher.submit("gone"), batcher.submit("there")
    assert gone.cancel()
    device.free(2)

    results([there])
    assert device.batches == [["first"], ["there"]]


def test_those_that_are_cancelled_leave_their_places_to_others(device, start):
    batcher = start({1: 1.0, 2: 1.1}, max_waiting=4)
    gone = [batcher.submit(name, timeout_s=3.5) for name in "abc"]
    assert all(future.cancel() for future in gone)

    assert (batcher.in_flight, batcher.wait_s()) == (1, 1.0)
    there = [batcher.submit(name, timeout_s=3.5) for name in "de"]
    device.free(2)

    assert results(there) == ["answer to d", "answer to e"]
    assert device.batches == [["first"], ["d", "e"]]


def test_one_that_is_being_computed_cannot_be_cancelled(device, start):
    batcher = start()
    waiting = batcher.submit("a")
    device.free()
    device.wait_until_busy()

    assert not waiting.cancel()
    assert batcher.in_flight == 1
    device.free()
    assert results([waiting]) == ["answer to a"]


def test_closing_answers_what_waits(device, start):
    batcher = start()
    waiting = batcher.submit("a")
    device.free(2)

    batcher.close()

    assert waiting.done()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit("b")


def test_a_model_is_free_when_its_last_request_was_answered():
    """Without the collector, whose oldest generation may not run for minutes."""

    class Version:
        def recommend_all(self, requests):
            return [ValueError("refused") if each == "bad" else each for each in requests]

    batcher = Batcher(lambda requests: requests, BatchCosts({1: 0.01}), 64)
    version = Version()
    is_there = weakref.ref(version)
    gc.collect()
    gc.disable()
    try:
        assert batcher.submit("x", compute=version.recommend_all).result(timeout=20) == "x"
        with pytest.raises(ValueError, match="refused"):
            batcher.submit("bad", compute=version.recommend_all).result(timeout=20)
        batcher.submit("y").result(timeout=20)  # so that the thread has done with the batch before
        del version
        assert is_there() is None
    finally:
        gc.enable()
        batcher.close()
