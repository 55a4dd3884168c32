"""`rayrec maas up`: language models in this process, after everything that could fail has been checked.

settings ─► port, certificate ─► folders, runs ─► memory plan ─► other services ─► weights ─► answers
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.tls import check_tls
from rayrec.serve.language.api import build_language_api
from rayrec.serve.language.config import EmbeddedModel, ModelsConfig, RayLlmModel, RemoteModel, ServedConfig
from rayrec.serve.language.memory import MemoryPlan, folder_of, plan_memory
from rayrec.serve.language.ray_llm import application, remote_model
from rayrec.serve.language.remote import RemoteService, check_remote
from rayrec.serve.language.request_log import ChatLog
from rayrec.serve.language.served import ServedModel
from rayrec.serve.launch.launch import stop_signal
from rayrec.serve.launch.single_process import answering_here
from rayrec.serve.web.address import check_port

logger = logging.getLogger(__name__)


def serve_models(models: ModelsConfig, config: ServeConfig) -> None:
    """Answer requests until SIGINT or SIGTERM; call it on the main thread.

    Raises:
        InputError: as `serving_models`.
    """
    with serving_models(models, config) as url, stop_signal() as stopped:
        # All that is there now stays until the process ends. Transformers' engine collects garbage when it
        # stops, and so does the interpreter: among millions of objects, that takes seconds.
        gc.collect()
        gc.freeze()
        names = ", ".join(model.name for model in models.models)
        logger.info("%s answer at %s/v1, described at %s/docs; Ctrl-C stops", names, url, url)
        stopped.wait()
        logger.info("stopping")


@contextmanager
def serving_models(models: ModelsConfig, config: ServeConfig) -> Iterator[str]:
    """The service runs inside the block; the value is its base URL.

    Raises:
        InputError: a folder, the memory, the port, the certificate or another service does not allow it, for
            which nothing was started; or a cluster does not, and what was started there is removed.
        RuntimeError: the service does not answer.
    """
    if not config.single_process:
        with _serving_on_ray(models, config) as url:
            yield url
        return
    check_port(config.host, config.port)
    if config.tls is not None:
        check_tls(config.tls)
    with ExitStack() as stack:
        whole = stack.enter_context(_with_folders(models))
        plan_memory(whole).check()
        _check_remotes(whole.models)
        whole = stack.enter_context(_deployed(whole))
        served = [served_model(model) for model in whole.models if not isinstance(model, RayLlmModel)]
        log = None if models.request_log is None else ChatLog(models.request_log)
        with answering_here(build_language_api(served, models.shared_names, log), config) as url:
            yield url


@contextmanager
def _serving_on_ray(models: ModelsConfig, config: ServeConfig) -> Iterator[str]:
    """As `serving_models`, by replicas of Ray Serve."""
    from rayrec.platform.cluster import check_accelerators, starts_cluster
    from rayrec.serve.on_ray.language import build_language_application, cpus_of, replica_claim
    from rayrec.serve.on_ray.serving import serve_of_cluster

    starts = starts_cluster(config.cluster)
    if not starts:
        _check_that_nodes_find_all(models)
    with ExitStack() as stack:
        whole = stack.enter_context(_with_folders(models))
        # Of a cluster that is joined, other machines have the memory.
        plan = plan_memory(whole, by_replica=True)
        if starts:
            plan.check()
        _check_remotes(whole.models)
        whole = stack.enter_context(_deployed(whole))
        with serve_of_cluster(config, cpus_of(whole.embedded)) as there:
            for model in whole.embedded:
                check_accelerators(
                    replica_claim(model),
                    model.replicas.replicas,
                    "replicas",
                    "choose another device, or fewer",
                )
            yield there.run(build_language_application(whole, there.config))


def _check_that_nodes_find_all(models: ModelsConfig) -> None:
    """Check settings for what processes of a cluster that is joined do not have.

    Raises:
        InputError: a run, or a variable of the environment.
    """
    for model in models.models:
        if isinstance(model, EmbeddedModel) and model.run is not None:
            raise InputError(
                f"{model.name}: replicas in a cluster that is joined find no run exported by this command; "
                "export it to a folder that all nodes have, and give that"
            )
        if isinstance(model, RemoteModel) and model.token_variable is not None:
            raise InputError(
                f"{model.name}: the gateway in a cluster that is joined does not have this command's "
                f"{model.token_variable}; give token_file, a file that all nodes have"
            )


def _check_remotes(models: Iterable[ServedConfig]) -> None:
    """Check that other services answer, and have their models.

    Raises:
        InputError: one has not.
        MachineError: one does not answer.
    """
    for model in models:
        if isinstance(model, RemoteModel):
            asyncio.run(check_remote(model))


def served_model(model: EmbeddedModel | RemoteModel) -> ServedModel:
    """What answers for a model; nothing is started.

    Raises:
        InputError: it cannot be loaded, or lacks its token.
    """
    if isinstance(model, RemoteModel):
        return RemoteService(model)
    from rayrec.serve.language.embedded import EmbeddedService  # which needs transformers
    from rayrec.serve.language.loading import load_model

    return EmbeddedService(load_model(model))


@contextmanager
def _deployed(models: ModelsConfig) -> Iterator[ModelsConfig]:
    """The settings with models of `ray_llm` as those of another service: applications that run in the block.

    Raises:
        InputError: the cluster refuses them, or could not start them.
        MachineError: it does not answer, or they do not run in time.
    """
    if not models.ray_llm:
        yield models
        return
    from rayrec.serve.on_ray.declared import DeclaredApplications

    cluster = DeclaredApplications(models.ray.dashboard, models.ray.serve)
    logger.info("deploying %d applications at %s", len(models.ray_llm), models.ray.dashboard)
    with cluster.deployed([application(model) for model in models.ray_llm], models.ray.start_timeout_s):
        url = cluster.serve_url()
        deployed = {model.name: remote_model(model, url) for model in models.ray_llm}
        _check_remotes(deployed.values())
        there = tuple(deployed.get(model.name, model) for model in models.models)
        yield models.model_copy(update={"models": there})


def plan_models(models: ModelsConfig) -> MemoryPlan:
    """What the models will take.

    Raises:
        InputError: a folder is missing, or is of no language model.
    """
    with _with_folders(models) as whole:
        return plan_memory(whole)


@contextmanager
def _with_folders(models: ModelsConfig) -> Iterator[ModelsConfig]:
    """The settings with a folder for each model; those of runs are written, and go with the block."""
    for embedded in models.embedded:
        folder_of(embedded)
    with ExitStack() as stack:
        whole: list[ServedConfig] = []
        for model in models.models:
            if isinstance(model, EmbeddedModel) and model.run is not None:
                draft = stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-model-"))
                from rayrec.serve.language.loading import exported

                model = exported(model, Path(draft) / "model")
            whole.append(model)
        yield models.model_copy(update={"models": tuple(whole)})
