"""How a model is served with what Ray Serve brings along: `@serve.batch`, whose batches wait for a timer."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

from rayrec.serve.app.loading import load_service
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest

MAX_REQUESTS = 256
"""In a replica at once: more than there are connections."""


class BatchSettings(BaseModel):
    """Of `@serve.batch`."""

    max_batch_size: int
    wait_s: float


class BatchReplica:
    """The run's model behind `@serve.batch`; POST /settings changes how it batches.

    POST /v1/bare answers every request as the first, without the model: what proxy, routes and JSON take.
    No way to batch answers more requests a second.
    """

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        os.chdir(working_directory)
        torch.set_num_threads(config.threads)
        self._service = load_service(run, config, config.device)
        self._service.warm_up()
        # Computed beside the event loop, which takes the next requests meanwhile.
        self._model = ThreadPoolExecutor(1)
        self._first: RecommendAnswer | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        api = FastAPI()

        @api.post("/v1/recommend")
        async def recommend(request: RecommendRequest) -> RecommendAnswer:
            answer = await self.batch(request)
            if isinstance(answer, Exception):
                raise answer
            return answer

        @api.post("/settings")
        async def settings(settings: BatchSettings) -> None:
            self.batch.set_max_batch_size(settings.max_batch_size)
            self.batch.set_batch_wait_timeout_s(settings.wait_s)

        @api.post("/v1/bare")
        async def bare(request: RecommendRequest) -> RecommendAnswer:
            if self._first is None:
                self._first = await recommend(request)
            return self._first

        return api

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.01)
    async def batch(self, requests: list[RecommendRequest]) -> list[RecommendAnswer | Exception]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._model, self._service.recommend_all, requests)


def application(run: Path, config: ServeConfig) -> serve.Application:
    """What `ray.serve.run` takes."""
    deployed = serve.deployment(
        name="serve-batch",
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": config.threads},
    )
    return deployed(serve.ingress()(BatchReplica)).bind(str(run.resolve()), config, os.getcwd())
