"""How soon what many users do changes what others are recommended: `rayrec online`, from event to answer.

A log of 2,000 users is trained on first. Then 400 new users each do the same: two popular items, and after
them one that nobody was recommended there. Their events are posted, one request per user; what is measured is
the time from the last of them until that item is among the first ten for a history of the two popular ones,
asked all the time. All is one command on this machine: the service, the trainer, two servers and the others.

* `online-learned`: 60 s over that time.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.serve import free_port
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare

NUM_USERS, NUM_ITEMS, EVENTS_PER_USER, NEW_USERS = 2_000, 1_000, 20, 400
TARGET_S, PATIENCE_S = 60.0, 300.0
FIRST, POPULAR = 10, ["i0", "i1"]


def bench(options: BenchOptions) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        port = free_port()
        command = [*_prepared(Path(folder)), "--port", str(port)]
        log.print("online: training on what happened before")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            service = _Service(f"http://127.0.0.1:{port}", process)
            service.wait_until_caught_up()
            seconds = [service.seconds_to_learn(number) for number in range(options.pairs)]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return [Bar.of("online-learned", [TARGET_S / each for each in seconds], "a minute", 1.0)]


class _Service:
    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self._url, self._process = url, process

    def wait_until_caught_up(self) -> None:
        """With the rows that were there: no version comes that has more steps."""
        step, since = -1, time.monotonic()
        while time.monotonic() - since < 30:
            time.sleep(1)
            try:
                now = self._ask("recommend", {"k": 1})["model"]["step"]
            except OSError:
                now, since = step, time.monotonic()
            if now != step:
                step, since = now, time.monotonic()

    def seconds_to_learn(self, number: int) -> float:
        taught = self._never_recommended()
        now = time.time()
        for user in range(NEW_USERS):
            history = [*POPULAR, taught]
            self._ask(
                "events",
                [
                    {"user_id": f"n{number}-{user}", "item_id": item, "timestamp": now - 3 + place}
                    for place, item in enumerate(history)
                ],
            )
        began = time.monotonic()
        while taught not in self._recommended(FIRST):
            if time.monotonic() - began > PATIENCE_S:
                raise RuntimeError(f"after {PATIENCE_S:g} s {taught} is not among the first {FIRST}")
            time.sleep(0.1)
        seconds = time.monotonic() - began
        log.print(f"online: {taught} is recommended {seconds:.1f} s after the last event", highlight=False)
        return seconds

    def _never_recommended(self) -> str:
        """The last of all that are recommended."""
        return self._recommended(NUM_ITEMS)[-1]

    def _recommended(self, k: int) -> list[str]:
        return [item["item_id"] for item in self._ask("recommend", {"history": POPULAR, "k": k})["items"]]

    def _ask(self, route: str, body: Any) -> Any:
        if self._process.poll() is not None:
            raise RuntimeError("rayrec online ended; what it said above tells why")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/{route}", json.dumps(body).encode(), headers)
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)


def _prepared(folder: Path) -> list[str]:
    """The command, for a log that is made here."""
    random = np.random.default_rng(0)
    users_N = np.repeat(np.arange(NUM_USERS), EVENTS_PER_USER)
    popularity_I = 1.0 / np.arange(10, NUM_ITEMS + 10)
    items_N = random.choice(NUM_ITEMS, size=len(users_N), p=popularity_I / popularity_I.sum())
    columns = {
        "user_id": [f"u{user}" for user in users_N.tolist()],
        "item_id": [f"i{item}" for item in items_N.tolist()],
        "timestamp": np.arange(len(users_N)) + 1_600_000_000,
    }
    source = folder / "log"
    source.mkdir()
    pq.write_table(pa.table(columns), source / "interactions.parquet")
    prepare(source, folder / "data", PrepareConfig(allow=frozenset({"short-users", "cold-items"})))
    rayrec = [sys.executable, "-m", "rayrec"]
    for arguments in (
        ["store", str(source / "interactions.parquet"), str(folder / "events")],
        ["keys", str(folder / "events"), str(folder / "samples")],
    ):
        subprocess.run([*rayrec, "data", *arguments], check=True, stdout=subprocess.DEVNULL)
    settings = {
        "data.path": folder / "data",
        "data.samples": folder / "samples",
        "data.features": json.dumps(
            [
                {"op": "join_history", "store": str(folder / "events"), "last": 50},
                {"op": "concat", "inputs": ["item_ids", "item_id"], "output": "item_ids"},
            ]
        ),
        "snapshots.publish.to": folder / "versions",
        "cluster.dashboard": "false",
    }
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    config = str(CHECKOUT / "configs" / "online.yaml")
    return [*rayrec, "online", config, "--run", str(folder / "run"), *changes]
