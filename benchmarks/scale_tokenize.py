"""`rayrec tokenize` at size: semantic IDs of ten million items, in memory that does not grow with them.

A synthetic log with 4 events an item (RAYREC_BENCH_ROWS: another number of items than ten million) and one of
a tenth of the items, both prepared on Ray: items belong to topics of a thousand, users to one topic, and one
event in ten is of any user. Every item has an event. Codes are three levels of 256 of interaction vectors
with 64 dimensions. Bars:

* `scale-tokenize-process`: 2 GB over the peak memory of any process.
* `scale-tokenize-total`: 8 GB over the peak of all processes together, those of Ray too.
* `scale-tokenize-bits`: 1 if one process, whose tasks take other numbers of items and events, gives the
  smaller catalog the same codes.
* `scale-tokenize-resume`: 1 if the smaller catalog gets them, too, after tokenization was killed in the
  middle of a pass, with all of Ray, and gone on with.
* `scale-tokenize-topics`: of users' next items, how many have the same first code as the item before, over
  five times what chance gives: codes that say nothing of items are no use, however little they cost.
* `scale-tokenize-mapped`: memory of its own that a process takes for registry and trie as they are made, over
  ten times what a second process takes that maps the files.

Memory is looked at as `scale-prepare` does: resident memory counts mapped files, the columns of a product
among them. It takes some hours and 60 GB of the folder for temporary files, and writes the record
`benchmarks/quality/scale-tokenize.json` with the date.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.processes import ProcessorTime, descendants
from benchmarks.quality_page import RECORDS
from benchmarks.scale_prepare import LOOK_S, PROCESS_BYTES, TOTAL_BYTES, Peaks
from rayrec.platform.console import log
from rayrec.samples.prepare.writer import whole_folder

RECORD = RECORDS / "scale-tokenize.json"
NUM_ITEMS, PART, EVENTS_PER_ITEM, EVENTS_PER_USER = 10_000_000, 10, 4, 10
ITEMS_PER_TOPIC, OTHERS, ROWS_PER_FILE = 1_000, 0.1, 2_000_000
OVER_CHANCE, LESS_MEMORY = 5.0, 10.0
_DRIVER = (sys.executable, "-m", "benchmarks.scale_tokenize_driver")


def bench(options: BenchOptions) -> list[Bar]:
    num_items, load = options.rows or NUM_ITEMS, os.getloadavg()[2]
    folder = Path(tempfile.gettempdir()) / "rayrec-scale-tokenize"
    small, large = (_data(folder, number) for number in (num_items // PART, num_items))
    with tempfile.TemporaryDirectory(dir=folder, prefix="room-") as name:
        room = Path(name)
        of_small = _tokenized("ray", small, room)
        alone = _tokenized("one", small, room)
        resumed = _killed_and_resumed(small, room)
        of_large = _tokenized("ray", large, room, keep=True)
        memory = [_loaded(way, room) for way in ("made", "mapped")]
    levels = of_large.answer["next_items"]["levels"]
    over_chance = levels[0]["same"] / levels[0]["by_chance"]
    bars = [
        Bar.once("scale-tokenize-process", PROCESS_BYTES / of_large.process_bytes, "2 GB", 1.0),
        Bar.once("scale-tokenize-total", TOTAL_BYTES / of_large.total_bytes, "8 GB", 1.0),
        Bar.once("scale-tokenize-bits", float(alone.version == of_small.version), "one process", 1.0),
        Bar.once(
            "scale-tokenize-resume", float(resumed.version == of_small.version), "a run left alone", 1.0
        ),
        Bar.once("scale-tokenize-topics", over_chance / OVER_CHANCE, "five times chance", 1.0),
        Bar.once(
            "scale-tokenize-mapped",
            memory[0] / memory[1] / LESS_MEMORY,
            "a tenth of the memory of a process that makes its own",
            1.0,
        ),
    ]
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "items": [num_items // PART, num_items],
        "smaller, on Ray": of_small.record(),
        "smaller, one process": alone.record(),
        "smaller, killed and resumed": resumed.record(),
        "on Ray": of_large.record(),
        "own memory of a process, registry and trie made and mapped, MB": [
            round(each / 1e6) for each in memory
        ],
        "load before": load,
        "load after": os.getloadavg()[2],
        "bars": {bar.name: {"value": bar.value, "target": bar.target} for bar in bars},
    }
    RECORD.write_text(json.dumps(made, indent=2) + "\n")
    return bars


@dataclass(frozen=True)
class Run:
    """One tokenization."""

    answer: dict[str, Any]
    """Of the driver."""
    processor_s: float
    process_bytes: int
    total_bytes: int
    peaks: dict[str, int]
    """Bytes of the largest process of each name."""

    @property
    def version(self) -> str:
        return str(self.answer["version"])

    def record(self) -> dict[str, Any]:
        return {
            **self.answer,
            "processor_s": round(self.processor_s, 1),
            "largest process MB": round(self.process_bytes / 1e6),
            "all processes MB": round(self.total_bytes / 1e6),
            "by process MB": {name: round(peak / 1e6) for name, peak in sorted(self.peaks.items())},
        }


def _tokenized(way: str, data: Path, room: Path, *more: str, keep: bool = False) -> Run:
    out = room / "ids"
    with Peaks(LOOK_S) as peaks, ProcessorTime() as processors:
        answer = _answer(room, way, data, out, *more)
    if not keep:
        shutil.rmtree(out)
    run = Run(
        answer,
        processors.seconds,
        max(peaks.of_processes.values()),
        peaks.of_all,
        peaks.by_name(),
    )
    log.print(f"scale-tokenize: {way} {data.name} {json.dumps(run.record())}")
    return run


def _answer(room: Path, way: str, *arguments: str | Path) -> dict[str, Any]:
    with (room / f"{way}.log").open("a") as errors:
        done = subprocess.run(
            [*_DRIVER, way, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=errors,
            check=False,
            text=True,
        )
    if done.returncode:
        raise RuntimeError((room / f"{way}.log").read_text()[-4_000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _killed_and_resumed(data: Path, room: Path) -> Run:
    """Kill a tokenization, with all processes of Ray, while the matrix is multiplied; then go on with it."""
    out = room / "ids"
    command = [*_DRIVER, "ray", str(data), str(out)]
    before = set(descendants())
    with (room / "killed.log").open("w") as errors, subprocess.Popen(command, stderr=errors) as driver:
        results = out.parent / f".{out.name}.tokenizing" / "results"
        while not list(results.glob("product-1-*.pickle")):
            assert driver.poll() is None, (room / "killed.log").read_text()
            time.sleep(0.02)
        for process in [*descendants(), driver.pid]:
            if process not in before:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    log.print("scale-tokenize: killed; going on")
    assert not out.exists()
    return _tokenized("ray", data, room, "resume")


def _loaded(way: str, room: Path) -> int:
    """Bytes of its own that a process takes for registry and trie."""
    answer = _answer(room, way, room / "ids")
    log.print(f"scale-tokenize: registry and trie {way} {json.dumps(answer)}")
    return int(answer["own_bytes"])


def _data(folder: Path, num_items: int) -> Path:
    """The prepared data set with so many items, made if it is not there."""
    data = folder / f"data-{num_items}"
    if not data.is_dir():
        log.print(f"scale-tokenize: making a data set of {num_items:,} items in {data}")
        source = folder / f"log-{num_items}"
        shutil.rmtree(source, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        num_events = EVENTS_PER_ITEM * num_items
        with whole_folder(source) as draft:
            for number in range(-(-num_events // ROWS_PER_FILE)):
                rows = min(ROWS_PER_FILE, num_events - number * ROWS_PER_FILE)
                write_part(draft / f"part-{number:05}.parquet", number, rows, num_items)
        _answer(folder, "prepare", source, data)
        shutil.rmtree(source)
    return data


def write_part(path: Path, number: int, num_rows: int, num_items: int) -> None:
    """Events of one file of the log: all items in turn, then more of those that many users like."""
    random = np.random.default_rng([0, number])
    first = number * ROWS_PER_FILE
    items = np.arange(first, first + num_rows)
    is_more = items >= num_items
    num_topics = -(-num_items // ITEMS_PER_TOPIC)
    within = np.minimum((60 * random.pareto(1.1, num_rows)).astype(np.int64), ITEMS_PER_TOPIC - 1)
    drawn = np.minimum(random.integers(0, num_topics, num_rows) * ITEMS_PER_TOPIC + within, num_items - 1)
    items = np.where(is_more, drawn, items)
    users_of_topic = max(EVENTS_PER_ITEM * ITEMS_PER_TOPIC // EVENTS_PER_USER, 1)
    topics = items // ITEMS_PER_TOPIC
    is_other = random.random(num_rows) < OTHERS
    topics = np.where(is_other, random.integers(0, num_topics, num_rows), topics)
    columns = {
        "user_id": topics + num_topics * random.integers(0, users_of_topic, num_rows),
        "item_id": items,
        "timestamp": 1_700_000_000 + random.integers(0, 90 * 86_400, num_rows),
    }
    pq.write_table(pa.table(columns), path, row_group_size=131_072, compression="zstd")
