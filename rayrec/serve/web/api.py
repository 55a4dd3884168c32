"""The HTTP side of the service: routes and error answers.

    event loop: room? ─► parse, check ─► admission ─► batcher, at most `max_waiting` in flight ─► its thread:
      /v1/recommend: here         │                      └ else 503                  service.recommend_all
      /v2: `open_inference`       └ its limits: 429 for one caller, 503 for all
      /v1/completions: `completions`
      health answers

Requests of all protocols meet in the batcher, so that they are computed together. It knows nothing of Ray, so
that it can be tested, or embedded, without.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.gzip import GZipMiddleware
from fastapi_offline import FastAPIOffline

from rayrec import __version__
from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.request_info import info_of
from rayrec.serve.config.admission import OPEN, AdmissionConfig
from rayrec.serve.config.models import MODEL_NAME
from rayrec.serve.engine.allocation import Allocator
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.current import Service
from rayrec.serve.engine.lists import ItemLists
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.events.request_log import REQUEST_ID, RequestLog, request_id_of
from rayrec.serve.protocols.completions import completions_router
from rayrec.serve.protocols.open_inference import OpenInference
from rayrec.serve.protocols.open_inference_routes import open_inference_router
from rayrec.serve.web.error_handlers import add_error_handlers
from rayrec.serve.web.events import events_router
from rayrec.serve.web.guards import HeadAsGet, LoadShedding, RequestGuard
from rayrec.serve.web.lists import lists_router
from rayrec.serve.web.metrics import (
    Meter,
    PrometheusMeter,
    ReadMetrics,
    RequestMeter,
    metrics_router,
    serving_metrics,
)
from rayrec.serve.web.openapi import describe
from rayrec.serve.web.pages import RecentActivity, page_router
from rayrec.serve.wire.request_body import MAX_BODY_BYTES, CheckedRoute
from rayrec.serve.wire.schemas import (
    LiveAnswer,
    ReadyAnswer,
    RecommendAnswer,
    RecommendRequest,
)

logger = logging.getLogger(__name__)

ANSWERING_ROUTES = (
    "/v1/recommend",
    "/v1/completions",
    "/v2/models/{name}/infer",
    "/v2/models/{name}/versions/{version}/infer",
)
"""That compute something."""
PACKED_BYTES = 1024
"""Smaller answers are not compressed for those that take compressed ones."""


@dataclass(frozen=True)
class Answering:
    """What answers behind the routes, for other protocols: in `api.state.answering`."""

    inference: OpenInference
    admission: AdmissionControl
    meters: Sequence[Meter]


def build_api(
    service: Service,
    batcher: Batcher[RecommendRequest, RecommendAnswer],
    timeout_s: float,
    admission_config: AdmissionConfig = OPEN,
    meters: Sequence[Meter] = (),
    intake: EventIntake | None = None,
    request_log: RequestLog | None = None,
    allocator: Allocator | None = None,
    on_close: Sequence[Callable[[], None]] = (),
    version_metrics: ReadMetrics | None = None,
    item_lists: ItemLists | None = None,
    model_name: str = MODEL_NAME,
) -> FastAPI:
    """The application that answers for one service.

    Args:
        batcher: computes what requests ask of the service.
        timeout_s: a request that would not be answered by then is refused.
        admission_config: which requests are admitted, and what degrades under load.
        meters: measure requests; a `PrometheusMeter` is shown at /metrics, a `RecentActivity` on a page.
        intake: takes events; closed when the application shuts down, as is the log.
        request_log: of what is asked and answered, in any protocol.
        allocator: decides how much of each request is computed.
        on_close: called when the application shuts down, after the logs are closed.
        item_lists: that filters of requests name; None: nobody keeps any.
        version_metrics: of a service that follows versions; metrics and the page show them.
        model_name: of protocols that name models.
    """
    admission = AdmissionControl(
        admission_config, service, batcher, timeout_s, request_log=request_log, allocator=allocator
    )

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        yield
        # Logs first: a service that is stopped has a few seconds, and what they hold is nowhere else.
        closing = [log.close for log in (intake, request_log) if log is not None]
        for close in (*closing, *on_close):
            try:
                await run_in_threadpool(close)
            except Exception:  # the others have to be closed all the same
                logger.exception("something could not be closed")

    api = FastAPIOffline(
        title="RayRec",
        version=__version__,
        summary="Recommendations from a trained model.",
        lifespan=lifespan,
    )
    api.add_middleware(LoadShedding, admission=admission)
    api.add_middleware(GZipMiddleware, minimum_size=PACKED_BYTES, compresslevel=1)
    api.add_middleware(HeadAsGet)
    api.add_middleware(RequestGuard, max_body_bytes=MAX_BODY_BYTES)
    api.add_middleware(RequestMeter, meters=meters)
    add_error_handlers(api)

    recommending = APIRouter(route_class=CheckedRoute)

    @recommending.post("/v1/recommend")
    async def recommend(request: RecommendRequest, http: Request, response: Response) -> RecommendAnswer:
        """The items that the model expects next. With a header `X-Request-Timeout-Ms`, an answer that would
        come later than in so many milliseconds is not computed. The answer has the `X-Request-Id` of the
        request, or one of its own."""
        request_id = request_id_of(http.headers.get(REQUEST_ID))
        response.headers[REQUEST_ID] = request_id
        return await admission.begin(request, info_of(http), request_id=request_id)

    def admit(http: Request) -> Callable[[], None]:
        return admission.admit(info_of(http))

    api.include_router(recommending)

    @api.get("/health/ready")
    async def ready() -> ReadyAnswer:
        """Answers once the model is loaded."""
        return ReadyAnswer(model=service.model)

    @api.get("/health/live")
    async def live() -> LiveAnswer:
        """Answers while the process runs."""
        return LiveAnswer()

    for meter in meters:
        meter.watch(lambda: serving_metrics(admission.status, service.model.step) | service.pinned.metrics())
        meter.watch(lambda: batcher.load.metrics())
        if intake is not None:
            meter.watch(intake.metrics)
        if request_log is not None:
            meter.watch(request_log.metrics)
        if allocator is not None:
            meter.watch(allocator.metrics)
        if version_metrics is not None:
            meter.watch(version_metrics)
        if isinstance(meter, PrometheusMeter):
            api.include_router(metrics_router(meter))
        elif isinstance(meter, RecentActivity):
            api.include_router(page_router(service, admission, meter, version_metrics))
    inference = OpenInference(service, admission, model_name)
    api.state.answering = Answering(inference, admission, meters)
    api.include_router(open_inference_router(inference))
    api.include_router(completions_router(service, admission, model_name))
    api.include_router(events_router(intake, admit))
    api.include_router(lists_router(item_lists))
    describe(api, ANSWERING_ROUTES)
    return api
