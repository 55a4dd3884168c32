"""The batchers' own load, and how many replicas it asks for: by a clock that is moved by hand."""

import itertools
import math
import threading

import numpy as np
import pytest

from rayrec.serve.config.scaling import BatcherTargets, ScalingConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batch_load import WINDOW_S, BatcherLoad, LoadWindow
from rayrec.serve.engine.batching import Batcher, TooManyWaitingError
from rayrec.serve.on_ray.scaling import Bounds, Deployed, Load, Wish
from rayrec.serve.on_ray.serve_dashboard import ServeDashboard
from rayrec.serve.on_ray.serving import scaled_deployments

IDLE = BatcherLoad(0.0, 0.0, 0.0, 0.0)
TARGETS = BatcherTargets(work=0.5, queue_wait_s=0.1, full_batches=0.5, backlog_s=1.0)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_window_forgets_what_is_older_and_begins_with_the_time_that_there_was():
    clock = Clock()
    window = LoadWindow(clock)
    assert window.read(0.0) == IDLE
    window.came(1.0)
    clock.now = 4.0
    window.came(1.0)
    window.computed([0.2, 0.4], is_full=True)
    window.computed([0.0], is_full=False)
    assert window.read(0.7) == BatcherLoad(0.5, pytest.approx(0.2), 0.5, 0.7)
    clock.now = WINDOW_S + 2.0
    assert window.read(0.0).work == pytest.approx(0.1)
    clock.now = WINDOW_S + 5.0
    assert window.read(0.0) == IDLE


def test_a_batcher_counts_what_it_refuses_as_load():
    clock, begun, goes_on = Clock(), threading.Event(), threading.Event()

    def compute(requests):
        begun.set()
        goes_on.wait(10)
        return list(requests)

    batcher = Batcher(compute, BatchCosts({1: 0.04, 4: 0.04}), max_waiting=2, clock=clock)
    first = batcher.submit(1)
    begun.wait(10)
    second = batcher.submit(2)
    with pytest.raises(TooManyWaitingError):
        batcher.submit(3)
    with pytest.raises(TooManyWaitingError):
        batcher.check_room(1.0)
    batcher.refused(2)
    clock.now = 1.0
    goes_on.set()
    assert (first.result(10), second.result(10)) == (1, 2)
    batcher.close()
    load = batcher.load
    assert load.work == pytest.approx(6 * 0.01)  # six requests, at a quarter of a batch of four
    assert load.queue_wait_s == pytest.approx(0.5)  # of two, one has waited for a second
    assert load.full_batches == 0


def load_of(*batchers, running=None):
    return Load(None, True, None, batchers, len(batchers) if running is None else running)


def test_worked_numbers_of_what_is_needed():
    assert load_of().needs(TARGETS) == {}
    busy = BatcherLoad(0.4, 0.05, 0.1, 0.2)
    assert load_of(busy, busy).needs(TARGETS) == {"work": pytest.approx(1.6)}
    waiting = BatcherLoad(0.4, 0.35, 0.1, 1.2)
    assert load_of(busy, waiting).needs(TARGETS) == {
        "work": pytest.approx(1.6),
        "queue wait": pytest.approx(4.0),
    }
    full = BatcherLoad(1.2, 0.05, 0.9, 3.0)
    assert load_of(full).needs(TARGETS) == {
        "work": pytest.approx(2.4),
        "full batches": pytest.approx(1.8),
        "backlog": pytest.approx(3.0),
    }


def test_the_batchers_decide_unless_something_else_is_named():
    assert scaled_of({}).requests_per_replica is None
    assert scaled_of({"requests_per_replica": 3}).requests_per_replica == 3
    wish = Wish(Bounds(1, 8), ScalingConfig(average_s=0, batcher=TARGETS), 2)
    many = Load(1000.0, True, None, (IDLE, IDLE), 2)
    assert wish.observe(0, many, 2) == 2  # in flight, they cost nothing
    assert wish.observe(5, load_of(BatcherLoad(2.0, 0.0, 0.0, 0.0), IDLE), 2) == 4
    assert (wish.needed, wish.why) == (4.0, "work")


def test_a_trickle_adds_no_replicas_whatever_waits():
    trickle = BatcherLoad(0.001, 0.5, 1.0, 0.0)
    wish = Wish(Bounds(1, 16), ScalingConfig(average_s=0, batcher=TARGETS, lower_after_s=60), 4)
    seen = [wish.observe(at, load_of(*[trickle] * wish.replicas), wish.replicas) for at in range(0, 600, 5)]
    assert sorted(seen, reverse=True) == seen
    assert seen[-1] == 1


class WaitingByNumber:
    """A service in which requests wait though there is little work: with one replica at a third of it, and
    with two at all of it."""

    def __init__(self, **settings):
        self.now, self.num_waits = 0, 0
        settings = {"average_s": 0, "batcher": TARGETS, "lower_after_s": 60, **settings}
        self.wish = Wish(Bounds(1, 16), ScalingConfig(**settings), 1)

    def run(self, work, seconds):
        """Numbers of replicas."""
        seen = []
        for _ in range(0, seconds, 5):
            self.now += 5
            num = self.wish.replicas
            waits = num <= (2 if work > 0.8 else 1)
            self.num_waits += waits
            each = BatcherLoad(work / num, 0.25 if waits else 0.0, 0.0, 0.0)
            seen.append(self.wish.observe(self.now, load_of(*[each] * num), num))
        return seen


def test_replicas_that_were_added_for_waiting_stay_while_like_work_comes():
    service = WaitingByNumber()
    assert set(service.run(0.9, 900)[30:]) == {3}  # work alone needs two
    assert service.run(0.86, 300) == [3] * 60
    assert service.run(0.3, 400)[-1] == 2  # which work alone would do with one of
    num_waits = service.num_waits
    assert min(service.run(0.9, 60)) >= 3
    assert service.run(0.3, 400)[-1] == 2
    assert service.num_waits <= num_waits + 1  # before the work was seen to be back


def test_replicas_that_were_added_for_waiting_are_tried_without_when_it_is_long_ago():
    service = WaitingByNumber(lower_after_s=10)
    assert service.run(0.9, 1100)[30:].count(2) == 3  # once in 240 s, and what it takes to see it


def scaled_of(scaling):
    return scaled_deployments(ServeConfig.parse({"max_replicas": 4, "scaling": scaling}))["recommend"]


def test_replicas_that_have_said_nothing_are_not_taken_for_idle():
    wish = Wish(Bounds(1, 8), ScalingConfig(average_s=0, batcher=TARGETS), 4)
    for at in range(0, 3600, 5):
        assert wish.observe(at, load_of(running=4), 4) == 4
        assert wish.observe(at + 2, load_of(IDLE, IDLE, IDLE, running=4), 4) == 4
    for at in range(3600, 4000, 5):
        wish.observe(at, load_of(IDLE, IDLE, IDLE, IDLE), 4)
    assert wish.replicas == 2


def test_the_signal_is_read_of_the_replicas_that_run():
    metrics = {"work": 0.25, "queue_wait_seconds": 0.5, "full_batches": 1.0, "backlog_seconds": 2.0}

    def page(replica):
        lines = [
            f'ray_rayrec_batcher_{name}{{run="r",serve_replica="{replica}",WorkerId="w"}} {value}'
            for name, value in metrics.items()
        ]
        return "\n".join(lines)

    answers = {
        "http://head/api/prometheus/sd": '[{"targets": ["10.0.0.1:9"]}]',
        "http://10.0.0.1:9/metrics": f"{page('a')}\n{page('gone')}",
    }
    client = ServeDashboard(lambda: "http://head", lambda method, url, values: answers[url])
    deployed = {"recommend": Deployed(2, ("10.0.0.1", "10.0.0.1"), ("a", "b"))}
    load = client.loads("rayrec", deployed)["recommend"]
    assert (load.batchers, load.num_running) == ((BatcherLoad(0.25, 0.5, 1.0, 2.0),), 2)


SOON = ScalingConfig(lower_after_s=60)


class Replicas:
    """As many batchers as are wished for, in simulated time; batches as `BatchCosts` has them."""

    START_S = 40.0

    def __init__(self, clock, costs, num):
        self._clock, self._costs = clock, costs
        self._from = [0.0] * num
        """When each begins to answer."""
        self._windows = [LoadWindow(clock) for _ in range(num)]
        self._queues = [[] for _ in range(num)]
        self._free_at = [0.0] * num
        self._turn = itertools.count()
        self.waits = []
        """(When, s) of each request."""

    @property
    def running(self):
        return [each for each, begins in enumerate(self._from) if begins <= self._clock.now]

    def scale(self, num):
        while len(self._from) > num and len(self._from) > 1:
            for each in (self._from, self._windows, self._queues, self._free_at):
                each.pop()
        while len(self._from) < num:
            self._from.append(self._clock.now + self.START_S)
            self._windows.append(LoadWindow(self._clock))
            self._queues.append([])
            self._free_at.append(0.0)

    def request(self):
        running = self.running
        chosen = running[next(self._turn) % len(running)]
        self._windows[chosen].came(self._costs.least_s)
        if len(self._queues[chosen]) < 64:  # others are refused
            self._queues[chosen].append(self._clock.now)

    def compute(self):
        now = self._clock.now
        for each in self.running:
            queue = self._queues[each]
            if not queue or self._free_at[each] > now:
                continue
            size = self._costs.best_size(len(queue), math.inf)
            taken, self._queues[each] = queue[:size], queue[size:]
            waited = [now - came for came in taken]
            self.waits += [(now, wait) for wait in waited]
            self._free_at[each] = now + self._costs.of(size)
            is_full = 1 < self._costs.full_size <= size and bool(self._queues[each])
            self._windows[each].computed(waited, is_full)

    def load(self):
        loads = []
        for each in self.running:
            backlog_s = len(self._queues[each]) * self._costs.least_s
            loads.append(self._windows[each].read(backlog_s))
        return load_of(*loads)


def simulated(rate_at, seconds, begin=1, most=16, settings=SOON):
    """Ten milliseconds at a time: (replicas by second, waits)."""
    clock, random = Clock(), np.random.default_rng(7)
    costs = BatchCosts({1: 0.02, 8: 0.04, 16: 0.08})  # at most 200 requests per second
    replicas = Replicas(clock, costs, begin)
    wish = Wish(Bounds(1, most), settings, begin)
    seen = []
    for tick in range(100 * seconds):
        clock.now = tick / 100
        for _ in range(random.poisson(rate_at(clock.now) / 100)):
            replicas.request()
        replicas.compute()
        if tick % 1000 == 0:  # as often as Ray exports metrics
            replicas.scale(wish.observe(clock.now, replicas.load(), len(replicas.running)))
        if tick % 100 == 0:
            seen.append(wish.replicas)
    return seen, replicas.waits


@pytest.mark.slow
def test_a_load_that_rises_to_six_times_as_much_gets_what_it_needs_and_keeps_it():
    seen, waits = simulated(lambda at: 100 if at < 60 else 600, 260)
    assert set(seen[:60]) == {1}
    assert 600 / 200 / 0.7 <= seen[-1] <= 7  # 4.3 of full replicas at 70 %
    changes = [(before, after) for before, after in itertools.pairwise(seen) if before != after]
    assert len(changes) <= 4
    assert (
        sum(after < before for before, after in changes) <= 1
    )  # what the queue of the rise asked for beyond
    late = [wait for at, wait in waits if at > 200]
    assert np.mean(late) < 0.05
    before = [wait for at, wait in waits if 70 < at < 100]
    assert np.mean(before) > 0.1  # what one replica made of it


def test_a_load_that_falls_is_followed_later_and_no_further_than_it_bears():
    seen, waits = simulated(lambda at: 600 if at < 60 else 100, 340, begin=5, settings=SOON)
    assert seen[60:120] == [5] * 60
    assert seen[-1] == 1
    assert sorted(seen, reverse=True) == seen
    assert np.mean([wait for at, wait in waits if at > 300]) < 0.05


def test_replicas_that_are_busy_with_small_batches_are_not_full():
    """At 50 requests per second, one after the other: busy all the time, at a quarter of the load."""
    seen, _ = simulated(lambda at: 50, 100)
    assert set(seen) == {1}
