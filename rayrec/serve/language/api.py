"""The application that answers for language models: protocols behind the guards that every service has.

request ─► counted ─► body bounded ─► token? ─► route ─► model, its limits ─► engine ─► answer, or events
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rayrec import __version__
from rayrec.serve.engine.batching import SWITCH_S
from rayrec.serve.language.answering import LanguageModels
from rayrec.serve.language.config import SharedNameConfig
from rayrec.serve.language.measures import LanguageCollector, SharingCollector
from rayrec.serve.language.openai_routes import openai_router
from rayrec.serve.language.request_log import ChatLog
from rayrec.serve.language.served import ServedModel
from rayrec.serve.language.triton_routes import triton_router
from rayrec.serve.web.error_handlers import add_error_handlers
from rayrec.serve.web.guards import HeadAsGet, RequestGuard
from rayrec.serve.web.metrics import Meter, PrometheusMeter, RequestMeter
from rayrec.serve.wire.request_body import MAX_BODY_BYTES


def build_language_api(
    models: Sequence[ServedModel],
    shared: Sequence[SharedNameConfig] = (),
    log: ChatLog | None = None,
    meters: Sequence[Meter] = (),
) -> FastAPI:
    """The application; its engines run while it does.

    Args:
        shared: names that several of the models answer to.
        log: of requests; closed with the application.
        meters: that requests are told to as well.
    """
    by_name = {model.settings.name: model for model in models}

    served = LanguageModels(models, shared, log)
    meter = PrometheusMeter()
    if log is not None:
        for each in (meter, *meters):
            each.watch(log.metrics)

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        # The engine's thread has much to do behind a token, which the loop could send meanwhile.
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        async with AsyncExitStack() as started:
            started.callback(sys.setswitchinterval, switch_s)
            for model in models:
                started.push_async_callback(model.stop)
                await model.start()
            started.push_async_callback(served.close)
            yield

    registry = CollectorRegistry()
    registry.register(SharingCollector(served.shared))
    registry.register(LanguageCollector({name: model.measures for name, model in by_name.items()}))
    api = FastAPIOffline(
        title="RayRec", version=__version__, summary="Language models as a service.", lifespan=lifespan
    )
    api.state.shared = served.shared  # for metrics elsewhere than at its own page
    api.add_middleware(HeadAsGet)
    api.add_middleware(RequestGuard, max_body_bytes=MAX_BODY_BYTES)
    api.add_middleware(RequestMeter, meters=[meter, *meters])
    add_error_handlers(api)

    @api.get("/health/ready", response_model=None)
    async def ready() -> Any:
        """Whether all engines of this process run; what is elsewhere and does not answer is named."""
        found = dict(zip(by_name, await asyncio.gather(*(model.why_not() for model in models)), strict=True))
        said = {name: why for name, why in found.items() if why is not None}
        if stopped := [why for name, why in said.items() if by_name[name].is_here]:
            return JSONResponse({"error": stopped[0]}, 503)
        answering = [name for name in by_name if name not in said]
        # Names alone: probes need no token, and reasons name machines.
        return {"status": "ready", "models": answering} | ({"unavailable": list(said)} if said else {})

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
