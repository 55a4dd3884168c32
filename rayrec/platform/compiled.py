"""Shared by compiled kernels of several rooms: hashing, remainders, sorting, arrays as kernels expect them.

Numba caches a compiled kernel by the source of the kernel's own file, so after a change here, the caches of
its callers must be deleted; the hash is a contract and does not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_FIRST_INVERSE = np.uint64(0x96DE1B173F119089)
_SECOND_INVERSE = np.uint64(0x319642B2D24D8EC3)
_S27 = np.uint64(27)
_S30 = np.uint64(30)
_S31 = np.uint64(31)
_S32 = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_MOST = np.uint64(2**64 - 1)


@njit(nogil=True, cache=True, inline="always")
def mix64(value: Any) -> Any:
    """`rayrec.platform.hashing.mix64` of one uint64."""
    z = np.uint64(value) + _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return z ^ (z >> _S31)


@njit(nogil=True, cache=True, inline="always")
def unmix64(mixed: Any) -> Any:
    """The uint64 whose `mix64` this is."""
    z = np.uint64(mixed)
    z = (z ^ (z >> _S31) ^ (z >> np.uint64(62))) * _SECOND_INVERSE
    z = (z ^ (z >> _S27) ^ (z >> np.uint64(54))) * _FIRST_INVERSE
    return (z ^ (z >> _S30) ^ (z >> np.uint64(60))) - _GOLDEN


@njit(nogil=True, cache=True, inline="always")
def extend64(prefix: Any, part: Any) -> Any:
    """One more part for `combine64`: combine64(a, b) = extend64(extend64(0, a), b)."""
    return mix64(np.uint64(prefix) ^ np.uint64(part))


@njit(nogil=True, cache=True, inline="always")
def reciprocal64(divisor: Any) -> Any:
    """What `remainder64` multiplies by; of a uint64 that is not 0."""
    return _MOST // divisor


@njit(nogil=True, cache=True, inline="always")
def remainder64(value: Any, divisor: Any, reciprocal: Any) -> Any:
    """value % divisor, all uint64, by multiplications: unlike divisions, they are done in vectors.

    Source: Barrett, CRYPTO '86. With r = (2**64 - 1) // d, the high 64 bits of value * r are the quotient
    or at most 2 less.
    """
    low, high = value & _LOW, value >> _S32
    r_low, r_high = reciprocal & _LOW, reciprocal >> _S32
    middle = high * r_low + ((low * r_low) >> _S32)
    quotient = high * r_high + (middle >> _S32) + ((low * r_high + (middle & _LOW)) >> _S32)
    rest = value - quotient * divisor
    rest = rest - divisor if rest >= divisor else rest
    return rest - divisor if rest >= divisor else rest


SIGN_BIT = np.int64(-(2**63))
"""With it turned over, uint64 values read as int64 have the order that they have as uint64."""


@njit(nogil=True, cache=True)
def stable_order(keys_N: Any) -> Any:
    """[N] indices that put int64 keys in order, equal ones as they came.

    By itself in the cache: numpy's sort takes seconds to compile, in every kernel that calls it.
    """
    return np.argsort(keys_N, kind="mergesort")


def kernel_input(array: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """Contiguous read-only view (a copy only if it must be) in the dtype a kernel expects.

    Read-only always: arrays over Arrow's buffers or out of Ray's object store are, and a writable one would
    be another type to the compiler, so that every kernel would be compiled twice.
    """
    view = np.ascontiguousarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view
