"""Texts over Triton's protocols: tensors `text_input` and `text_output`, and its generate extension.

    /v2/models/{m}/infer              text_input [B] or [B, 1] BYTES; parameters of sampling in the request's
                                      parameters, or as JSON in an input sampling_parameters [1]
    /v2/models/{m}/generate           {"text_input": ..., "parameters": {...}} ─► {"text_output": ...}
    /v2/models/{m}/generate_stream    the same, as server-sent events with what is added

Parameters are those of `/v1/completions`, such as max_tokens and temperature.

Sources: the Open Inference Protocol, github.com/kserve/open-inference-protocol; the generate extension,
github.com/triton-inference-server/server, docs/protocol/extension_generate.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from rayrec import __version__
from rayrec.serve.language.answering import Admitted, LanguageModels, events
from rayrec.serve.language.served import Values
from rayrec.serve.protocols.tensor_codec import DTYPES, HEADER_LENGTH, NamedTensor, read_call, write_answer
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.request_body import json_object, unpacked_body

VERSION = "1"
MOST_ROWS = 64
_NOT_HERE = ("stream", "stream_options", "logprobs", "n", "model", "prompt")
"""Of a completion: tensors have another way to say it, or none."""


def triton_router(models: LanguageModels) -> APIRouter:
    """Routes below `/v2`."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("")
    async def server() -> dict[str, Any]:
        """The server's name and extensions."""
        return {"name": "rayrec", "version": __version__, "extensions": ["binary_tensor_data", "generate"]}

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        """Answers while the process runs."""
        return {"live": True}

    @router.get("/health/ready")
    async def ready() -> Response:
        """Whether all engines of this process run."""
        here = [model for model in models.models.values() if model.is_here]
        is_ready = not any(await asyncio.gather(*(model.why_not() for model in here)))
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @router.get("/models/{name}")
    async def metadata(name: str) -> dict[str, Any]:
        """Names, datatypes and shapes of inputs and outputs."""
        models.check_name(name)
        return {
            "name": name,
            "versions": [VERSION],
            "platform": "rayrec",
            "inputs": [
                {"name": "text_input", "datatype": "BYTES", "shape": [-1]},
                {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1]},
            ],
            "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}],
        }

    @router.get("/models/{name}/ready")
    async def model_ready(name: str) -> Response:
        """Whether its engine answers."""
        is_ready = await models.why_not(models.check_name(name)) is None
        return JSONResponse({"name": name, "ready": is_ready}, 200 if is_ready else 503)

    @router.post("/models/{name}/infer", response_model=None)
    async def infer(name: str, http: Request) -> Response:
        """Texts that go on those of the rows."""
        models.check_name(name)
        call = read_call(await unpacked_body(http), http.headers.get(HEADER_LENGTH), name)
        texts, said = _rows(call.inputs)
        wanted = call.is_binary or {"text_output": call.binary_by_default}
        if set(wanted) != {"text_output"}:
            raise RequestError("outputs: there is text_output alone")
        parameters = {key: value for key, value in call.parameters.items() if key != "binary_data_output"}
        admitted = _admitted(models, http, name, texts, parameters | said, is_stream=False)
        answers = _texts(await admitted.whole(http), len(texts))
        written = np.array([answer.encode() for answer in answers], dtype=DTYPES["BYTES"])
        head: dict[str, Any] = {"model_name": name, "model_version": VERSION}
        if call.call_id is not None:
            head["id"] = call.call_id
        content, length = write_answer(head, [NamedTensor("text_output", "BYTES", written)], wanted)
        if length is None:
            return Response(content, headers=dict(admitted.headers), media_type="application/json")
        headers = {HEADER_LENGTH: str(length), **admitted.headers}
        return Response(content, headers=headers, media_type="application/octet-stream")

    @router.post("/models/{name}/generate", response_model=None)
    async def generate(name: str, http: Request) -> Response:
        """The text that goes on one."""
        admitted = await _generated(models, http, name, is_stream=False)
        (text,) = _texts(await admitted.whole(http), 1)
        answer = {"model_name": name, "model_version": VERSION, "text_output": text}
        return JSONResponse(answer, headers=dict(admitted.headers))

    @router.post("/models/{name}/generate_stream", response_model=None)
    async def generate_stream(name: str, http: Request) -> Response:
        """The same, as it is written."""
        admitted = await _generated(models, http, name, is_stream=True)
        return events(http, admitted, _pieces(name, await admitted.values(http)), None)

    return router


async def _generated(models: LanguageModels, http: Request, name: str, is_stream: bool) -> Admitted:
    models.check_name(name)
    body = json_object(await unpacked_body(http))
    text, given = body.pop("text_input", None), body.pop("parameters", {})
    body.pop("id", None)
    if not isinstance(text, str) or not isinstance(given, Mapping):
        raise RequestError("expected text_input, a text, and parameters, an object")
    return _admitted(models, http, name, [text], {**given, **body}, is_stream)


def _texts(answer: Mapping[str, Any], count: int) -> list[str]:
    """Texts of a completion's choices, in the order of its prompts.

    Raises:
        RequestError: there is none for one of them.
    """
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    if missing := set(range(count)) - texts.keys():
        raise RequestError(f"the answer has no text for prompt {min(missing)}", 502)
    return [texts[index] for index in range(count)]


async def _pieces(name: str, chunks: Values) -> Values:
    async with aclosing(chunks):
        async for chunk in chunks:
            for choice in chunk["choices"]:
                yield {"model_name": name, "model_version": VERSION, "text_output": choice["text"]}


def _admitted(
    models: LanguageModels,
    http: Request,
    name: str,
    texts: Sequence[str],
    parameters: Mapping[str, Any],
    is_stream: bool,
) -> Admitted:
    for parameter in _NOT_HERE:
        if parameter in parameters:
            raise RequestError(f"parameters: {parameter!r} is not known here")
    body = {"model": name, "prompt": list(texts) if len(texts) > 1 else texts[0], **parameters}
    return models.admit(http, "text", body | ({"stream": True} if is_stream else {}))


def _rows(inputs: Mapping[str, NamedTensor]) -> tuple[list[str], dict[str, Any]]:
    """(texts, parameters of sampling)."""
    for name, tensor in inputs.items():
        if name not in ("text_input", "sampling_parameters"):
            raise RequestError(f"inputs: there is no {name!r}; known are text_input, sampling_parameters")
        if tensor.datatype != "BYTES":
            raise RequestError(f"{name}: is {tensor.datatype}; expected BYTES")
    if "text_input" not in inputs:
        raise RequestError("inputs: text_input is not there")
    values = inputs["text_input"].values
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or not 1 <= len(values) <= MOST_ROWS:
        raise RequestError(f"text_input: has the shape {list(values.shape)}; expected 1 to {MOST_ROWS} texts")
    said: dict[str, Any] = {}
    if "sampling_parameters" in inputs:
        given = inputs["sampling_parameters"].values.ravel()
        if len(given) != 1:
            raise RequestError("sampling_parameters: expected one text of JSON")
        said = json_object(bytes(given[0]))
    try:
        return [bytes(value).decode() for value in values], said
    except UnicodeDecodeError as error:
        raise RequestError("text_input: a text is not UTF-8") from error
