"""After which steps there is a cut."""

from rayrec.pipelines.config import SnapshotConfig
from rayrec.pipelines.snapshot_writer import CutSchedule


class Surroundings:
    def __init__(self) -> None:
        self.asked = self.writing = False
        self.now = 0.0

    def schedule(self, **settings: object) -> CutSchedule:
        config = SnapshotConfig.parse(settings)
        return CutSchedule(config, lambda: self.asked, lambda: self.writing, lambda: self.now)


def test_without_settings_there_is_a_cut_only_when_somebody_asks():
    around = Surroundings()
    schedule = around.schedule()

    assert not any(schedule(step) for step in range(100))
    around.asked = True
    assert schedule(100)


def test_every_so_many_steps():
    schedule = Surroundings().schedule(every_steps=3)

    assert [step for step in range(10) if schedule(step)] == [2, 5, 8]


def test_every_so_many_seconds_since_the_last_one_began():
    around = Surroundings()
    schedule = around.schedule(every_s=10)
    cuts = []
    for step in range(40):
        around.now = float(step)
        if schedule(step):
            cuts.append(step)

    assert cuts == [10, 20, 30]


def test_while_one_is_written_there_is_no_other_but_a_wish_is_not_forgotten():
    around = Surroundings()
    schedule = around.schedule(every_steps=2)
    around.writing = around.asked = True

    assert not any(schedule(step) for step in range(10))
    around.writing = False
    assert schedule(10)
