"""Reads parts of training batches; all of it is in `SampleReader`."""

from __future__ import annotations

from ray.actor import ActorHandle

from rayrec.actors.heartbeats import Heart
from rayrec.actors.spawning import ActorRole, Where, anywhere, spawn_stateless
from rayrec.platform.metrics import RayStageMetrics, StageClock, StageTimes
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.reading.decoding import ReadSpec
from rayrec.samples.reading.read_plan import AssignedPart
from rayrec.samples.reading.reader import SampleReader


class SampleReaderActor:
    """Any reader can read any part, so it keeps no position that could be lost with it."""

    def __init__(self, role: ActorRole, spec: ReadSpec) -> None:
        self._role = role
        self._pulse = role.pulse()
        self._reader = SampleReader(spec)
        self._clock = StageClock()
        self._metrics = RayStageMetrics(role.run, role.stage, role.member)

    def __repr__(self) -> str:
        return self._role.actor_name

    def read(self, reading: AssignedPart) -> RowBatch:
        with self._pulse.during("read"), self._clock.busy():
            rows = self._reader.read(reading.part, reading.ahead)
        self._metrics.after_batch(self._clock.times())
        return rows

    def start_clock(self) -> None:
        """Training goes on: from now on, time between batches is waiting."""
        self._clock.start()

    def stop_clock(self) -> None:
        """Until the next start nothing is trained."""
        self._clock.stop()

    def stats(self) -> StageTimes:
        times = self._clock.times()
        self._metrics.publish(times)
        return times


def spawn_sample_readers(
    run: str,
    spec: ReadSpec,
    num_readers: int,
    num_cpus: float,
    heart: Heart | None = None,
    restarts: int = 0,
    where: Where = anywhere,
) -> list[ActorHandle]:
    return [
        spawn_stateless(
            SampleReaderActor,
            ActorRole(run, "sample_reader", member, heart),
            {"num_cpus": num_cpus, **where(member)},
            restarts,
            spec,
        )
        for member in range(num_readers)
    ]
