"""Leaves of the compiled kernels: memory reached by its address.

Numba caches a compiled kernel by the source of the kernel's own file. A change in *this* file therefore
needs the caches of its callers dropped (`find . -name '*.nb[ic]' -delete`), which is why it holds only
what never changes: the order of a sum is a contract, the rest are single machine instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from rayrec.platform.arrays import Float32Array


# Intrinsics are called from compiled code only, with another signature than the one defined here;
# hence their names are given to the compiler's objects, typed Any.
def _pointer_from_address(dtype: Any) -> tuple[Any, Any]:
    pointer_type = types.CPointer(dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer_type))

    return pointer_type(types.uint64), generate


def _float32_at(typingctx: Any, address: Any) -> tuple[Any, Any]:
    return _pointer_from_address(types.float32)


def _int32_at(typingctx: Any, address: Any) -> tuple[Any, Any]:
    return _pointer_from_address(types.int32)


def _prefetch(typingctx: Any, address: Any) -> tuple[Any, Any]:

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


def _unaligned_load(typingctx: Any, address: Any) -> tuple[Any, Any]:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _INT64_POINTER), align=1)

    return types.uint64(types.uint64), generate


def _unaligned_store(typingctx: Any, address: Any, value: Any) -> tuple[Any, Any]:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _INT64_POINTER), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def _unaligned_store_half(typingctx: Any, address: Any, value: Any) -> tuple[Any, Any]:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = builder.trunc(arguments[1], _INT32)
        builder.store(half, builder.inttoptr(arguments[0], ir.PointerType(_INT32)), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def _copy_lanes(typingctx: Any, target: Any, source: Any) -> tuple[Any, Any]:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source = (builder.inttoptr(address, _LANES_POINTER) for address in arguments)
        builder.store(builder.load(source, align=4), target, align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def _add_lanes(typingctx: Any, target: Any, source: Any) -> tuple[Any, Any]:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source = (builder.inttoptr(address, _LANES_POINTER) for address in arguments)
        total = builder.fadd(builder.load(target, align=4), builder.load(source, align=4))
        builder.store(total, target, align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


def _sum_squares(typingctx: Any, values: Any, num_values: Any) -> tuple[Any, Any]:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, num_values = arguments

        def square(load: Any) -> Any:
            value = load(values)
            return builder.fmul(value, value)

        return _sum_in_lanes(builder, num_values, square)

    return types.float32(types.uint64, types.uint64), generate


def _sum_decayed_squares(
    typingctx: Any, values: Any, scale: Any, others: Any, num_values: Any
) -> tuple[Any, Any]:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, scale, others, num_values = arguments

        def square(load: Any) -> Any:
            other = builder.fmul(_in_every_lane(builder, scale), load(others))
            value = builder.fadd(load(values), other)
            return builder.fmul(value, value)

        return _sum_in_lanes(builder, num_values, square)

    return types.float32(types.uint64, types.float32, types.uint64, types.uint64), generate


def _sum_in_lanes(builder: Any, num_values: Any, term: Any) -> Any:
    """The sum of `term(load)` over the numbers, where `load(address)` is LANES of those at the address."""
    index = num_values.type
    rest = builder.urem(num_values, index(LANES))
    whole = builder.sub(num_values, rest)
    total = cgutils.alloca_once_value(builder, _NO_LANES)

    def pointer(address: Any, at: Any) -> Any:
        return builder.inttoptr(builder.add(address, builder.mul(at, index(4))), _LANES_POINTER)

    def add(load: Any) -> None:
        builder.store(builder.fadd(builder.load(total), term(load)), total)

    with cgutils.for_range_slice(builder, index(0), whole, index(LANES), intp=index) as (at, _):
        add(lambda address: builder.load(pointer(address, at), align=4))
    with builder.if_then(builder.icmp_unsigned("!=", rest, index(0))):
        # What is not read counts as zero, which leaves the sum of a lane as it is.
        numbers = ir.Constant(ir.VectorType(index, LANES), list(range(LANES)))
        is_read = builder.icmp_unsigned("<", numbers, _in_every_lane(builder, rest))
        masked_load = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(_NO_LANES.type, [_LANES_POINTER, _INT32, is_read.type, _NO_LANES.type]),
            f"llvm.masked.load.v{LANES}f32.p0",
        )
        add(
            lambda address: builder.call(
                masked_load, [pointer(address, whole), _INT32(4), is_read, _NO_LANES]
            )
        )
    sums, width = builder.load(total), LANES
    while width > 1:
        width //= 2
        lower, upper = (_shuffled(builder, sums, range(first, first + width)) for first in (0, width))
        sums = builder.fadd(lower, upper)
    return builder.extract_element(sums, _INT32(0))


def _in_every_lane(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return _shuffled(builder, builder.insert_element(nothing, value, _INT32(0)), [0] * LANES)


def _shuffled(builder: Any, vector: Any, lanes: Iterable[int]) -> Any:
    chosen = [_INT32(lane) for lane in lanes]
    which = ir.Constant(ir.VectorType(_INT32, len(chosen)), chosen)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), which)


LANES = 16
"""float32 numbers in a cache line, and in the widest vectors there are."""
_LANES_POINTER = ir.PointerType(ir.VectorType(ir.FloatType(), LANES))
_NO_LANES = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)
_INT32 = ir.IntType(32)
_INT64_POINTER = ir.PointerType(ir.IntType(64))

copy_lanes: Any = intrinsic(_copy_lanes)
"""copy_lanes(target, source): copy LANES float32 from one address to another.

A loop over the numbers of a row is compiled to vectors too, but a short row never gets there: its
numbers are left to the loop's scalar rest.
"""
add_lanes: Any = intrinsic(_add_lanes)
"""add_lanes(target, source): add LANES float32 at one address to those at another."""
sum_squares: Any = intrinsic(_sum_squares)
"""sum_squares(values, num_values): sum of value**2, float32 at an address.

The order of the additions is part of what a table's bits are. Number d is added to lane d mod LANES, every
lane in ascending order from zero; then the upper half of the lanes to the lower one, until one is left. A
CPU with vectors of any width, and any other device, can do just that.
"""
sum_decayed_squares: Any = intrinsic(_sum_decayed_squares)
"""sum_decayed_squares(values, scale, others, num_values): likewise of (value + scale * other)**2."""
float32_at: Any = intrinsic(_float32_at)
"""float32_at(address): pointer to float32, for `numba.carray`."""
int32_at: Any = intrinsic(_int32_at)
"""int32_at(address): pointer to int32, for `numba.carray`."""
load64: Any = intrinsic(_unaligned_load)
"""load64(address): uint64 at any address."""
store64: Any = intrinsic(_unaligned_store)
"""store64(address, value): write a uint64 to any address."""
store32: Any = intrinsic(_unaligned_store_half)
"""store32(address, value): write the lower half of a uint64 to any address."""
prefetch: Any = intrinsic(_prefetch)
"""prefetch(address): ask for a cache line; never faults, has no effect on results."""


@njit(nogil=True, cache=True, inline="always")
def numbers_address(numbers: Float32Array) -> np.uint64:
    """Address of the first of contiguous numbers."""
    return np.uint64(numbers.ctypes.data)


class RowAddresses(NamedTuple):
    """Where row records are: row r is record `r mod 2**shift` of block `r >> shift`."""

    blocks: NDArray[np.uint64]
    """Address of every block."""
    shift: int
    """Logarithm of the rows in a block."""
    words: int
    """4-byte words in a record."""


@njit(nogil=True, cache=True, inline="always")
def row_address(rows: RowAddresses, row: Any) -> Any:
    """Address of the record of a row."""
    within = row & ((1 << rows.shift) - 1)
    return rows.blocks[row >> rows.shift] + np.uint64(within * rows.words * 4)


@njit(nogil=True, cache=True, inline="always")
def prefetch_words(address: Any, num_words: int) -> None:
    """Ask for every cache line of so many 4-byte words."""
    line = address & ~np.uint64(63)
    end = address + np.uint64(4 * num_words)
    while line < end:
        prefetch(line)
        line += np.uint64(64)


@njit(nogil=True, cache=True, inline="always")
def prefetch_row(rows: RowAddresses, row: Any) -> None:
    """Ask for every cache line of a row's record."""
    prefetch_words(row_address(rows, row), rows.words)
