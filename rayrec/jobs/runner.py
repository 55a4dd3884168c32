"""Attempts as Ray's jobs: what is handed over, how they stand, and how they are stopped.

Ray starts every attempt as a process on its head, which asks Ray for its actors. The only state is Ray's: a
call that was interrupted is repeated, and does nothing if it was done before.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rayrec.jobs.job import Job, Running, Size
from rayrec.jobs.ledger import Attempt, Command
from rayrec.pipelines.cluster.placement import NODE_ID_LABEL
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

LEDGER_KEY = "rayrec_ledger"
"""In what Ray keeps with a job: whose it is."""
CALL_S, SUBMIT_S = 15.0, 120.0
"""Time in which the head answers; to a submission, which waits for its agent."""
AGENT_REFUSES = "Request failed with status code 400"
"""In the text of an answer 500: the head passes on that its agent refuses."""
TERM_S = 30
"""Time between SIGTERM and SIGKILL; Ray's own is 3 s, and a training writes how it ended."""
TRAINERS = "pipeline.num_trainers"
NOT_ITS_OWN = frozenset(
    f"JOB_SUPERVISOR_ACTOR_{what}"
    for what in ("START_TIMEOUT", "START_FAILURE", "UNSCHEDULABLE", "UNKNOWN_FAILURE", "DIED")
)
"""Ray's types of failures of the process that it starts a command in."""


class HeadDownError(Exception):
    """Ray's head does not answer: what is asked of it is asked again later."""


@dataclass(frozen=True)
class Submission:
    """An attempt as it is handed to Ray."""

    id: str
    entrypoint: str
    """For a shell."""
    env: Mapping[str, str] = field(default_factory=dict)
    package: str | None = None
    """URI of the working directory, which Ray unpacks."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """That the process itself holds."""
    node: str | None = None
    """On which it runs; None: the head."""
    owner: str = ""
    """The ledger that it is from."""


@dataclass(frozen=True)
class Report:
    """How an attempt stands."""

    state: str
    """As Ray says it: PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED."""
    exit_code: int | None = None
    message: str = ""
    ray_job: str | None = None
    """Ray's id of its driver, by which its actors are known."""
    never_ran: bool = False
    """Ray had no process for it, or lost it: the command itself did not fail."""

    @property
    def is_over(self) -> bool:
        return self.state in ("STOPPED", "SUCCEEDED", "FAILED")


class Runner(Protocol):
    """Where attempts run. All raise `HeadDownError` where there is no answer."""

    def submit(self, submission: Submission) -> None:
        """Start an attempt; one that was started before is left alone.

        Raises:
            InputError: it can never be started as it is.
        """

    def report(self, submission: str) -> Report | None:
        """How an attempt stands; None if nothing is known of it."""

    def stop(self, submission: str) -> None:
        """Let an attempt end: SIGTERM, after a while SIGKILL; returns at once."""

    def logs(self, submission: str) -> str:
        """What its process wrote; empty if nothing is known of it."""


def arguments_of(job: Job, command: Command, size: Size, python: str) -> list[str]:
    """The program and its arguments, with what a size sets.

    Args:
        python: interpreter that has rayrec.
    """
    argv = list(command.argv)
    if job.kind == "train":
        assert command.run is not None, "a training has a folder"
        num_trainers = size.counts()["trainer"]
        argv += ["--set", f"{TRAINERS}={num_trainers}", "--run", command.run, "--resume-if-begun"]
    return [python, "-m", "rayrec", *argv] if command.is_rayrec else argv


def submission_of(
    attempt: Attempt, running: Running, command: Command, owner: str, python: str
) -> Submission:
    """What is handed to Ray for an attempt.

    Args:
        owner: the ledger.
        python: interpreter that has rayrec, by its path on the cluster.
    """
    # With Ray, which commands that only read the ledger do without.
    from rayrec.pipelines.cluster.reservation import NODES_VARIABLE

    size = running.job.sizes[attempt.size]
    argv = arguments_of(running.job, command, size, python)
    if running.job.kind == "service":
        argv += ["--replicas", str(next(iter(size.counts().values())))]
    entrypoint = f"exec {shlex.join(argv)}"
    is_package = command.working_dir is not None and "://" in command.working_dir
    if command.working_dir is not None and not is_package:
        entrypoint = f"cd {shlex.quote(command.working_dir)} && {entrypoint}"
    nodes = list(dict.fromkeys(node for members in running.placed.values() for node in members))
    held = size.groups[0].resources if command.holds_resources else {}
    return Submission(
        attempt.submission,
        entrypoint,
        {**command.env, NODES_VARIABLE: ",".join(nodes)},
        command.working_dir if is_package else None,
        held,
        nodes[0] if command.holds_resources else None,
        owner,
    )


class RayRunner:
    """Ray's own job submission, over HTTP: the process of the queue outlives Ray's head."""

    def __init__(self, dashboard: Callable[[], str]) -> None:
        """
        Args:
            dashboard: URL of the head's dashboard, of which a new head has another.
        """
        self._dashboard = dashboard
        self._client: tuple[str, JobSubmissionClient] | None = None

    def submit(self, submission: Submission) -> None:
        from rayrec.pipelines.cluster.nodes import FOLDER_VARIABLE, cluster_folder

        options: dict[str, Any] = {}
        if submission.resources:
            names = {"CPU": "entrypoint_num_cpus", "GPU": "entrypoint_num_gpus"}
            options = {names[name]: count for name, count in submission.resources.items() if name in names}
            others = {name: count for name, count in submission.resources.items() if name not in names}
            if others:
                options["entrypoint_resources"] = others
        if submission.node is not None:
            options["entrypoint_label_selector"] = {NODE_ID_LABEL: submission.node}
        environment: dict[str, Any] = {
            "env_vars": {
                "RAY_JOB_STOP_WAIT_TIME_S": str(TERM_S),
                # Jobs have to see the quarantine that the queue sees.
                FOLDER_VARIABLE: str(cluster_folder().absolute()),
                **submission.env,
            }
        }
        if submission.package is not None:
            environment["working_dir"] = submission.package
        try:
            with self._asked(submission.id, SUBMIT_S) as client:
                client.submit_job(
                    entrypoint=submission.entrypoint,
                    submission_id=submission.id,
                    runtime_env=environment,
                    metadata={LEDGER_KEY: submission.owner},
                    **{"entrypoint_num_cpus": 0, **options},
                )
        except (TypeError, ValueError) as error:
            raise InputError(f"Ray does not start it: {error}") from None
        except (HeadDownError, _RefusedError) as error:
            # Ray answers 500, and not 400, to an id that it has: the agent's own 400 is wrapped on the way.
            if not self._has(submission):
                if isinstance(error, HeadDownError) and AGENT_REFUSES not in str(error):
                    raise
                raise InputError(f"Ray does not start it: {_last_line(str(error.args[-1]))}") from None

    def _has(self, submission: Submission) -> bool:
        """Whether Ray has this attempt.

        Raises:
            InputError: it has another job of this id.
        """
        details = self._details(submission.id)
        if details is not None and (details.metadata or {}).get(LEDGER_KEY) != submission.owner:
            raise InputError(
                f"Ray has a job {submission.id!r} that is not of this ledger; submit it again with "
                "another --id"
            ) from None
        return details is not None

    def report(self, submission: str) -> Report | None:
        details = self._details(submission)
        if details is None:
            return None
        error = getattr(details.error_type, "value", details.error_type)
        return Report(
            details.status.value,
            details.driver_exit_code,
            details.message or "",
            details.job_id or None,
            error in NOT_ITS_OWN,
        )

    def _details(self, submission: str) -> Any:
        try:
            with self._asked(submission) as client:
                return client.get_job_info(submission)
        except _RefusedError as error:
            if error.code == 404:
                return None
            raise HeadDownError(error.last_line) from error

    def stop(self, submission: str) -> None:
        try:
            with self._asked(submission) as client:
                client.stop_job(submission)
        except _RefusedError as error:
            if error.code != 404:
                raise HeadDownError(error.last_line) from error

    def logs(self, submission: str) -> str:
        try:
            with self._asked(submission) as client:
                return client.get_job_logs(submission)
        except _RefusedError:
            return ""

    @contextmanager
    def _asked(self, what: str, timeout_s: float = CALL_S) -> Iterator[JobSubmissionClient]:
        """Turns what goes wrong inside into one of two: the head is down, or it refuses."""
        import requests

        try:
            yield self._connected(timeout_s)
        except (requests.exceptions.RequestException, ConnectionError, TimeoutError) as error:
            self._client = None
            raise HeadDownError(f"{what}: {error}") from error
        except RuntimeError as error:
            code = _status_code(str(error))
            if code in (None, 500, 502, 503, 504):
                self._client = None
                raise HeadDownError(f"{what}: {error}") from error
            raise _RefusedError(code, str(error)) from error

    def _connected(self, timeout_s: float) -> JobSubmissionClient:
        url = self._dashboard()
        if self._client is None or self._client[0] != url:
            self._client = url, _client(url)
        client = self._client[1]
        client.timeout_s = timeout_s  # type: ignore[attr-defined]
        return client


class _RefusedError(Exception):
    """The head answered, and does not do it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.last_line = _last_line(text) or f"status {code}"


def _last_line(text: str) -> str:
    """Of a traceback, without what is wrapped around it."""
    lines = [line for line in text.splitlines() if line.strip(" '\".")]
    return lines[-1].strip() if lines else ""


def _status_code(text: str) -> int | None:
    """Of Ray's message for an answer that is not 200; it has no class of its own."""
    words = text.removeprefix("Request failed with status code ").split(":", 1)
    return int(words[0]) if words[0].isdigit() else None


def _client(url: str) -> JobSubmissionClient:
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """Waits no longer than it is told to: Ray's own would wait for a head that hangs for ever."""

        timeout_s = CALL_S

        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, **{"timeout": self.timeout_s, **options})

    # Ray prefers these to the URL that it is given.
    kept = {name: os.environ.pop(name, None) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    try:
        return Client(url)
    finally:
        os.environ.update({name: value for name, value in kept.items() if value is not None})
