"""`submit`, `jobs`: what a team runs on a cluster that it shares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from rayrec.cli.app import app
from rayrec.cli.queues import LedgerOption, counts_by_name, open_ledger
from rayrec.platform.console import Answer, command, new_table, out, print_rows
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.jobs.job import Size
    from rayrec.pipelines.cluster.placement import ActorGroup

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
OWN_RETRIES = 3
MOST = 1e6
"""CPUs or GPUs of one program."""
UNITS_OF_TIME = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@command(app, "submit")
def submit_command(
    argv: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND …", help="`train CONFIG …`, `serve RUN …`, or a program with its arguments."
        ),
    ],
    queue: Annotated[str, typer.Option(help="Whose guarantee it uses.")],
    priority: Annotated[int, typer.Option(help="Within its queue, higher first.")] = 0,
    job_id: Annotated[
        str | None, typer.Option("--id", help="Name of the job; submitting it again changes nothing.")
    ] = None,
    expected: Annotated[
        str | None, typer.Option(metavar="90s|30m|2h|1d", help="How long it takes, as far as known.")
    ] = None,
    min_trainers: Annotated[
        int | None, typer.Option(min=1, help="A training goes on with fewer trainers, down to so many.")
    ] = None,
    within: Annotated[
        str | None, typer.Option(help="Label of nodes, such as `rack`: all of it where that is the same.")
    ] = None,
    not_before: Annotated[
        str | None, typer.Option(metavar="TIME", help="Reserve room for then: 2026-12-01T08:00, or +2h.")
    ] = None,
    cpus: Annotated[float | None, typer.Option(min=0, max=MOST, help="CPUs of the program \\[1].")] = None,
    gpus: Annotated[float, typer.Option(min=0, max=MOST, help="GPUs of the program.")] = 0.0,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COUNT", help="Other resources of the program, as Ray names them."),
    ] = None,
    actors: Annotated[
        int | None,
        typer.Option(
            min=1, help="The program asks Ray for so many actors with that each, and has none itself."
        ),
    ] = None,
    may_stop: Annotated[
        bool, typer.Option("--may-stop", help="It may be ended, and started again from its beginning.")
    ] = False,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Failures in a row after which it is tried again \\[3 of `train` and `serve`, else 0].",
        ),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment variable; may be repeated.")
    ] = None,
    working_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder that all nodes see, or URI of a package for Ray to unpack \\[where it is submitted]."
        ),
    ] = None,
    ledger: LedgerOption = None,
) -> Answer:
    """Queue a job; it starts when its queue has room for all of it."""
    import time
    import uuid

    from rayrec.jobs.job import Job
    from rayrec.jobs.ledger import Command
    from rayrec.jobs.overview import check_job, check_only_service, job_summary

    opened = open_ledger(ledger)
    where = str(Path(working_dir or ".").resolve()) if "://" not in (working_dir or "") else str(working_dir)
    environment = dict(_variable(text) for text in env or ())
    job_sizes: tuple[Size, ...]
    run: str | None = None
    if argv[0] == "train":
        _only_of_programs(cpus, gpus, resource, actors)
        kept, job_sizes, run = _training(argv[1:], where, min_trainers)
        kind, stoppable, is_rayrec, holds = "train", True, True, False
    elif min_trainers is not None:
        raise InputError("--min-trainers is for `train`; a service has --min-replicas of its own")
    elif argv[0] == "serve":
        kept, job_sizes = _service(argv, cpus, gpus, resource, actors)
        kind, stoppable, is_rayrec, holds = "service", may_stop, True, False
    else:
        kept, job_sizes = list(argv), (_program(cpus, gpus, resource, actors),)
        kind, stoppable, holds = "other", may_stop, actors is None
        names = {each.name for each in app.registered_commands}
        is_rayrec = argv[0] in names | {each.name for each in app.registered_groups}
    name = job_id or f"{_stem(argv, run)}-{uuid.uuid4().hex[:6]}"
    if not JOB_ID.fullmatch(name):
        raise InputError(
            f"--id {name}: expected at most 80 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    now = time.time()
    known = opened.find(name)
    start = None if not_before is None else _time("--not-before", not_before, now)
    if known is not None and not_before is not None and not_before.startswith("+"):
        start = known.job.not_before  # counted from when it was submitted first
    job = Job(
        id=name,
        queue=queue,
        sizes=job_sizes,
        submitted_at=now,
        priority=priority,
        kind=kind,  # type: ignore[arg-type]
        expected_s=None if expected is None else _seconds("--expected", expected),
        may_stop=stoppable,
        within=within,
        not_before=start,
    )
    times = retries if retries is not None else 0 if kind == "other" else OWN_RETRIES
    command = Command(tuple(kept), environment, where, is_rayrec, holds, run, times)
    with opened.change():
        if opened.find(name) is None:
            check_job(opened.queues(), opened.nodes(), job)
            if kind == "service":
                check_only_service(opened)
        entry = opened.add(job, command)
    summary = job_summary(entry)
    print_rows(
        f"Job {name} (next: rayrec jobs {name})",
        [
            ("queue", queue),
            ("state", entry.state.value),
            ("asks for", summary["asks"]),
            ("sizes", str(len(job_sizes))),
        ],
    )
    return summary


def _parsed(argv: Sequence[str]) -> dict[str, Any]:
    """Arguments of one of rayrec's own commands, as it would read them."""
    name, *arguments = argv
    commands: Any = typer.main.get_command(app)
    try:
        context = commands.commands[name].make_context(name, arguments)
    except Exception as error:
        # Of click, or of the copy that newer releases of typer have of it.
        if not hasattr(error, "format_message"):
            raise
        raise InputError(f"{name}: {error.format_message()}") from None
    return dict(context.params)


def _training(
    arguments: Sequence[str], where: str, min_trainers: int | None
) -> tuple[list[str], tuple[Size, ...], str]:
    """What is run of a training, without what the queue sets; the gangs; the folder of its run."""
    from rayrec.jobs.trainings import training_sizes

    given = _parsed(["train", *arguments])
    if given["local"] or given["snapshot"]:
        raise InputError(
            "train: --local and --snapshot are for runs by hand; the queue starts it on Ray, and from its "
            "last snapshot"
        )
    root = Path.cwd() if "://" in where else Path(where)
    config_file, overrides = Path(given["config_file"]), list(given["overrides"] or ())
    run = Path(given["run"] or Path("runs") / config_file.stem)
    if "://" in where and not run.is_absolute():
        raise InputError(
            f"train: --run {run}: with --working-dir {where} it has to be an absolute path that all nodes see"
        )
    sizes = training_sizes(root / config_file, overrides, min_trainers)
    kept = ["train", str(config_file), *(part for each in overrides for part in ("--set", each))]
    return kept, sizes, str(root / run)


def _service(
    argv: Sequence[str],
    cpus: float | None,
    gpus: float,
    resource: list[str] | None,
    actors: int | None,
) -> tuple[list[str], tuple[Size, ...]]:
    """A service by replicas, from the most down to the least."""
    from rayrec.jobs.job import Size
    from rayrec.platform.devices import HOST, claimed_resources, ray_claim
    from rayrec.serve.config.serve import ServeConfig

    given = _parsed(argv)
    if given["single_process"]:
        raise InputError("serve: --single-process is without Ray; leave it out")
    if actors is not None or given["services"] is not None:
        raise InputError(
            "serve: the queue knows services of whole replicas; leave --actors and --services out"
        )
    if given["models"] is not None and cpus is None:
        raise InputError("serve: --models takes the threads of all models; say how many with --cpus")
    most = given.get("max_replicas") or given["replicas"]
    least = given.get("min_replicas") or (1 if given.get("max_replicas") else given["replicas"])
    if least > most:
        raise InputError(
            f"serve: --min-replicas {least} is more than the {most} replicas that it has at most"
        )
    asked = {HOST.ray_resource: ServeConfig().threads if cpus is None else cpus}
    if given["device"] is not None:
        asked |= claimed_resources(ray_claim(given["device"]))
    asked |= _asked(gpus, resource)
    groups = [_group("replica", number, asked) for number in range(most, least - 1, -1)]
    return list(argv), tuple(Size((group,), group.count / most) for group in groups)


def _program(cpus: float | None, gpus: float, resource: list[str] | None, actors: int | None) -> Size:
    from rayrec.jobs.job import Size

    asked = {"CPU": 1.0 if cpus is None else cpus, **_asked(gpus, resource)}
    return Size((_group("command" if actors is None else "actor", actors or 1, asked),))


def _group(stage: str, count: int, asked: dict[str, float]) -> ActorGroup:
    from rayrec.pipelines.cluster.placement import SMALLEST_SHARE, ActorGroup
    from rayrec.platform.devices import ACCELERATOR_RESOURCES

    for name, each in asked.items():  # Ray would refuse these when the job has waited for its room
        if 0 < each < SMALLEST_SHARE:
            raise InputError(
                f"--resource {name}={each:g}: Ray counts nothing below {SMALLEST_SHARE:g}; ask for more, or "
                "leave it out"
            )
        if name in ACCELERATOR_RESOURCES and each > 1 and each != int(each):
            raise InputError(
                f"--resource {name}={each:g}: Ray gives a share of one card, or whole cards; ask for "
                f"{int(each)} or {int(each) + 1}"
            )
    resources = {name: each for name, each in asked.items() if each > 0}
    return ActorGroup(stage, "--cpus, --gpus, --resource", count, resources, {}, "PACK")


def _asked(gpus: float, resource: list[str] | None) -> dict[str, float]:
    asked = counts_by_name("--resource", resource)
    if gpus and "GPU" in asked:
        raise InputError(
            f"--gpus {gpus:g} and --resource GPU={asked['GPU']:g} say the same; keep one of them"
        )
    return asked | ({"GPU": gpus} if gpus else {})


def _only_of_programs(
    cpus: float | None, gpus: float, resource: list[str] | None, actors: int | None
) -> None:
    if cpus is not None or gpus or resource or actors is not None:
        raise InputError(
            "--cpus, --gpus, --resource and --actors say what a program asks for; a training's settings say "
            "it themselves (pipeline.num_trainers, device, …)"
        )


def _stem(argv: Sequence[str], run: str | None) -> str:
    text = Path(run).name if run is not None else Path(argv[0]).stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).strip("-._")[:60] or "job"


def _variable(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise InputError(f"--env {text}: expected NAME=VALUE")
    return name, value


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise InputError(f"{option} {text}: expected a time such as 90s, 30m, 2h or 1d")
    return float(found[1]) * UNITS_OF_TIME[found[2]]


def _time(option: str, text: str, now: float) -> float:
    """Unix time of an ISO time (of this machine's zone, if it names none), or of `+2h`."""
    from datetime import datetime

    if text.startswith("+"):
        return now + _seconds(option, text[1:])
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise InputError(f"{option} {text}: expected a time such as 2026-12-01T08:00, or +2h") from None


@command(app, "jobs")
def jobs_command(
    job_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One job, with all that was decided.")
    ] = None,
    stop: Annotated[
        str | None, typer.Option(metavar="ID", help="Stop a job; a training at a snapshot.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those that are over.")] = False,
    ledger: LedgerOption = None,
) -> Answer:
    """List jobs, show one, or stop one."""
    import time

    from rayrec.jobs.ledger import JobState
    from rayrec.jobs.overview import job_details, job_summary

    opened, now = open_ledger(ledger), time.time()
    if stop is not None:
        if job_id not in (None, stop):
            raise InputError(f"--stop {stop}: name one job, not {job_id} beside it")
        with opened.change():
            entry = opened.cancel(stop, now)
        how = entry.state.value if entry.state.is_over else "stops at the queue's next look"
        print_rows(f"Job {stop}", [("state", how)])
        return job_summary(entry)
    if job_id is not None:
        details = job_details(opened, job_id)
        _print_job(details)
        return details
    states = tuple(JobState) if everything else (JobState.running, JobState.waiting)
    jobs = [job_summary(each) for each in opened.jobs(*states)]
    headings = ("job", "queue", "state", "size", "asks for", "attempt", "priority", "why")
    table = new_table("", headings, figures=("attempt", "priority"))
    for each in jobs:
        table.add_row(
            *map(
                escape,
                (
                    each["id"],
                    each["queue"],
                    each["state"],
                    each["size"] or "",
                    each["asks"],
                    str(each["attempt"] or ""),
                    str(each["priority"]),
                    each["reason"],
                ),
            )
        )
    out.print(table)
    return {"jobs": jobs}


def _print_job(details: dict[str, Any]) -> None:
    import time

    def when(at: float) -> str:
        return time.strftime("%F %T", time.localtime(at))

    rows = [(name, str(details[name])) for name in ("queue", "state", "kind", "asks", "reason")]
    rows += [("command", " ".join(details["command"]))]
    if details["run"]:
        rows.append(("run", details["run"]))
    print_rows(f"Job {details['id']}", rows)
    headings = ("attempt", "Ray's job", "size", "began", "phase", "outcome", "work lost")
    attempts = new_table("", headings, figures=("attempt", "work lost"))
    for each in details["attempts"]:
        lost = "" if each["lost_s"] is None else f"{each['lost_s']:.0f} s"
        attempts.add_row(
            str(each["number"]),
            each["submission"],
            str(each["size"]),
            when(each["began_at"]),
            each["phase"],
            each["outcome"] or "",
            lost,
        )
    if attempts.row_count:
        out.print(attempts)
        out.print(
            "what an attempt wrote: ray job logs with its name as Ray's job", highlight=False, soft_wrap=True
        )
    decisions = new_table("", ("when", "what", "why"), figures=("when",))
    for each in details["decisions"]:
        decisions.add_row(when(each["at"]), each["kind"], escape(each["reason"]))
    out.print(decisions)
