"""What is read of a message by whoever forwards it: whom it is for, and how many requests it has.

    /v1/recommend     {"user_id": ...}             one
    /v1/completions   {"user": ..., "prompt": []}  a prompt each
    /v2/.../infer     {"inputs": [{"shape": []}]}  a row each; its users are in tensors, which are not read

What cannot be read is of nobody and counts as one: its target says what is wrong with it.
"""

from __future__ import annotations

from typing import Any

from rayrec.serve.config.admission import USER_HEADER
from rayrec.serve.on_ray.http_messages import HttpRequest
from rayrec.serve.protocols.tensor_codec import HEADER_LENGTH
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.request_body import LARGE_BYTES, parsed_json, unpacked

_USER_FIELDS = ("user_id", "user")
"""Of `/v1/recommend` and of `/v1/completions`."""


def user_of(request: HttpRequest) -> str | None:
    """The user of a request, by its header, or by its body."""
    if (named := request.header(USER_HEADER)) is not None:
        return named
    body = _described(request)
    for field in _USER_FIELDS:
        if isinstance(user := body.get(field), (str, int)) and not isinstance(user, bool):
            # JSON can write half of a surrogate pair, which cannot be hashed.
            return str(user).encode(errors="backslashreplace").decode()
    return None


def num_requests_of(request: HttpRequest) -> int:
    """How many requests a message counts for, which its target would compute one by one; at least 1."""
    body = _described(request)
    prompts, inputs = body.get("prompt"), body.get("inputs")
    if request.path.startswith("/v2/") and isinstance(inputs, list):
        # Rows of all inputs are the same, or the target refuses the message.
        return max((_num_rows(each) for each in inputs), default=1)
    return max(len(prompts), 1) if isinstance(prompts, list) else 1


def is_large(request: HttpRequest) -> bool:
    """Whether to read it takes so long that others should not wait for it."""
    return len(request.body) > LARGE_BYTES or request.header("content-encoding") is not None


def _num_rows(described: Any) -> int:
    shape = described.get("shape") if isinstance(described, dict) else None
    rows = shape[0] if isinstance(shape, list) and shape else 1
    return max(rows, 1) if isinstance(rows, int) else 1


def _described(request: HttpRequest) -> dict[str, Any]:
    """The JSON object of a message, without bytes that follow it; empty where there is none."""
    try:
        body = unpacked(request.body, request.header("content-encoding"))
        length = request.header(HEADER_LENGTH)
        if length is not None and length.isascii() and length.isdigit() and len(length) < 10:
            body = body[: int(length)]
        found = parsed_json(body)
    except RequestError:
        return {}
    return found if isinstance(found, dict) else {}
