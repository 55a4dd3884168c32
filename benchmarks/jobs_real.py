"""The queue on five Ray nodes of this machine: reclaim from a training, and kills of the queue's process.

A head without anything, and four nodes of 2 CPUs, two of which have a "card" each, a resource that Ray
counts; everything is computed on CPUs. Two teams are guaranteed a card each and lend it to each other. Bars:

* `jobs-real-reclaim`: team b trains with two trainers, one of them on the card of team a. Team a submits a
  program that asks for a card: 60 s over the time until the program runs. The training writes a snapshot,
  ends, and goes on with one trainer.
* `jobs-real-rows`: rows that the training's cursor has at the end over those that there are. A cursor takes
  no row twice.
* `jobs-real-bits`: a training that needs both cards is stopped for a program of team a, and goes on with two
  trainers when that has ended. 1 if its weights, rows and cursor are those of one that nobody disturbs.
* `jobs-real-answers`: a service has two replicas, one of which is borrowed from queue `ads`, and four clients
  ask it all the time. `ads` submits a program, and the service is left one replica; when the program has
  ended, it gets the second one back. 0.1 % of the requests over those that failed; an answer counts if it is
  that of the model called directly. `jobs-real-service`: 60 s over the time until that program runs.
* `jobs-real-kept`: programs come one after the other while the queue's process is killed at random times and
  started again, 50 times; one time in ten it is Ray's head that is lost, with all nodes. 1 if all programs
  ended well and no attempt was started twice, nor two of one program at a time; else 0.

It writes `benchmarks/quality/jobs-real.json` with the date. `RAYREC_BENCH_STEPS` below 25 is half the number
of kills.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.chaos import differences
from benchmarks.checked_load import Checked, Window, checks
from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions
from benchmarks.peer_process import PeerProcess
from benchmarks.quality_page import RECORDS
from benchmarks.queue_cluster import QueueCluster, queue_cluster
from benchmarks.serve import free_port
from benchmarks.serve_kill import expected_of
from rayrec.jobs.ledger import JobState
from rayrec.pipelines.cluster.service_limits import ServiceLimits
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.consumed_rows import consumed_rows
from rayrec.platform.console import log

RECORD = RECORDS / "jobs-real.json"
RECLAIM_S = 60.0
KILLS, KILL_WITHIN_S = 50, 14.0
"""A kill comes at a random time after the start, which takes about half as long: also before it is done."""
PROGRAMS, PROGRAM_S = 40, (1.0, 8.0)
STARTS_S, ENDS_S = 240.0, 900.0
NODES = [{"num_cpus": 2, "resources": {"card": 1} if has_one else {}} for has_one in (1, 1, 0, 0)]
SETTINGS = "{snapshot_s: 45, scheduling: {grow_pause_s: 10}}"
EPOCHS = 3
K, CLIENTS, SERVICE_S, MOST_FAILED = 10, 4, 150.0, 0.001
"""Items of an answer, clients, the time for which they ask, and the share of requests that may fail."""
SCALING = {"requests_per_replica": 0.01, "average_s": 0, "raise_again_s": 1, "look_s": 1}
"""Anything at all in flight is too much for one replica."""

PROGRAM = """
import json, os, sys, time
log, seconds = sys.argv[1], float(sys.argv[2])
attempt = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"]
began = time.time()
def tell(line):
    with open(log, "a") as file:
        file.write(f"{line} {attempt} {time.time()}\\n")
tell("began")
while time.time() < began + seconds:
    time.sleep(0.2)
    tell("lives")
tell("ended")
"""


@dataclass
class Kept:
    """What became of the programs while the queue was killed."""

    kills: int
    programs: int
    lost: int
    """That did not run to their end."""
    twice: int
    """Of which an attempt was started twice, or two lived at one time."""
    attempts: int
    heads: int
    """Kills that were of Ray's head, with all that ran; the programs begin again."""


def bench(options: BenchOptions) -> list[Bar]:
    with TemporaryDirectory(prefix="rayrec-bench-") as name, beauty_sized(options.data) as data:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        with queue_cluster(folder, NODES, SETTINGS) as cluster:
            for team in ("team-a", "team-b"):
                _rayrec(cluster, "queue", "add", team, "--resource", "card=1", "--cohort", "all")
            for team in ("media", "ads"):
                _rayrec(cluster, "queue", "add", team, "--resource", "CPU=1", "--cohort", "services")
            cluster.start_queue()
            reclaim = _reclaim(cluster, data)
            service = _scale(cluster, cluster.folder / "training")
            differing = _compare(cluster, data)
            kept = _kill(cluster, min(KILLS, 2 * options.steps))
    failed = service["failed"] / service["requests"]
    bars = [
        Bar.once("jobs-real-reclaim", RECLAIM_S / reclaim["started_s"], "60 s", 1.0),
        Bar.once("jobs-real-rows", reclaim["rows once"], "each row once", 1.0),
        Bar.once("jobs-real-bits", float(not differing), "an undisturbed training", 1.0),
        Bar.once("jobs-real-service", RECLAIM_S / service["started_s"], "60 s", 1.0),
        Bar.once("jobs-real-answers", MOST_FAILED / max(failed, 1e-9), "0.1 % of the requests", 1.0),
        Bar.once("jobs-real-kept", float(kept.lost == kept.twice == 0), "each program once", 1.0),
    ]
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "reclaim": reclaim,
        "service": service,
        "differences from an undisturbed training": differing,
        "kills": vars(kept),
        "bars": {bar.name: {"value": bar.value, "target": bar.target} for bar in bars},
    }
    RECORD.write_text(json.dumps(made, indent=2) + "\n")
    return bars


def _rayrec(cluster: QueueCluster, *arguments: object) -> None:
    head, separator, program = list(map(str, arguments)), [], list[str]()
    if "--" in head:
        at = head.index("--")
        head, separator, program = head[:at], ["--"], head[at + 1 :]
    command = [sys.executable, "-m", "rayrec", *head, "--ledger", str(cluster.ledger_path)]
    done = subprocess.run(
        [*command, *separator, *program], env=cluster.environment, capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stderr}")


def _submit_program(cluster: QueueCluster, name: str, team: str, seconds: float, *options: object) -> Path:
    told = cluster.folder / f"{name}.log"
    program = (sys.executable, cluster.folder / "program.py", told, seconds)
    where = ("--working-dir", cluster.folder)
    _rayrec(cluster, "submit", "--id", name, "--queue", team, *where, *options, "--", *program)
    return told


def _reclaim(cluster: QueueCluster, data: Path) -> dict[str, Any]:
    run = _train(cluster, data, "training", EPOCHS, "--min-trainers", 1)
    cluster.wait_for(lambda: _step(run) > 20, STARTS_S)
    began_with, at_step = _trainers(cluster), _step(run)
    _say(f"the training is at step {at_step} with {began_with} trainers")
    started_s = _start_owner(cluster, "owner")
    cluster.wait_for(lambda: cluster.is_over("training", "owner"), ENDS_S, every_s=1.0)
    entry = cluster.job("training")
    with cluster.ledger() as ledger:
        attempts = ledger.attempts("training")
    assert entry.state is JobState.succeeded, cluster.told()
    consumed = consumed_rows(run, "last")
    rows = sum(epoch.rows or 0 for epoch in consumed.epochs)
    read = sum(epoch.consumed for epoch in consumed.epochs)
    result = RunFolder.open(run).state["result"]
    figures = {
        "started_s": started_s,
        "trainers": [began_with, *(entry.job.sizes[each.size].counts()["trainer"] for each in attempts[1:])],
        "work lost s": [each.lost_s for each in attempts],
        "outcomes": [each.outcome for each in attempts],
        "rows": rows,
        "rows read": read,
        "rows once": read / rows,
        "steps": result["steps"],
        "final loss": result["final_loss"],
    }
    _say(json.dumps(figures))
    return figures


def _compare(cluster: QueueCluster, data: Path) -> list[str]:
    """In what a training that was stopped and went on differs from another one."""
    stopped = _train(cluster, data, "stopped", 1)
    cluster.wait_for(lambda: _step(stopped) > 20, STARTS_S)
    _start_owner(cluster, "other-owner")
    cluster.wait_for(lambda: cluster.is_over("stopped", "other-owner"), ENDS_S, every_s=1.0)
    with cluster.ledger() as ledger:
        outcomes = [each.outcome for each in ledger.attempts("stopped")]
    assert outcomes == ["stopped", "succeeded"], cluster.told()
    alone = _train(cluster, data, "undisturbed", 1)
    cluster.wait_for(lambda: cluster.is_over("undisturbed"), ENDS_S, every_s=1.0)
    found = differences(stopped, alone, 1)
    _say(f"differences from an undisturbed training: {found or 'none'}")
    return found


def _train(cluster: QueueCluster, data: Path, name: str, epochs: int, *options: object) -> Path:
    config, run = cluster.folder / f"{name}.yaml", cluster.folder / name
    config.write_text(yaml.safe_dump(_settings(data, epochs)))
    wish = ("--id", name, "--queue", "team-b", "--working-dir", cluster.folder, *options)
    _rayrec(cluster, "submit", *wish, "--", "train", config, "--run", run)
    return run


def _start_owner(cluster: QueueCluster, name: str) -> float:
    """Seconds until a program runs that asks for the card of team a."""
    told = _submit_program(cluster, name, "team-a", 10.0, "--resource", "card=1")
    # The time of the command itself, which is the same with an empty cluster, is not that of reclaim.
    started_s = cluster.wait_for(told.exists, 2 * RECLAIM_S)
    _say(f"program {name} runs {started_s:.1f} s after it was submitted")
    return started_s


def _scale(cluster: QueueCluster, run: Path) -> dict[str, Any]:
    """A service gives a replica back, and gets it again, while it is asked."""
    port, limits = free_port(), ServiceLimits(cluster.folder)
    (cluster.folder / "scaling.yaml").write_text(yaml.safe_dump(SCALING))
    wish = ("--id", "service", "--queue", "media", "--working-dir", cluster.folder)
    options = ("--min-replicas", 1, "--max-replicas", 2, "--scaling", cluster.folder / "scaling.yaml")
    _rayrec(cluster, "submit", *wish, "--", "serve", run, "--port", port, *options)
    url = f"http://127.0.0.1:{port}/v1/recommend"
    load: PeerProcess = PeerProcess(checks, (expected_of(run), K))
    found: Future[Checked]
    with ThreadPoolExecutor(1) as pool:
        try:
            cluster.wait_for(lambda: limits.state() is not None, STARTS_S)
            _say("the service answers")
            load.measure(Window(url, CLIENTS, 2.0))  # thrown away
            found = pool.submit(load.measure, Window(url, CLIENTS, SERVICE_S))
            cluster.wait_for(lambda: _replicas(limits) == 2, SERVICE_S)
            told = _submit_program(cluster, "urgent", "ads", 20.0, "--cpus", 1)
            started_s = cluster.wait_for(told.exists, 2 * RECLAIM_S)
            had = _replicas(limits)
            cluster.wait_for(lambda: cluster.is_over("urgent"), ENDS_S, every_s=1.0)
            again_s = cluster.wait_for(lambda: _replicas(limits) == 2, SERVICE_S)
            checked = found.result()
        finally:
            load.stop()
    _rayrec(cluster, "jobs", "--stop", "service")
    cluster.wait_for(lambda: cluster.is_over("service"), ENDS_S, every_s=1.0)
    figures = {
        "started_s": started_s,
        "replicas meanwhile": had,
        "second replica again s": again_s,
        "requests": checked.requests,
        "failed": checked.failed + len(checked.wrong),
        "first tries that failed": dict(checked.failures),
        "wrong": len(checked.wrong),
        "longest gap s": checked.longest_gap_s,
    }
    _say(json.dumps(figures))
    return figures


def _replicas(limits: ServiceLimits) -> int:
    state = limits.state()
    return 0 if state is None else state.num_replicas


def _settings(data: Path, epochs: int) -> dict[str, Any]:
    backbone = {"dim": 16, "num_layers": 1, "num_heads": 2, "feedforward_dim": 32, "max_length": 20}
    return {
        "data": {"path": str(data)},
        "model": {
            "name": "sasrec",
            "item_matrix": "sparse",
            "num_negatives": 64,
            "backbone": {**backbone, "dropout": 0.1},
        },
        "sparse": {"num_servers": 1},
        "pipeline": {"num_trainers": 2, "trainer_threads": 1, "cpus_per_trainer": 0.5},
        "placement": {"trainers": {"resources": {"card": 1}}},
        "training": {"batch_size": 32, "epochs": epochs},
        "evaluation": {"every_epochs": epochs, "max_users": 200},
    }


def _step(run: Path) -> int:
    if not (run / "run.json").exists():
        return 0
    return int((RunFolder(run).state.get("now") or {}).get("step") or 0)


def _trainers(cluster: QueueCluster) -> int:
    entry = cluster.job("training")
    assert entry.running is not None
    return entry.job.sizes[entry.running.size].counts()["trainer"]


def _kill(cluster: QueueCluster, num_kills: int) -> Kept:
    """Programs of both teams, while the queue is killed and started again."""
    draw = random.Random(0)
    names = [f"program-{number}" for number in range(PROGRAMS)]
    to_submit, heads = list(names), 0
    for number in range(num_kills):
        while to_submit and len(names) - len(to_submit) < (number + 1) * len(names) / num_kills:
            name = to_submit.pop(0)
            _submit_program(
                cluster,
                name,
                draw.choice(("team-a", "team-b")),
                draw.uniform(*PROGRAM_S),
                "--resource",
                "card=1",
            )
        time.sleep(draw.uniform(0.0, KILL_WITHIN_S))
        if number % 10 == 4:
            cluster.replace_head()
            heads += 1
        else:
            cluster.kill_queue()
            cluster.start_queue()
        if number % 10 == 9:
            with cluster.ledger() as ledger:
                over = len(ledger.jobs(JobState.succeeded))
            _say(f"{number + 1} kills, {over} jobs are done")
    cluster.wait_for(lambda: cluster.is_over(*names), ENDS_S, every_s=1.0)
    lost = twice = attempts = 0
    for name in names:
        lines = [line.split() for line in (cluster.folder / f"{name}.log").read_text().splitlines()]
        lost += all(line[0] != "ended" for line in lines) or cluster.job(name).state is not JobState.succeeded
        began = [attempt for line, attempt, _ in lines if line == "began"]
        order = [attempt for _, attempt, _ in lines]
        # Of attempts that do not live at one time, the lines of each are together.
        turns = sum(one != other for one, other in itertools.pairwise(order)) + 1
        twice += len(set(began)) != len(began) or turns != len(began)
        attempts += cluster.job(name).attempt
    kept = Kept(num_kills, len(names), lost, twice, attempts, heads)
    _say(f"{kept}")
    return kept


def _say(text: str) -> None:
    log.print(text, highlight=False, markup=False)
