"""Requests that nobody should send: by schemathesis from the OpenAPI page, and by hand where it is blind.

    from_openapi    values that the page's schemas forbid, of all operations
    made_by_hand    binary tensors that lie about themselves, cut and flipped bodies, headers of all sorts

Both are the same for a seed. What a service may answer to them is `why_wrong`.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

JSON = {"content-type": "application/json"}
HEADER_LENGTH = "inference-header-content-length"
MAX_BODY = 1024 * 1024
_TRACES = re.compile(r'Traceback \(most recent|File \\?"[^"]+", line \d+|site-packages/')
"""What a stack trace has and a sentence has not, though it may repeat what was asked."""


@dataclass(frozen=True)
class BadRequest:
    """As HTTP clients take it."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def why_wrong(status: int, headers: dict[str, str], text: str) -> str | None:
    """What is wrong with an answer to a bad request; None where nothing is.

    Some requests that a schema forbids are harmless and answered; whoever sends the others has to be told by
    a status below 500. A 503 is deliberate where it says when to come back.
    """
    if status >= 500 and not (status == 503 and "retry-after" in headers):
        return f"status {status}"
    if status < 200:
        return f"status {status}"
    if status >= 400 and _TRACES.search(text):
        return "a stack trace"
    return None


def made_by_hand(count: int, seed: int = 0) -> Iterator[BadRequest]:
    """So many, of every kind in turn."""
    draw = random.Random(seed)
    kinds: list[Callable[[random.Random], BadRequest]] = [
        _lying_tensor,
        _odd_tensor,
        _flipped,
        _cut,
        _random_bytes,
        _odd_json,
        _odd_headers,
        _packed,
        _large,
        _many_errors,
        _wrong_everywhere,
        _odd_path,
    ]
    for place in range(count):
        yield kinds[place % len(kinds)](draw)


def tensors_message(inputs: list[dict[str, Any]], parts: list[bytes], **more: Any) -> tuple[bytes, int]:
    """A body with binary tensors, and the length of its JSON."""
    text = json.dumps({"inputs": inputs, **more}).encode()
    return b"".join([text, *parts]), len(text)


def binary_texts(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


_INFER = "/v2/models/recommend/infer"
_GOOD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/recommend", b'{"user_id": "u1", "k": 3}'),
    ("/v1/recommend", b'{"history": ["i1", "i2"], "timestamps": [1, 2], "exclude_seen": false}'),
    ("/v1/events", b'{"user_id": "u1", "item_id": "i1", "timestamp": 1600000000}'),
    ("/v1/completions", b'{"model": "recommend", "prompt": "i1 i2", "n": 2, "logprobs": 1}'),
    (_INFER, b'{"inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["u1"]}]}'),
)


def _lying_tensor(draw: random.Random) -> BadRequest:
    """Sizes that are not those of what comes."""
    content = binary_texts([b"i1", b"i2"])
    size = draw.choice(
        [len(content) + draw.randint(1, 2**31), len(content) - 1, 0, -1, 2**63, True, "12", None]
    )
    shape = draw.choice(
        [[1, 2], [2, 1], [2, 2], [0, 2], [-1, 2], [2**31, 2**31], [2], [], [1, 1, 2], ["1", 2], 2]
    )
    body, length = tensors_message(
        [{"name": "history", "datatype": "BYTES", "shape": shape, "parameters": {"binary_data_size": size}}],
        [content],
    )
    said = draw.choice([length, length - 1, length + 1, 0, -1, len(body) + 1, "x", "", "1e3", "٣", 2**70])
    return BadRequest("POST", _INFER, body, {HEADER_LENGTH: str(said).encode().decode("latin-1")})


def _odd_tensor(draw: random.Random) -> BadRequest:
    """Well-formed messages of tensors that nobody can read."""
    name = draw.choice(["history", "user_id", "timestamps", "history_length", "nothing", "", "\x00"])
    datatype = draw.choice(["BYTES", "FP16", "FP32", "INT64", "BOOL", "BF16", "int64", "", "UINT64"])
    values = draw.choice(
        [
            [["i1", "i2"]],
            [[1.5, "i"]],
            [[1e308, -1e308]],
            [[2**64, -(2**63)]],
            [[None, True]],
            [{"a": 1}],
            [["\ud800", "\x00"]],
            "text",
            [[[[[[[[[1]]]]]]]]],
        ]
    )
    tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [1, 2], "data": values}
    if draw.random() < 0.3:
        tensor["parameters"] = draw.choice([{"binary_data_size": 8}, {"binary_data": 1}, [], "x"])
    inputs = [tensor] * draw.choice([0, 1, 1, 2])
    more: dict[str, Any] = draw.choice(
        [
            {},
            {"parameters": {"k": draw.choice([0, -1, 2**40, 1.5, "3", None, True])}},
            {"outputs": draw.choice([[{"name": "nothing"}], [{}], "item_id", [{"name": "score"}] * 2])},
            {"id": draw.choice([1, None, "x" * 10_000])},
            {"unknown": 1},
        ]
    )
    return BadRequest("POST", _INFER, json.dumps({"inputs": inputs, **more}).encode(), JSON)


def _flipped(draw: random.Random) -> BadRequest:
    path, body = draw.choice(_GOOD_BODIES)
    changed = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return BadRequest("POST", path, bytes(changed), JSON)


def _cut(draw: random.Random) -> BadRequest:
    path, body = draw.choice(_GOOD_BODIES)
    first = draw.randrange(len(body))
    stop = draw.randrange(first, len(body))
    return BadRequest("POST", path, body[:first] + body[stop:], JSON)


def _random_bytes(draw: random.Random) -> BadRequest:
    path, _ = draw.choice(_GOOD_BODIES)
    kind = draw.choice(
        ["application/json", "application/octet-stream", "text/plain; charset=utf-16", "", "x"]
    )
    return BadRequest("POST", path, draw.randbytes(draw.randint(0, 300)), {"content-type": kind})


def _odd_json(draw: random.Random) -> BadRequest:
    """What JSON can say and nobody means."""
    path, _ = draw.choice(_GOOD_BODIES)
    value = draw.choice(
        [
            b"[" * 50_000,
            b'{"a":' * 20_000,
            b"1" * 5_000,
            b"NaN",
            b"-Infinity",
            b"1e400",
            b'"\\ud800"',
            b"null",
            b"[]",
            b"{}",
            b'{"user_id": "\\ud83d"}',
            b'{"user_id": "\\u0000"}',
            b'{"user_id": 99999999999999999999999999}',
            b'{"user_id": 1e3, "k": 1e2}',
            b'{"user_id": "u1", "user_id": "u2"}',
            b'{"k": 9223372036854775808}',
            b'{"history": ' + b'["i1", ' * 3_000 + b"[]" + b"]" * 3_000 + b"}",
            b'{"history": [' + b", ".join([b'"i1"'] * 20_000) + b"]}",
            b'{"history": ["i1"], "timestamps": [9999999999999999]}',
            b'{"row": {"clicks": {"a": [1, {"b": null}]}}}',
            b'{"instruction": {"behavior": "\\ud800", "trigger_item": true}}',
            b'{"model": "recommend", "prompt": ["", "<a_9>", "<a_1><b_1>"], "n": 99999}',
            b'{"user_id": "u1", "item_id": "i1", "timestamp": 1e308}',
            b'[{"user_id": "u1", "item_id": "i1", "timestamp": -1e18}]',
            b"[" + b", ".join([b'{"user_id": "u1", "item_id": "i1"}'] * 3_000) + b"]",
        ]
    )
    return BadRequest("POST", path, value, JSON)


def _odd_headers(draw: random.Random) -> BadRequest:
    path, body = draw.choice(_GOOD_BODIES)
    name, value = draw.choice(
        [
            ("x-request-timeout-ms", draw.choice(["0", "-1", "1.5", "x", "9" * 400, "", "+1"])),
            ("x-caller-key", "k" * draw.choice([257, 5_000])),
            ("x-request-id", draw.choice(["", "\xff\xfe", "x" * 5_000])),
            ("content-encoding", draw.choice(["br", "gzip", "deflate", "gzip, gzip", "x" * 1_000])),
            ("content-type", draw.choice(["multipart/form-data", "application/json; charset=x", "/"])),
            ("accept", "x/y"),
            (HEADER_LENGTH, draw.choice(["0", "-1", "5", "99999999999999999999", "x"])),
            ("authorization", "Bearer \xff"),
        ]
    )
    return BadRequest("POST", path, body, {**JSON, name: value})


def _packed(draw: random.Random) -> BadRequest:
    """Bodies that become large, or are not what their header says."""
    path, body = draw.choice(_GOOD_BODIES)
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    whole = packer.compress(b" " * draw.choice([0, 100, 8 * MAX_BODY]) + body) + packer.flush()
    bad = draw.choice([whole[:-3], whole + b"x", whole + whole, whole, body])
    return BadRequest("POST", path, bad, {**JSON, "content-encoding": draw.choice(["gzip", "deflate"])})


def _large(draw: random.Random) -> BadRequest:
    path, body = draw.choice(_GOOD_BODIES)
    return BadRequest("POST", path, body + b" " * (MAX_BODY + draw.randint(1, 1_000)), JSON)


def _many_errors(draw: random.Random) -> BadRequest:
    """Of a route that takes no packed bodies."""
    name, value = draw.choice(
        [("history", "[]"), ("history", "{}"), ("history", "1.5"), ("timestamps", '""')]
    )
    values = ",".join([value] * (MAX_BODY // (len(value) + 1) - 20))
    fields = ",".join(f'"f{number}": 1' for number in range(70_000))
    body = draw.choice([f'{{"{name}": [{values}]}}', f"{{{fields}}}", f'{{"instruction": {{{fields}}}}}'])
    return BadRequest("POST", "/v1/recommend", body.encode(), JSON)


def _wrong_everywhere(draw: random.Random) -> BadRequest:
    """As many mistakes as a body holds, in a kilobyte: whoever collects them all has nothing else to do."""
    path, before, value, after = draw.choice(
        [
            ("/v1/completions", b'{"model": "recommend", "prompt": [', b"1", b"]}"),
            ("/v1/completions", b'{"model": "recommend", "prompt": [', b'"i1"', b"]}"),
            ("/v1/completions", b'{"model": "recommend", "prompt": "', b"<a_1>", b'"}'),
            ("/v1/events", b"[", b"1", b"]"),
            ("/v1/events", b"[", b"{}", b"]"),
            (_INFER, b'{"inputs": [', b"1", b"]}"),
            (_INFER, _tensor_of(b"INT64"), b"1", b"]}]}"),
            (_INFER, _tensor_of(b"FP32"), b"1e39", b"]}]}"),
            (_INFER, _tensor_of(b"BYTES"), b'""', b"]}]}"),
            (_INFER, _tensor_of(b"BYTES"), b"[]", b"]}]}"),
        ]
    )
    count = (MAX_BODY - len(before) - len(after)) // (len(value) + 1)
    body = before.replace(b"COUNT", str(count).encode()) + b",".join([value] * (count - 8)) + after
    return BadRequest("POST", path, zlib.compress(body), {**JSON, "content-encoding": "deflate"})


def _tensor_of(datatype: bytes) -> bytes:
    return b'{"inputs": [{"name": "history", "datatype": "%s", "shape": [1, COUNT], "data": [' % datatype


def _odd_path(draw: random.Random) -> BadRequest:
    path = draw.choice(
        [
            "/v1/history?user_id=" + "x" * 5_000,
            "/v1/history?user_id=%00&limit=-1",
            "/v1/history?user_id=%FF%FE",
            "/v1/users?limit=1e9",
            "/v1/users?like=%ED%A0%80",
            "/v2/models/%2e%2e/infer",
            "/v2/models/recommend/versions/-1/infer",
            "/v2/models/recommend/versions/%00/infer",
            "/v1/models/%FF",
            "/" + "a/" * 2_000,
            "//v1/recommend",
            "/v1/recommend/",
            "/metrics?x=" + "%41" * 500,
            "/docs/../etc/passwd",
        ]
    )
    method = draw.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
    return BadRequest(method, path, draw.choice([b"", b"{}"]), JSON)


def from_openapi(page: dict[str, Any], count: int, ask: Callable[[BadRequest], None], seed: int = 0) -> int:
    """Values that the schemas of the page forbid, for every operation in turn, about so many in all.

    Args:
        page: what /openapi.json answers.

    Returns:
        How many were asked.
    """
    import schemathesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(page)
    strategies = [
        found.ok().as_strategy(generation_mode=GenerationMode.NEGATIVE)
        for found in schema.get_all_operations()
    ]
    num_asked = 0
    while strategies and num_asked < count:
        each = -(-(count - num_asked) // len(strategies))
        able = []
        for strategy in strategies:  # some can make only a few values: the others make up for them
            if num := _ask_all(strategy, each, seed, ask):
                able.append(strategy)
            num_asked += num
        strategies, seed = able, seed + 1
    return num_asked


def _ask_all(strategy: Any, count: int, seed: int, ask: Callable[[BadRequest], None]) -> int:
    """How many cases there were, at most so many."""
    import hypothesis

    num_asked = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def sent(case: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        ask(_request_of(case))

    with contextlib.suppress(hypothesis.errors.Unsatisfiable, hypothesis.errors.InvalidArgument):
        sent()  # Unsatisfiable: of an operation without anything that could be wrong
    return num_asked


def _request_of(case: Any) -> BadRequest:
    import requests

    keywords = case.as_transport_kwargs(base_url="http://service")
    keywords.pop("timeout", None)
    known = {"method", "url", "headers", "params", "data", "json", "cookies", "files"}
    prepared = requests.Request(
        **{name: value for name, value in keywords.items() if name in known}
    ).prepare()
    body = prepared.body or b""
    headers = {str(name): _latin(value) for name, value in prepared.headers.items()}
    return BadRequest(
        str(prepared.method),
        prepared.path_url,
        body.encode(errors="surrogatepass") if isinstance(body, str) else bytes(body),
        {name: value for name, value in headers.items() if name.lower() != "content-length"},
    )


def _latin(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
