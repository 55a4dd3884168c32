"""The 64-bit hash of texts that `rayrec.samples.prepare.ids` gives to users and items, compiled.

BLAKE2b (RFC 7693) without a key, with a digest of 8 bytes, read as a little-endian signed integer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from rayrec.platform.arrays import Int32Array, Int64Array
from rayrec.platform.compiled import kernel_input

_IV = np.array(
    [
        0x6A09E667F3BCC908,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
        0x5BE0CD19137E2179,
    ],
    dtype=np.uint64,
)
_SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    ],
    dtype=np.int64,
)
_ROUNDS = 12
_BLOCK = 128
_DIGEST_OF_8_BYTES = np.uint64(0x01010008)
"""First word of the parameter block: fan-out 1, depth 1, no key, 8 bytes of digest."""


def hash_texts(texts: pa.StringArray) -> Int64Array:
    """[N] hash of each text, each distinct one computed once; what stands for a null means nothing.

    Equal to `rayrec.samples.prepare.ids.hash_strings`.
    """
    encoded = texts.dictionary_encode()
    distinct, indices = encoded.dictionary, encoded.indices
    if not len(distinct):
        return np.zeros(len(texts), dtype=np.int64)
    _, offsets, data = distinct.buffers()
    offsets_D1 = np.frombuffer(offsets, np.int32)[distinct.offset : distinct.offset + len(distinct) + 1]
    hashes_D = _blake2b(
        kernel_input(np.frombuffer(data or b"", np.uint8), np.uint8), kernel_input(offsets_D1, np.int32)
    )
    if indices.null_count:
        indices = indices.fill_null(0)
    return hashes_D[indices.to_numpy()]


@njit(nogil=True, cache=True, inline="always")
def _rotate(value: Any, right: Any) -> Any:
    return (value >> np.uint64(right)) | (value << np.uint64(64 - right))


@njit(nogil=True, cache=True, inline="always")
def _mix(a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> Any:
    """The function G of the RFC."""
    a = a + b + x
    d = _rotate(d ^ a, 32)
    c = c + d
    b = _rotate(b ^ c, 24)
    a = a + b + y
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 63)
    return a, b, c, d


@njit(nogil=True, cache=True)
def _blake2b(bytes_X: NDArray[np.uint8], offsets_D1: Int32Array) -> Int64Array:
    hashes_D = np.empty(len(offsets_D1) - 1, dtype=np.int64)
    m = np.empty(16, dtype=np.uint64)
    h = np.empty(8, dtype=np.uint64)
    for n in range(len(hashes_D)):
        start = int(offsets_D1[n])
        size = int(offsets_D1[n + 1]) - start
        for i in range(8):
            h[i] = _IV[i]
        h[0] ^= _DIGEST_OF_8_BYTES
        done = 0
        while True:
            in_block = min(size - done, _BLOCK)
            last = done + in_block == size
            for i in range(16):
                m[i] = np.uint64(0)
            for i in range(in_block):
                byte = np.uint64(bytes_X[start + done + i])
                m[i >> 3] |= byte << np.uint64(8 * (i & 7))
            done += in_block
            v0, v1, v2, v3, v4, v5, v6, v7 = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
            v8, v9, v10, v11 = _IV[0], _IV[1], _IV[2], _IV[3]
            v12, v13, v14, v15 = _IV[4] ^ np.uint64(done), _IV[5], _IV[6], _IV[7]
            if last:
                v14 = ~v14
            for r in range(_ROUNDS):
                s = _SIGMA[r]
                v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m[s[0]], m[s[1]])
                v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m[s[2]], m[s[3]])
                v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m[s[4]], m[s[5]])
                v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m[s[6]], m[s[7]])
                v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m[s[8]], m[s[9]])
                v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m[s[10]], m[s[11]])
                v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m[s[12]], m[s[13]])
                v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m[s[14]], m[s[15]])
            h[0] ^= v0 ^ v8
            h[1] ^= v1 ^ v9
            h[2] ^= v2 ^ v10
            h[3] ^= v3 ^ v11
            h[4] ^= v4 ^ v12
            h[5] ^= v5 ^ v13
            h[6] ^= v6 ^ v14
            h[7] ^= v7 ^ v15
            if last:
                break
        hashes_D[n] = np.int64(h[0])
    return hashes_D
