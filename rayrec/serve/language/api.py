"""The application that answers for language models: protocols behind the guards that every service has.

request ─► counted ─► body bounded ─► token? ─► route ─► model, its limits ─► engine ─► answer, or events
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rayrec import __version__
from rayrec.serve.engine.batching import SWITCH_S
from rayrec.serve.language.answering import LanguageModels
from rayrec.serve.language.loading import LanguageModelHere
from rayrec.serve.language.measures import LanguageCollector
from rayrec.serve.language.openai_routes import openai_router
from rayrec.serve.language.triton_routes import triton_router
from rayrec.serve.web.error_handlers import add_error_handlers
from rayrec.serve.web.guards import HeadAsGet, RequestGuard
from rayrec.serve.web.metrics import PrometheusMeter, RequestMeter
from rayrec.serve.wire.request_body import MAX_BODY_BYTES


def build_language_api(models: Sequence[LanguageModelHere]) -> FastAPI:
    """The application; its engines run while it does."""

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        # The engine's thread has much to do behind a token, which the loop could send meanwhile.
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        for model in models:
            model.engine.start()
        try:
            yield
        finally:
            for model in models:
                await run_in_threadpool(model.engine.stop)
                if model.template is not None:
                    model.template.close()
            sys.setswitchinterval(switch_s)

    served = LanguageModels(models)
    meter = PrometheusMeter()
    registry = CollectorRegistry()
    registry.register(LanguageCollector({model.name: model.engine.measures for model in models}))
    api = FastAPIOffline(
        title="RayRec", version=__version__, summary="Language models as a service.", lifespan=lifespan
    )
    api.add_middleware(HeadAsGet)
    api.add_middleware(RequestGuard, max_body_bytes=MAX_BODY_BYTES)
    api.add_middleware(RequestMeter, meters=[meter])
    add_error_handlers(api)

    @api.get("/health/ready", response_model=None)
    async def ready() -> Any:
        """Whether all engines run."""
        stopped = [model.name for model in models if not model.engine.is_alive]
        if stopped:
            return JSONResponse({"error": f"the engine of {stopped[0]} has stopped; its log says why"}, 503)
        return {"status": "ready", "models": [model.name for model in models]}

    @api.get("/health/live")
    async def live() -> dict[str, str]:
        """Answers while the process runs."""
        return {"status": "live"}

    @api.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        """Metrics for Prometheus."""
        return PlainTextResponse(meter.page() + generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    api.include_router(openai_router(served))
    api.include_router(triton_router(served))
    return api
