"""A page to look at: whose history leads to which recommendations, and how the service fares.

    GET /            the page: one file, nothing is built and nothing loaded from elsewhere
    GET /v1/status   what answers, and how it did in the last seconds; of several replicas, one of them
    GET /v1/users    users of the run's data, to choose from
    GET /v1/history  what is known of a user, with titles: the data set's events and those that came since

It shows what users did to every client that reaches the service, so by default it is there only where no
other machine does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict

from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.config.admission import StepName
from rayrec.serve.engine.current import Service
from rayrec.serve.web.metrics import ReadMetrics
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.schemas import ModelInfo, RankerInfo

SECONDS = 10.0
"""That metrics are of."""
MOST_KEPT = 20_000
"""Requests, and batches; more than come in that time."""
MAX_USERS, MAX_EVENTS = 100, 200
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class RecentMetrics:
    """Of the last `SECONDS`."""

    requests_per_s: float
    failed: int
    """Requests with another status than 200."""
    p50_ms: float | None
    """None where there was no request."""
    p99_ms: float | None
    mean_batch: float | None
    """Requests that were computed together; None where nothing was computed."""
    largest_batch: int | None


class RecentActivity:
    """A meter that forgets; safe to call from several threads."""

    def __init__(self, routes: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            routes: whose requests count: looking at a service is none of its work.
        """
        self._routes, self._clock = frozenset(routes), clock
        self._requests: deque[tuple[float, int, float]] = deque(maxlen=MOST_KEPT)
        self._batches: deque[tuple[float, int]] = deque(maxlen=MOST_KEPT)
        self._lock = threading.Lock()

    def request(self, route: str, status: int, seconds: float) -> None:
        if route in self._routes:
            with self._lock:
                self._requests.append((self._clock(), status, seconds))

    def batch(self, num_requests: int, seconds: float) -> None:
        with self._lock:
            self._batches.append((self._clock(), num_requests))

    def watch(self, metrics: ReadMetrics) -> None:
        """They are no activity."""

    def metrics(self) -> RecentMetrics:
        since = self._clock() - SECONDS
        with self._lock:
            requests = [each for each in self._requests if each[0] > since]
            batches = [size for at, size in self._batches if at > since]
        p50_ms = p99_ms = None
        if requests:
            p50_ms, p99_ms = (
                float(ms) for ms in np.percentile([1e3 * seconds for _, _, seconds in requests], [50, 99])
            )
        return RecentMetrics(
            requests_per_s=len(requests) / SECONDS,
            failed=sum(status != 200 for _, status, _ in requests),
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            mean_batch=float(np.mean(batches)) if batches else None,
            largest_batch=max(batches, default=None),
        )


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class VersionStatus(_Answer):
    """Of the published version that answers."""

    age_s: float
    """Since it was published."""
    wanted: int | None
    """That the store points to, where it is another one: it is being loaded, or cannot be."""


class NearlineStatus(_Answer):
    """Of what was computed of users before they ask."""

    hit_share: float | None
    """Of the products that were looked for since the service started; null before any was."""
    coverage: float | None
    """Share of the active users whom workers have done; null while that is not known."""
    user_seconds: float | None
    """That a worker takes for a user."""

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> NearlineStatus:
        """From `ProductReader.metrics`."""
        looked_for = sum(
            count
            for name, count in metrics.items()
            if name.endswith(("_hits_total", "_missing_total", "_stale_total", "_old_total", "_short_total"))
        )
        hits = sum(count for name, count in metrics.items() if name.endswith("_hits_total"))
        return cls(
            hit_share=hits / looked_for if looked_for else None,
            coverage=metrics.get("nearline_coverage"),
            user_seconds=metrics.get("nearline_user_seconds"),
        )


class StatusAnswer(_Answer):
    """What answers here."""

    model: ModelInfo
    version: VersionStatus | None
    """Null where a run's snapshot answers."""
    ranker: RankerInfo | None
    scores_are_log_probabilities: bool
    recent: RecentMetrics
    in_hand: int
    """Requests that have no answer yet."""
    load: float
    """1 is full; 0 without steps under load."""
    degraded: list[StepName]
    """Steps in force."""
    price: float | None
    """Of a second of the device, in value; 0 while nobody gets less. Null where nothing is allocated."""
    nearline: NearlineStatus | None
    """Null without near-line products."""


class UsersAnswer(_Answer):
    """Users to choose from, in the order of their ids."""

    users: list[str]


class ShownEvent(_Answer):
    """Of a history."""

    item_id: str
    title: str | None
    new: bool
    """It came to the service, and is not in the data set."""


class HistoryAnswer(_Answer):
    """What is known of a user."""

    user_id: str
    num_events: int
    events: list[ShownEvent]
    """The newest, newest first."""
    lacks_events: bool
    """Events that came since cannot be read now."""


def page_router(
    service: Service,
    admission: AdmissionControl,
    recent: RecentActivity,
    version_metrics: ReadMetrics | None = None,
) -> APIRouter:
    """Make the routes of the page.

    Args:
        version_metrics: of a service that follows versions, see `VersionFollower`.
    """
    router = APIRouter(tags=["Page"])
    html = files("rayrec.serve.web").joinpath("page.html").read_text(encoding="utf-8")

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=_HEADERS)

    @router.get("/v1/status")
    async def status() -> StatusAnswer:
        """What answers here, and how it did in the last seconds."""
        now = admission.status
        version = None
        if version_metrics is not None:
            metrics = version_metrics()
            wanted = int(metrics["serving_version_wanted"])
            version = VersionStatus(
                age_s=metrics["serving_version_age_s"],
                wanted=wanted if metrics["serving_version_not_loaded"] else None,
            )
        return StatusAnswer(
            model=service.model,
            version=version,
            ranker=service.ranker,
            scores_are_log_probabilities=service.item_texts is not None,
            recent=recent.metrics(),
            in_hand=now.in_flight,
            load=now.load,
            degraded=list(now.steps),
            price=now.price,
            # Which may ask a store.
            nearline=None
            if (products := service.pinned.products) is None
            else NearlineStatus.of(await run_in_threadpool(products.metrics)),
        )

    @router.get("/v1/users")
    def users(  # in a thread, since the first time all of them are sorted
        like: Annotated[str, Query(max_length=256)] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_USERS)] = 20,
    ) -> UsersAnswer:
        """Users whose id begins with a text."""
        return UsersAnswer(users=service.users_like(like, limit))

    @router.get("/v1/history")
    def history(  # in a thread, since a store of events may have to be waited for
        user_id: Annotated[str, Query(max_length=1024)],
        limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 50,
    ) -> HistoryAnswer:
        """What is known of a user."""
        found = service.known_history(user_id, limit)
        if found is None:
            raise RequestError(f"user_id: no user of the run's data is {user_id!r}", 404)
        return HistoryAnswer(
            user_id=user_id,
            num_events=found.num_events,
            events=[
                ShownEvent(item_id=each.item_key, title=each.title, new=each.is_new) for each in found.newest
            ],
            lacks_events=found.lacks_events,
        )

    return router
