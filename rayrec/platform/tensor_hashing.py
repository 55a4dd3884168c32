"""`rayrec.platform.hashing` for tensors, on any device."""

from __future__ import annotations

from torch import Tensor

# Signed forms of splitmix64's constants: torch cannot multiply unsigned 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's `>>` copies the sign bit."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def mix64(values: Tensor) -> Tensor:
    """splitmix64 of int64 values; equals `rayrec.platform.hashing.mix64` bit for bit."""
    z = values + _GOLDEN
    z = (z ^ shift_right(z, 30)) * _FIRST
    z = (z ^ shift_right(z, 27)) * _SECOND
    return z ^ shift_right(z, 31)
