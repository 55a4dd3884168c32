import pytest

from rayrec.platform.metrics import MeterClock, StageClock, StageTimes


class ManualClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_busy_or_waiting_while_the_clock_runs():
    now = ManualClock()
    clock = StageClock(now)
    now.now += 7  # start-up
    clock.start()
    now.now += 1
    with clock.busy():
        now.now += 2
    now.now += 5
    with clock.busy():
        now.now += 1
    now.now += 3

    assert clock.times() == StageTimes(busy_s=3.0, waiting_s=6.0, num_batches=2)
    clock.stop()
    assert clock.times() == StageTimes(busy_s=3.0, waiting_s=9.0, num_batches=2)


def test_what_happens_between_two_windows_is_not_waiting():
    now = ManualClock()
    clock = StageClock(now)
    for _ in range(2):
        clock.start()
        with clock.busy():
            now.now += 1
        clock.stop()
        now.now += 50  # validation

    assert clock.times() == StageTimes(busy_s=2.0, waiting_s=0.0, num_batches=2)


def test_parts_of_a_batch_are_work_but_no_batch():
    now = ManualClock()
    clock = StageClock(now)
    clock.start()
    with clock.busy(num_batches=0):
        now.now += 1
    with clock.busy():
        now.now += 2

    assert clock.times() == StageTimes(busy_s=3.0, waiting_s=0.0, num_batches=1)


def test_a_batch_that_fails_took_its_time():
    now = ManualClock()
    clock = StageClock(now)

    def fail() -> None:
        now.now += 4
        raise KeyError

    with pytest.raises(KeyError), clock.busy():
        fail()

    assert clock.times() == StageTimes(busy_s=4.0, waiting_s=0.0, num_batches=1)


def test_metered_work_counts_within_windows_only():
    now, meter = ManualClock(), ManualClock()
    clock = MeterClock(meter, now)
    meter.now += 30  # a snapshot was loaded
    clock.start()
    now.now, meter.now = now.now + 10, meter.now + 4
    assert clock.times(5) == StageTimes(busy_s=4.0, waiting_s=6.0, num_batches=5)
    clock.stop()
    now.now, meter.now = now.now + 20, meter.now + 20  # validation
    clock.start()
    now.now, meter.now = now.now + 1, meter.now + 1
    clock.stop()

    assert clock.times(7) == StageTimes(busy_s=5.0, waiting_s=6.0, num_batches=7)
