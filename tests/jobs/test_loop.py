"""The queue's process on a cluster in memory: start, reclaim, failures, a head that goes away, kills."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.jobs.admission import SchedulingConfig
from rayrec.jobs.job import Job, Size
from rayrec.jobs.ledger import ClusterId, Command, JobState, Ledger
from rayrec.jobs.loop import QueueLoop, QueueRunConfig, alone
from rayrec.jobs.overview import queue_list
from rayrec.jobs.queues import Cell, QueueConfig, ResourceQuota
from rayrec.pipelines.cluster.placement import ActorGroup, Node
from rayrec.platform.errors import InputError, MachineError, NoRoomError
from tests.helpers.examples import share_of
from tests.jobs.fake_cluster import FakeCluster, KilledError, KilledLedger, Kills

SETTINGS = QueueRunConfig(
    snapshot_s=20.0, fast_s=30.0, scheduling=SchedulingConfig(grow_pause_s=5.0, failure_pause_s=1.0)
)


def node(name: str, cards: int = 2) -> Node:
    return Node(name, name, {}, {"GPU": cards, "CPU": 64}, {"GPU": cards, "CPU": 64})


def sizes(most: int, least: int, stage: str = "trainer") -> tuple[Size, ...]:
    return tuple(
        Size((ActorGroup(stage, "placement.trainers", number, {"GPU": 1.0}, {}, "PACK"),), number / most)
        for number in range(most, least - 1, -1)
    )


def training(job_id: str, queue: str, most: int, least: int, at: float = 1_000.0, **more: Any) -> Any:
    job = Job(job_id, queue, sizes(most, least), at, kind="train", **more)
    return job, Command(("train", "c.yaml"), is_rayrec=True, run=f"/runs/{job_id}", retries=2)


def program(job_id: str, queue: str, cards: int, at: float = 1_000.0, retries: int = 0, **more: Any) -> Any:
    group = ActorGroup("command", "--gpus", 1, {"GPU": float(cards)}, {}, "PACK")
    job = Job(job_id, queue, (Size((group,)),), at, **more)
    return job, Command(("python", "work.py"), holds_resources=True, retries=retries)


def queue(name: str, cards: float, cohort: str | None = "all") -> QueueConfig:
    return QueueConfig(name=name, cohort=cohort, quotas={"GPU": ResourceQuota(nominal=cards)})


class Story:
    """A fake cluster, its ledger, and a loop that may be killed and started again."""

    def __init__(
        self,
        folder: Path,
        work: dict[str, float],
        content: bytes | None = None,
        world: FakeCluster | None = None,
    ) -> None:
        self.path = folder / "jobs.db"
        if content is not None:
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self.path.write_bytes(content)
        self.world = world or FakeCluster([node("n0"), node("n1")], work)
        self.kills = Kills()
        self.start()

    def start(self, settings: QueueRunConfig = SETTINGS, **more: Any) -> None:
        """A process of the queue, with what the last one left in the ledger."""
        self.ledger: Ledger = KilledLedger(self.path, lambda: self.kills())
        self.world.kills = lambda: self.kills()
        self.loop = QueueLoop(
            self.ledger,
            self.world.look,
            self.world,
            self.world,
            settings,
            now=self.world.clock,
            sleep=self.world.sleep,
            **more,
        )

    def add(self, *jobs: Any) -> None:
        with self.ledger.change():
            for job, command in jobs:
                self.ledger.add(job, command)

    def queues(self, *queues: QueueConfig) -> None:
        with self.ledger.change():
            for each in queues:
                self.ledger.put_queue(each)

    def passes(self, seconds: float) -> None:
        until = self.world.now + seconds
        self.loop.run(lambda: self.world.now >= until)

    def ends(self, within: float = 500.0) -> None:
        until = self.world.now + within
        self.loop.run(lambda: self.is_over or self.world.now >= until)
        assert self.is_over, self.states

    @property
    def is_over(self) -> bool:
        return not self.ledger.jobs(JobState.waiting, JobState.running)

    @property
    def states(self) -> dict[str, str]:
        return {each.id: each.state.value for each in self.ledger.jobs()}

    def noted(self, job_id: str) -> list[str]:
        return [each.kind for each in self.ledger.noted(job_id)]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    made = Story(tmp_path, {"first": 40.0, "second": 20.0})
    made.queues(queue("team-a", 2), queue("team-b", 2))
    return made


def test_a_job_runs_to_its_end_on_the_node_that_was_chosen(story):
    story.add(program("first", "team-a", 2))
    story.passes(3)

    process = story.world.processes["first-1"]
    assert process.submission.node in ("n0", "n1")
    assert process.submission.resources == {"GPU": 2.0}
    story.ends()
    assert story.states == {"first": "succeeded"}
    assert story.world.history == ["first-1"]


def test_a_borrower_shrinks_at_a_snapshot_and_grows_again(story):
    story.world.work |= {"first": 120.0, "second": 20.0}
    story.add(training("first", "team-b", 4, 2))
    story.passes(5)
    assert "num_trainers=4" in story.world.processes["first-1"].submission.entrypoint

    story.add(program("second", "team-a", 2, at=1_005.0))
    story.passes(12)
    assert "num_trainers=2" in story.world.processes["first-2"].submission.entrypoint
    assert story.states == {"first": "running", "second": "running"}
    (first, second, *_) = story.ledger.attempts("first")
    assert first.lost_s is not None
    assert first.lost_s <= 1.0
    assert second.size == 2

    story.ends()
    assert story.states == {"first": "succeeded", "second": "succeeded"}
    assert "grow" in story.noted("first")
    assert "num_trainers=4" in story.world.processes["first-3"].submission.entrypoint
    # All that was done before a snapshot was done once.
    assert story.world.worked["first"] <= 120.0 + 4 * 2 * 4


def test_a_borrower_that_may_be_stopped_waits_and_goes_on(story):
    story.add(program("first", "team-b", 4 // 2, may_stop=True), program("third", "team-b", 2, at=1_001.0))
    story.world.work |= {"third": 40.0}
    story.passes(4)
    story.add(program("second", "team-a", 2, at=1_004.0))
    story.passes(6)

    assert sorted(story.states.values()) == ["running", "running", "waiting"]
    story.ends()
    assert set(story.states.values()) == {"succeeded"}


def test_a_training_that_had_to_leave_after_a_long_run_has_not_waited_for_long(tmp_path):
    """It would be the first of its queue then, whatever its priority, and nobody could stop it again."""
    story = Story(tmp_path, {"low": 1e9, "high": 4.0, "next": 1e9})
    story.world.nodes = {"n0": node("n0")}
    story.queues(queue("team-a", 2, cohort=None))
    patient = SETTINGS.scheduling.model_copy(update={"max_wait_s": 100.0})
    story.start(settings=SETTINGS.model_copy(update={"scheduling": patient}))
    story.add(training("low", "team-a", 2, 2))
    story.passes(150)
    story.add(training("high", "team-a", 2, 2, at=1_150.0, priority=5))
    story.add(training("next", "team-a", 2, 2, at=1_151.0, priority=5))
    story.passes(20)

    assert story.states == {"low": "waiting", "high": "succeeded", "next": "running"}
    assert 145 < story.ledger.job("low").waiting.ran_s < 160
    (listed,) = queue_list(story.ledger)
    (waits,) = listed["waiting"]
    assert 1_140 < waits["waits_since"] < 1_160


def test_without_a_snapshot_in_time_it_is_stopped_all_the_same_and_the_loss_is_said(story):
    story.world.writes_snapshots = False
    story.world.work |= {"first": 400.0}
    story.add(training("first", "team-b", 4, 2))
    story.passes(5)
    story.add(program("second", "team-a", 2, at=1_005.0))
    story.passes(30)

    stopped = story.ledger.attempts("first")[0]
    assert stopped.lost_s == pytest.approx(24.0, abs=2.0)
    reason = next(each.reason for each in story.ledger.noted("first") if each.kind == "stop")
    assert "s of work are done again (no snapshot within 20 s)" in reason
    assert "second" in {each.id for each in story.ledger.jobs(JobState.running, JobState.succeeded)}


def test_the_next_attempt_waits_until_the_actors_of_the_last_one_are_gone(story):
    story.world.work |= {"first": 400.0}
    story.add(training("first", "team-b", 4, 2))
    story.passes(5)
    story.add(program("second", "team-a", 2, at=1_005.0))

    # `FakeCluster` refuses a start on a card that is in use.
    story.passes(20)
    assert story.world.history[:1] == ["first-1"]
    assert {"first-2", "second-1"} <= set(story.world.history)


def test_a_failed_attempt_is_tried_again_as_often_as_was_asked_for(story):
    story.world.failures_left["first"] = 2
    story.add(program("first", "team-a", 1, retries=2))
    story.ends()
    assert story.world.history == ["first-1", "first-2", "first-3"]
    assert story.states["first"] == "succeeded"


def test_a_job_that_fails_too_often_has_failed_and_says_its_last_line(story):
    story.world.failures_left["first"] = 9
    story.add(program("first", "team-a", 1, retries=1))
    story.ends()
    assert story.world.history == ["first-1", "first-2"]
    entry = story.ledger.job("first")
    assert entry.state is JobState.failed
    assert entry.reason == "attempt 2 failed 2 times in a row with exit code 1: the last line"


def test_wrong_input_of_rayrec_is_not_tried_again(story):
    story.add(training("first", "team-a", 1, 1))
    story.passes(2)
    process = story.world.processes["first-1"]
    process.state, process.exit_code, process.gone_at = "FAILED", 2, story.world.now
    story.ends()
    assert story.states["first"] == "failed"
    assert story.world.history == ["first-1"]


def test_its_user_stops_a_job_that_waits_and_one_that_runs(story):
    story.world.work |= {"first": 400.0}
    story.add(training("first", "team-a", 2, 2), program("second", "team-a", 2, at=1_001.0, priority=-1))
    with story.ledger.change():
        story.ledger.cancel("second", 1_001.0)
    story.passes(4)
    with story.ledger.change():
        story.ledger.cancel("first", story.world.now)
    story.ends()
    assert story.states == {"first": "stopped", "second": "stopped"}
    assert story.world.history == ["first-1"]
    assert story.world.saved["first"] > 0


def test_a_ledger_that_somebody_writes_for_long_does_not_end_the_queue(story):
    story.ledger._db.execute("PRAGMA busy_timeout = 0")
    story.add(program("first", "team-a", 2))
    with Ledger(story.path).change():
        story.passes(3)
        assert story.states == {"first": "waiting"}
    story.ends()
    assert story.states == {"first": "succeeded"}
    assert story.world.history == ["first-1"]


def test_a_full_disk_of_the_ledger_does_not_end_the_queue(story, caplog):
    name = "n" * 5_000  # so that to write where a job is takes pages of its own
    story.world.nodes = {name: node(name)}
    story.passes(2)
    story.add(program("first", "team-a", 2))
    database = story.ledger._db
    database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")

    def fill() -> None:
        for number in range(100):
            with story.ledger.change():
                story.ledger._put(f"more {number}", "x" * 5_000)

    with pytest.raises(NoRoomError, match=r"jobs\.db: its disk is full"):
        fill()
    story.passes(3)
    assert story.states == {"first": "waiting"}
    assert story.world.history == []
    assert len([line for line in caplog.messages if "its disk is full" in line]) == 1, "said once"

    database.execute("PRAGMA max_page_count = 100000")
    story.ends()
    assert story.states == {"first": "succeeded"}
    assert story.world.history == ["first-1"]


def test_while_the_head_is_down_nothing_changes_and_jobs_go_on_afterwards(story):
    story.world.work |= {"first": 400.0}
    story.add(training("first", "team-a", 2, 2))
    story.passes(5)
    cluster, story.world.cluster = story.world.cluster, None
    story.passes(20)
    assert story.states == {"first": "running"}
    story.world.cluster = cluster
    story.ends()
    assert story.world.history == ["first-1"]


def test_a_head_that_has_forgotten_its_jobs_is_given_them_again(story):
    story.world.work |= {"first": 100.0, "second": 30.0}
    story.add(training("first", "team-a", 2, 2), program("second", "team-b", 2))
    story.passes(5)
    story.world.lose_head()
    story.passes(5)
    story.world.new_head("second")
    story.ends()

    assert story.states == {"first": "succeeded", "second": "succeeded"}
    assert sorted(story.world.history) == ["first-1", "first-2", "second-1", "second-2"]
    assert story.ledger.attempts("first")[0].outcome == "lost"
    assert "lost: its head is a new one" in " ".join(each.reason for each in story.ledger.noted("first"))


def test_a_job_whose_node_is_gone_is_placed_again(story):
    story.add(program("first", "team-a", 2))
    story.passes(3)
    lost = story.world.processes["first-1"].submission.node
    del story.world.nodes[lost]
    story.passes(6)
    assert story.world.processes["first-2"].submission.node != lost
    story.ends()


def test_a_program_that_fails_with_its_node_is_started_on_another(story):
    story.add(program("first", "team-a", 2))
    story.passes(3)
    process = story.world.processes["first-1"]
    del story.world.nodes[process.submission.node]
    process.state, process.gone_at = "FAILED", story.world.now
    story.ends()
    assert story.states["first"] == "succeeded"
    assert story.world.history == ["first-1", "first-2"]


def test_room_that_was_planned_on_a_node_that_is_gone_is_planned_again(story):
    story.world.work |= {"first": 400.0}
    story.add(training("first", "team-b", 4, 2))
    story.passes(5)
    story.add(program("second", "team-a", 2, at=1_005.0))
    story.passes(1)
    plan = story.ledger.job("second").waiting.plan
    (node_of_plan,) = plan.placed["command"]
    kept = story.world.nodes.pop(node_of_plan)
    story.passes(2)
    assert story.ledger.job("second").waiting.plan is None
    story.world.nodes[node_of_plan] = kept
    story.ends()
    assert story.states == {"first": "succeeded", "second": "succeeded"}


def test_a_job_for_which_nodes_are_missing_waits_for_them_with_a_sentence(story):
    story.queues(queue("team-a", 4))
    story.add(program("first", "team-a", 3))
    story.passes(3)
    entry = story.ledger.job("first")
    assert entry.state is JobState.waiting
    assert entry.reason.startswith(
        "could not run on the nodes that there are: --gpus: a command fits on no node of the Ray cluster "
        "(each asks for 3 GPU)"
    )
    story.world.nodes["n2"] = node("n2", 4)
    story.ends()
    assert story.states == {"first": "succeeded"}


def test_a_new_head_whose_nodes_are_not_back_loses_no_job(story):
    story.world.work |= {"first": 100.0, "second": 30.0}
    story.add(training("first", "team-a", 2, 2), program("second", "team-b", 2))
    story.passes(5)
    nodes, story.world.nodes = story.world.nodes, {"head": node("head", 0)}
    story.world.lose_head()
    story.world.new_head("second")
    story.passes(10)
    assert story.states == {"first": "waiting", "second": "waiting"}
    story.world.nodes |= nodes
    story.ends()
    assert story.states == {"first": "succeeded", "second": "succeeded"}


def test_what_ray_does_not_do_for_one_job_holds_up_no_other(story):
    story.world.work |= {"first": 400.0}
    story.add(program("first", "team-a", 2))
    story.passes(3)
    story.world.silent.add("first-1")
    story.add(program("second", "team-b", 2, at=1_003.0))
    story.passes(15)
    assert story.states == {"first": "running", "second": "succeeded"}


def test_an_attempt_for_which_ray_had_no_process_is_no_failure_of_its_own(story):
    story.add(program("first", "team-a", 2))
    story.passes(3)
    process = story.world.processes["first-1"]
    process.never_ran = True
    story.world._end(process, "FAILED")
    story.ends()
    assert story.states == {"first": "succeeded"}
    assert story.world.history == ["first-1", "first-2"]
    assert story.ledger.job("first").num_failures == 0


def test_a_job_for_which_ray_never_has_a_process_is_not_tried_for_ever(story):
    story.add(program("first", "team-a", 2))
    while story.states["first"] != "failed":
        story.passes(3)
        for process in story.world.processes.values():
            if not process.is_over:
                process.never_ran = True
                story.world._end(process, "FAILED")
        assert len(story.world.history) <= 10
    assert story.ledger.job("first").reason.startswith("Ray had no process for its last 10 attempts")


def test_a_training_that_comes_no_further_has_failed_however_long_each_attempt_takes(story):
    story.world.work |= {"first": 1e6}
    story.add(training("first", "team-a", 2, 2))
    for number in range(1, 4):
        story.passes(2 * SETTINGS.fast_s)
        story.world._end(story.world.processes[f"first-{number}"], "FAILED", 1)
    story.ends()
    assert story.ledger.job("first").reason == (
        "attempt 3 failed 3 times in a row with exit code 1: the last line"
    )


def test_a_training_that_came_further_has_not_failed_again_and_again(story):
    story.world.work |= {"first": 1e6}
    story.add(training("first", "team-a", 2, 2))
    for number in range(1, 6):
        story.passes(2 * SETTINGS.fast_s)
        story.world.saved_at["first"] = story.world.now - 1.0
        story.world._end(story.world.processes[f"first-{number}"], "FAILED", 1)
        story.passes(10)
    assert story.states == {"first": "running"}


def test_time_without_a_head_is_no_time_of_work(story):
    story.add(training("first", "team-a", 2, 2, expected_s=3600.0))
    story.world.work |= {"first": 1e6}
    story.passes(30)
    story.world.cluster = None
    story.passes(7200)
    story.world.lose_head()
    story.world.new_head("second")
    story.loop.tick()
    entry = story.ledger.job("first")
    left_s = entry.waiting.left_s if entry.running is None else entry.running.ends_at - story.world.now
    assert left_s == pytest.approx(3600.0, abs=60.0)


def test_a_clock_that_is_put_back_stops_nobody_and_nothing(story):
    slept: list[float] = []
    story.loop._sleep = lambda seconds: (slept.append(seconds), story.world.sleep(seconds))
    story.add(program("first", "team-a", 2))
    look, back = story.loop._look, [True]

    def look_and_put_back(awaited: Any = ()) -> Any:
        if back and story.world.now > 1_003.0:
            back.clear()
            story.world.now -= 3600.0
        return look(awaited)

    story.loop._look = look_and_put_back
    rounds = iter(range(60))
    story.loop.run(lambda: story.is_over or next(rounds, None) is None)
    assert story.states == {"first": "succeeded"}
    assert max(slept) <= SETTINGS.tick_s


def test_planned_room_that_somebody_else_has_taken_is_planned_again(story):
    """Who does not ask the queue has taken the card that was given back."""
    story.world.nodes["n2"] = node("n2", 2)
    story.world.work |= {"first": 4000.0, "rest": 4000.0}
    story.queues(queue("team-a", 2), queue("team-b", 4))
    story.add(training("first", "team-b", 6, 4))
    story.passes(5)
    story.add(program("second", "team-a", 1, at=1_005.0))
    story.passes(1)
    plan = story.ledger.job("second").waiting.plan
    (planned,) = plan.placed["command"]
    look = story.loop._look

    def with_another(awaited: Any = ()) -> Any:
        view = look(awaited)
        # Between two attempts of the first job, too, nothing is free.
        left = 0.0 if story.world.now < 1_040.0 else 1.0
        used = [
            replace(each, free={**each.free, "GPU": min(left, max(0.0, each.free["GPU"] - 1))})
            if each.id == planned
            else each
            for each in view.nodes
        ]
        return replace(view, nodes=tuple(used))

    story.loop._look = with_another
    story.passes(20)
    assert story.ledger.job("second").waiting.plan is not None
    story.passes(3 * SETTINGS.scheduling.grace_s)
    assert story.states["second"] == "succeeded"


def test_a_service_is_where_ray_serve_has_put_it(tmp_path):
    story = Story(tmp_path, {"service": 1e9})
    story.queues(queue("team-b", 4))
    story.start(scale=lambda entry, replicas: True, replica_nodes=lambda entry: ("n1", "n0"))
    job = Job("service", "team-b", sizes(2, 1, "replica"), 1_000.0, kind="service", may_stop=False)
    story.add((job, Command(("serve", "runs/x"), is_rayrec=True)))
    story.world._take_cards = lambda process: process.holds.update({"n0": 1, "n1": 1})  # type: ignore[method-assign]
    story.passes(3)
    assert set(story.ledger.job("service").running.placed["replica"]) == {"n0", "n1"}


def test_guarantees_that_have_no_node_left_are_told(story):
    with story.ledger.change():
        story.ledger.put_queue(
            QueueConfig(name="team-c", cells=(Cell(resources={"GPU": 2.0}, count=2),), cohort=None)
        )
    story.passes(1)
    assert story.ledger.lacking() == []
    del story.world.nodes["n1"]
    story.passes(15)
    (sentence,) = story.ledger.lacking()
    assert "team-c" in sentence


def test_jobs_that_are_long_over_are_forgotten(story):
    story.add(program("first", "team-a", 2))
    story.ends()
    story.world.now += (SETTINGS.keep_days + 1) * 86_400
    story.passes(1)
    assert story.states == {}
    assert story.noted("first") == []


def test_the_queue_of_another_ledger_is_not_joined(story):
    look = story.loop._look
    story.loop._look = lambda awaited=(): replace(look(awaited), owner="/other/jobs.db on host")
    with pytest.raises(InputError, match=r"the queue of another ledger \(/other/jobs.db on host\)"):
        story.loop.tick()


def test_a_ledger_of_another_cluster_is_refused(story):
    with story.ledger.change():
        story.ledger.bind(ClusterId("other:6379", "of another"))
    with pytest.raises(InputError, match="a ledger of the Ray cluster at other:6379"):
        story.loop.run(lambda: True) or story.loop.tick()
    story.start(has_moved=True)
    assert story.loop.tick()


def test_a_second_process_of_the_queue_is_told_which_one_runs_it(tmp_path):
    with (
        alone(tmp_path / "jobs.db"),
        pytest.raises(MachineError, match=r"another process runs this queue \(process \d+ on "),
        alone(tmp_path / "jobs.db"),
    ):
        pass
    with alone(tmp_path / "jobs.db"):
        pass


def test_a_ledger_has_one_process_by_whatever_name_it_is_known(tmp_path):
    (tmp_path / "link.db").symlink_to(tmp_path / "jobs.db")
    with (
        alone(tmp_path / "jobs.db"),
        pytest.raises(MachineError, match="another process runs this queue"),
        alone(tmp_path / "link.db"),
    ):
        pass


def test_where_another_queue_has_the_cluster_nothing_is_begun(story):
    def kueue(nodes: Any) -> None:
        raise InputError("Kueue has this cluster")

    story.start(check_alone=kueue)
    story.add(program("first", "team-a", 1))
    with pytest.raises(InputError, match="Kueue"):
        story.passes(3)
    assert story.world.history == []


def test_a_service_is_scaled_without_another_attempt(tmp_path):
    story = Story(tmp_path, {"service": 1e9, "second": 20.0})
    story.queues(queue("team-a", 2), queue("team-b", 2))
    told: list[int] = []

    def scale(entry: Any, replicas: int) -> bool:
        told.append(replicas)
        process = story.world.processes.get("service-1")
        while process is not None and sum(process.holds.values()) > replicas:
            fullest = max(process.holds, key=lambda name: process.holds[name])
            process.holds[fullest] -= 1
        return True

    story.start(scale=scale)
    job = Job("service", "team-b", sizes(4, 2, "replica"), 1_000.0, kind="service", may_stop=False)
    story.add((job, Command(("serve", "runs/x"), is_rayrec=True)))
    story.world.nodes = {"n0": node("n0", 4)}
    story.world._take_cards = lambda process: process.holds.update(
        {"n0": 4 if "serve" in process.submission.entrypoint else 2}
    )  # type: ignore[method-assign]
    story.passes(3)
    assert "--replicas 4" in story.world.processes["service-1"].submission.entrypoint
    story.add(program("second", "team-a", 2, at=1_003.0))
    story.passes(6)

    assert told[0] == 4, "said before it starts, too"
    assert set(told[told.index(2) :]) == {2}, "and said again, since others may change it"
    assert story.world.history == ["service-1", "second-1"]
    assert story.ledger.job("service").running.size == 2


def test_a_service_that_cannot_be_told_its_replicas_holds_up_no_other_job(tmp_path):
    """Its limit is a file on a disk that nodes share, which may be full, or not answer for a while."""
    story = Story(tmp_path, {"service": 1e9, "second": 4.0})
    story.queues(queue("team-a", 2), queue("team-b", 2))
    troubles: list[Exception] = [OSError(116, "Stale file handle"), NoRoomError("disk is full")]

    def scale(entry: Any, replicas: int) -> bool:
        if troubles:
            raise troubles[0]
        return True

    story.start(scale=scale)
    job = Job("service", "team-b", sizes(1, 1, "replica"), 1_000.0, kind="service", may_stop=False)
    story.add((job, Command(("serve", "runs/x"), is_rayrec=True)))
    story.add(program("second", "team-a", 1, at=1_001.0))
    story.passes(3)
    assert story.world.history == ["second-1"], "no replica starts before it was told how many"
    troubles.pop(0)
    story.passes(5)
    assert story.states["second"] == "succeeded"
    troubles.clear()
    story.passes(2)
    assert story.world.history == ["second-1", "service-1"]
    troubles.append(OSError(28, "No space left on device"))
    story.passes(3)

    assert story.states["service"] == "running"
    assert story.world.live("service") == ["service-1"]


WORK = {"big": 60.0, "small": 12.0, "owner": 8.0, "rival": 4.0}
OWNER_COMES_AT, HEAD_IS_LOST_AT = 1_006.0, 1_020.0


def scenario(folder: Path) -> Story:
    """A borrower shrinks for an owner, a job fails once: everything that is written."""
    story = Story(folder, dict(WORK))
    story.world.failures_left["small"] = 1
    story.queues(queue("team-a", 2), queue("team-b", 2))
    story.add(training("big", "team-b", 3, 2), program("small", "team-b", 1, at=1_001.0, retries=1))
    story.kills = Kills()
    return story


def play(story: Story, loses_head: bool, on_tick: Callable[[], None] = lambda: None) -> None:
    """Go through the scenario; whenever the queue is killed, it is started again."""
    world = story.world
    while not (world.now > HEAD_IS_LOST_AT and story.is_over):
        assert world.now < 1_300.0, story.states
        try:
            on_tick()
            # What its users do is done once, whatever happens to the queue.
            if world.now >= OWNER_COMES_AT and story.ledger.find("owner") is None:
                kills, story.kills = story.kills, Kills()
                story.add(program("owner", "team-a", 2, at=OWNER_COMES_AT))
                story.kills = kills
            if (
                loses_head
                and world.now >= HEAD_IS_LOST_AT
                and world.cluster == ClusterId("head:6379", "first")
            ):
                world.lose_head()
                world.new_head("second")
            story.loop.tick()
        except KilledError:
            story.ledger.close()
            story.start()
            # A rival may come before the next process of the queue: what was begun has to be known.
            story.add(program("rival", "team-a", 1, at=world.now, priority=9))
        world.sleep(2.0)


@pytest.mark.parametrize("loses_head", [False, True])
def test_a_kill_at_any_point_loses_no_job_and_starts_none_twice(tmp_path, loses_head):
    (tmp_path / "undisturbed").mkdir()
    undisturbed = scenario(tmp_path / "undisturbed")
    begun: list[tuple[int, FakeCluster, bytes]] = []
    """Of every tick: points before it, and the world and the ledger at its begin."""

    def keep() -> None:
        undisturbed.world.kills = lambda: None
        world, content = deepcopy(undisturbed.world), undisturbed.ledger._db.serialize()
        undisturbed.world.kills = lambda: undisturbed.kills()
        begun.append((undisturbed.kills.num_points, world, content))

    play(undisturbed, loses_head, keep)
    assert undisturbed.states == dict.fromkeys(("big", "small", "owner"), "succeeded")
    assert {"shrink", "go on", "wait", "stop"} <= set(undisturbed.noted("big") + undisturbed.noted("small"))
    num_points, killed = undisturbed.kills.num_points, 0
    assert num_points > 150
    every = 100 // share_of(100)  # in `make test` a kill at some of the points
    for (first, world, content), (after, *_) in zip(begun, [*begun[1:], (num_points,)], strict=True):
        if loses_head and world.now < HEAD_IS_LOST_AT - 2.0:
            continue  # the same as without
        for at in range(first, after):
            if at % every:
                continue
            story = Story(tmp_path, {}, content=content, world=deepcopy(world))
            story.kills = Kills(at - first)
            play(story, loses_head)
            # `FakeCluster` asserts that no job has two attempts at once, and no card two jobs.
            assert story.states == dict.fromkeys(WORK, "succeeded"), at
            assert story.kills.num_points > at - first, "it was killed"
            assert len(set(story.world.history)) == len(story.world.history), "an attempt is started once"
            story.ledger.close()
            killed += 1
    assert killed == len(range(0, num_points, every)) or loses_head
