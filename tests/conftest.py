"""What tests of several rooms share."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import typer.testing

from rayrec.platform import files
from rayrec.platform.cluster import start_on_this_machine
from tests.helpers.examples import register_profiles
from tests.helpers.forked_workers import TEMPLATE, forked_workers
from tests.helpers.redis_server import RedisServer

register_profiles()
hypothesis.settings.load_profile("repeatable")

# Tensors here are tiny: on a busy machine, threads that wait for each other cost more than they add.
torch.set_num_threads(1)

# `torch.manual_seed` writes down the stack for each kind of device there may be later, 5 ms for every test.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

# Typer would build all commands again for every call, which takes longer than most of them do.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# While tests are collected, nearly all that is made stays. What stays is not looked through again later.
gc.disable()

# Ray's workers run at niceness 15: beside tests of another process they would hardly run at all.
os.environ.setdefault("RAY_worker_niceness", "0")


COMPILING_FILES = tuple(
    Path(__file__).parent / name
    # While the first process compiles, the others are busy with torch alone; then each goes on.
    for name in (
        "actors/test_parameter_server.py",
        "models/test_recipes.py",
        "benchmarks/test_reproduction.py",
    )
)


def pytest_configure(config: pytest.Config) -> None:
    is_process_of_xdist = hasattr(config, "workerinput")
    if not is_process_of_xdist and config.getoption("dist", "no") == "loadfile":
        _fork_processes_of_xdist(config)


def _fork_processes_of_xdist(config: pytest.Config) -> None:
    """As Ray's workers, out of the same template."""
    if {*config.option.tx} != {"popen"}:
        return
    workers = forked_workers()
    try:
        interpreter = workers.__enter__()
    except RuntimeError:  # the template did not start: each imports by itself then
        return
    config.add_cleanup(lambda: workers.__exit__(None, None, None))
    config.option.tx = [f"popen//python={interpreter}"] * len(config.option.tx)
    os.environ[TEMPLATE] = str(Path(interpreter).with_name("template"))


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the session's Ray cluster, and put files that use Ray first.

    They take longest, and what comes last should be short: `--no-loadscope-reorder` keeps the order. A file
    is not divided: its fixtures would be made twice. Before them come a few that compile most kernels, in a
    checkout that has none yet: else all processes of a cluster, and all of xdist's, compile the same ones.
    """
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")
    with_ray = {item.path for item in items if item.get_closest_marker("ray")}
    kernels = {path: place for place, path in enumerate(COMPILING_FILES)}
    items.sort(key=lambda item: (kernels.get(item.path, len(kernels)), item.path not in with_ray))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    # Not where collection is finished: the process of xdist that distributes tests collects none.
    gc.enable()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from tests.helpers.one_cluster import FilesOfOneCluster

    return FilesOfOneCluster(config, log)


@pytest.fixture(autouse=True, scope="session")
def _tables_on_disk_lie_in_temporary_folders() -> Iterator[None]:
    """Also where the system keeps those in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MEMORY_FILE_SYSTEMS", {})
        yield


@pytest.fixture(autouse=True)
def _same_draws_and_threads_in_any_order_of_tests() -> None:
    SEED(0)
    torch.set_num_threads(1)  # what was tested may have set its own


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One small Ray cluster for all tests of a process that need one: starting it takes longer than most of
    them."""
    import ray

    with forked_workers() as interpreter:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", interpreter)
            start_on_this_machine(
                num_cpus=8,
                object_store_memory=200_000_000,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis server for all tests that need one and leave it running."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
