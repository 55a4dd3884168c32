"""`queue manifests`: the queues and jobs of a ledger for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayrec.cli.app import app, queue_app
from rayrec.cli.queues import LedgerOption, open_ledger
from rayrec.cli.serving import serve_config
from rayrec.platform.console import Answer, command, print_rows
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.jobs.kubernetes import KubernetesConfig, Manifest
    from rayrec.jobs.ledger import JobEntry

QUEUES = "queues"
"""Name of the file; jobs' begin with `job-`."""


@command(queue_app, "manifests")
def manifests_command(
    kueue: Annotated[
        Path,
        typer.Option(metavar="OUT", help="Folder for manifests of Kueue and KubeRay, for kubectl apply -f."),
    ],
    settings: Annotated[
        Path | None, typer.Option(help="YAML file with image, namespace, volume and names of resources.")
    ] = None,
    ledger: LedgerOption = None,
) -> Answer:
    """Write the queues, and the jobs that are not over, as manifests for Kubernetes."""
    from rayrec.jobs.kubernetes import KubernetesConfig, queue_manifests, write_manifests
    from rayrec.jobs.ledger import JobState

    config = KubernetesConfig() if settings is None else KubernetesConfig.load(settings)
    opened = open_ledger(ledger)
    queues = opened.queues()
    if not queues.queues:
        raise InputError("there is no queue; add one with `rayrec queue add NAME --cards N`")
    jobs = opened.jobs(JobState.waiting, JobState.running)
    files = {QUEUES: queue_manifests(queues, config)}
    files |= {f"job-{entry.id}": manifests_of(entry, config) for entry in jobs}
    paths = write_manifests(kueue, files)
    print_rows(
        f"Manifests in {kueue} (next: kubectl apply -f {kueue})",
        [("queues", ", ".join(queue.name for queue in queues.queues)), ("jobs", str(len(jobs)))],
    )
    return {"folder": str(kueue), "files": [path.name for path in paths]}


def manifests_of(entry: JobEntry, config: KubernetesConfig) -> list[Manifest]:
    """Of one job of the ledger, as it was submitted.

    Raises:
        InputError: Kubernetes cannot have it.
    """
    from rayrec.jobs.kubernetes import job_manifests, service_manifests

    if entry.job.kind != "service":
        return job_manifests(entry.job, entry.command, config)
    where = Path(entry.command.working_dir or ".")
    name, *arguments = entry.command.argv
    commands: Any = typer.main.get_command(app)
    # They were parsed before, when the job was submitted.
    parsed = commands.commands[name].make_context(name, arguments).params
    given = {key: where / value if isinstance(value, Path) else value for key, value in parsed.items()}
    try:
        serve = serve_config(given)
    except InputError as error:
        raise InputError(f"job {entry.id}: {error}") from error
    if serve.tls is not None:
        raise InputError(
            f"job {entry.id}: a RayService has no certificate of rayrec's; leave out --tls-cert and "
            "--tls-key, and let the cluster's ingress speak TLS"
        )

    def located(run: str) -> str:
        return run if "://" in run else str(where / run)

    run = located(str(parsed["run"]))
    models = tuple(each.model_copy(update={"run": located(each.run)}) for each in serve.models)
    # Nobody scales it there, as `rayrec serve` does: it has what it was submitted with.
    fixed = {"min_replicas": None, "max_replicas": None, "num_replicas": entry.job.sizes[0].groups[0].count}
    served = serve.model_copy(update={**fixed, "host": "0.0.0.0", "models": models})
    values = served.model_dump(mode="json", exclude_defaults=True)
    return service_manifests(entry.job, {"run": run, **values}, config)
