"""Tensors of the Open Inference Protocol: as JSON, as bytes, and the messages that carry them.

    JSON object ┬ inputs: name, datatype, shape, data            in JSON: values in row-major order, or nested
                └         name, datatype, shape, parameters ──┐  binary: `binary_data_size` bytes of what
    bytes of the binary tensors, one after the other ◄────────┘  follows the JSON object, in the same order

The header `Inference-Header-Content-Length` says how long the object is where bytes follow it. Binary numbers
are little-endian, and each text is its length in 4 bytes and itself. What the protocol says may be in a
message is checked here, and nothing of what it means.

`tritonclient.utils` has the same encodings for clients: it neither bounds how many texts a body may claim nor
says what is wrong with one, which is most of what is here.

Sources: github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md; the extension
`binary_tensor_data`, docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/
extension_binary_data.html.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.request_body import json_object

HEADER_LENGTH = "Inference-Header-Content-Length"

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
"""Array type by datatype; elements of BYTES are `bytes`."""

MAX_DIMENSIONS = 8
_MAX_DIMENSION = 2**31 - 1
"""More than any body holds; shapes with a zero have no other bound."""


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """An input or output."""

    name: str
    datatype: str
    values: NDArray[Any]


@dataclass(frozen=True)
class InferenceCall:
    """What a request for inference says."""

    call_id: str | None
    parameters: dict[str, Any]
    inputs: dict[str, NamedTensor]
    is_binary: dict[str, bool] | None
    """Whether each requested output is wanted in binary; None: all are, as `binary_by_default` says."""
    binary_by_default: bool


_OPTIONAL = ("id", "model_name", "parameters", "outputs")


def read_call(body: bytes, header_length: str | None, model: str) -> InferenceCall:
    """Parse a message of the protocol into its call.

    Args:
        header_length: the header `HEADER_LENGTH` as it came.
        model: that the path names; KServe's client names it in the message again.

    Raises:
        RequestError: for everything that the protocol does not allow.
    """
    length = _checked_length(header_length, len(body))
    described = json_object(body[:length])
    _check_keys(described, "the request", required=("inputs",), optional=_OPTIONAL)
    if (named := described.get("model_name", model)) != model:
        raise RequestError(f"model_name: is {_shown(named)}, and the path names {_shown(model)}")
    call_id = described.get("id")
    if not isinstance(call_id, str | None):
        raise RequestError("id: expected a text")
    parameters = dict(_mapping(described.get("parameters"), "parameters"))
    binary_by_default = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
    tail = _Tail(memoryview(body)[length:], header_length is not None)
    inputs: dict[str, NamedTensor] = {}
    for index, each in enumerate(_list(described["inputs"], "inputs")):
        tensor = _read_input(each, f"inputs.{index}", tail)
        if tensor.name in inputs:
            raise RequestError(f"inputs: {tensor.name!r} stands there twice; which is meant?")
        inputs[tensor.name] = tensor
    tail.check_is_used()
    outputs = _list(described.get("outputs", []), "outputs")
    is_binary = _requested_outputs(outputs, binary_by_default) if outputs else None
    return InferenceCall(call_id, parameters, inputs, is_binary, binary_by_default)


def write_answer(
    head: Mapping[str, Any], outputs: Sequence[NamedTensor], is_binary: Mapping[str, bool]
) -> tuple[bytes, int | None]:
    """Encode the outputs of a call.

    Args:
        head: what the answer has besides the outputs.
        is_binary: by output.

    Returns:
        (Body, length of the JSON object at its beginning; None where it is all of it).
    """
    described, parts = [], []
    for tensor in outputs:
        output: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.values.shape),
        }
        if is_binary[tensor.name]:
            content = encode_binary(tensor.datatype, tensor.values)
            output["parameters"] = {"binary_data_size": len(content)}
            parts.append(content)
        else:
            output["data"] = encode_json(tensor.datatype, tensor.values)
        described.append(output)
    text = json.dumps({**head, "outputs": described}, allow_nan=False, separators=(",", ":")).encode()
    return b"".join([text, *parts]), len(text) if parts else None


def encode_binary(datatype: str, values: NDArray[Any]) -> bytes:
    """Elements in row-major order."""
    if datatype != "BYTES":
        return np.ascontiguousarray(values, dtype=DTYPES[datatype]).tobytes()
    return b"".join(struct.pack("<I", len(element)) + element for element in values.flat)


def decode_binary(datatype: str, shape: Sequence[int], content: bytes | memoryview) -> NDArray[Any]:
    """The inverse of `encode_binary`.

    Raises:
        RequestError: there are more or fewer bytes than the shape needs, or a BOOL is neither 0 nor 1.
    """
    count = _num_elements(shape)
    if datatype == "BYTES":
        return _array(_decode_texts(count, bytes(content)), shape)
    dtype = DTYPES[datatype]
    if len(content) != count * dtype.itemsize:
        raise RequestError(
            f"{len(content)} bytes for {count} elements of {datatype}; expected {count * dtype.itemsize}"
        )
    if datatype == "BOOL" and (np.frombuffer(content, dtype=np.uint8) > 1).any():
        raise RequestError("a BOOL is a byte with value 0 or 1")
    return np.frombuffer(content, dtype=dtype).reshape(tuple(shape))


def encode_json(datatype: str, values: NDArray[Any]) -> list[Any]:
    """Elements in row-major order; those of BYTES have to be UTF-8."""
    if datatype == "BYTES":
        return [element.decode() for element in values.flat]
    elements: list[Any] = values.ravel().tolist()
    return elements


def decode_json(datatype: str, shape: Sequence[int], data: Any) -> NDArray[Any]:
    """The inverse of `encode_json`, and of arrays that are nested as the shape is.

    Raises:
        RequestError: there are more or fewer elements than the shape has, or one is not of the datatype.
    """
    if datatype == "FP16":
        raise RequestError("FP16 has no form in JSON; send it as binary data")
    elements = _list(data, "data")
    count = _num_elements(shape)
    if list in set(map(type, elements)):
        elements = _flattened(elements, shape)
    if len(elements) != count:
        raise RequestError(f"{len(elements)} elements for the shape {list(shape)}; expected {count}")
    return _array(_checked_elements(datatype, elements), shape, DTYPES[datatype])


class _Tail:
    """The bytes after the JSON object, which the inputs take one after the other."""

    def __init__(self, content: memoryview, is_announced: bool) -> None:
        self._content = content
        self._is_announced = is_announced
        self._used = 0

    def take(self, size: int) -> memoryview:
        if not self._is_announced:
            raise RequestError(f"binary data needs the header {HEADER_LENGTH}")
        there = len(self._content) - self._used
        if size > there:
            raise RequestError(f"binary_data_size is {size}, and {there} bytes are left of the body")
        self._used += size
        return self._content[self._used - size : self._used]

    def check_is_used(self) -> None:
        if self._used < len(self._content):
            raise RequestError(
                f"{len(self._content)} bytes follow the JSON object, and the inputs take {self._used} of them"
            )


def _checked_length(header: str | None, num_bytes: int) -> int:
    if header is None:
        return num_bytes
    if not re.fullmatch("[0-9]{1,18}", header) or int(header) > num_bytes:
        raise RequestError(
            f"the header {HEADER_LENGTH} is {header[:40]!r}; expected a number up to the {num_bytes} bytes "
            "of the body"
        )
    return int(header)


def _read_input(described: Any, where: str, tail: _Tail) -> NamedTensor:
    described = _mapping(described, where)
    _check_keys(described, where, required=("name", "datatype", "shape"), optional=("parameters", "data"))
    name, datatype = _text(described["name"], f"{where}.name"), described["datatype"]
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise RequestError(
            f"{name}: there is no datatype {_shown(datatype)} here; known are {', '.join(DTYPES)}"
        )
    shape = checked_shape(described["shape"], name)
    parameters = _mapping(described.get("parameters"), f"{name}.parameters")
    _check_keys(parameters, f"{name}.parameters", optional=("binary_data_size",))
    try:
        if "binary_data_size" not in parameters:
            if "data" not in described:
                raise RequestError("has neither data nor a binary_data_size")
            return NamedTensor(name, datatype, decode_json(datatype, shape, described["data"]))
        if "data" in described:
            raise RequestError("has both data and a binary_data_size; give one")
        size = parameters["binary_data_size"]
        if not _is_int(size) or size < 0:
            raise RequestError(f"binary_data_size is {_shown(size)}; expected a number of bytes")
        return NamedTensor(name, datatype, decode_binary(datatype, shape, tail.take(size)))
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error


def _requested_outputs(outputs: list[Any], binary_by_default: bool) -> dict[str, bool]:
    is_binary: dict[str, bool] = {}
    for index, each in enumerate(outputs):
        where = f"outputs.{index}"
        described = _mapping(each, where)
        _check_keys(described, where, required=("name",), optional=("parameters",))
        name = _text(described["name"], f"{where}.name")
        parameters = _mapping(described.get("parameters"), f"{where}.parameters")
        _check_keys(parameters, f"{where}.parameters", optional=("binary_data",))
        if name in is_binary:
            raise RequestError(f"outputs: {name!r} stands there twice; ask once")
        is_binary[name] = _flag(parameters.get("binary_data", binary_by_default), f"{name}.binary_data")
    return is_binary


def checked_shape(shape: Any, name: str) -> tuple[int, ...]:
    """A shape that a request can have.

    Raises:
        RequestError: it is another one.
    """
    sizes = _list(shape, f"{name}.shape")
    if len(sizes) > MAX_DIMENSIONS or not all(
        _is_int(size) and 0 <= size <= _MAX_DIMENSION for size in sizes
    ):
        raise RequestError(
            f"{name}: the shape {_shown(shape)} is none; expected up to {MAX_DIMENSIONS} sizes from 0 to "
            f"{_MAX_DIMENSION}"
        )
    if math.prod(size or 1 for size in sizes) > _MAX_DIMENSION:
        raise RequestError(f"{name}: the shape {sizes} has more elements than a request can bring")
    return tuple(sizes)


def _num_elements(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _array(elements: list[Any], shape: Sequence[int], dtype: np.dtype[Any] = DTYPES["BYTES"]) -> NDArray[Any]:
    flat: NDArray[Any] = np.empty(len(elements), dtype=dtype)
    flat[:] = elements
    return flat.reshape(tuple(shape))


def _decode_texts(count: int, content: bytes) -> list[bytes]:
    if count * 4 > len(content):  # before a list of that length is made
        raise RequestError(f"{len(content)} bytes are too few for {count} elements of BYTES")
    elements, offset = [], 0
    for number in range(count):
        end = offset + 4
        if end <= len(content):
            end += struct.unpack_from("<I", content, offset)[0]
        if end > len(content):
            raise RequestError(
                f"element {number} of BYTES ends at byte {end}, and there are {len(content)} bytes"
            )
        elements.append(content[offset + 4 : end])
        offset = end
    if offset < len(content):
        raise RequestError(f"{len(content) - offset} bytes follow the {count} elements of BYTES")
    return elements


def _flattened(nested: list[Any], shape: Sequence[int]) -> list[Any]:
    """Elements of lists in lists, which have to be exactly of the shape."""
    level = [nested]
    for depth, size in enumerate(shape):
        if any(not isinstance(part, list) or len(part) != size for part in level):
            raise RequestError(
                f"data is nested, and not as the shape {list(shape)} is: at depth {depth} expected lists of "
                f"{size}"
            )
        level = [element for part in level for element in part]
    return level


def _checked_elements(datatype: str, elements: list[Any]) -> list[Any]:
    """Elements as an array takes them. All at once: a body may have half a million."""
    kinds: set[type] = set(map(type, elements))
    allowed, bounds = _allowed_elements(datatype)
    if not kinds <= allowed:
        raise _no_element(datatype, next(value for value in elements if type(value) not in allowed))
    if bounds is not None and elements:
        for value in (min(elements), max(elements)):
            if not bounds[0] <= value <= bounds[1]:
                raise _no_element(datatype, value)
    if datatype != "BYTES":
        return elements
    try:
        return [value.encode() for value in elements]
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise RequestError("expected text that UTF-8 can encode") from error


def _allowed_elements(datatype: str) -> tuple[set[type], tuple[float, float] | None]:
    """Types of JSON's values, and the bounds of numbers."""
    dtype = DTYPES[datatype]
    if datatype == "BYTES":
        return {str}, None
    if datatype == "BOOL":
        return {bool}, None
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        return {int, float}, (-largest, largest)
    limits = np.iinfo(dtype)
    return {int}, (int(limits.min), int(limits.max))


def _no_element(datatype: str, value: Any) -> RequestError:
    return RequestError(f"{_shown(value)} is no element of {datatype}")


def _check_keys(
    found: Mapping[str, Any], where: str, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    for key in required:
        if key not in found:
            raise RequestError(f"{where}: has no {key!r}")
    for key in found:
        if key not in required and key not in optional:
            known = ", ".join([*required, *optional])
            raise RequestError(f"{where}: {_shown(key)} is not known here; known are {known}")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{where}: expected an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where}: expected an array")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where}: expected a text")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{where}: expected true or false")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value as JSON has it, in ASCII and short: an answer has to be writable whatever came."""
    try:
        text = json.dumps(value)
    except RecursionError:  # arrays in arrays, just so deep that they could be read
        text = "[[[..."
    return text if len(text) <= 60 else f"{text[:57]}..."
