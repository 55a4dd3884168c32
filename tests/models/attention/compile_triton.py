"""Compiles our Triton kernels to machine code for NVIDIA GPUs; needs triton, and no GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rayrec.models.attention import triton_kernels
from rayrec.models.attention.triton_backend import TABLE_COPIES, block_size, padded_width

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""By compute capability: what one program may have."""
INTEGERS = ("QUERY_OFFSETS", "KEY_OFFSETS", "QUERY_TIME", "KEY_TIME", "BOUNDS", "D_PLACE", "D_TIME")
SHORT_INTEGERS = ("FIRST", "STOP", "BLOCK_ROW", "BLOCK_START", "SEEN_FROM", "SEEN_TO")
SUMS = ("LSE", "DELTA", "UNITS", "PLACE_TABLE", "TIME_TABLE")


def compiled(
    kernel: str, dtype: str, width: int, softmax: bool, num_spans: int, biased: bool, capability: int
) -> int:
    """Bytes of shared memory that the compiled kernel takes."""
    block = block_size(False, width * (4 if dtype == "fp32" else 2))
    constants = {
        "H": 4,
        "C": width,
        "E": width,
        "BLOCK_C": padded_width(width),
        "BLOCK_E": padded_width(width),
        "BLOCK_T": block,
        "BLOCK_S": block,
        "SOFTMAX": softmax,
        "NUM_SPANS": num_spans,
        "NUM_PLACES": 99 if biased else 0,
        "NUM_TIMES": 64 if biased else 0,
        "TABLE_COPIES": TABLE_COPIES,
        "BLOCK_TIMES": 64 if biased else 1,
        "ACC": tl.float32,
        "PRECISION": "ieee",
    }
    absent: set[str] = set()
    if not softmax:
        absent |= {"LSE", "DELTA"}
    if not biased:
        absent |= {
            "D_PLACE",
            "D_TIME",
            "PLACE_TABLE",
            "TIME_TABLE",
            "QUERY_TIME",
            "KEY_TIME",
            "BOUNDS",
            "UNITS",
        }
    signature, given = {}, {}
    function = getattr(triton_kernels, kernel)
    for name in (parameter.name for parameter in function.params):
        if name in constants or name in absent:
            signature[name], given[name] = "constexpr", constants.get(name)
        elif name in INTEGERS:
            signature[name] = "*i64"
        elif name in SHORT_INTEGERS:
            signature[name] = "*i32"
        elif name in SUMS:
            signature[name] = "*fp32"
        elif name in ("scale", "length"):
            signature[name] = "fp32"
        elif name == "num_queries" or name.endswith(("_token", "_head")):
            signature[name] = "i32"
        else:
            signature[name] = f"*{dtype}"
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(function, signature, given), target=target).metadata.shared


if __name__ == "__main__":
    for kernel in ("forward", "query_gradients", "key_gradients"):
        for case in (
            ("bf16", 64, True, 1, False, 80),
            ("fp32", 32, False, 2, True, 90),
        ):
            shared = compiled(kernel, *case)
            print(kernel, *case, "shared bytes", shared, flush=True)
            assert shared <= SHARED_BYTES[case[-1]], f"{kernel} {case} takes {shared} bytes of shared memory"
