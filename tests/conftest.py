"""What tests of several rooms share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One small Ray cluster for all tests that need one: starting it takes longer than most of them."""
    import ray

    ray.init(
        num_cpus=8,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    yield
    ray.shutdown()
