import pytest

from rayrec.platform.metrics import StageClock, StageTimes


class ManualClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_busy_or_waiting_and_start_up_is_neither():
    now = ManualClock()
    clock = StageClock(now)
    now.now += 7  # start-up
    with clock.busy():
        now.now += 2
    now.now += 5
    with clock.busy():
        now.now += 1
    now.now += 3  # not known to be waiting before the next batch comes

    assert clock.times() == StageTimes(busy_s=3.0, waiting_s=5.0, num_batches=2)


def test_a_batch_that_fails_took_its_time():
    now = ManualClock()
    clock = StageClock(now)

    def fail() -> None:
        now.now += 4
        raise KeyError

    with pytest.raises(KeyError), clock.busy():
        fail()

    assert clock.times() == StageTimes(busy_s=4.0, waiting_s=0.0, num_batches=1)
