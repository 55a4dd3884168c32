"""`POST /v1/events`: one event, or a list of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, TypeAdapter, ValidationError

from rayrec.serve.events.intake import EventIntake, LogFullError, RefusedEventError
from rayrec.serve.wire.errors import RequestError, explain
from rayrec.serve.wire.request_body import strict_json, unpacked_body
from rayrec.serve.wire.schemas import Event, EventsAnswer

THREADS = 32
"""Messages that are taken at once: those that come together share a commit of the store."""
_EVENTS: TypeAdapter[list[Event]] = TypeAdapter(Annotated[list[Event], Field(fail_fast=True)])
_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "oneOf": [Event.model_json_schema(), {"type": "array", "items": Event.model_json_schema()}]
            }
        }
    },
}


Admit = Callable[[Request], Callable[[], None]]
"""Counts a message as in flight, until what is returned is called."""


def events_router(intake: EventIntake | None, admit: Admit | None = None) -> APIRouter:
    """Make the route that takes events.

    Args:
        intake: None: the service takes no events, and says so.
        admit: counts a message like a request; None: what sent it here did that.
    """
    router = APIRouter(tags=["Events"])
    # Of their own, which are begun as they are needed: a store that hangs takes no thread of those that
    # read large bodies and users' histories.
    threads = ThreadPoolExecutor(THREADS, "events")

    @router.post("/v1/events", openapi_extra={"requestBody": _BODY})
    async def events(http: Request) -> EventsAnswer:
        """What users did: the next recommendation for them knows it when this is answered. All events of a
        message are taken, or none."""
        if intake is None:
            raise RequestError("this service takes no events; start it with --events FILE", 404)
        # The whole body first: a slow one must not hold a slot meanwhile.
        body = await unpacked_body(http)
        release = None if admit is None else admit(http)
        try:
            # In a thread: a store may wait for its disk or its network.
            return await asyncio.get_running_loop().run_in_executor(
                threads, lambda: intake.take(checked_events(body, intake.check_count))
            )
        except RefusedEventError as error:
            raise RequestError(str(error), 422) from error
        except LogFullError as error:
            raise RequestError(f"{error}; try again in a few seconds", 503) from error
        finally:
            if release is not None:
                release()

    return router


def checked_events(body: bytes, check_count: Callable[[int], None]) -> list[Event]:
    """Parse a body into events.

    Args:
        check_count: as `EventIntake.check_count`, asked before the events are looked at.

    Raises:
        RequestError: the body is no JSON (400), or no events (422).
        RefusedEventError: they are too many.
    """
    found = strict_json(body)
    is_one = not isinstance(found, list)
    if not is_one:
        check_count(len(found))
    try:
        return _EVENTS.validate_python([found] if is_one else found)
    except ValidationError as error:
        problems: list[Any] = [
            {**problem, "loc": problem["loc"][1:] if is_one else problem["loc"]} for problem in error.errors()
        ]
        raise RequestError(explain(problems, Event.model_fields), 422) from error
