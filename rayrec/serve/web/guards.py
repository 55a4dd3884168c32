"""Middleware between server and application.

    RequestGuard   bodies stay small and come soon; no failure leaves as a stack trace
    HeadAsGet      HEAD is answered as GET is
    LoadShedding   under overload, requests are refused before anything is spent on them

Most requests are refused under overload, and what a refusal costs is missing where others are answered. To
read and check a body takes several times as long as to refuse by the headers.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.limits import CallerLimitError, RefusedError
from rayrec.serve.admission.request_info import RequestInfo, address_of, attach_info
from rayrec.serve.engine.batching import DeadlineError, TooManyWaitingError
from rayrec.serve.wire.deadlines import NO_TIME_HEADER, HeaderError
from rayrec.serve.wire.errors import error_response, status_of_bad_request

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 10.0
"""A body that is not whole by then is not waited for. The largest one comes in it at 100 kB a second."""

OVERLOAD_ERRORS = (RefusedError, TooManyWaitingError, DeadlineError)
"""Errors of requests that are refused for want of capacity."""


class RequestGuard:
    """ASGI middleware, outside of everything that may fail.

    Args:
        max_body_bytes: a larger body is refused with status 413 as soon as that much of it has come,
            whatever length its header announces.
        body_timeout_s: a body that takes longer is refused with status 408, and its connection closed. It
            begins where the application begins to read.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes, is_whole, answering = 0, False, False
        ends_at: float | None = None

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_whole, ends_at
            if is_whole:  # from now on it waits for the caller to go away
                return await receive()
            if ends_at is None:
                ends_at = asyncio.get_running_loop().time() + self._body_timeout_s
            try:
                async with asyncio.timeout_at(ends_at):
                    message = await receive()
            except TimeoutError as error:
                sentence = f"the whole body has not come in {self._body_timeout_s:g} s; send it at once"
                raise HTTPException(408, sentence, {"Connection": "close"}) from error
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                # Raised where the application reads the body, which hands it to its error handlers.
                raise HTTPException(413, f"the body is larger than {self._max_body_bytes} bytes; send less")
            return message

        async def send_noted(message: Message) -> None:
            nonlocal answering
            answering = True
            await send(message)

        try:
            await self._app(scope, receive_limited, send_noted)
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            logger.exception("%s %s failed, error %s", scope["method"], scope["path"], error_id)
            if answering:  # too late for another answer: the server has to cut this one off
                raise
            sentence = "something failed in the service; its log says what"
            answer = error_response(scope["path"], 500, sentence, error_id)
            await answer(scope, receive, send)


class WithoutHeader:
    """ASGI middleware: a header of answers does not leave the application."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [each for each in message["headers"] if each[0].lower() != self._name]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, send_without)


class HeadAsGet:
    """ASGI middleware: HEAD is answered as GET is, without the body (RFC 9110, section 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A scope of its own: the server has to know that it was HEAD.
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send_head)
        finally:
            if "route" in asked:  # which the router leaves for what counts requests by it
                scope["route"] = asked["route"]


class LoadShedding:
    """ASGI middleware in front of the routes, which refuses by what the headers of a request say."""

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        found = self._let_in(scope)
        if isinstance(found, JSONResponse):
            await found(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._admission.here(found)

    def _let_in(self, scope: Scope) -> RequestInfo | JSONResponse:
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
        return info


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
