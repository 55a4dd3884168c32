"""Arrays of a safetensors file, mapped: processes of a node share the memory, and read what they use.

Files are written array by array; the library's own function makes a copy of all of them first. A file
has to be replaced, not changed, while somebody reads it: ours are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}

_NAMES = {np.dtype(dtype): name for name, dtype in _TYPES.items()}


def write_tensors(
    path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; not atomically.

    Raises:
        OSError: it cannot be written.
    """
    # The widest first, as the format asks for, so that each is aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, array in ordered:
        first, end = end, end + array.nbytes
        dtype = _NAMES[array.dtype.newbyteorder("=")]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [first, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).reshape(-1).data)


def mapped_tensors(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and arrays. Arrays may be written to, which no other process and not the file sees.

    Raises:
        OSError: the file cannot be read.
        safetensors.SafetensorError: it is damaged.
        KeyError: it has numbers of a type that numpy lacks.
    """
    from safetensors import safe_open

    # Checks that names, shapes and sizes fit the file.
    with safe_open(path, framework="numpy") as opened:
        metadata: dict[str, str] = opened.metadata() or {}
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    content = np.memmap(path, np.uint8, "c")
    arrays = {}
    for name, entry in header.items():
        dtype = np.dtype(_TYPES[entry["dtype"]])
        count, first = math.prod(entry["shape"]), 8 + header_bytes + entry["data_offsets"][0]
        flat = np.frombuffer(content, dtype, count, first) if count else np.empty(0, dtype)
        arrays[name] = flat.reshape(entry["shape"])
    return metadata, arrays
