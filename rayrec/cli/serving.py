"""`serve`: answer requests over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import (
    CANDIDATES,
    CandidatesOption,
    CombineOption,
    DataOption,
    GeneratorWeightOption,
    ObjectiveOption,
    RankerOption,
    WhichOption,
    check_run,
    check_served,
    ranking_of,
)
from rayrec.platform.console import Answer, command
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.serve.config.serve import ServeConfig


AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Name that a proxy in front, or a page of yours, asks for; may be given several times "
        "\\[only names of this machine, on a loopback address]."
    ),
]
ConnectionsOption = Annotated[
    int, typer.Option(min=1, help="Connections at once, of one address half of them.")
]
CertificateOption = Annotated[
    Path | None, typer.Option(help="PEM file of the certificate chain, for HTTPS \\[plain HTTP].")
]
CertificateKeyOption = Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        help="File with the bearer token that callers must send \\[RAYREC_SERVE_TOKEN, else no token]."
    ),
]


@command(app, "serve")
def serve_command(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(help="Folder that `rayrec train` wrote, or a store of published versions to follow."),
    ],
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the HTTP service.")] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="Port of the Open Inference Protocol over gRPC \\[HTTP alone]."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    replicas: Annotated[int, typer.Option(min=1, help="Processes that each hold the whole model.")] = 1,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Replicas are taken away down to so many \\[1, if there is --max-replicas]."
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Replicas are added under load up to so many \\[none are added]."),
    ] = None,
    scaling: Annotated[
        Path | None,
        typer.Option(
            help="YAML file that says when replicas are added and taken away \\[by the load of batchers]."
        ),
    ] = None,
    single_process: Annotated[
        bool, typer.Option("--single-process", help="Serve from this process, without Ray.")
    ] = False,
    allowed_host: AllowedHostOption = None,
    max_connections: ConnectionsOption = 8192,
    keep_alive: Annotated[
        int | None,
        typer.Option(min=1, help="Seconds that connections stay open without a request \\[5; Ray Serve's]."),
    ] = None,
    page: Annotated[
        bool | None,
        typer.Option(help="Serve a web page with users' histories at / \\[only on a loopback address]."),
    ] = None,
    snapshot: WhichOption = "best",
    device: Annotated[str | None, typer.Option(help="Device to compute on \\[the run's].")] = None,
    data: DataOption = None,
    ranker: RankerOption = None,
    candidates: CandidatesOption = CANDIDATES,
    objective: ObjectiveOption = None,
    combine: CombineOption = "sum",
    generator_weight: GeneratorWeightOption = 0.0,
    compile_ranking: Annotated[
        bool,
        typer.Option("--compile", help="Rank small batches with compiled programs, cached in RUN/compiled."),
    ] = False,
    graphs: Annotated[
        bool,
        typer.Option(
            help="Record the kernels of small batches at the start and replay them (CUDA graphs), on devices "
            "that have this."
        ),
    ] = False,
    prefix_cache: Annotated[
        float,
        typer.Option(
            "--prefix-cache-mib", min=0, help="Prefix-cache size in MiB for returning users (0 = off)."
        ),
    ] = 0,
    prefix_cache_host: Annotated[
        float,
        typer.Option("--prefix-cache-host-mib", min=0, help="What has no room there, in the host's memory."),
    ] = 0,
    prefix_cache_disk: Annotated[
        float,
        typer.Option("--prefix-cache-disk-mib", min=0, help="What has no room there either, in files."),
    ] = 0,
    prefix_cache_folder: Annotated[
        Path | None, typer.Option(help="Folder of these files \\[that of temporary files].")
    ] = None,
    keep_contexts: Annotated[float | None, typer.Option(min=0, hidden=True)] = None,
    admission: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with limits per caller and service, and what degrades under load \\[no limits]."
        ),
    ] = None,
    access: Annotated[Path | None, typer.Option(hidden=True)] = None,
    tls_cert: CertificateOption = None,
    tls_key: CertificateKeyOption = None,
    token_file: TokenFileOption = None,
    events: Annotated[
        Path | None,
        typer.Option(help="YAML file that says where events posted to /v1/events go \\[events are refused]."),
    ] = None,
    neighbors: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a graph (`rayrec data graph`), or YAML file of its settings: neighbors are "
            "candidates of the ranking stage, and answer where the model has nothing \\[no neighbors]."
        ),
    ] = None,
    nearline: Annotated[
        Path | None,
        typer.Option(
            help="YAML file that says where `rayrec nearline` keeps what it computed of users, and what "
            "is used \\[none]."
        ),
    ] = None,
    lists: Annotated[
        Path | None,
        typer.Option(
            help="Folder of named lists of items that requests filter by \\[kept in memory by one process]."
        ),
    ] = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            help="Folder where replicas leave their newest users and compiled shapes, and those that start "
            "answer them before they are ready \\[none]."
        ),
    ] = None,
    request_log: Annotated[
        Path | None,
        typer.Option(help="YAML file that says where requests and answers are logged \\[no log]."),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            help="YAML file: further models of the same service, each with a name, a run or store and "
            "settings of its own, and the name of RUN \\[RUN alone, as `recommend`]."
        ),
    ] = None,
    services: Annotated[
        Path | None,
        typer.Option(
            help="YAML file: run gateway, features and inference as separate deployments, with routing and a "
            "shadow \\[one deployment does it all]."
        ),
    ] = None,
) -> Answer:
    """Answer requests over HTTP until interrupted."""
    from rayrec.serve.launch.launch import serve_run

    config = serve_config(context.params)
    for each in (run, *(model.run for model in config.models)):
        check_served(each)
    if ranker is not None:
        check_run(ranker)
    serve_run(run, config)
    return {"run": run, "host": host, "port": port}


def serve_config(given: Mapping[str, Any]) -> ServeConfig:
    """The settings that arguments of `rayrec serve` stand for.

    Args:
        given: by the arguments' names, as the command line was parsed; files by their paths.

    Raises:
        InputError: arguments or files that do not fit together.
    """
    from rayrec.serve.config.admission import OPEN, AdmissionConfig
    from rayrec.serve.config.bearer_token import token_digest
    from rayrec.serve.config.events import EventsConfig, RequestLogConfig
    from rayrec.serve.config.models import MODEL_NAME, ModelsFile
    from rayrec.serve.config.nearline import NearlineReadConfig
    from rayrec.serve.config.neighbors import neighbors_of
    from rayrec.serve.config.scaling import ScalingConfig
    from rayrec.serve.config.serve import ServeConfig
    from rayrec.serve.config.services import ServicesConfig

    def file(name: str) -> Path | None:
        return None if given[name] is None else Path(given[name])

    certificate, key = given["tls_cert"], given["tls_key"]
    if (certificate is None) != (key is None):
        raise InputError("--tls-cert and --tls-key belong together; give both of them, or none")
    if given["compile_ranking"] and given["graphs"]:
        raise InputError("--compile and --graphs are two ways of ranking small batches; give one of them")
    if given["admission"] is not None and given["access"] is not None:
        raise InputError("--access is called --admission now; keep one of them")
    limits, neighbors, lists = file("admission") or file("access"), file("neighbors"), file("lists")
    data, scaling, nearline = file("data"), file("scaling"), file("nearline")
    events, request_log, services = file("events"), file("request_log"), file("services")
    warm_start, models = file("warm_start"), file("models")
    beside = None if models is None else ModelsFile.load(models)
    values = {
        "host": given["host"],
        "port": given["port"],
        "grpc_port": given["grpc_port"],
        "tls": None if certificate is None else {"certificate": str(certificate), "key": str(key)},
        "token_sha256": token_digest(file("token_file")),
        "num_replicas": given["replicas"],
        "min_replicas": given["min_replicas"],
        "max_replicas": given["max_replicas"],
        "scaling": ScalingConfig() if scaling is None else ScalingConfig.load(scaling),
        "single_process": given["single_process"],
        "allowed_hosts": list(given["allowed_host"] or ()),
        "connections": {"most": given["max_connections"], "keep_alive_s": given["keep_alive"]},
        "page": given["page"],
        "snapshot": given["snapshot"],
        "device": given["device"],
        "data": None if data is None else str(data),
        "ranking": ranking_of(
            file("ranker"),
            given["candidates"],
            given["objective"],
            given["combine"],
            given["generator_weight"],
        ),
        "compile": {"graphs": given["graphs"]} if given["compile_ranking"] or given["graphs"] else None,
        "prefix_cache_mib": given["prefix_cache"] or given["keep_contexts"] or 0,
        "prefix_cache_host_mib": given["prefix_cache_host"],
        "prefix_cache_disk_mib": given["prefix_cache_disk"],
        "prefix_cache_folder": None if (cache := file("prefix_cache_folder")) is None else str(cache),
        "admission": OPEN if limits is None else AdmissionConfig.load(limits),
        "events": None if events is None else EventsConfig.load(events),
        "neighbors": None if neighbors is None else neighbors_of(neighbors),
        "nearline": None if nearline is None else NearlineReadConfig.load(nearline),
        "lists": None if lists is None else str(lists.resolve()),
        "warm_start": None if warm_start is None else {"folder": str(warm_start.resolve())},
        "request_log": None if request_log is None else RequestLogConfig.load(request_log),
        "name": MODEL_NAME if beside is None else beside.name,
        "models": () if beside is None else beside.models,
        "services": None if services is None else ServicesConfig.load(services),
    }
    return ServeConfig.parse(values, source="rayrec serve")
