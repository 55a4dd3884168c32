"""After which steps there is a cut."""

from rayrec.pipelines.config.sections import SnapshotConfig
from rayrec.pipelines.runs.snapshot_schedule import ASK_EVERY_S, SnapshotSchedule


class Surroundings:
    def __init__(self) -> None:
        self.asked = self.writing = False
        self.now = 0.0

    def schedule(self, **settings: object) -> SnapshotSchedule:
        config = SnapshotConfig.parse(settings)
        return SnapshotSchedule(config, lambda: self.asked, lambda: self.writing, lambda: self.now)


def cuts_of(schedule: SnapshotSchedule, steps: range) -> list[int]:
    """Each is begun at once."""
    cuts = []
    for step in steps:
        if schedule(step):
            cuts.append(step)
            schedule.taken()
    return cuts


def test_without_settings_there_is_a_cut_only_when_somebody_asks():
    around = Surroundings()
    schedule = around.schedule()

    assert not any(schedule(step) for step in range(100))
    around.asked = True
    assert not schedule(100)  # steps may be short, and a look at the folder takes its time
    around.now += ASK_EVERY_S
    assert schedule(101)


def test_every_so_many_steps():
    schedule = Surroundings().schedule(every_steps=3)

    assert cuts_of(schedule, range(10)) == [2, 5, 8]


def test_every_so_many_seconds_since_the_last_one_began():
    around = Surroundings()
    schedule = around.schedule(every_s=10)
    cuts = []
    for step in range(40):
        around.now = float(step)
        cuts += cuts_of(schedule, range(step, step + 1))

    assert cuts == [10, 20, 30]


def test_while_one_is_written_there_is_no_other_but_a_wish_is_not_forgotten():
    around = Surroundings()
    schedule = around.schedule(every_steps=2)
    around.writing = around.asked = True

    assert not any(schedule(step) for step in range(10))
    around.writing = False
    around.now += ASK_EVERY_S
    assert schedule(10)


def test_between_a_cut_and_the_beginning_of_its_writing_there_is_no_other():
    """Steps are submitted ahead: the one that was cut has not been reported when the next ones are."""
    schedule = Surroundings().schedule(every_steps=1)

    assert [schedule(step) for step in range(3)] == [True, False, False]
    schedule.taken()
    assert schedule(3)
