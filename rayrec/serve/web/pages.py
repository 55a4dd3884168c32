"""A page to look at: whose history leads to which recommendations, and how the service fares.

    GET /            the page: one file, nothing is built and nothing loaded from elsewhere
    GET /v1/status   what answers, and how it did in the last seconds; of several replicas, one of them
    GET /v1/users    users of the run's data, to choose from
    GET /v1/history  what is known of a user, with titles: the data set's events and those that came since

It shows to anybody who reaches the service what users did, so it is there only where nobody outside of this
machine does, unless it is asked for.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict

from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.config.admission import StepName
from rayrec.serve.engine.current import Service
from rayrec.serve.web.metrics import ReadMetrics
from rayrec.serve.web.recent import RecentActivity, RecentMetrics
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.schemas import ModelInfo, RankerInfo

MAX_USERS, MAX_EVENTS = 100, 200
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
    "Cache-Control": "no-cache",
}


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class VersionStatus(_Answer):
    """Of the published version that answers."""

    age_s: float
    """Since it was published."""
    wanted: int | None
    """That the store points to, where it is another one: it is being loaded, or cannot be."""


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


class UsersAnswer(_Answer):
    """Users to choose from, in the order of their ids."""

    users: list[str]


class Event(_Answer):
    """Of a history."""

    item_id: str
    title: str | None
    new: bool
    """It came to the service, and is not in the data set."""


class HistoryAnswer(_Answer):
    """What is known of a user."""

    user_id: str
    num_events: int
    events: list[Event]
    """The newest, newest first."""
    lacks_events: bool
    """Events that came since cannot be read now."""


def page_router(
    service: Service,
    admission: AdmissionControl,
    recent: RecentActivity,
    version_metrics: ReadMetrics | None = None,
) -> APIRouter:
    """
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
            events=[Event(item_id=each.item_key, title=each.title, new=each.is_new) for each in found.newest],
            lacks_events=found.lacks_events,
        )

    return router
