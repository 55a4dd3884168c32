"""A service that answers over HTTP and gRPC, as `rayrec serve --single-process` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.single_process import answering_here
from tests.helpers.http import free_port


class Addresses(NamedTuple):
    http: str
    grpc: str


@contextmanager
def answering(api: FastAPI, **settings: Any) -> Iterator[Addresses]:
    """Where it answers, inside the block."""
    config = ServeConfig(port=free_port(), grpc_port=free_port(), **settings)
    with answering_here(api, config):
        yield Addresses(f"127.0.0.1:{config.port}", f"127.0.0.1:{config.grpc_port}")
