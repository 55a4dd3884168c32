"""Arithmetic of rows that lie on a device of torch: sums of squares, roots, and the weights of `layout`.

A row must have the same bits wherever it is changed, so these functions, and `update_on_device` of every
optimizer, do what the compiled ones do, operation by operation, in float32: sums, products, quotients and
roots round as IEEE 754 says. What would round otherwise is not used: `addcmul`, `lerp` and compiled code fuse
a product with a sum; a quotient with a Python number, on either side, is a product with a reciprocal on some
devices, so whatever divides or is divided is a tensor.

Held to the compiled equations bit by bit with torch's CPU device (`tests/embeddings/test_device_cache.py`,
which does the same on CUDA and Ascend where they are there). Written for both; not run there yet. On Ascend
it needs, beside float32 arithmetic, `where`, `masked_fill` and `Tensor.view(dtype)`, the operations
`index_select`, `index_copy_`, `>>`, `&` and `^`, for which the sources of torch_npu have kernels, and a
product of int64 that wraps. Shifts are masked, since not every device copies the sign. Whether all of that
takes int64 there, and whether quotients and roots round as IEEE 754 says, is for that test to tell.

Axes: M rows of one step, D numbers of a row, S numbers of its optimizer state, L lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayrec.embeddings.base.compiled import LANES
from rayrec.embeddings.base.layout import BFLOAT16, FLOAT32
from rayrec.platform.devices import device_named
from rayrec.platform.tensor_hashing import mix64, shift_right


def sum_squares(values_MD: Tensor) -> Tensor:
    """[M] sums of squares, added in the order of `compiled.sum_squares`."""
    num_rows, dim = values_MD.shape
    squares_MD = values_MD * values_MD
    if dim % LANES:
        padding = squares_MD.new_zeros(num_rows, -dim % LANES)
        squares_MD = torch.cat((squares_MD, padding), dim=1)
    groups = squares_MD.split(LANES, dim=1)
    sums_ML = groups[0]
    for group_ML in groups[1:]:
        sums_ML = sums_ML + group_ML
    while sums_ML.shape[1] > 1:
        lower, upper = sums_ML.chunk(2, dim=1)
        sums_ML = lower + upper
    return sums_ML[:, 0]


def load_weights(kind: int, dim: int, words_MW: Tensor) -> Tensor:
    """[M, D] float32 weights out of the first int32 words of each record; for FLOAT32 a view of them."""
    if kind == FLOAT32:
        return words_MW[:, :dim].view(torch.float32)
    dtype = torch.bfloat16 if kind == BFLOAT16 else torch.float16
    return words_MW[:, : (dim + 1) // 2].view(dtype)[:, :dim].to(torch.float32)


def rounding_bits(seed_hash: int, ids_M: Tensor, step: int, dim: int) -> Tensor:
    """[M, D] numbers from 0 to 65,535 by which 16-bit weights are rounded, as int32.

    Args:
        seed_hash: `combine64(table seed)`, as int64.
    """
    hash_M = mix64(mix64(ids_M ^ seed_hash) ^ step)
    elements_D = torch.arange(dim, device=ids_M.device)
    return shift_right(mix64(hash_M[:, None] ^ elements_D), 48).to(torch.int32)


def store_weights(kind: int, words_MW: Tensor, weights_MD: Tensor, random_MD: Tensor | None) -> None:
    """Write weights to the first words of each record.

    Args:
        random_MD: `rounding_bits` of 16-bit weights; None for FLOAT32.
    """
    num_rows, dim = weights_MD.shape
    if random_MD is None:
        words_MW[:, :dim].view(torch.float32).copy_(weights_MD)
        return
    narrowed = _as_bfloat16 if kind == BFLOAT16 else _as_float16
    halves_MD = narrowed(weights_MD, random_MD)
    num_words = (dim + 1) // 2
    halves_MH = torch.zeros(num_rows, 2 * num_words, dtype=torch.int16, device=weights_MD.device)
    halves_MH[:, :dim] = _low_half(halves_MD)
    words_MW[:, :num_words] = halves_MH.view(torch.int32)


def _as_bfloat16(weights_MD: Tensor, random_MD: Tensor) -> Tensor:
    """[M, D] bits in the low half of int32; `layout` says how numbers are rounded."""
    return (weights_MD.view(torch.int32) + random_MD) >> 16


def _as_float16(weights_MD: Tensor, random_MD: Tensor) -> Tensor:
    """Likewise."""
    bits_MD = weights_MD.view(torch.int32)
    sign_MD = (bits_MD >> 16) & 0x8000
    magnitude_MD = bits_MD & 0x7FFFFFFF
    normal_MD = (magnitude_MD + (random_MD & 0x1FFF) - 0x38000000) >> 13
    # Numbers of another size than these two are for are not used, but must not be out of an integer's range.
    scaled_MD = (weights_MD.abs() * 2.0**24).clamp(max=2.0**11)
    whole_MD = scaled_MD.to(torch.int32)
    is_up_MD = random_MD.to(torch.float32) * 2.0**-16 < scaled_MD - whole_MD.to(torch.float32)
    rounded_MD = torch.where(magnitude_MD >= 0x38800000, normal_MD, whole_MD + is_up_MD)
    return sign_MD | torch.where(magnitude_MD >= 0x477FE000, 0x7BFF, rounded_MD)


def _low_half(words: Tensor) -> Tensor:
    """The low 16 bits as int16, none of them out of its range on the way."""
    return (((words & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)


def root(values: Tensor) -> Tensor:
    """Square roots, correctly rounded."""
    if not device_named(values.device.type).has_own_memory:
        # The host's may be MKL's, which can be off by a bit; of a root in float64 the nearest float32 is that
        # of the root itself (Figueroa, "When is Double Rounding Innocuous?", SIGNUM 1995).
        return values.to(torch.float64).sqrt().to(torch.float32)
    return values.sqrt()


def dim_of(values_MD: Tensor) -> Tensor:
    """D as a tensor, to divide by: a quotient with a Python number may be a product with a reciprocal."""
    return torch.full((), values_MD.shape[1], dtype=torch.float32, device=values_MD.device)
