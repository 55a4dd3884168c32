"""`rayrec prepare` at size: memory that does not grow with the log, and speed that does not fall with it.

A synthetic log of 200 million events (RAYREC_BENCH_ROWS: another number) and one of a tenth of it, in
Parquet files of two million: users with twenty events on average, one user with a hundredth of all, items
by a power law, times of 90 days, three columns. The split is by time at fractions of the events. Bars:

* `scale-prepare-process`: 2 GB over the peak memory of any process.
* `scale-prepare-total`: 8 GB over the peak of all processes together, those of Ray too.
* `scale-prepare-growth`: the lower of the events per second of the two logs over the higher; without Ray's
  start.
* `scale-prepare-speed`: seconds of one process that holds the smaller log, over those on Ray with its
  start.
* `scale-prepare-bits`: 1 if both ways write the same manifest of the smaller log, checksums included.
* `scale-prepare-resume`: 1 if the smaller log gives that manifest, too, after it was killed in the middle
  of a pass, with all of Ray, and gone on with.

How it is measured. Every half second `/proc` tells the resident memory of each process below this one, and
their proportional memory, which counts shared pages once; what a process maps of files counts. Beside other
work, the seconds of processors in the record tell more of speed and growth than the bars.
RAYREC_BENCH_PAIRS (at most 3) is the number of measurements of the smaller log, each of both ways. It takes
up to an hour and 20 GB of the folder for temporary files, and writes the record
`benchmarks/quality/scale-prepare.json` with the date.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.processes import ProcessorTime, command_of, descendants
from benchmarks.quality_page import RECORDS
from rayrec.platform.console import log
from rayrec.samples.prepare.writer import whole_folder

RECORD = RECORDS / "scale-prepare.json"
NUM_EVENTS, PART, ROWS_PER_FILE, ROWS_PER_GROUP = 200_000_000, 10, 2_000_000, 131_072
EVENTS_PER_USER, NUM_ITEMS, BUSIEST = 20, 500_000, 100
"""The busiest user has one event in so many."""
PROCESS_BYTES, TOTAL_BYTES = 2e9, 8e9
GROWTH_TARGET, SPEED_TARGET = 0.8, 0.8
MOST_PAIRS, LOOK_S = 3, 0.5
_DRIVER = (sys.executable, "-m", "benchmarks.scale_prepare_driver")


def bench(options: BenchOptions) -> list[Bar]:
    num_events, load = options.rows or NUM_EVENTS, os.getloadavg()[2]
    folder = Path(tempfile.gettempdir()) / "rayrec-scale-prepare"
    small, large = (_log(folder, number) for number in (num_events // PART, num_events))
    with _room(folder) as room:
        pairs = [_pair(small, room) for _ in range(min(options.pairs, MOST_PAIRS))]
        resumed = _killed_and_resumed(small, room)
        of_large = _measured("ray", large, room)
    one, ray = ([pair[way] for pair in pairs] for way in ("one", "ray"))
    of_small_s = statistics.median(run.prepare_s for run in ray)
    rates = num_events // PART / of_small_s, num_events / of_large.prepare_s
    peaks = [*ray, of_large]
    speed = statistics.median(mine.total_s / theirs.total_s for mine, theirs in zip(one, ray, strict=True))
    same = len({run.content for run in (*one, *ray)}) == 1
    bars = [
        Bar.once(
            "scale-prepare-process", PROCESS_BYTES / max(run.process_bytes for run in peaks), "2 GB", 1.0
        ),
        Bar.once("scale-prepare-total", TOTAL_BYTES / max(run.total_bytes for run in peaks), "8 GB", 1.0),
        Bar.once(
            "scale-prepare-growth", min(rates) / max(rates), "a log of a tenth of the events", GROWTH_TARGET
        ),
        Bar.once("scale-prepare-speed", speed, "one process that holds the log", SPEED_TARGET),
        Bar.once("scale-prepare-bits", float(same), "one process that holds the log", 1.0),
        Bar.once("scale-prepare-resume", float(resumed.content == ray[0].content), "a run left alone", 1.0),
    ]
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "events": [num_events // PART, num_events],
        "one process": [run.record() for run in one],
        "on Ray": [run.record() for run in ray],
        "on Ray, killed and resumed": resumed.record(),
        "on Ray, all events": of_large.record(),
        "events per second": [round(rate) for rate in rates],
        "load before": load,
        "load after": os.getloadavg()[2],
        "bars": {bar.name: {"value": bar.value, "target": bar.target} for bar in bars},
    }
    RECORD.write_text(json.dumps(made, indent=2) + "\n")
    return bars


@dataclass(frozen=True)
class Run:
    """One preparation."""

    content: str
    """Checksum of the manifest."""
    start_s: float
    prepare_s: float
    processor_s: float
    """Of all processes, Ray's and the looking at them included."""
    process_bytes: int
    total_bytes: int
    peaks: dict[str, int]
    """Bytes of the largest process of each name."""

    @property
    def total_s(self) -> float:
        return self.start_s + self.prepare_s

    def record(self) -> dict[str, Any]:
        return {
            "start_s": round(self.start_s, 1),
            "prepare_s": round(self.prepare_s, 1),
            "processor_s": round(self.processor_s, 1),
            "largest process MB": round(self.process_bytes / 1e6),
            "all processes MB": round(self.total_bytes / 1e6),
            "by process MB": {name: round(peak / 1e6) for name, peak in sorted(self.peaks.items())},
        }


def _pair(source: Path, room: Path) -> dict[str, Run]:
    pair = {way: _measured(way, source, room) for way in ("one", "ray")}
    log.print(f"scale-prepare: one process {pair['one'].total_s:.0f} s, on Ray {pair['ray'].total_s:.0f} s")
    return pair


def _measured(way: str, source: Path, room: Path, *more: str) -> Run:
    out, spill = room / "data", room / "spill"
    spill.mkdir(exist_ok=True)
    with Peaks(LOOK_S) as peaks, ProcessorTime() as processors:
        done = subprocess.run(
            [*_DRIVER, way, str(source), str(out), str(spill), *more],
            stdout=subprocess.PIPE,
            stderr=(room / f"{way}.log").open("a"),
            check=True,
            text=True,
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(out)
    run = Run(
        answer["content"],
        answer["start_s"],
        answer["prepare_s"],
        processors.seconds,
        max(peaks.of_processes.values()),
        peaks.of_all,
        peaks.by_name(),
    )
    log.print(f"scale-prepare: {way} {source.name} {json.dumps(run.record())}")
    return run


def _killed_and_resumed(source: Path, room: Path) -> Run:
    """Kill a preparation, with all processes of Ray, while users are sorted; then go on with it."""
    out, spill = room / "data", room / "spill"
    spill.mkdir(exist_ok=True)
    command = [*_DRIVER, "ray", str(source), str(out), str(spill)]
    before = set(descendants())
    with (room / "killed.log").open("w") as errors, subprocess.Popen(command, stderr=errors) as driver:
        results = out.parent / f".{out.name}.preparing" / "results"
        while len(list(results.glob("users-*.pickle"))) < 4:
            assert driver.poll() is None, (room / "killed.log").read_text()
            time.sleep(0.05)
        for process in [*descendants(), driver.pid]:
            if process not in before:
                _kill(process)
    log.print("scale-prepare: killed; going on")
    assert not out.exists()
    return _measured("ray", source, room, "resume")


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@contextmanager
def _room(folder: Path) -> Iterator[Path]:
    """A folder for data sets inside the block."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="room-") as room:
        yield Path(room)


@dataclass
class Peaks:
    """The most memory that each process below this one had, and all of them at one moment."""

    interval_s: float
    of_processes: dict[int, int] = field(default_factory=dict)
    """Resident bytes by process id."""
    of_all: int = 0
    """Proportional bytes, which count shared pages once."""
    _names: dict[int, str] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Peaks:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def by_name(self) -> dict[str, int]:
        """The largest process of each name."""
        found: dict[str, int] = {}
        for process, peak in self.of_processes.items():
            name = self._names[process]
            found[name] = max(found.get(name, 0), peak)
        return found

    def _look(self) -> None:
        while not self._over.wait(self.interval_s):
            total = 0
            for process in descendants():
                memory = _memory_of(process)
                if memory is not None:
                    resident, proportional = memory
                    total += proportional
                    self.of_processes[process] = max(self.of_processes.get(process, 0), resident)
                    self._names[process] = _name_of(process) or self._names.get(process, "")
            self.of_all = max(self.of_all, total)


def _memory_of(process: int) -> tuple[int, int] | None:
    """(resident, proportional) bytes of a process; None of one that has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(Rss|Pss): +(\d+) kB", text, re.MULTILINE))
    return 1024 * int(found.get("Rss", 0)), 1024 * int(found.get("Pss", 0))


def _name_of(process: int) -> str:
    """What a process does: a task of Ray, a part of Ray, or the driver."""
    command = command_of(process)
    if command.startswith("ray::"):
        return "worker"
    for part in ("raylet", "gcs_server", "default_worker", "log_monitor", "monitor", "agent"):
        if part in command:
            return part
    return "driver" if "_driver" in command else command.split(" ")[0].rpartition("/")[2]


def _log(folder: Path, num_events: int) -> Path:
    """The log with so many events, made if it is not there."""
    source = folder / f"log-{num_events}"
    if not source.is_dir():
        log.print(f"scale-prepare: writing {num_events:,} events to {source}")
        source.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(source) as draft:
            for number in range(-(-num_events // ROWS_PER_FILE)):
                rows = min(ROWS_PER_FILE, num_events - number * ROWS_PER_FILE)
                _write_part(draft / f"part-{number:05}.parquet", number, rows, num_events // EVENTS_PER_USER)
    return source


def _write_part(path: Path, number: int, num_rows: int, num_users: int) -> None:
    random = np.random.default_rng([0, number])
    users = random.integers(1, num_users, num_rows)
    users[random.random(num_rows) < 1 / BUSIEST] = 0
    columns = {
        "user_id": users,
        "item_id": np.minimum((2_000 * random.pareto(1.1, num_rows)).astype(np.int64), NUM_ITEMS - 1),
        "timestamp": 1_700_000_000 + random.integers(0, 90 * 86_400, num_rows),
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP, compression="zstd")
