"""What the OpenAPI document says of every route: its token, its headers and its errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI

from rayrec.serve.config.admission import USER_HEADER
from rayrec.serve.events.request_log import MAX_REQUEST_ID, REQUEST_ID
from rayrec.serve.web.bearer_token import OPEN_PATHS
from rayrec.serve.wire.deadlines import HEADER as TIMEOUT
from rayrec.serve.wire.errors import is_openai, status_of_bad_request
from rayrec.serve.wire.schemas import ErrorAnswer

_TOKEN, _OPENAI_ERROR = "token", "OpenAIError"
_TEXTS = {
    400: "The body is not JSON, not what its Content-Encoding says, or does not come whole.",
    401: "The token is missing or wrong.",
    404: "There is nothing of this name.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is compressed in another way than gzip or deflate.",
    422: "The request is not one the service answers.",
    429: "This caller asks for more than it may; Retry-After says when to try again.",
    500: "Something failed; the log says what, under the id of the answer.",
    503: "More requests come or wait than the service takes, the answer would come too late, or something "
    "that is needed does not answer; Retry-After says when to try again.",
}
_OF_BODIES, _OF_LIMITS = (400, 408, 413, 415), (429, 503)
_RETRY_AFTER = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
_ID = {"type": "string", "maxLength": MAX_REQUEST_ID}
_HEADERS: tuple[dict[str, Any], ...] = (
    {"name": REQUEST_ID, "description": "Comes back with the answer.", "schema": _ID},
    {
        "name": TIMEOUT,
        "description": "Milliseconds; an answer that would come later is not computed.",
        "schema": {"type": "integer", "minimum": 1},
    },
    {"name": USER_HEADER, "description": "Whom the request is for.", "schema": {"type": "string"}},
)


def describe(api: FastAPI, answering: Collection[str]) -> None:
    """Have the document say it; `api.state.has_token` says whether callers need a token.

    Args:
        answering: routes that compute something.
    """
    described = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            _complete(described(), answering, getattr(api.state, "has_token", False))
        assert api.openapi_schema is not None, "it is kept when it is made"
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]  # as FastAPI has it in its documentation


def _complete(document: dict[str, Any], answering: Collection[str], has_token: bool) -> None:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.setdefault(ErrorAnswer.__name__, ErrorAnswer.model_json_schema())
    text_or_null = {"type": ["string", "null"]}
    schemas[_OPENAI_ERROR] = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": text_or_null,
                    "code": text_or_null,
                },
            }
        },
    }
    if has_token:
        components["securitySchemes"] = {_TOKEN: {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_open = path in OPEN_PATHS
            statuses = {500}
            if has_token and not is_open:
                operation["security"] = [{_TOKEN: []}]
                statuses.add(401)
            if method in ("post", "put"):
                statuses |= {*_OF_BODIES, status_of_bad_request(path)}
            if method == "post":
                statuses |= set(_OF_LIMITS)
            if "{" in path or path in ("/v1/events", "/v1/completions"):
                statuses.add(404)
            if path in answering:
                operation.setdefault("parameters", []).extend({**each, "in": "header"} for each in _HEADERS)
                ok = operation["responses"].setdefault("200", {"description": "Answered."})
                ok.setdefault("headers", {})[REQUEST_ID] = {"schema": _ID}
            _add_errors(operation["responses"], path, statuses)


def _add_errors(responses: dict[str, Any], path: str, statuses: Collection[int]) -> None:
    name = _OPENAI_ERROR if is_openai(path) else ErrorAnswer.__name__
    schema = {"$ref": f"#/components/schemas/{name}"}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _TEXTS[status],
            "content": {"application/json": {"schema": schema}},
            **({"headers": {"Retry-After": _RETRY_AFTER}} if status in _OF_LIMITS else {}),
        }
    if "422" in responses and 422 not in statuses:  # the framework's own, which no route answers with
        del responses["422"]
