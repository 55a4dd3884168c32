"""`rayrec queue`, `submit` and `jobs`: what they write into the ledger, and what they refuse."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.jobs.job import Running
from rayrec.jobs.ledger import ClusterId, JobEntry, JobState, Ledger
from rayrec.jobs.loop import alone
from rayrec.pipelines.cluster.placement import Node
from tests.cli.commands import answer, rayrec, refused
from tests.helpers.runs import make_run


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYREC_LEDGER", str(tmp_path / "jobs.db"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "jobs.db"


@pytest.fixture
def team(path: Path) -> str:
    answer("queue", "add", "team-a", "--cards", "4", "--cohort", "all")
    return "team-a"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("jobs")) / "config.yaml"


def submit(*arguments: Any, program: Any = ("python", "x.py")) -> dict[str, Any]:
    code, stdout, stderr = rayrec("submit", "--queue", "team-a", *arguments, "--json", "--", *program)
    assert code == 0, stderr
    summary: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return summary


def submit_refused(*arguments: Any, program: Any = ("python", "x.py")) -> str:
    line: str = refused("submit", "--queue", "team-a", *arguments, "--", *program)
    return line


def entry(path: Path, name: str) -> JobEntry:
    return Ledger(path).job(name)


def see_nodes(path: Path, *cards: float) -> None:
    """As if the queue had seen a cluster."""
    nodes = [
        Node(f"n{number}", f"10.0.0.{number}", {}, {"GPU": each, "CPU": 8.0}, {"GPU": each, "CPU": 8.0})
        for number, each in enumerate(cards)
    ]
    ledger = Ledger(path)
    with ledger.change():
        ledger.bind(ClusterId("h:1", "x"))
        ledger.keep_nodes(nodes, time.time())


def let_run(path: Path, name: str) -> None:
    """As if the queue had started a job."""
    ledger = Ledger(path)
    known = ledger.job(name)
    stage = known.job.sizes[0].groups[0].stage
    with ledger.change():
        running = Running(known.job, 0, {stage: ("n0",)}, 1.0)
        ledger.update(
            replace(known, state=JobState.running, running=running, attempt=1, reason="starts on n0")
        )


# Queues


@pytest.mark.parametrize(
    "command",
    [("queue", "list"), ("queue", "remove", "team-a"), ("jobs",), ("queue", "manifests", "--kueue")],
)
def test_a_ledger_that_is_not_there_is_named_and_not_made(path, tmp_path, command):
    kueue = (tmp_path / "kueue",) if command[-1] == "--kueue" else ()

    assert f"{path}: there is no ledger" in refused(*command, *kueue)
    assert "there is no ledger" in submit_refused()

    assert not path.exists()


def test_a_queue_has_what_it_was_given(path):
    answer(
        *("queue", "add", "team-a", "--cards", "8", "--resource", "CPU=64", "--cohort", "all"),
        *("--borrow", "4", "--lend", "GPU=2", "--weight", "2", "--reclaim", "LowerPriority"),
    )
    (queue,) = Ledger(path).queues().queues
    assert queue.quotas["GPU"].nominal == 8
    assert (queue.quotas["GPU"].borrowing_limit, queue.quotas["GPU"].lending_limit) == (4, 2)
    assert queue.quotas["CPU"].nominal == 64
    assert (queue.cohort, queue.weight) == ("all", 2)
    assert queue.preemption.reclaim_within_cohort == "LowerPriority"


def test_a_guarantee_may_be_given_in_shapes(path):
    answer("queue", "add", "team-a", "--cell", "2xGPU=8,CPU=32@rack", "--cell", "GPU=1")
    (queue,) = Ledger(path).queues().queues
    assert [(cell.count, cell.resources, cell.within) for cell in queue.cells] == [
        (2, {"GPU": 8, "CPU": 32}, "rack"),
        (1, {"GPU": 1}, None),
    ]
    assert queue.all_quotas["GPU"].nominal == 17


def test_adding_a_queue_again_changes_what_is_said_and_keeps_the_rest(path):
    answer(
        *("queue", "add", "team-a", "--cards", "8", "--resource", "CPU=64", "--cohort", "all"),
        *("--borrow", "4", "--weight", "2", "--reclaim", "LowerPriority"),
    )
    assert answer("queue", "add", "team-a", "--cards", "6")["cohort"] == "all"
    answer("queue", "add", "team-a", "--lend", "2")
    (queue,) = Ledger(path).queues().queues
    gpus = queue.quotas["GPU"]
    assert (gpus.nominal, gpus.borrowing_limit, gpus.lending_limit) == (6, 4, 2)
    assert queue.quotas["CPU"].nominal == 64
    assert (queue.cohort, queue.weight) == ("all", 2)
    assert queue.preemption.reclaim_within_cohort == "LowerPriority"
    assert "there is no cohort to borrow from" in refused("queue", "add", "team-a", "--cohort", "")


def test_a_queue_leaves_its_cohort(path):
    answer("queue", "add", "team-a", "--cards", "6", "--cohort", "all")
    assert answer("queue", "add", "team-a", "--cohort", "")["cohort"] is None


def test_a_queue_from_which_others_borrow_stays(path):
    for name in ("team-a", "team-b"):
        answer("queue", "add", name, "--cards", "4", "--cohort", "all")
    submit("--id", "a", "--gpus", "6", "--may-stop")
    let_run(path, "a")
    assert "its jobs hold 6 GPU" in refused("queue", "remove", "team-b")
    assert len(Ledger(path).queues().queues) == 2


def test_a_quarantined_node_holds_up_no_change_of_queues(path):
    see_nodes(path, 4, 4)
    answer("queue", "add", "team-a", "--cards", "8", "--cohort", "all")
    ledger = Ledger(path)
    with ledger.change():
        nodes = ledger.nodes()
        ledger.keep_nodes([replace(nodes[0], quarantined="a fan"), *nodes[1:]], time.time())
    answer("queue", "add", "team-b", "--resource", "CPU=2", "--cohort", "all")


def test_guarantees_that_the_nodes_do_not_have_are_mended_one_after_the_other(path):
    for name in ("team-a", "team-b"):
        answer("queue", "add", name, "--cards", "8", "--cohort", "all")
    see_nodes(path, 4, 4)
    assert "guaranteed 20 GPU together" in refused("queue", "add", "team-c", "--cards", "4")
    answer("queue", "add", "team-c", "--resource", "CPU=1")
    answer("queue", "add", "team-a", "--cards", "6")
    assert "guaranteed 15 GPU together" in refused("queue", "add", "team-a", "--cards", "7")
    answer("queue", "add", "team-b", "--cards", "2")


def test_a_relative_time_may_be_said_again(team, path):
    submit("--id", "a", "--not-before", "+2h")
    first = Ledger(path).job("a").job.not_before
    submit("--id", "a", "--not-before", "+2h")
    assert Ledger(path).job("a").job.not_before == first


def test_cards_are_those_that_the_cluster_has(path):
    ledger = Ledger(path)
    with ledger.change():
        ledger.keep_nodes([Node("n", "a", {}, {"NPU": 8.0}, {"NPU": 8.0})], 1.0)
    answer("queue", "add", "team-a", "--cards", "4")
    assert list(Ledger(path).queues().queues[0].quotas) == ["NPU"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["team-a"], "queue team-a: say what it is guaranteed: --cards, --resource or --cell"),
        (["Team A", "--cards", "1"], "must be lower-case letters, digits and '-'"),
        (["a", "--resource", "GPU"], "--resource GPU: expected NAME=COUNT, as in GPU=8"),
        (["a", "--resource", "GPU=x"], "--resource x: expected a number"),
        (["a", "--resource", "GPU=-3"], "--resource -3: expected a number, 0 or more"),
        (["a", "--cell", "GPU=inf"], "--cell inf: expected a number, 0 or more"),
        (["a", "--cell", "@rack"], "--cell @rack: expected [Nx]NAME=COUNT"),
        (["a", "--cards", "1", "--borrow", "2"], "there is no cohort to borrow from or lend to"),
        (["a", "--cards", "1", "--cohort-parent", "b"], "--cohort-parent says what the cohort is part of"),
        (["a", "--cards", "1", "--reclaim", "Some"], "preemption.reclaim_within_cohort"),
        (["a", "--cards", "1", "--cohort", "Big Team"], "must be lower-case letters, digits and '-'"),
        (["a", "--cards", "1", "--cohort", "c", "--cohort-parent", ""], "must be lower-case letters"),
        (["a", "--resource", "CPU=1", "--resource", "CPU=2"], "--resource CPU=2: CPU is named twice"),
        (["a", "--cards", "1", "--resource", "GPU=2"], "--cards 1 and --resource GPU=2 say the same"),
    ],
)
def test_settings_that_are_none_are_refused(path, arguments, sentence):
    assert sentence in refused("queue", "add", *arguments)
    assert Ledger(path).queues().queues == ()


def test_cohorts_in_a_circle_are_refused(path):
    answer("queue", "add", "a", "--cards", "1", "--cohort", "one", "--cohort-parent", "two")
    line = refused("queue", "add", "b", "--cards", "1", "--cohort", "two", "--cohort-parent", "one")
    assert "cohorts must make a tree" in line
    assert [each.name for each in Ledger(path).queues().queues] == ["a"]


def test_a_quota_below_what_runs_is_refused(path):
    answer("queue", "add", "team-a", "--cards", "4")
    submit("--id", "a", "--gpus", "3")
    let_run(path, "a")
    line = refused("queue", "add", "team-a", "--cards", "2")
    assert "queue 'team-a': its jobs hold 3 GPU, and with these settings it may have 2 at most" in line
    see_nodes(path, 4)
    assert "its jobs hold 3 GPU" in refused("queue", "add", "team-a", "--cards", "2")
    answer("queue", "add", "team-a", "--cards", "3")


def test_guarantees_that_the_nodes_cannot_hold_at_once_are_refused(path):
    see_nodes(path, 6, 2)
    answer("queue", "add", "team-a", "--cell", "GPU=4", "--cohort", "all")
    line = refused("queue", "add", "team-b", "--cell", "GPU=4", "--cohort", "all")
    assert "cell" in line
    assert [each.name for each in Ledger(path).queues().queues] == ["team-a"]


def test_a_queue_is_removed_when_nobody_uses_it(team, path):
    submit("--id", "a")
    assert "queue 'team-a': 1 jobs wait or run in it (a)" in refused("queue", "remove", "team-a")
    answer("jobs", "--stop", "a")
    assert answer("queue", "remove", "team-a")["removed"]
    assert "there is no queue 'team-a'" in refused("queue", "remove", "team-a")


def test_the_list_says_who_runs_who_waits_and_why(team, path):
    submit("--id", "running", "--gpus", "3")
    let_run(path, "running")
    submit("--id", "low", "--gpus", "2")
    submit("--id", "high", "--gpus", "2", "--priority", "5")
    ledger = Ledger(path)
    with ledger.change():
        ledger.update(replace(ledger.job("high"), reason="waits for cards", starts_at=time.time() + 60))

    (queue,) = answer("queue", "list")["queues"]
    assert (queue["use"], queue["running"]) == ("3 of 4 GPU", ["running"])
    assert [(each["id"], each["reason"]) for each in queue["waiting"]] == [
        ("high", "waits for cards"),
        ("low", "the queue has not looked at it yet"),
    ]
    _, stdout, stderr = rayrec("queue", "list")
    assert "in 60 s" in stdout or "in 59 s" in stdout
    assert "the queue's process has never run; start it with `rayrec queue run`" in " ".join(stderr.split())


def test_a_second_process_of_the_queue_is_refused(team, path):
    with alone(path):
        line = refused("queue", "run", "--address", "127.0.0.1:1", code=1)
    assert f"{path}: another process runs this queue (process " in line


# Jobs


def test_a_training_is_queued_with_its_gangs(team, path, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = ("train", config, "--set", "pipeline.num_trainers=3", "--run", "runs/x", "--resume-if-begun")
    summary = submit(
        "--id", "a", "--min-trainers", "2", "--expected", "2h", "--within", "rack", program=program
    )

    assert summary["state"] == "waiting"
    found = entry(path, "a")
    assert [size.counts()["trainer"] for size in found.job.sizes] == [3, 2]
    assert (found.job.kind, found.job.expected_s, found.job.within) == ("train", 7200.0, "rack")
    assert found.job.may_stop
    assert found.command.argv == ("train", str(config), "--set", "pipeline.num_trainers=3")
    assert found.command.run == str(tmp_path / "runs" / "x")
    assert found.command.working_dir == str(tmp_path)
    assert found.command.retries == 3


def test_a_service_is_queued_by_its_replicas(team, path):
    program = ("serve", "runs/x", "--max-replicas", "4", "--min-replicas", "2")
    submit("--id", "a", "--gpus", "1", "--cpus", "2", program=program)
    found = entry(path, "a")
    assert [size.counts() for size in found.job.sizes] == [{"replica": 4}, {"replica": 3}, {"replica": 2}]
    assert found.job.sizes[0].groups[0].resources == {"CPU": 2.0, "GPU": 1.0}
    assert (found.job.kind, found.job.may_stop) == ("service", False)


def test_a_second_service_is_refused_while_there_is_one(team, path):
    program = ("serve", "runs/x", "--replicas", "1")
    submit("--id", "a", "--cpus", "2", program=program)
    assert "job a is a service, and a Ray cluster has one" in submit_refused("--id", "b", program=program)
    submit("--id", "a", "--cpus", "2", program=program)  # the same again
    answer("jobs", "--stop", "a")
    submit("--id", "b", program=program)


def test_a_program_says_what_it_asks_for(team, path):
    submit("--id", "a", "--cpus", "2", "--gpus", "1", "--resource", "disk=0.5", "--env", "A=b=c")
    found = entry(path, "a")
    assert found.job.sizes[0].groups[0].resources == {"CPU": 2.0, "GPU": 1.0, "disk": 0.5}
    assert found.command.holds_resources
    assert found.command.env == {"A": "b=c"}
    assert (found.job.may_stop, found.command.retries, found.command.is_rayrec) == (False, 0, False)

    submit("--id", "b", "--gpus", "1", "--actors", "3", "--may-stop", "--retries", "1")
    found = entry(path, "b")
    assert found.job.sizes[0].counts() == {"actor": 3}
    assert (found.command.holds_resources, found.job.may_stop, found.command.retries) == (False, True, 1)


def test_another_command_of_rayrec_is_one(team, path):
    submit("--id", "a", program=("evaluate", "runs/x"))
    assert entry(path, "a").command.is_rayrec
    submit("--id", "b", program=("text", "prepare", "records", "--out", "data"))
    assert entry(path, "b").command.is_rayrec


def test_the_help_of_what_would_be_submitted_is_no_failure(team, path):
    code, stdout, stderr = rayrec("submit", "--queue", "team-a", "--", "train", "--help")
    assert (code, stderr) == (0, "")
    assert "--resume-if-begun" in stdout
    assert Ledger(path).jobs() == []


def test_submitting_again_under_an_id_changes_nothing(team, path):
    first = submit("--id", "a", "--gpus", "1")
    assert submit("--id", "a", "--gpus", "1") == first
    assert "a job of this id was submitted" in submit_refused("--id", "a", "--gpus", "2")
    assert len(Ledger(path).jobs()) == 1


def test_a_reservation_is_for_a_time(team, path):
    before = time.time()
    submit("--id", "a", "--not-before", "+2h")
    submit("--id", "b", "--not-before", "2030-01-02T03:04:05+00:00")
    assert entry(path, "a").job.not_before == pytest.approx(before + 7200, abs=60)
    assert entry(path, "b").job.not_before == 1_893_553_445.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--expected", "soon"], "--expected soon: expected a time such as 90s, 30m, 2h or 1d"),
        (["--not-before", "soon"], "--not-before soon: expected a time such as 2026-12-01T08:00, or +2h"),
        (["--id", "../x"], "--id ../x: expected at most 80 letters"),
        (["--env", "A"], "--env A: expected NAME=VALUE"),
        (["--resource", "GPU"], "--resource GPU: expected NAME=COUNT"),
        (["--min-trainers", "2"], "--min-trainers is for `train`"),
        (["--resource", "a=1", "--resource", "a=2"], "--resource a=2: a is named twice"),
        (["--gpus", "1", "--resource", "GPU=2"], "--gpus 1 and --resource GPU=2 say the same"),
        (["--gpus", "1.5"], "--resource GPU=1.5: Ray gives a share of one card, or whole cards"),
        (["--resource", "NPU=2.25", "--actors", "2"], "--resource NPU=2.25: Ray gives a share of one card"),
        (["--gpus", "0.00004"], "--resource GPU=4e-05: Ray counts nothing below 0.0001"),
        (["--resource", "disk=0.00001"], "--resource disk=1e-05: Ray counts nothing below 0.0001"),
    ],
)
def test_options_that_are_none_are_refused(team, path, arguments, sentence):
    assert sentence in submit_refused(*arguments)
    assert Ledger(path).jobs() == []


@pytest.mark.parametrize(
    ("arguments", "more", "sentence"),
    [
        ([], ["--no-such"], "train: No such option: --no-such"),
        ([], ["--local"], "--local and --snapshot are for runs by hand"),
        (["--gpus", "1"], [], "--cpus, --gpus, --resource and --actors say what a program asks for"),
        (["--min-trainers", "9"], [], "--min-trainers 9: it must be from 1 to pipeline.num_trainers"),
        (["--working-dir", "s3://x/y.zip"], ["--run", "r"], "it has to be an absolute path"),
    ],
)
def test_a_training_that_cannot_be_queued_is_refused(team, config, arguments, more, sentence):
    assert sentence in submit_refused(*arguments, program=("train", config, *more))


def test_an_unknown_queue_is_refused(team):
    line = refused("submit", "--queue", "team-x", "--", "python", "x.py")
    assert line == (
        "rayrec: there is no queue 'team-x'; queues are: team-a; add it with `rayrec queue add team-x`"
    )


def test_a_job_that_could_never_fit_is_refused_where_the_cluster_is_known(team, path):
    submit("--id", "unknown", "--gpus", "5")  # the queue looks when it runs
    see_nodes(path, 2, 2)
    line = submit_refused("--id", "quota", "--gpus", "5")
    assert (
        "job quota could never run: it asks for 5 GPU at least, and queue 'team-a' may use 4 at most" in line
    )
    line = submit_refused("--id", "node", "--gpus", "3")
    assert "job node could never run: --cpus, --gpus, --resource: a command fits on no node" in line
    submit("--id", "fits", "--gpus", "2")


def test_jobs_are_listed_shown_and_stopped(team, path):
    submit("--id", "a", "--gpus", "1")
    submit("--id", "b", "--gpus", "1")
    let_run(path, "a")
    assert [(each["id"], each["state"]) for each in answer("jobs")["jobs"]] == [
        ("a", "running"),
        ("b", "waiting"),
    ]
    shown = answer("jobs", "a")
    assert (shown["nodes"], shown["size"], shown["command"]) == (["n0"], "1 of 1", ["python", "x.py"])
    assert shown["decisions"][0]["reason"] == "submitted to queue 'team-a'"

    assert answer("jobs", "--stop", "b")["state"] == "stopped"
    assert answer("jobs", "--stop", "a")["state"] == "running"  # until the queue looks
    assert entry(path, "a").is_cancelled
    assert [each["id"] for each in answer("jobs")["jobs"]] == ["a"]
    assert len(answer("jobs", "--all")["jobs"]) == 2
    assert "there is no job 'c'" in refused("jobs", "c")
    assert "there is no job 'c'" in refused("jobs", "--stop", "c")
