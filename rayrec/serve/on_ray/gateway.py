"""The gateway: what comes over HTTP goes to a target, or is refused before anybody computes.

    request ─► token? ─► a route that computes? ─► body ─► limits, of each row: 429, 503 ─► Router ─► answer
                           │                                             └ Shadow: another target, not awaited
                           ├ /v1/events ─► features
                           └ all others ─► main

It forwards whole messages, so whatever protocol a target speaks is spoken here. Steps that are taken under
load, and the deadline of a request, are the target's: it knows how long its batches take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic

from fastapi import FastAPI, Request, Response

from rayrec.serve.admission.limits import Admissions
from rayrec.serve.admission.request_info import RequestInfo, address_of
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.services import MAIN, ServicesConfig
from rayrec.serve.on_ray.http_messages import HttpAnswer, HttpRequest, SendHttp
from rayrec.serve.routing.shadow import Shadow, Shadowed
from rayrec.serve.routing.targets import TARGET, Routed, Router
from rayrec.serve.web.api import ANSWERING_ROUTES
from rayrec.serve.web.error_handlers import add_error_handlers
from rayrec.serve.web.guards import HeadAsGet, RequestGuard
from rayrec.serve.web.metrics import Meter, RequestMeter
from rayrec.serve.wire.deadlines import NO_TIME_HEADER
from rayrec.serve.wire.errors import RequestError, error_response
from rayrec.serve.wire.request_body import MAX_BODY_BYTES, beside_the_loop
from rayrec.serve.wire.schemas import LiveAnswer

logger = logging.getLogger(__name__)


class Gateway:
    """Sends requests where they belong; on one event loop."""

    def __init__(
        self,
        config: ServicesConfig,
        admission: AdmissionConfig,
        targets: Mapping[str, SendHttp],
        events: SendHttp | None,
        timeout_s: float,
    ) -> None:
        """
        Args:
            admission: its limits hold here, of all targets together.
            targets: of every name in the settings; `main` is one of them.
            events: takes those that are posted; None: `main` says that there is nobody.
            timeout_s: in which targets answer.
        """
        self._callers_header, self._timeout_s = admission.callers.header, timeout_s
        self._admissions = Admissions(admission.service, admission.callers, monotonic)
        sends = {name: _Patient(name, send, timeout_s) for name, send in targets.items()}
        self.main, self._events = sends[MAIN], None
        if events is not None:
            # Events without a time would be other events the second time.
            self._events = _Patient("features", events, timeout_s, attempts=1)
        self.shadow: Shadow[HttpRequest] | None = None
        self._routed: Routed[HttpRequest, HttpAnswer] | None = None
        self._answer: SendHttp = self.main
        if config.routing is not None:
            asked = {name: sends[name] for name in config.routing.weights}
            self._answer = self._routed = Routed(
                Router(config.routing), asked, lambda request: (request.user, None)
            )
        if config.shadow is not None:
            self.shadow = Shadow(_failing(sends[config.shadow.target]), config.shadow)
            self._answer = Shadowed(self._answer, self.shadow)

    async def compute(self, http: Request) -> HttpAnswer:
        """Answer a message of a route that computes something.

        Raises:
            HeaderError: a header that cannot be used.
            RequestError: it has more rows than are ever admitted together.
            RefusedError: too many requests.
        """
        answer = await self._admitted(http, self._answer, has_rows=True)
        # HAProxy knows of no targets, and would refuse those of the others, too.
        return answer if self._routed is None else answer.without_header(NO_TIME_HEADER)

    async def take_events(self, http: Request) -> HttpAnswer:
        """Forward events to the features; raises as `compute`."""
        return await self._admitted(http, self._events or self.main, has_rows=False)

    async def _admitted(self, http: Request, send: SendHttp, has_rows: bool) -> HttpAnswer:
        """Admit a request, or answer that there is no capacity.

        Args:
            has_rows: whether a message counts as often as it has rows.
        """
        info = RequestInfo.of(http.headers, address_of(http), self._callers_header, self._timeout_s)
        # Under overload refusing is most of the work, so it comes before the body; slots are taken after it,
        # or a slow one would hold them meanwhile.
        info.room = self._admissions.check(info.caller)
        request = await HttpRequest.of(http)
        most = self._admissions.most_at_once
        if has_rows and (most is not None or self._routed is not None):
            contents = await beside_the_loop(request.is_large, lambda: request.contents)
            info.num_rows = 1 if most is None else contents.num_rows
            if most is not None and info.num_rows > most:
                raise RequestError(f"{info.num_rows} rows or prompts in one request; send from 1 to {most}")
        releases = self._admissions.admit_all(info.caller, info.num_rows, info.room)
        try:
            return await send(request)
        finally:
            for release in releases:
                release()

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        found: dict[str, float] = {
            "gateway_in_flight": self._admissions.service.concurrency.in_flight,
            "gateway_refused_total": self._admissions.num_refused + self._admissions.num_refused_callers,
        }
        if self._routed is not None:
            found |= {f"gateway_sent_to_{name}_total": count for name, count in self._routed.num_sent.items()}
        if self.shadow is not None:
            counts = self.shadow.counts
            found |= {
                "gateway_shadow_sent_total": counts.sent,
                "gateway_shadow_answered_total": counts.answered,
                "gateway_shadow_failed_total": counts.failed,
                "gateway_shadow_dropped_total": counts.dropped,
            }
        return found

    async def close(self) -> None:
        """Give up what is at the shadow."""
        if self.shadow is not None:
            await self.shadow.close()


def build_gateway(gateway: Gateway, meters: Sequence[Meter] = ()) -> FastAPI:
    """The application; its documentation is that of `main`."""

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.close()

    api = FastAPI(title="RayRec, gateway", openapi_url=None, lifespan=lifespan)
    api.add_middleware(HeadAsGet)
    api.add_middleware(RequestGuard, max_body_bytes=MAX_BODY_BYTES)
    api.add_middleware(RequestMeter, meters=meters)
    add_error_handlers(api)
    for meter in meters:
        meter.watch(gateway.metrics)

    @api.get("/health/live")
    async def live() -> LiveAnswer:
        return LiveAnswer()

    async def compute(http: Request) -> Response:
        return (await gateway.compute(http)).as_response()

    for route in ANSWERING_ROUTES:
        api.add_api_route(route, compute, methods=["POST"], response_model=None)

    @api.post("/v1/events", response_model=None)
    async def events(http: Request) -> Response:
        return (await gateway.take_events(http)).as_response()

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
    async def other(path: str, http: Request) -> Response:
        return (await gateway.main(await HttpRequest.of(http))).as_response()

    return api


def _failing(send: SendHttp) -> SendHttp:
    """The same for a shadow, which counts errors: a target's failures are answers of HTTP."""

    async def ask(request: HttpRequest) -> HttpAnswer:
        answer = await send(request)
        if answer.status >= 500:
            raise RuntimeError(f"status {answer.status}")
        return answer

    return ask


class _Patient:
    """Asks again where a replica went away while it answered, and says so where nobody does."""

    def __init__(self, name: str, send: SendHttp, timeout_s: float, attempts: int = 2) -> None:
        self._name, self._send, self._timeout_s, self._attempts = name, send, timeout_s, attempts

    async def __call__(self, request: HttpRequest) -> HttpAnswer:
        said = ""
        for _ in range(self._attempts):
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._send(request)
                return answer.with_header(TARGET, self._name)
            except TimeoutError:
                said = f"not in {self._timeout_s:g} s"
                break
            except Exception as error:  # of the way there: applications answer their own failures with 500
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                logger.warning("%s has not answered: %s", self._name, said)
        response = error_response(request.path, 503, f"{self._name} does not answer now; try again")
        return HttpAnswer(response.status_code, tuple(response.raw_headers), bytes(response.body))
