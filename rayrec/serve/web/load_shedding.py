"""Load shedding: under overload, refuse requests before anything is spent on them.

Most requests are refused then, and what a refusal costs is missing where others are answered. To read and
check a body takes several times as long as to refuse by the headers.
"""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.limits import CallerLimitError, RefusedError
from rayrec.serve.admission.request_info import address_of, attach_info
from rayrec.serve.engine.batching import DeadlineError, TooManyWaitingError
from rayrec.serve.wire.deadlines import NO_TIME_HEADER, HeaderError
from rayrec.serve.wire.errors import error_response, status_of_bad_request

OVERLOAD_ERRORS = (RefusedError, TooManyWaitingError, DeadlineError)
"""Errors of requests that are refused for want of capacity."""


class LoadShedding:
    """ASGI middleware in front of the routes, which refuses by what the headers of a request say."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that is not let in; one that is has its `RequestInfo` from now on."""
        http, path = HTTPConnection(scope), scope["path"]
        try:
            info = self._admission.read_headers(http.headers, address_of(http))
            if _computes(path):
                self._admission.check_room(info)
        except OVERLOAD_ERRORS as error:
            return overload_answer(path, error)
        except HeaderError as error:
            return error_response(path, status_of_bad_request(path), str(error))
        attach_info(scope, info)
        return None


def overload_answer(path: str, error: Exception) -> JSONResponse:
    """The answer to a request that one of `OVERLOAD_ERRORS` refuses."""
    if isinstance(error, RefusedError):
        status = 429 if isinstance(error, CallerLimitError) else 503
        return error_response(path, status, str(error), headers={"Retry-After": str(error.retry_after_s)})
    headers = {"Retry-After": "1"}
    if isinstance(error, DeadlineError):
        headers[NO_TIME_HEADER] = "1"
    return error_response(path, 503, f"{error}; try again in a second", headers=headers)


def _computes(path: str) -> bool:
    if path in ("/v1/recommend", "/v1/completions"):
        return True
    return path.startswith("/v2/models/") and path.endswith("/infer")
