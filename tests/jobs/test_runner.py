"""What is handed to Ray, and what its answers mean; Ray itself is in tests/jobs/ray."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rayrec.jobs.job import Job, Running, Size
from rayrec.jobs.ledger import Attempt, Command, Phase
from rayrec.jobs.runner import HeadDownError, RayRunner, Submission, submission_of
from rayrec.jobs.trainings import RunFolders, training_sizes
from rayrec.jobs.watcher import ClusterWatcher
from rayrec.pipelines.cluster.placement import ActorGroup
from rayrec.platform.errors import InputError
from tests.helpers.runs import make_run

PLACED = {"trainer": ("n1", "n1", "n2")}


def gang(stage: str, count: int, **resources: float) -> Size:
    return Size((ActorGroup(stage, "x", count, resources, {}),))


def handed(
    command: Command, *sizes: Size, size: int = 0, kind: Any = "train", placed: Any = None
) -> Submission:
    job = Job("job", "team-a", sizes, 0.0, kind=kind)
    running = Running(job, size, PLACED if placed is None else placed, 1.0)
    attempt = Attempt("job", 2, "job-2", "cluster", size, Phase.starting, 1.0)
    return submission_of(attempt, running, command, "a ledger", "/opt/python")


def test_a_training_is_started_with_the_trainers_of_its_size_and_resumes():
    command = Command(
        ("train", "my run.yaml", "--set", "seed=1"), {"A": "b"}, "/a folder", is_rayrec=True, run="/runs/x"
    )
    told = handed(command, gang("trainer", 3, GPU=1), gang("trainer", 2, GPU=1), size=1)

    assert told.id == "job-2"
    assert told.entrypoint == (
        "cd '/a folder' && exec /opt/python -m rayrec train 'my run.yaml' --set seed=1 "
        "--set pipeline.num_trainers=2 --run /runs/x --resume-if-begun"
    )
    assert told.env == {"A": "b", "RAYREC_NODES": "n1,n2"}
    assert told.resources == {}
    assert told.node is None


def test_a_service_is_started_with_the_replicas_of_its_size():
    command = Command(("serve", "runs/x", "--port", "80"), is_rayrec=True)
    told = handed(command, gang("replica", 4, CPU=1), gang("replica", 3, CPU=1), size=1, kind="service")
    assert told.entrypoint == "exec /opt/python -m rayrec serve runs/x --port 80 --replicas 3"


def test_a_program_holds_what_it_asks_for_on_its_node():
    command = Command(("python", "-c", "print(1)"), holds_resources=True)
    told = handed(command, gang("command", 1, CPU=2, GPU=1), kind="other", placed={"command": ("n2",)})

    assert told.entrypoint == "exec python -c 'print(1)'"
    assert told.resources == {"CPU": 2, "GPU": 1}
    assert told.node == "n2"


def test_a_program_whose_actors_ask_holds_nothing_itself():
    told = handed(
        Command(("python", "x.py"), working_dir="s3://bucket/code.zip"),
        gang("actor", 2, GPU=1),
        kind="other",
        placed={"actor": ("n1", "n2")},
    )
    assert told.package == "s3://bucket/code.zip"
    assert told.entrypoint == "exec python x.py"
    assert (told.resources, told.node) == ({}, None)


def wrapped(last_line: str) -> tuple[int, str]:
    """As Ray's head passes on that its agent refuses."""
    return 500, (
        "Traceback (most recent call last):\n  …\nRuntimeError: Request failed with status code 400: "
        f"Traceback (most recent call last):\n  …\n{last_line}\n.\n"
    )


class Head:
    """Answers as Ray's head does, over HTTP."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.refuses: tuple[int, str] | None = None
        self.stopped: list[str] = []
        self.error_type: str | None = "JOB_ENTRYPOINT_COMMAND_ERROR"
        head = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                code, text = head.answer(self.command, self.path, json.loads(body) if body else {})
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path == "/api/version":
            return 200, json.dumps(
                {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}
            )
        if self.refuses is not None:
            return self.refuses
        if method == "POST" and path == "/api/jobs/":
            name = body["submission_id"]
            if name in self.jobs:
                return wrapped(f"ValueError: Job with submission_id {name} already exists. ")
            self.jobs[name] = body
            return 200, json.dumps({"job_id": name, "submission_id": name})
        name = path.split("/")[3]
        if name not in self.jobs:
            return 404, f"Job {name} does not exist"
        if path.endswith("/stop"):
            self.stopped.append(name)
            return 200, json.dumps({"stopped": True})
        if path.endswith("/logs"):
            return 200, json.dumps({"logs": "a line\n"})
        details = {
            "type": "SUBMISSION",
            "job_id": "03000000",
            "submission_id": name,
            "status": "FAILED",
            "entrypoint": "x",
            "message": "it broke",
            "metadata": self.jobs[name]["metadata"],
            "driver_exit_code": 2,
            "error_type": self.error_type,
        }
        return 200, json.dumps(details)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


@pytest.fixture
def runner(head: Head) -> RayRunner:
    return RayRunner(lambda: head.url)


MINE = Submission("job-1", "exec true", {"A": "b"}, owner="a ledger")


def test_what_is_handed_over_arrives(head, runner, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.255.255.1:6379")  # which is not the cluster that was asked for
    monkeypatch.setenv("RAYREC_CLUSTER_FOLDER", "/shared/cluster")
    runner.submit(
        Submission("job-1", "exec true", {"A": "b"}, None, {"CPU": 2, "GPU": 1, "NPU": 3}, "n1", "x")
    )

    asked = head.jobs["job-1"]
    assert asked["entrypoint"] == "exec true"
    assert (asked["entrypoint_num_cpus"], asked["entrypoint_num_gpus"]) == (2, 1)
    assert asked["entrypoint_resources"] == {"NPU": 3}
    assert asked["entrypoint_label_selector"] == {"ray.io/node-id": "n1"}
    assert asked["runtime_env"]["env_vars"] == {
        "A": "b",
        "RAY_JOB_STOP_WAIT_TIME_S": "30",
        "RAYREC_CLUSTER_FOLDER": "/shared/cluster",
    }


def test_submitting_twice_is_submitting_once(head, runner):
    runner.submit(MINE)
    runner.submit(MINE)
    assert list(head.jobs) == ["job-1"]
    assert head.jobs["job-1"]["entrypoint_num_cpus"] == 0


def test_an_id_that_somebody_else_has_used_is_refused(head, runner):
    runner.submit(Submission("job-1", "exec other", owner="another ledger"))
    with pytest.raises(InputError, match="Ray has a job 'job-1' that is not of this"):
        runner.submit(MINE)


@pytest.mark.parametrize(
    "answered",
    [
        (400, "Traceback …\nValueError: a label selector that is none"),
        wrapped("ValueError: a label selector that is none"),
    ],
)
def test_what_ray_never_takes_is_refused_with_its_last_line(head, runner, answered):
    head.answer_before = head.answer

    def answer(method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if method == "POST":
            return answered
        return head.answer_before(method, path, body)

    head.answer = answer
    with pytest.raises(InputError, match="Ray does not start it: ValueError: a label selector that is none"):
        runner.submit(MINE)


def test_a_package_that_ray_cannot_unpack_is_refused(head, runner):
    with pytest.raises(InputError, match=r"Ray does not start it: .*code"):
        runner.submit(Submission("job-1", "exec true", package="s3://bucket/code"))
    assert head.jobs == {}


def test_what_never_had_a_process_is_told_from_what_failed(head, runner):
    runner.submit(MINE)
    assert not runner.report("job-1").never_ran
    head.error_type = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
    assert runner.report("job-1").never_ran


def test_reports_say_how_an_attempt_stands(head, runner):
    assert runner.report("job-1") is None
    runner.submit(MINE)
    report = runner.report("job-1")
    assert (report.state, report.exit_code, report.message, report.ray_job) == (
        "FAILED",
        2,
        "it broke",
        "03000000",
    )
    assert report.is_over
    assert runner.logs("job-1") == "a line\n"
    assert runner.logs("job-9") == ""


def test_stopping_what_is_not_known_does_nothing(head, runner):
    runner.stop("job-1")
    runner.submit(MINE)
    runner.stop("job-1")
    assert head.stopped == ["job-1"]


def test_a_head_that_is_in_trouble_or_gone_is_down(head, runner):
    head.refuses = (500, "No available agent to submit job, please try again later.")
    for ask in (lambda: runner.submit(MINE), lambda: runner.report("x"), lambda: runner.stop("x")):
        with pytest.raises(HeadDownError):
            ask()
    head.refuses = None
    runner.submit(MINE)
    head.close()
    with pytest.raises(HeadDownError):
        runner.report("job-1")


def test_where_no_head_answers_it_is_not_asked_again_and_again():
    times = iter([0.0, 0.0, 0.5, 5.0, 5.0])
    watcher = ClusterWatcher("127.0.0.1:1", clock=lambda: next(times))
    for _ in range(3):  # the second of them comes too early for a try
        with pytest.raises(HeadDownError, match=r"no Ray head answers at 127\.0\.0\.1:1"):
            watcher.look()
    assert next(times, None) is None


# Trainings


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("jobs"))


def test_a_training_has_a_size_for_every_number_of_trainers(run):
    sizes = training_sizes(run / "config.yaml", ["pipeline.num_trainers=4"], 2)
    assert [size.counts()["trainer"] for size in sizes] == [4, 3, 2]
    assert [size.speed for size in sizes] == [1.0, 0.75, 0.5]
    assert len(training_sizes(run / "config.yaml", ["pipeline.num_trainers=4"])) == 1


def test_more_least_trainers_than_there_are_is_refused(run):
    with pytest.raises(
        InputError, match=r"--min-trainers 3: it must be from 1 to pipeline\.num_trainers, which is 2"
    ):
        training_sizes(run / "config.yaml", ["pipeline.num_trainers=2"], 3)


def test_a_number_of_trainers_that_settings_forbid_is_refused(run):
    overrides = ["pipeline.num_trainers=2", "training.parallel=fsdp2"]
    with pytest.raises(InputError, match=r"--min-trainers 1, with 1 trainers: .*fsdp2"):
        training_sizes(run / "config.yaml", overrides, 1)


def test_what_is_lost_is_what_was_done_since_the_last_snapshot(run, tmp_path):
    folders = RunFolders(1.0)
    last = max((run / "snapshots").iterdir())
    written = (last / "manifest.json").stat().st_mtime

    assert folders.lost_s(run, written - 100, written + 30) == pytest.approx(30.0)
    assert folders.lost_s(run, written + 20, written + 30) == pytest.approx(10.0)  # it began after that
    assert folders.lost_s(tmp_path / "not begun", 100.0, 130.0) == 30.0


def test_a_run_that_does_not_train_says_that_it_writes_no_snapshot(run):
    folders = RunFolders(1.0, sleep=lambda seconds: None)
    while (answer := folders.ask_snapshot("job-1", run)) is None:
        pass
    assert answer.snapshot is None
    assert "nothing trains in this folder now" in answer.error


def test_the_end_of_a_run_is_measured_by_its_steps(run, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())

    def at(step: int) -> None:
        now = {"step": step, "steps": 100, "is_total": True}
        (folder / "run.json").write_text(json.dumps({"state": "running", "now": now, "last": None}))

    folders = RunFolders(1.0)
    at(10)
    assert folders.left_s("job-1", folder, 0.0) is None
    at(30)
    assert folders.left_s("job-1", folder, 30.0) is None  # too short a time
    assert folders.left_s("job-1", folder, 100.0) == pytest.approx(350.0)
    assert folders.left_s("job-2", tmp_path / "not begun", 100.0) is None


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"state": "running", "now": 3}',
        '{"state": "running", "last": null, "now": {"step": "x", "steps": 5, "is_total": true}}',
        '{"state": "running", "last": null, "now": {"step": NaN, "steps": 5, "is_total": true}}',
        '{"state": "running", "last": null, "now": {"step": 1, "steps": Infinity, "is_total": true}}',
    ],
)
def test_nothing_that_is_in_the_folder_of_a_run_ends_the_queue(run, tmp_path, content):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    (folder / "run.json").write_text(content)
    folders = RunFolders(1.0)

    assert folders.lost_s(folder, 100.0, 130.0) == 30.0
    assert [folders.left_s("job-1", folder, now) for now in (0.0, 100.0)] == [None, None]
