"""What a row's record holds: weights | optimizer state S | last step | count, in 4-byte words.

Weights are float32, one per word, or 16-bit numbers, two per word. State is always float32: an
accumulator that rounds stops growing.

A 16-bit weight is rounded stochastically: up with a probability of its distance from the number below,
so that updates smaller than a rounding step are kept on average. The random bits are a hash of (table
seed, id, step, element): every mode, shard count and machine rounds alike.

Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3.

Axes: D numbers of a row.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numba import njit

from rayrec.platform.arrays import Float32Array, Int32Array
from rayrec.platform.compiled import extend64

WeightDtype = Literal["float32", "bfloat16", "float16"]

FLOAT32, BFLOAT16, FLOAT16 = range(3)
_KINDS: dict[WeightDtype, int] = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

NEVER = -1
"""Last step of a row that no step has changed."""
STEP_WORD = -2
"""Where in a record its last step is; the count follows."""


class RecordLayout(NamedTuple):
    """Where the parts of a record are, in words."""

    kind: int
    """Of the weights: FLOAT32, BFLOAT16 or FLOAT16."""
    dim: int
    weight_words: int
    state_size: int

    @classmethod
    def of(cls, dtype: WeightDtype, dim: int, state_size: int) -> RecordLayout:
        return cls(_KINDS[dtype], dim, dim if dtype == "float32" else (dim + 1) // 2, state_size)


def record_words(layout: RecordLayout) -> int:
    """4-byte words of one record."""
    return layout.weight_words + layout.state_size + 2


@njit(nogil=True, cache=True)
def load_weights(kind: int, words: Int32Array, weights_D: Float32Array) -> None:
    """Write the weights of a record, which its first words hold, to weights_D."""
    if kind == FLOAT32:
        # No assignment of slices: what it says of shapes that differ takes seconds to compile.
        floats = words.view(np.float32)
        for d in range(len(weights_D)):
            weights_D[d] = floats[d]
        return
    halves = words[: (len(weights_D) + 1) // 2].view(np.uint16)
    bits_D = weights_D.view(np.uint32)
    for d in range(len(weights_D)):
        if kind == BFLOAT16:
            bits_D[d] = np.uint32(halves[d]) << np.uint32(16)
        else:
            bits_D[d] = _widened(np.uint32(halves[d]), weights_D, d)


@njit(nogil=True, cache=True)
def store_weights(kind: int, words: Int32Array, weights_D: Float32Array, step_hash: np.uint64) -> None:
    """Write weights_D to a record.

    Args:
        step_hash: `combine64(table seed, id, step)`, from which 16-bit weights take their rounding.
    """
    if kind == FLOAT32:
        floats = words.view(np.float32)
        for d in range(len(weights_D)):
            floats[d] = weights_D[d]
        return
    halves = words[: (len(weights_D) + 1) // 2].view(np.uint16)
    bits_D = weights_D.view(np.uint32)
    for d in range(len(weights_D)):
        random = np.uint32(extend64(step_hash, np.uint64(d)) >> np.uint64(48))
        if kind == BFLOAT16:
            halves[d] = np.uint16((bits_D[d] + random) >> np.uint32(16))
        else:
            halves[d] = np.uint16(_narrowed(bits_D[d], weights_D[d], random))
    if len(weights_D) % 2:
        halves[len(weights_D)] = 0


@njit(nogil=True, cache=True, inline="always")
def _widened(half: Any, weights_D: Float32Array, d: int) -> Any:
    """Bits of the float32 that equals a float16."""
    sign = (half & np.uint32(0x8000)) << np.uint32(16)
    exponent, fraction = (half >> np.uint32(10)) & np.uint32(31), half & np.uint32(1023)
    if exponent == 0:  # a multiple of the smallest subnormal
        weights_D[d] = np.float32(fraction) * np.float32(2.0**-24)
        return weights_D.view(np.uint32)[d] | sign
    return sign | ((exponent + np.uint32(112)) << np.uint32(23)) | (fraction << np.uint32(13))


@njit(nogil=True, cache=True, inline="always")
def _narrowed(bits: Any, value: Any, random: Any) -> Any:
    """A float32 as float16, rounded by 16 random bits; what is too large becomes the largest number."""
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude >= np.uint32(0x477FE000):  # 65,504
        return sign | np.uint32(0x7BFF)
    if magnitude >= np.uint32(0x38800000):  # 2**-14, the smallest normal number
        rounded = (magnitude + (random & np.uint32(0x1FFF)) - np.uint32(0x38000000)) >> np.uint32(13)
        return sign | rounded
    scaled = abs(value) * np.float32(2.0**24)
    whole = np.uint32(scaled)
    remainder = scaled - np.float32(whole)
    if np.float32(random) * np.float32(2.0**-16) < remainder:
        whole += np.uint32(1)
    return sign | whole
