"""Reads parts of training batches; all of it is in `SampleReader`."""

from __future__ import annotations

from typing import Any

from rayrec.actors.spawning import ActorRole, Host
from rayrec.actors.stage_actor import StageActor
from rayrec.platform.metrics import StageClock, StageTimes
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.reading.decoding import ReadSpec
from rayrec.samples.reading.read_plan import AssignedPart
from rayrec.samples.reading.reader import SampleReader


class SampleReaderActor(StageActor[StageClock]):
    """Any reader can read any part, so it keeps no position that could be lost with it."""

    def __init__(self, role: ActorRole, spec: ReadSpec) -> None:
        super().__init__(role, StageClock())
        self._reader = SampleReader(spec)

    def read(self, reading: AssignedPart) -> RowBatch:
        with self._heartbeats.during("read"), self._clock.busy():
            rows = self._reader.read(reading.part, reading.ahead)
        self._metrics.after_batch(self._clock.times())
        return rows

    def close(self) -> None:
        self._reader.close()

    def stats(self) -> StageTimes:
        times = self._clock.times()
        self._metrics.publish(times)
        return times


def spawn_sample_readers(
    host: Host, spec: ReadSpec, num_readers: int, num_cpus: float, restarts: int = 0
) -> list[Any]:
    """Start the readers of a run."""
    return [
        host.spawn(SampleReaderActor, "sample_reader", member, (spec,), {"num_cpus": num_cpus}, restarts)
        for member in range(num_readers)
    ]
