"""What rows and gradients take between two nodes: a Ray cluster over a shaped link of 1 Gbit/s.

    namespace a: trainer, reader, feature worker, driver ──── 1 Gbit/s each way ──── namespace b: one server

Whole pipelines of `rayrec train` with a SASRec of width 64 and binary cross-entropy with 64 negatives for
each event, as gSASRec has many (Petrov & Macdonald, RecSys 2023): a step reads and updates some 27,000 rows
of 64 numbers, and computes little, so that most of it is what travels. Runs differ in `sparse.wire` and
`pipeline.mode`; windows are taken in turns. Both namespaces share the cores of this machine. Bars:

* `parallel-rows-bytes`, `parallel-rows-bytes-int8`: 0.51 and 0.28 over the bytes of a step with `bfloat16`
  and `int8_row`, of those with float32: all that the kernel counts on the link both ways, with ids (which
  have 32 bits here), headers and Ray's own messages.
* `parallel-rows-step`: steps per second with `bfloat16` over those with float32, mode `sync`, in which a step
  waits for both ways.
* `parallel-rows-step-int8`, `parallel-rows-step-ahead`: with `int8_row`, and with `bfloat16` in mode
  `exact_prefetch`, in which rows come while gradients go; nothing is claimed of them.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.row_run import ROLE, SERVERS, TRAINERS
from benchmarks.shaped_link import End, shaped_link, why_not
from rayrec.platform.console import log
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare

MEGABITS, PORT = 1_000, 6379
NUM_USERS, NUM_EVENTS, NUM_ITEMS = 40_000, 10, 200_000
BFLOAT16_BYTES, INT8_BYTES, STEP = 0.51, 0.28, 1.6
TARGETS = {
    "parallel-rows-bytes": 1.0,
    "parallel-rows-bytes-int8": 1.0,
    "parallel-rows-step": STEP,
    "parallel-rows-step-int8": 0.0,
    "parallel-rows-step-ahead": 0.0,
}
_STORE_BYTES = 256 * 2**20
_STARTS, _ENDS_S = 4, 30.0

Window = dict[str, Any]


def bench(options: BenchOptions) -> list[Bar]:
    if (reason := why_not()) is not None:
        log.print(f"not measured: {reason}")
        return [Bar(name, None, None, reason, target, None) for name, target in TARGETS.items()]
    found = windows(options.pairs, options.steps)
    for (mode, wire), some in found.items():
        step_s, moved = (statistics.median(one[key] for one in some) for key in ("step_s", "moved"))
        log.print(
            f"{mode}, {wire}: {1e3 * step_s:.0f} ms a step, {moved / 1e6:.2f} MB both ways",
            highlight=False,
        )

    def ratios(key: str, wire: str, mode: str = "sync") -> list[float]:
        """Of float32's to this wire's."""
        pairs = zip(found[mode, "float32"], found[mode, wire], strict=True)
        return [wide[key] / narrow[key] for wide, narrow in pairs]

    def bar(name: str, values: Sequence[float], peer: str) -> Bar:
        return Bar.of(name, values, peer, TARGETS[name])

    half, quarter = (
        [limit * ratio for ratio in ratios("moved", wire)]
        for wire, limit in (("bfloat16", BFLOAT16_BYTES), ("int8_row", INT8_BYTES))
    )
    return [
        bar("parallel-rows-bytes", half, f"{BFLOAT16_BYTES} of float32's bytes"),
        bar("parallel-rows-bytes-int8", quarter, f"{INT8_BYTES} of float32's bytes"),
        bar("parallel-rows-step", ratios("step_s", "bfloat16"), "float32 rows"),
        bar("parallel-rows-step-int8", ratios("step_s", "int8_row"), "float32 rows"),
        bar("parallel-rows-step-ahead", ratios("step_s", "bfloat16", "exact_prefetch"), "float32 rows"),
    ]


def windows(num_windows: int, steps: int) -> dict[tuple[str, str], list[Window]]:
    """By mode and wire."""
    with tempfile.TemporaryDirectory(prefix="rows-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        data = _data(Path(folder))
        with shaped_link(MEGABITS) as ends, _cluster(ends, folder) as environment:
            command = ends[0].command(
                sys.executable,
                "-m",
                "benchmarks.row_run",
                *(str(data), f"{ends[0].address}:{PORT}", ends[0].interface, str(num_windows), str(steps)),
            )
            printed = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, env=environment, text=True
            ).stdout
    found: dict[tuple[str, str], list[Window]] = defaultdict(list)
    for line in printed.splitlines():
        if not line.startswith("{"):  # what Ray says
            continue
        window = json.loads(line)
        found[window["mode"], window["wire"]].append(window)
    return found


def _data(folder: Path) -> Path:
    """Users whose items are sampled alike of a large catalog."""
    num = NUM_USERS * NUM_EVENTS
    items_N = np.random.default_rng(0).integers(0, NUM_ITEMS, num)
    log_of = {"user_id": np.arange(num) // NUM_EVENTS, "item_id": items_N, "timestamp": np.arange(num)}
    (folder / "source").mkdir()
    pq.write_table(pa.table(log_of), folder / "source" / "interactions.parquet")
    prepare(folder / "source", folder / "data", PrepareConfig(allow=frozenset({"cold-items"})))
    return folder / "data"


@contextmanager
def _cluster(ends: tuple[End, End], folder: str) -> Iterator[dict[str, str]]:
    """A node of Ray in each namespace; the environment of those that join it."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    first, second = ends
    head = ("--head", f"--port={PORT}", f"--temp-dir={folder}/ray", "--include-dashboard=false")
    nodes = (
        (first, TRAINERS, head),
        (second, SERVERS, (f"--address={first.address}:{PORT}",)),
    )
    with ExitStack() as stack:
        for end, role, how in nodes:
            command = end.command(
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *how),
                f"--node-ip-address={end.address}",
                f"--labels={ROLE}={role}",
                "--num-cpus=8",
                f"--object-store-memory={_STORE_BYTES}",
            )
            stack.callback(_end, _started(command, Path(folder) / f"{role}.log", environment))
        yield environment


def _started(command: list[str], output: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A node that is up; tried again where Ray has given up, as it does on a busy machine."""
    for _ in range(_STARTS):
        with output.open("wb") as log_file:
            node = subprocess.Popen(command, stdout=log_file, stderr=log_file, env=environment)
        while node.poll() is None:
            if b"block forever" in output.read_bytes():
                return node
            time.sleep(0.5)
    raise RuntimeError(f"no Ray node can be started: {output.read_text()[-2_000:]}")


def _end(node: subprocess.Popen[bytes]) -> None:
    """The node ends its processes when it is told to end."""
    node.terminate()
    try:
        node.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
