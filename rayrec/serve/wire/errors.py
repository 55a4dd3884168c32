"""Errors as they leave the service: one sentence, in the form of the protocol that was spoken.

    path                          form                                              a bad request is
    /v1/completions, chat, ...    {"error": {"message", "type", "param", "code"}}   400
    /v2                           {"error": sentence}                               400
    all others                    {"error": sentence}                               422; 400 if it is no JSON

Which form it is depends on the path alone, so that it is the same for what no route has seen: bodies that are
too large, paths that are not there, failures.

Sources: the Open Inference Protocol, github.com/kserve/open-inference-protocol; the errors of OpenAI's API as
its client reads them, github.com/openai/openai-python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from rayrec.serve.wire.schemas import ErrorAnswer

_OPENAI_PATHS = ("/v1/completions", "/v1/models", "/v1/chat", "/v1/embeddings")
_TENSOR_PATHS = ("/v2",)


class RequestError(ValueError):
    """A request that gets this sentence instead of an answer, mostly since its protocol does not allow it."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        """
        Args:
            message: a sentence for the caller.
            param: the field that is wrong, for protocols that name it along with the sentence.
            code: what a program may go by, likewise.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def error_response(
    path: str,
    status: int,
    error: str,
    error_id: str | None = None,
    headers: dict[str, str] | None = None,
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    """The only way in which errors leave the service.

    Args:
        path: that was asked.
        error_id: status 500 only: the log has the cause under this id.
        headers: of the answer; 503 has `Retry-After` in any case.
    """
    if status == 503:
        headers = {"Retry-After": "1"} | (headers or {})
    # JSON can write half of a surrogate pair, and a sentence may quote it.
    error = error.encode(errors="backslashreplace").decode()
    param = None if param is None else param.encode(errors="backslashreplace").decode()
    if is_openai(path):
        said = error if error_id is None else f"{error} under {error_id}"
        kind = "server_error" if status >= 500 else "invalid_request_error"
        content = {"error": {"message": said, "type": kind, "param": param, "code": code}}
        return JSONResponse(content, status, headers)
    answer = ErrorAnswer(error=error, error_id=error_id)
    return JSONResponse(answer.model_dump(exclude_none=True), status, headers)


def is_openai(path: str) -> bool:
    """Whether errors of a path are in OpenAI's form."""
    return _is_below(path, _OPENAI_PATHS)


def status_of_bad_request(path: str) -> int:
    """By the table above, of a request that is HTTP and JSON."""
    return 400 if _is_below(path, (*_OPENAI_PATHS, *_TENSOR_PATHS)) else 422


def explain(problems: Sequence[Any], known_fields: Iterable[str]) -> str:
    """One sentence on the first problem that pydantic found; where a value may be of two types, on both.

    Args:
        problems: with locations in the object that was checked.
        known_fields: of the object that has an unknown one.
    """
    first = problems[0]
    location = first["loc"]
    if not location:
        return "expected a JSON object, sent with the header 'Content-Type: application/json'"
    if first["type"] == "extra_forbidden":
        return f"{_dotted(location)}: unknown field; known are {', '.join(known_fields)}"
    if location[-1] in ("str", "int"):  # the members of a union
        members = {problem["loc"][-1] for problem in problems if problem["loc"][:-1] == location[:-1]}
        expected = "a number" if "float" in members else "a string or an integer"
        return f"{_dotted(location[:-1])}: expected {expected}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{_dotted(location)}: {message[0].lower()}{message[1:]}"


def _is_below(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _dotted(location: Sequence[str | int]) -> str:
    return ".".join(map(str, location))
