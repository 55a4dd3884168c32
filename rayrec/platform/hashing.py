"""64-bit integer hashing, vectorized and the same on every machine.

`mix64` is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014): a bijection of the 64-bit integers in which every input bit moves every
output bit.  Orders, shards and keys derived from it depend on the values alone.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def as_uint64(values: ArrayLike) -> NDArray[np.uint64]:
    """Integers of any width and sign as uint64, negative ones modulo 2**64; shape kept."""
    if isinstance(values, int):
        return np.asarray(values % 2**64, dtype=np.uint64)
    array = np.asarray(values)
    if array.dtype.kind not in "iub":
        raise TypeError(f"hashing takes integers, not {array.dtype}")
    return array.astype(np.uint64)


def mix64(values: ArrayLike) -> NDArray[np.uint64]:
    """The splitmix64 finalizer of each integer; same shape, arithmetic modulo 2**64."""
    # At least one dimension while computing: numpy warns of wrap-around for scalars, not for arrays.
    given = as_uint64(values)
    z = np.atleast_1d(given) + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return (z ^ (z >> np.uint64(31))).reshape(given.shape)


def combine64(*parts: ArrayLike) -> NDArray[np.uint64]:
    """One 64-bit hash of several integers or arrays of them, broadcast together; order matters.

    `h = mix64(h ^ part)` over the parts, from `h = 0`.
    """
    h = np.zeros((), dtype=np.uint64)
    for part in parts:
        h = mix64(h ^ as_uint64(part))
    return h
