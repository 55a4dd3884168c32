"""Does a run reach the numbers that it would have reached, whatever dies?

    python -m benchmarks.chaos [--kills 50] [--seed 0]

A small run trains while its processes are killed (SIGKILL) at random steps: driver, sample readers, feature
workers, parameter servers, trainers, and the processes that call for groups of trainers. A run whose driver
is dead is begun again with other numbers of readers, feature workers and servers. In the end it is held
against the same run left alone:

* every row of the data set is consumed once in every epoch, by the cursor of the last snapshot;
* dense weights, their optimizer's state, and every embedding row with its state have the same bits;
* so has the loss of every step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.snapshot.snapshot import load_tables
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import Snapshot, read_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare

ROLES = ("driver", "sample_reader", "feature_worker", "parameter_server", "trainer-")
GROUP_ROLE = "trainer_group"
"""Of runs whose trainers have groups."""
LAYOUTS = ((2, 1, 1), (3, 2, 2), (1, 1, 2), (2, 3, 1))
"""(servers, readers, feature workers) of the first start, the second, ...; then from the first again."""
BATCH_SIZE = 16
STEPS_PER_KILL = 14
"""Of the run: enough that it is not over before the last kill."""
PATIENCE_S = 300.0
"""Longest that nothing may happen: several attempts of a run that hangs on a busy machine."""


@dataclass(frozen=True)
class Outcome:
    """What a run went through."""

    kills: Counter[str]
    """By role."""
    starts: int
    """Of the driver."""
    rollbacks: int
    """Returns to a snapshot that the driver made by itself."""
    steps: int
    trained_again: int
    """Steps that were lost behind a snapshot."""
    differences: list[str] = field(default_factory=list)
    """From the run that was left alone; there should be none."""


def chaos(
    folder: Path,
    num_kills: int,
    num_trainers: int,
    seed: int,
    cluster: str | None = None,
    group_size: int = 1,
) -> Outcome:
    """Train a run under kills in an empty folder, and hold it against one that is left alone.

    Args:
        num_kills: at least as many as there are roles: every role dies.
        cluster: Ray's address; None lets every driver start its own.
        group_size: trainers of a group.
    """
    data = ring_of_items(folder, num_kills * STEPS_PER_KILL)
    run = ChaosRun(folder, data, num_trainers, group_size, seed, cluster)
    starts = run.train_under(_victims(num_kills, seed, roles(group_size)))
    alone = folder / "alone"
    run.start(alone, LAYOUTS[0], step_s=0.0).wait()
    journal = run.journal("chaos")
    return Outcome(
        kills=run.kills,
        starts=starts,
        rollbacks=RunFolder.open(folder / "chaos").state.get("rollbacks", 0),
        steps=len({line["step"] for line in journal}),
        trained_again=len(journal) - len({line["step"] for line in journal}),
        differences=differences(folder / "chaos", alone, EPOCHS)
        + _other_losses(journal, run.journal("alone")),
    )


class ChaosRun:
    """One run, its drivers and its victims."""

    def __init__(
        self, folder: Path, data: Path, num_trainers: int, group_size: int, seed: int, cluster: str | None
    ) -> None:
        self._folder = folder
        self._data = data
        self._num_trainers, self._group_size = num_trainers, group_size
        self._random = random.Random(seed)
        self._cluster = cluster
        self.kills: Counter[str] = Counter()

    def train_under(self, victims: Sequence[str]) -> int:
        """Train to the end, killing one victim after the other; returns how often the driver was started."""
        waiting, starts = list(victims), 0
        while True:
            layout = LAYOUTS[starts % len(LAYOUTS)]
            driver = self.start(self._folder / "chaos", layout, step_s=0.02)
            starts += 1
            try:
                while waiting and self._kill(waiting.pop(0), driver):
                    pass
                if driver.wait(PATIENCE_S) == 0:
                    break
                if self.kills["driver"] < starts:
                    raise RuntimeError(f"the driver failed by itself: {self._errors()}")
            finally:
                driver.kill()
        if waiting:
            raise RuntimeError(f"the run was over before {waiting} could be killed; it is too short")
        return starts

    def start(self, run: Path, layout: tuple[int, int, int], step_s: float) -> subprocess.Popen[bytes]:
        config = self._folder / f"{run.name}.yaml"
        settings = small_run(self._data, layout, self._num_trainers, self._group_size, self._cluster)
        config.write_text(settings.to_yaml())
        journal = self._folder / f"{run.name}.jsonl"
        command = [sys.executable, "-m", "benchmarks.chaos_driver", config, run, journal, str(step_s)]
        with open(self._folder / f"{run.name}.log", "ab") as output:
            return subprocess.Popen(command, cwd=CHECKOUT, stdout=output, stderr=output)

    def journal(self, run: str) -> list[dict[str, Any]]:
        """One record per step that was trained, in the order in which it was."""
        path = self._folder / f"{run}.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]  # the last line may be half written
        return [json.loads(line) for line in whole.splitlines()]

    def _kill(self, role: str, driver: subprocess.Popen[bytes]) -> bool:
        """Some steps later, kill one process of this role; returns whether the driver is still there."""
        wanted = len(self.journal("chaos")) + self._random.randint(2, 8)
        while len(lines := self.journal("chaos")) < wanted:
            if driver.poll() is not None:
                raise RuntimeError(f"the driver ended by itself: {self._errors()}")
            _wait(lambda: len(self.journal("chaos")) > len(lines) or driver.poll() is not None)
        process = driver.pid if role == "driver" else self._process_of(role, lines)
        os.kill(process, signal.SIGKILL)
        self.kills[role] += 1
        log.print(f"killed {role} after {lines[-1]['step'] + 1} steps")
        if role == "driver":
            driver.wait()
            _wait(lambda: not RunFolder.open(self._folder / "chaos").is_alive)
            return False
        _wait(lambda: not _is_there(process))
        return True

    def _process_of(self, role: str, lines: list[dict[str, Any]]) -> int:
        processes = [
            number
            for actor, number in sorted(lines[-1]["processes"].items())
            if role in actor and _is_there(number)
        ]
        return self._random.choice(processes)

    def _errors(self) -> str:
        return (self._folder / "chaos.log").read_text()[-2000:]


EPOCHS = 8


def small_run(
    data: Path,
    layout: tuple[int, int, int],
    num_trainers: int,
    group_size: int = 1,
    cluster: str | None = None,
    **recovery: Any,
) -> RunConfig:
    """A run of small steps, with rows that are admitted late and given up.

    Args:
        layout: (servers, readers, feature workers).
        cluster: Ray's address; None lets the driver start its own.
        recovery: settings of it.
    """
    num_servers, num_readers, num_workers = layout
    backbone = {"dim": 8, "num_layers": 1, "num_heads": 2, "feedforward_dim": 16, "max_length": 8}
    return RunConfig.parse(
        {
            "data": {"path": str(data), "window_rows": 100},
            "model": {
                "name": "sasrec",
                "item_matrix": "sparse",
                "num_negatives": 16,
                "user_embedding": True,
                "backbone": backbone | {"dropout": 0.1},
            },
            "sparse": {
                "num_servers": num_servers,
                "optimizer": {"kind": "adam", "lr": 0.03},
                "tables": {
                    "user": {"eviction": {"max_age_steps": 20, "every_steps": 7}},
                    "item": {"admission": {"min_sightings": 2}},
                },
            },
            "pipeline": {
                "num_readers": num_readers,
                "num_feature_workers": num_workers,
                "num_trainers": num_trainers,
                "trainers_per_group": group_size,
                "trainer_threads": 1,
                "cpus_per_actor": 0.01,
                "cpus_per_trainer": 0.01,
            },
            "training": {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "schedule": {"warmup_steps": 4}},
            "evaluation": {"batch_size": 64, "every_epochs": 4},
            "snapshots": {"every_steps": 5, "increments": 2},
            "recovery": {
                "hang_timeout_s": 5.0,
                "max_rollbacks": 50,
                "stage_restarts": 100,
                **recovery,
            },
            "cluster": {"address": cluster, "dashboard": False},
        }
    )


def differences(run: Path, alone: Path, num_epochs: int) -> list[str]:
    """In what the last snapshots of two runs differ, and rows that were not consumed once per epoch."""
    found, expected = (read_snapshot(RunFolder.open(path).chosen_snapshot("last")) for path in (run, alone))
    differing = []
    if found.committed_step != expected.committed_step:
        differing.append(f"it ended at step {found.committed_step}, not {expected.committed_step}")
    for part in ("weights", "optimizer_state"):
        arrays, others = getattr(found, part), getattr(expected, part)
        names = sorted(set(arrays) | set(others))
        differing += [
            f"{part} {name}"
            for name in names
            if name not in arrays or name not in others or arrays[name].tobytes() != others[name].tobytes()
        ]
    rows, other_rows = _tables(run, found), _tables(alone, expected)
    differing += [
        f"table {name}: {what}" for (name, what), value in rows.items() if value != other_rows[name, what]
    ]
    return differing + _not_consumed_once(run, found, num_epochs)


def _tables(run: Path, snapshot: Snapshot) -> dict[tuple[str, str], bytes]:
    """By table and column, all rows in order of their ids, whatever number of servers wrote them."""
    configs = assemble(RunFolder.open(run).config, checksums=False).tables
    found = {}
    for name, parts in load_tables(snapshot.sparse_chain, configs, ShardMap(1), 0).items():
        table = EmbeddingTable(next(config for config in configs if config.name == name))
        table.load(parts)
        rows = table.export()
        order = np.argsort(rows.ids_M)
        for column in ("ids_M", "weights_MD", "state_MS", "steps_M", "counts_M"):
            found[name, column] = getattr(rows, column)[order].tobytes()
        for what, (ids_K, *others) in (
            ("sighted", (rows.sighted.ids_K, rows.sighted.counts_K, rows.sighted.steps_K)),
            ("evicted", (rows.evicted.ids_V, rows.evicted.steps_V)),
        ):
            order = np.argsort(ids_K)
            found[name, what] = b"".join(part[order].tobytes() for part in (ids_K, *others))
    return found


def _not_consumed_once(run: Path, snapshot: Snapshot, num_epochs: int) -> list[str]:
    """By the cursor's own intervals, without help of the code that made them."""
    plan = assemble(RunFolder.open(run).config, checksums=False).plan
    rows_of = Counter({group.name: 0 for group in plan.groups.groups})
    for group in plan.groups.groups:
        rows_of[group.name] += group.num_rows
    counts = {
        (epoch, file): np.zeros(rows, dtype=np.int64)
        for epoch in range(num_epochs)
        for file, rows in rows_of.items()
    }
    for part in snapshot.cursor.to_table().to_pylist():
        counts[part["epoch"], part["file"]][part["start"] : part["stop"]] += 1
    return [
        f"epoch {epoch}, {file}: {int((count != 1).sum())} rows consumed not once"
        for (epoch, file), count in counts.items()
        if (count != 1).any()
    ]


def _other_losses(journal: list[dict[str, Any]], alone: list[dict[str, Any]]) -> list[str]:
    """Of every time that a step was trained."""
    expected = {line["step"]: line["loss"] for line in alone}
    return [
        f"loss of step {line['step']}: {line['loss']} instead of {expected.get(line['step'])}"
        for line in journal
        if line["loss"] != expected.get(line["step"])
    ]


def roles(group_size: int) -> tuple[str, ...]:
    """Parts of the names of processes that a run has."""
    return ROLES if group_size == 1 else (*ROLES, GROUP_ROLE)


def _victims(num_kills: int, seed: int, roles: Sequence[str]) -> list[str]:
    """Roles in random order, each at least once."""
    draw = random.Random(seed)
    victims = [*roles, *draw.choices(roles, k=num_kills - len(roles))]
    draw.shuffle(victims)
    return victims


def ring_of_items(folder: Path, num_steps: int) -> Path:
    """Users who walk round a ring of 50 items, enough of them for so many steps of `small_run`."""
    num_users = -(-num_steps // EPOCHS) * BATCH_SIZE
    draw = np.random.default_rng(0)
    lengths_U = draw.integers(4, 12, num_users)
    users_N = np.repeat(np.arange(num_users), lengths_U)
    places_N = np.concatenate([np.arange(length) for length in lengths_U])
    log_table = {
        "user_id": pa.array(users_N),
        "item_id": pa.array((users_N * 7 + places_N) % 50),
        "timestamp": pa.array(1_600_000_000 + places_N),
    }
    (folder / "log").mkdir(parents=True)
    pq.write_table(pa.table(log_table), folder / "log" / "interactions.parquet")
    prepare(folder / "log", folder / "data", PrepareConfig(rows_per_group=16, rows_per_file=200))
    return folder / "data"


def _wait(is_so: Any) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > ends:
            raise TimeoutError("nothing happens any more")
        time.sleep(0.02)


def _is_there(process: int) -> bool:
    """Whether a process exists and is not dead already."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(
    kills: Annotated[int, typer.Option(min=len(ROLES), help="Processes to kill, over all runs.")] = 50,
    seed: Annotated[int, typer.Option(help="Of what is killed, and when.")] = 0,
) -> None:
    """Three runs under kills: with one trainer, with two, and with two groups of two."""
    failed = False
    for num_trainers, group_size, share in (
        (1, 1, kills - 2 * (kills // 3)),
        (2, 1, kills // 3),
        (4, 2, kills // 3),
    ):
        with tempfile.TemporaryDirectory() as folder:
            outcome = chaos(Path(folder), share, num_trainers, seed, group_size=group_size)
        log.print(f"{num_trainers} trainers in groups of {group_size}: {outcome}")
        failed = failed or bool(outcome.differences)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
