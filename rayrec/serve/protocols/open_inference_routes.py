"""Routes of the Open Inference Protocol over HTTP, and of Triton's extensions of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from rayrec.serve.admission.request_info import info_of
from rayrec.serve.events.request_log import REQUEST_ID, request_id_of
from rayrec.serve.protocols.open_inference import INPUTS, OUTPUTS, Asked, OpenInference
from rayrec.serve.protocols.tensor_codec import HEADER_LENGTH, read_call, write_answer
from rayrec.serve.wire.request_body import LARGE_BYTES, beside_the_loop, unpacked_body

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
                    "model_name": {"type": "string", "description": "As in the path."},
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "k": {"type": "integer", "minimum": 1},
                            "exclude_seen": {"type": "boolean"},
                            "rank": {"type": "boolean"},
                            "filter": {"type": "string", "description": "JSON of a filter."},
                            "quotas": {"type": "string", "description": "JSON of an array of quotas."},
                            "diversity": {"type": "number", "minimum": 0, "maximum": 1},
                            "beams": {
                                "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}],
                                "description": "A number, or the JSON of an array of numbers.",
                            },
                            "beam_margin": {"type": "number", "exclusiveMinimum": 0},
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


def open_inference_router(inference: OpenInference) -> APIRouter:
    """Routes below `/v2`; errors are `{"error": sentence}`, with 400 for everything wrong in a request."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("")
    async def server() -> dict[str, Any]:
        """The server's name and extensions."""
        return inference.server()

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        """Answers while the process runs."""
        return {"live": True}

    @router.get("/health/ready")
    async def ready() -> dict[str, bool]:
        """Answers once the model is loaded."""
        return {"ready": True}

    @router.get("/models/stats")
    async def all_statistics() -> dict[str, Any]:
        """What was computed since this process began, as Triton's extension has it."""
        return inference.statistics()

    @router.post("/repository/index")
    async def index() -> list[dict[str, str]]:
        """The models of the service, as Triton's extension has them."""
        return inference.index()

    @router.get("/models/{name}")
    @router.get("/models/{name}/versions/{version}")
    async def model(name: str, version: str | None = None) -> dict[str, Any]:
        """Names, datatypes and shapes of inputs and outputs."""
        return inference.metadata(name, version)

    @router.get("/models/{name}/ready")
    @router.get("/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> dict[str, Any]:
        """Answers once the model is loaded."""
        inference.asked(name, version)
        return {"name": name, "ready": True}

    @router.get("/models/{name}/config")
    @router.get("/models/{name}/versions/{version}/config")
    async def config(name: str, version: str | None = None) -> dict[str, Any]:
        """Inputs, outputs and most rows of a message, as Triton's extension has it."""
        return inference.config(name, version)

    @router.get("/models/{name}/stats")
    @router.get("/models/{name}/versions/{version}/stats")
    async def statistics(name: str, version: str | None = None) -> dict[str, Any]:
        """What was computed since this process began, as Triton's extension has it."""
        return inference.statistics(name, version)

    @router.post("/models/{name}/infer", openapi_extra={"requestBody": _BODY})
    @router.post("/models/{name}/versions/{version}/infer", openapi_extra={"requestBody": _BODY})
    async def infer(name: str, request: Request, version: str | None = None) -> Response:
        """Recommends to all rows; either all are answered or none."""
        named = inference.named(name, version)
        body = await unpacked_body(request)
        header_length = request.headers.get(HEADER_LENGTH)

        def read() -> Asked:
            return inference.understood(read_call(body, header_length, name))

        asked = await beside_the_loop(len(body) > LARGE_BYTES, read)
        request_id = request_id_of(request.headers.get(REQUEST_ID))
        answered = await inference.answered(named, asked, info_of(request), request_id)
        head: dict[str, Any] = {"model_name": inference.name, "model_version": answered.version}
        if asked.call.call_id is not None:
            head["id"] = asked.call.call_id
        if answered.parameters:
            head["parameters"] = answered.parameters

        def written() -> tuple[bytes, int | None]:
            return write_answer(head, answered.outputs(list(asked.is_binary)), asked.is_binary)

        content, length = await beside_the_loop(answered.is_large, written)
        headers = {REQUEST_ID: request_id}
        if length is None:
            return Response(content, headers=headers, media_type="application/json")
        headers[HEADER_LENGTH] = str(length)
        return Response(content, headers=headers, media_type="application/octet-stream")

    return router
