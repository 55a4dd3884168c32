"""Leaves of the compiled kernels: integer hashing, and memory reached by its address.

Numba caches a compiled kernel by the source of the kernel's own file. A change in *this* file therefore
needs the caches of its callers dropped (`find . -name '*.nb[ic]' -delete`), which is why it holds only
what never changes: the hash is a contract, the rest are single machine instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S27 = np.uint64(27)
_S30 = np.uint64(30)
_S31 = np.uint64(31)


@njit(nogil=True, cache=True, inline="always")
def mix64(value: int) -> int:
    """`rayrec.platform.hashing.mix64` of one uint64."""
    z = np.uint64(value) + _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


@njit(nogil=True, cache=True, inline="always")
def extend64(prefix: int, part: int) -> int:
    """One more part for `combine64`: combine64(a, b) = extend64(extend64(0, a), b)."""
    return mix64(np.uint64(prefix) ^ np.uint64(part))


@intrinsic
def float32_at(typingctx: Any, address: Any) -> Any:
    """Pointer to float32 from an address, for `numba.carray`."""
    return _pointer_from_address(types.float32)


@intrinsic
def int32_at(typingctx: Any, address: Any) -> Any:
    """Pointer to int32 from an address, for `numba.carray`."""
    return _pointer_from_address(types.int32)


def _pointer_from_address(dtype: Any) -> tuple[Any, Any]:
    pointer_type = types.CPointer(dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer_type))

    return pointer_type(types.uint64), generate


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address; never faults, has no effect on results."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer_type, flag_type = cgutils.voidptr_t, ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer_type, flag_type, flag_type, flag_type]),
            "llvm.prefetch.p0",
        )
        for_reading, keep, data_cache = flag_type(0), flag_type(3), flag_type(1)
        pointer = builder.inttoptr(arguments[0], pointer_type)
        builder.call(function, [pointer, for_reading, keep, data_cache])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


def kernel_input(array: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """Contiguous read-only view (a copy only if it must be) in the dtype a kernel expects.

    Read-only always: arrays out of Ray's object store are read-only, and a writable one of the same
    dtype would be another type to the compiler, so every kernel would be compiled twice.
    """
    view = np.ascontiguousarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view
