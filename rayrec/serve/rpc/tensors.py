"""Tensors of gRPC messages: their elements in typed fields, or all of them as bytes beside them.

    inputs[i].contents.bytes_contents ...    each element in a field of its type
    raw_input_contents[i]                    as bytes, encoded as `tensor_codec` encodes binary tensors

A message has either; an answer comes as its request did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.serve.protocols.open_inference import OUTPUTS, Answered
from rayrec.serve.protocols.tensor_codec import (
    DTYPES,
    InferenceCall,
    NamedTensor,
    checked_shape,
    decode_binary,
    encode_binary,
)
from rayrec.serve.rpc.messages import ModelInferRequest, ModelInferResponse
from rayrec.serve.wire.errors import RequestError

_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""By datatype; FP16 has none."""


def read_request(content: bytes) -> tuple[Any, InferenceCall]:
    """Parse a `ModelInferRequest` into its call.

    Raises:
        RequestError: for everything that the protocol does not allow.
    """
    try:
        message = ModelInferRequest.FromString(content)
    except Exception as error:  # of protobuf's, which has one for each of its implementations
        raise RequestError("the message is no ModelInferRequest") from error
    raw: Sequence[bytes] = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RequestError(
            f"raw_input_contents: {len(raw)} for {len(message.inputs)} inputs; give every input its own, or "
            "none"
        )
    inputs: dict[str, NamedTensor] = {}
    for place, each in enumerate(message.inputs):
        if each.name in inputs:
            raise RequestError(f"inputs: {each.name!r} stands there twice; which is meant?")
        inputs[each.name] = _read_input(each, raw[place] if raw else None)
    for each in (*message.inputs, *message.outputs):
        for name in each.parameters:
            if name == "binary_data_size" and raw:
                continue  # KServe's client says the size over gRPC, too, where the bytes say it themselves
            raise RequestError(f"{each.name}: the parameter {name!r} is not known here")
    wanted = [each.name for each in message.outputs]
    if len(set(wanted)) < len(wanted):
        raise RequestError("outputs: one stands there twice; ask once")
    is_binary = dict.fromkeys(wanted, bool(raw)) if wanted else None
    parameters = {name: _value(name, each) for name, each in message.parameters.items()}
    return message, InferenceCall(message.id or None, parameters, inputs, is_binary, bool(raw))


def written_answer(message: Any, answered: Answered, is_binary: Mapping[str, bool]) -> Any:
    """The `ModelInferResponse` of a request.

    Args:
        message: the request.
        is_binary: by wanted output, in their order; all of them are, or none.
    """
    answer = ModelInferResponse(model_name=message.model_name, model_version=answered.version, id=message.id)
    for name, value in answered.parameters.items():
        if isinstance(value, str):
            answer.parameters[name].string_param = value
        else:
            answer.parameters[name].int64_param = value
    for tensor in answered.outputs(list(is_binary)):
        output = answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.values.shape)
        if is_binary[tensor.name]:
            answer.raw_output_contents.append(encode_binary(tensor.datatype, tensor.values))
        else:
            getattr(output.contents, _FIELDS[tensor.datatype]).extend(tensor.values.ravel().tolist())
    assert all(datatype in _FIELDS for datatype, _ in OUTPUTS.values()), "each has a field"
    return answer


def _read_input(described: Any, raw: bytes | None) -> NamedTensor:
    name, datatype = described.name, described.datatype
    if datatype not in DTYPES:
        raise RequestError(f"{name}: there is no datatype {datatype!r} here; known are {', '.join(DTYPES)}")
    shape = checked_shape(list(described.shape), name)
    try:
        if raw is None:
            return NamedTensor(name, datatype, _of_contents(datatype, shape, described))
        if described.HasField("contents"):
            raise RequestError("has both contents and raw_input_contents; give one")
        return NamedTensor(name, datatype, decode_binary(datatype, shape, raw))
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error


def _of_contents(datatype: str, shape: Sequence[int], described: Any) -> NDArray[Any]:
    if datatype not in _FIELDS:
        raise RequestError(f"{datatype} has no field of its own; send it in raw_input_contents")
    field = _FIELDS[datatype]
    if other := [each.name for each, _ in described.contents.ListFields() if each.name != field]:
        raise RequestError(f"has {other[0]}; elements of {datatype} are {field}")
    elements = list(getattr(described.contents, field))
    count = math.prod(shape)
    if len(elements) != count:
        raise RequestError(f"{len(elements)} elements for the shape {list(shape)}; expected {count}")
    dtype = DTYPES[datatype]
    if dtype.kind in "iu" and elements:
        bounds = np.iinfo(dtype)  # fields are wider than the narrow types
        for value in (min(elements), max(elements)):
            if not bounds.min <= value <= bounds.max:
                raise RequestError(f"{value} is no element of {datatype}")
    flat: NDArray[Any] = np.empty(count, dtype=dtype)
    flat[:] = elements
    return flat.reshape(tuple(shape))


def _value(name: str, parameter: Any) -> Any:
    chosen = parameter.WhichOneof("choice")
    if chosen is None:
        raise RequestError(f"parameters: {name!r} has no value")
    return getattr(parameter, chosen)
