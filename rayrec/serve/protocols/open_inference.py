"""The Open Inference Protocol (KServe's V2, Triton's HTTP) beside `/v1/recommend`: lists as tensors.

    message ─► `tensor_codec` ─► inputs ─► a `RecommendRequest` per row ─► the batcher ─► outputs ─► message

    history         BYTES, INT64  [B, T]         item ids, oldest first; "" fills rows up, on the right
    history_length  INT32, INT64  [B]            items of each row, instead of filling up with ""
    user_id         BYTES, INT64  [B] or [B, 1]  "" is nobody
    timestamps      INT64         [B, T]         UNIX seconds, as filled up as the history

    item_id         BYTES         [B, K]         best first, then ""
    score           FP32          [B, K]         as in `/v1/recommend`, then the lowest finite number
    num_items       INT32         [B]            items found
    source          BYTES         [B]            "model", "neighbors", "merged", "popular" or "none"
    item_source     BYTES         [B, K]         what named each item, then ""

Either `history` or `user_id` is needed; all other inputs may be left out, and mean what they mean in
`/v1/recommend`: a history replaces the stored one, even where it is empty. Ids may be integers of 32 or 64
bits, too: 12 is the id "12", and rows of different lengths need `history_length`. Parameters of a request
are `k`, `exclude_seen`, `rank` and `filter` from there; K is `k`, however few items there are. Of Triton's
parameters, `timeout` (microseconds) is as the header `X-Request-Timeout-Ms`, and `priority` orders what waits
for the model: 1 comes first, 0 and none are as 2. Among equals, the earliest deadline goes first. What waits
is not made late by others: they are refused instead, as everywhere.

Where something was lowered of an answer, or the events of users could not be read, the parameter `degraded`
of the message says what, of all its rows together: names of `/v1/recommend` with commas between them. Where
there was a filter, `allowed_items` and `unknown_filter_items` are parameters as well.

Positions without an item have the lowest finite score, not an infinite one or NaN: JSON can write neither.

Axes: B rows (users) of a request, T events of the longest history, K items asked for.

Sources: github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md; the extension
`binary_tensor_data` of Triton. Its other extensions (model configuration, repository, statistics, shared
memory) are neither named in the server's metadata nor there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import ValidationError

from rayrec import __version__
from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.request_info import info_of
from rayrec.serve.engine.batching import DEFAULT_PRIORITY
from rayrec.serve.engine.current import Service
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.request_log import REQUEST_ID, request_id_of
from rayrec.serve.protocols.rows import answers_of_all
from rayrec.serve.protocols.tensor_codec import (
    DTYPES,
    HEADER_LENGTH,
    InferenceCall,
    NamedTensor,
    read_call,
    write_answer,
)
from rayrec.serve.wire.errors import RequestError, explain
from rayrec.serve.wire.request_body import (
    LARGE_BYTES,
    LARGE_ITEMS,
    beside_the_loop,
    json_object,
    unpacked_body,
)
from rayrec.serve.wire.schemas import MODEL_NAME, RecommendAnswer, RecommendRequest

IDS = ("BYTES", "INT64", "INT32", "UINT64", "UINT32")
INPUTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "history": (IDS, (-1, -1)),
    "history_length": (("INT32", "INT64"), (-1,)),
    "user_id": (IDS, (-1,)),
    "timestamps": (("INT64",), (-1, -1)),
}
"""Datatypes, the first of which the metadata name, and shape; -1 is any size."""
OUTPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "item_id": ("BYTES", (-1, -1)),
    "score": ("FP32", (-1, -1)),
    "num_items": ("INT32", (-1,)),
    "source": ("BYTES", (-1,)),
    "item_source": ("BYTES", (-1, -1)),
}
PARAMETERS = ("k", "exclude_seen", "rank", "filter")
"""Parameters are texts, numbers and truth values: a filter is the JSON of one of `/v1/recommend`."""

MESSAGE_PARAMETERS = ("timeout", "priority")
"""Of the message and not of its rows; see above."""
NO_SCORE = float(np.finfo(np.float32).min)
"""Score of a position without an item."""


_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape", "data"],
    "properties": {
        "name": {"enum": list(INPUTS)},
        "datatype": {
            "enum": sorted({datatype for datatypes, _ in INPUTS.values() for datatype in datatypes})
        },
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 2},
        "data": {"type": "array", "description": "Elements in row-major order, nested or not."},
        "parameters": {"type": "object"},
    },
    "additionalProperties": False,
}
_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["inputs"],
                "properties": {
                    "id": {"type": "string"},
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "k": {"type": "integer", "minimum": 1},
                            "exclude_seen": {"type": "boolean"},
                            "rank": {"type": "boolean"},
                            "filter": {"type": "string", "description": "JSON of a filter."},
                            "timeout": {"type": "integer", "minimum": 0, "description": "Microseconds."},
                            "priority": {"type": "integer", "minimum": 0},
                            "binary_data_output": {"type": "boolean"},
                        },
                        "additionalProperties": False,
                    },
                    "inputs": {"type": "array", "items": _TENSOR, "minItems": 1},
                    "outputs": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {
                                "name": {"enum": list(OUTPUTS)},
                                "parameters": {
                                    "type": "object",
                                    "properties": {"binary_data": {"type": "boolean"}},
                                },
                            },
                            "additionalProperties": False,
                        },
                    },
                },
                "additionalProperties": False,
            }
        }
    },
}
"""Of what is all JSON; tensors may be binary instead, see `tensor_codec`."""


def open_inference_router(service: Service, admission: AdmissionControl) -> APIRouter:
    """Routes below `/v2`; errors are `{"error": sentence}`, with 400 for everything wrong in a request."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    def check_model(name: str, asked_version: str | None = None) -> RecommendationService:
        """The model that is asked."""
        pinned = service.pinned
        if name != MODEL_NAME:
            raise RequestError(f"there is no model {name!r}; the one here is {MODEL_NAME!r}", 404)
        if asked_version not in (None, own := pinned.model.label):
            raise RequestError(
                f"there is no version {asked_version!r} of {name!r}; the one here is {own!r}", 404
            )
        return pinned

    @router.get("")
    async def server() -> dict[str, Any]:
        """The server's name and extensions."""
        return {"name": "rayrec", "version": __version__, "extensions": ["binary_tensor_data"]}

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        """Answers while the process runs."""
        return {"live": True}

    @router.get("/health/ready")
    async def ready() -> dict[str, bool]:
        """Answers once the model is loaded."""
        return {"ready": True}

    @router.get("/models/{name}")
    @router.get("/models/{name}/versions/{version}")
    async def model(name: str, version: str | None = None) -> dict[str, Any]:
        """Names, datatypes and shapes of inputs and outputs."""
        return model_metadata(check_model(name, version).model.label)

    @router.get("/models/{name}/ready")
    @router.get("/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> dict[str, Any]:
        """Answers once the model is loaded."""
        check_model(name, version)
        return {"name": name, "ready": True}

    @router.post("/models/{name}/infer", openapi_extra={"requestBody": _BODY})
    @router.post("/models/{name}/versions/{version}/infer", openapi_extra={"requestBody": _BODY})
    async def infer(name: str, request: Request, version: str | None = None) -> Response:
        """Recommends to all rows; either all are answered or none."""
        pinned = check_model(name, version)
        body = await unpacked_body(request)
        header_length = request.headers.get(HEADER_LENGTH)

        def read() -> tuple[InferenceCall, dict[str, bool], list[RecommendRequest]]:
            call = read_call(body, header_length)
            return call, _wanted_outputs(call), rows_of(call, admission.most_at_once)

        call, is_binary, requests = await beside_the_loop(len(body) > LARGE_BYTES, read)
        info = info_of(request)
        if (timeout_s := timeout_in(call.parameters)) is not None:
            info.expires_at = min(info.expires_at, info.began_at + timeout_s)
        info.priority = call.parameters.get("priority") or DEFAULT_PRIORITY
        request_id = request_id_of(request.headers.get(REQUEST_ID))
        answers = await answers_of_all(admission, pinned, requests, info, _of_row, request_id)

        def written() -> tuple[bytes, int | None]:
            found = outputs_of(answers, requests[0].k)
            return write_answer(head, [found[output] for output in is_binary], is_binary)

        head: dict[str, Any] = {"model_name": MODEL_NAME, "model_version": pinned.model.label}
        if call.call_id is not None:
            head["id"] = call.call_id
        said: dict[str, Any] = {}
        if degraded := dict.fromkeys(name for answer in answers for name in answer.degraded):
            said["degraded"] = ",".join(degraded)
        if answers[0].allowed_items is not None:  # of the filter, which is that of all rows
            said["allowed_items"] = answers[0].allowed_items
            said["unknown_filter_items"] = answers[0].unknown_filter_items
        if said:
            head["parameters"] = said
        # Positions without an item are written, too.
        content, length = await beside_the_loop(len(answers) * requests[0].k > LARGE_ITEMS, written)
        headers = {REQUEST_ID: request_id}
        if length is None:
            return Response(content, headers=headers, media_type="application/json")
        headers[HEADER_LENGTH] = str(length)
        return Response(content, headers=headers, media_type="application/octet-stream")

    return router


def model_metadata(version: str) -> dict[str, Any]:
    """What the protocol calls the metadata of a model."""
    return {
        "name": MODEL_NAME,
        "versions": [version],
        "platform": "rayrec",
        "inputs": [
            {"name": name, "datatype": datatypes[0], "shape": list(shape)}
            for name, (datatypes, shape) in INPUTS.items()
        ],
        "outputs": [
            {"name": name, "datatype": datatype, "shape": list(shape)}
            for name, (datatype, shape) in OUTPUTS.items()
        ],
    }


def rows_of(call: InferenceCall, max_rows: int) -> list[RecommendRequest]:
    """A request for each row of the inputs.

    Raises:
        RequestError: an input or parameter is unknown or of another type or shape, or a row is no request;
            names it.
    """
    inputs = _checked_inputs(call.inputs)
    first = inputs.get("history", inputs.get("user_id"))
    if first is None:
        raise RequestError("inputs: neither history nor user_id is there; give one, or both")
    num_rows = first.shape[0]
    if not 1 <= num_rows <= max_rows:
        raise RequestError(f"{num_rows} rows in one request; send from 1 to {max_rows}")
    for name, values in inputs.items():
        if values.shape[0] != num_rows:
            raise RequestError(f"{name}: has {values.shape[0]} rows, where others have {num_rows}")
    for name in call.parameters:
        if name not in (*PARAMETERS, *MESSAGE_PARAMETERS):
            known = ", ".join((*PARAMETERS, *MESSAGE_PARAMETERS))
            raise RequestError(f"parameters: {name!r} is not known; known are {known}")
    parameters = {name: value for name, value in call.parameters.items() if name in PARAMETERS}
    if isinstance(given := parameters.get("filter"), str):
        try:
            parameters["filter"] = json_object(given.encode())
        except RequestError as error:
            raise RequestError(f"parameters: filter: {error}") from error
    return [_row(row, inputs, parameters) for row in range(num_rows)]


def timeout_in(parameters: Mapping[str, Any]) -> float | None:
    """Seconds in which the answer is wanted, by Triton's parameter; None: it says nothing, as 0 does.

    Raises:
        RequestError: it, or the priority, is no whole number of at least 0.
    """
    for name in MESSAGE_PARAMETERS:
        value = parameters.get(name, 0)
        if type(value) is not int or value < 0:
            raise RequestError(f"parameters: {name}: expected a whole number of at least 0, got {value!r}")
    return parameters["timeout"] / 1e6 if parameters.get("timeout") else None


def outputs_of(answers: Sequence[RecommendAnswer], k: int) -> dict[str, NamedTensor]:
    """All outputs by name, of answers with up to k items."""
    shape = (len(answers), k)
    item_ids_BK: NDArray[Any] = np.full(shape, b"", dtype=object)
    sources_BK: NDArray[Any] = np.full(shape, b"", dtype=object)
    scores_BK = np.full(shape, NO_SCORE, dtype=np.float32)
    for row, answer in enumerate(answers):
        for position, item in enumerate(answer.items):
            item_ids_BK[row, position], scores_BK[row, position] = item.item_id.encode(), item.score
            sources_BK[row, position] = item.source.encode()
    arrays = {
        "item_id": item_ids_BK,
        "score": scores_BK,
        "num_items": np.array([len(answer.items) for answer in answers], dtype=np.int32),
        "source": np.array([answer.source.encode() for answer in answers], dtype=DTYPES["BYTES"]),
        "item_source": sources_BK,
    }
    return {name: NamedTensor(name, OUTPUTS[name][0], values) for name, values in arrays.items()}


def _of_row(row: int, sentence: str, status: int = 400) -> RequestError:
    return RequestError(f"row {row}: {sentence}", status)


def _wanted_outputs(call: InferenceCall) -> dict[str, bool]:
    """Whether each wanted output is binary, in the order of the answer."""
    if call.is_binary is None:
        return dict.fromkeys(OUTPUTS, call.binary_by_default)
    for name in call.is_binary:
        if name not in OUTPUTS:
            raise RequestError(f"outputs: there is no {name!r}; known are {', '.join(OUTPUTS)}")
    return call.is_binary


def _checked_inputs(inputs: Mapping[str, NamedTensor]) -> dict[str, NDArray[Any]]:
    """Values by name, of the datatypes and numbers of dimensions that they have to have."""
    checked = {}
    for name, tensor in inputs.items():
        if name not in INPUTS:
            raise RequestError(f"inputs: there is no {name!r}; known are {', '.join(INPUTS)}")
        datatypes, shape = INPUTS[name]
        if tensor.datatype not in datatypes:
            raise RequestError(f"{name}: is {tensor.datatype}; expected {' or '.join(datatypes)}")
        values = tensor.values
        if datatypes is IDS and tensor.datatype != "BYTES":
            values = np.array([str(each).encode() for each in values.ravel().tolist()], dtype=object).reshape(
                values.shape
            )
        if name == "user_id" and values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != len(shape):
            raise RequestError(
                f"{name}: has the shape {list(values.shape)}; expected {len(shape)} dimension"
                f"{'s' * (len(shape) > 1)}, the first of rows"
            )
        checked[name] = values
    if "history" in checked:
        if "timestamps" in checked and checked["timestamps"].shape != checked["history"].shape:
            shapes = [list(checked[name].shape) for name in ("timestamps", "history")]
            raise RequestError(f"timestamps: have the shape {shapes[0]}, and the history {shapes[1]}")
    else:
        for name in ("history_length", "timestamps"):
            if name in checked:
                raise RequestError(f"{name}: is there without a history; give it, or leave this out")
    return checked


def _row(row: int, inputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]) -> RecommendRequest:
    try:
        fields: dict[str, Any] = dict(parameters)
        if "history" in inputs:
            history_T = inputs["history"][row]
            length = _length(history_T, inputs["history_length"][row] if "history_length" in inputs else None)
            fields["history"] = [item.decode() for item in history_T[:length]]
            if "timestamps" in inputs:
                fields["timestamps"] = inputs["timestamps"][row, :length].tolist()
        if "user_id" in inputs and inputs["user_id"][row]:
            fields["user_id"] = inputs["user_id"][row].decode()
        return RecommendRequest(**fields)
    except UnicodeDecodeError as error:
        raise _of_row(row, "an id is not UTF-8; ids are texts") from error
    except RequestError as error:
        raise _of_row(row, str(error)) from error
    except ValidationError as error:
        raise _of_row(row, explain(error.errors(), RecommendRequest.model_fields)) from error


def _length(history_T: NDArray[Any], given: Any) -> int:
    """Items of a row."""
    is_item_T = np.array([len(item) > 0 for item in history_T], dtype=bool)
    if given is None:
        positions = np.flatnonzero(is_item_T)
        length = int(positions[-1]) + 1 if len(positions) else 0
    else:
        length = int(given)
        if not 0 <= length <= len(history_T):
            raise RequestError(f"history_length is {length}; expected from 0 to {len(history_T)}")
    if not is_item_T[:length].all():
        position = int(np.argmin(is_item_T[:length]))
        raise RequestError(f'history.{position} is "" and items follow; fill rows up on the right')
    return length
