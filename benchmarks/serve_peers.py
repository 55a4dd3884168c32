"""How a model is served with what Ray Serve brings along: `@serve.batch`, whose batches wait for a timer."""

from __future__ import annotations

import asyncio
import os
import time
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

    POST /alone computes requests in full batches, one after the other, and answers how many a second: no
    way to serve this model with this many threads does more.
    """

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        os.chdir(working_directory)
        torch.set_num_threads(config.threads)
        self._service = load_service(run, config, config.device)
        self._service.warm_up()
        # Computed beside the event loop, which takes the next requests meanwhile.
        self._model = ThreadPoolExecutor(1)

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

        @api.post("/alone")
        async def alone(requests: list[RecommendRequest], size: int) -> float:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._model, self._rate_alone, requests, size)

        return api

    def _rate_alone(self, requests: list[RecommendRequest], size: int) -> float:
        began = time.perf_counter()
        for start in range(0, len(requests), size):
            self._service.recommend_all(requests[start : start + size])
        return len(requests) / (time.perf_counter() - began)

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
