"""Under load most requests are refused, and what they cost is missing where others are answered.

So whether there is room is asked before a body is read and checked, which takes several times as long as to
refuse. Who passes is asked again when the request is understood: others may have come meanwhile.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.limits import CallerLimitError, RefusedError
from rayrec.serve.engine.batching import DeadlineError, TooManyWaitingError
from rayrec.serve.wire.callers import origin_of
from rayrec.serve.wire.deadlines import NO_TIME_HEADER, HeaderError
from rayrec.serve.wire.errors import error_response

OVERLOAD_ERRORS = (RefusedError, TooManyWaitingError, DeadlineError)
"""Errors that say so."""


class LoadShedding:
    """ASGI middleware in front of the routes that compute something."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and _answers(scope["path"]):
            try:
                self._admission.check_room(origin_of(Request(scope)))
            except OVERLOAD_ERRORS as error:
                await overload_answer(scope["path"], error)(scope, receive, send)
                return
            except HeaderError:
                pass  # the route says so in the form of its protocol
        await self._app(scope, receive, send)


def overload_answer(path: str, error: Exception) -> JSONResponse:
    """The answer to whoever is refused by one of `OVERLOAD_ERRORS`."""
    if isinstance(error, RefusedError):
        status = 429 if isinstance(error, CallerLimitError) else 503
        return error_response(path, status, str(error), headers={"Retry-After": str(error.retry_after_s)})
    headers = {"Retry-After": "1"}
    if isinstance(error, DeadlineError):
        headers[NO_TIME_HEADER] = "1"
    return error_response(path, 503, f"{error}; try again in a second", headers=headers)


def _answers(path: str) -> bool:
    if path in ("/v1/recommend", "/v1/completions"):
        return True
    return path.startswith("/v2/models/") and path.endswith("/infer")
