"""Exceptions of routes as answers, for every application of the service."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from rayrec.platform.errors import UnavailableError
from rayrec.serve.engine.understanding import RefusedRequestError
from rayrec.serve.web.guards import OVERLOAD_ERRORS, overload_answer
from rayrec.serve.wire.deadlines import HeaderError
from rayrec.serve.wire.errors import RequestError, error_response, explain, status_of_bad_request
from rayrec.serve.wire.schemas import fields_of


def add_error_handlers(api: Starlette) -> None:
    """Each of them answers with one sentence."""
    api.add_exception_handler(StarletteHTTPException, _http_error)
    api.add_exception_handler(RequestValidationError, _invalid_request)
    api.add_exception_handler(RefusedRequestError, _refused_request)
    api.add_exception_handler(RequestError, _bad_request)
    api.add_exception_handler(UnavailableError, _unavailable)
    api.add_exception_handler(ClientDisconnect, _cut_off)
    for error in OVERLOAD_ERRORS:
        api.add_exception_handler(error, _overload)
    api.add_exception_handler(HeaderError, _refused_request)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    text = error.detail
    if error.status_code in (404, 405):
        text = f"there is no {request.method} {request.url.path}; /docs lists what there is"
    return error_response(request.url.path, error.status_code, text, headers=dict(error.headers or {}))


async def _overload(request: Request, error: Exception) -> JSONResponse:
    return overload_answer(request.url.path, error)


async def _invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    if any(problem["type"] == "json_invalid" for problem in problems):
        return error_response(request.url.path, 400, "the body is not valid JSON")
    for problem in problems:
        problem["loc"] = problem["loc"][1:]  # without the leading "body"
    return error_response(request.url.path, 422, explain(problems, fields_of(problems)))


async def _refused_request(request: Request, error: Exception) -> JSONResponse:
    path = request.url.path
    return error_response(path, status_of_bad_request(path), str(error))


async def _bad_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    path = request.url.path
    return error_response(path, error.status, str(error), param=error.param, code=error.code)


async def _cut_off(request: Request, error: Exception) -> JSONResponse:
    # Nobody reads it, as a rule; but it is no failure of ours, and is not to be counted or logged as one.
    return error_response(request.url.path, 400, "the connection ended before the whole body had come")


async def _unavailable(request: Request, error: Exception) -> JSONResponse:
    return error_response(request.url.path, 503, f"a service that the row needs does not answer: {error}")
