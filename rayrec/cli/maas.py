"""`maas`: language models as a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.app import maas_app
from rayrec.cli.serving import (
    AllowedHostOption,
    CertificateKeyOption,
    CertificateOption,
    ConnectionsOption,
    TokenFileOption,
)
from rayrec.platform.console import Answer, command, print_rows
from rayrec.platform.errors import InputError

ModelsArgument = Annotated[Path, typer.Argument(help="YAML file that says which models are served.")]


@command(maas_app, "up")
def up_command(
    models: ModelsArgument,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the HTTP service.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allowed_host: AllowedHostOption = None,
    max_connections: ConnectionsOption = 8192,
    tls_cert: CertificateOption = None,
    tls_key: CertificateKeyOption = None,
    token_file: TokenFileOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Serve by replicas of Ray Serve: `auto` or an address joins a cluster, `local` starts one "
            "\\[from this process, without Ray]."
        ),
    ] = None,
) -> Answer:
    """Check folders, memory and port, then serve the models until interrupted."""
    from rayrec.serve.config.bearer_token import token_digest
    from rayrec.serve.config.serve import ServeConfig
    from rayrec.serve.language.config import ModelsConfig

    if (tls_cert is None) != (tls_key is None):
        raise InputError("--tls-cert and --tls-key belong together; give both of them, or none")
    read = ModelsConfig.read(models)
    values = {
        "host": host,
        "port": port,
        "tls": None if tls_cert is None else {"certificate": str(tls_cert), "key": str(tls_key)},
        "token_sha256": token_digest(token_file),
        "single_process": cluster is None,
        "cluster": {"address": None if cluster in (None, "local") else cluster},
        "allowed_hosts": list(allowed_host or ()),
        "connections": {"most": max_connections},
    }
    config = ServeConfig.parse(values, source="rayrec maas up")
    from rayrec.serve.launch.language import serve_models

    serve_models(read, config)
    return {"models": [model.name for model in read.models], "host": host, "port": port}


@command(maas_app, "plan")
def plan_command(models: ModelsArgument) -> Answer:
    """Print what the models will take of memory, and whether there is so much; nothing is loaded."""
    from rayrec.platform.memory import human_size
    from rayrec.serve.language.config import ModelsConfig
    from rayrec.serve.launch.language import plan_models

    plan = plan_models(ModelsConfig.read(models))
    for model in plan.models:
        print_rows(f"{model.name} on {model.device}", model.rows())
    print_rows(
        "memory of this machine",
        [
            ("Python and libraries", human_size(plan.process)),
            ("models on the CPU", human_size(plan.total - plan.process)),
            ("together", human_size(plan.total)),
            ("may be used", human_size(plan.limit)),
        ],
    )
    plan.check()
    return {
        "bytes": plan.total,
        "limit_bytes": plan.limit,
        "models": {model.name: model.total for model in plan.models},
    }


@command(maas_app, "applications")
def applications_command(
    models: ModelsArgument,
    out: Annotated[Path, typer.Argument(help="YAML file to write, for `serve deploy` or a RayService.")],
) -> Answer:
    """Write the Ray Serve config of the models of engine `ray_llm`; nothing is deployed."""
    import yaml

    from rayrec.platform.files import write_atomically
    from rayrec.serve.language.config import ModelsConfig
    from rayrec.serve.language.ray_llm import application

    applications = [application(model) for model in ModelsConfig.read(models).ray_llm]
    if not applications:
        raise InputError(f"{models}: no model has the engine ray_llm, so there is no application")
    content = yaml.safe_dump({"applications": applications}, sort_keys=False)
    write_atomically(out, content.encode())
    names = [each["name"] for each in applications]
    print_rows(f"Applications in {out} (next: serve deploy {out})", [(name, "") for name in names])
    return {"file": str(out), "applications": names}
