"""Formats of rows and gradients: how far they are off, that they are so on average by nothing, and repeat."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rayrec.embeddings.base.row_codec import (
    NarrowRows,
    RoundingKey,
    decode,
    encode_gradients,
    encode_rows,
    narrow_bytes,
)
from tests.helpers.examples import examples

WIRES = ("bfloat16", "int8_row")
KEY = RoundingKey(table_seed=3, rank=1, step=7)
TINY, HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.tuples(st.integers(0, 4), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=numbers)
)


def step_of(wire: str, rows_MD: np.ndarray) -> np.ndarray:
    """[M, D] distance of the two numbers of the format around each number, at most."""
    magnitude_MD = np.abs(rows_MD).astype(np.float64)
    if wire == "bfloat16":
        return np.maximum(magnitude_MD * 2.0**-7, 2.0**-133)
    return np.maximum(magnitude_MD.max(axis=1, keepdims=True, initial=0) / 127 * (1 + 2e-6), TINY)


@pytest.mark.parametrize("wire", WIRES)
@examples(60)
@given(rows_MD=rows)
def test_rows_are_at_most_half_a_step_off_and_gradients_a_whole_one(wire, rows_MD):
    ids_M = np.arange(len(rows_MD)) - 2
    nearest_MD = decode(encode_rows(wire, rows_MD))
    rounded_MD = decode(encode_gradients(wire, ids_M, rows_MD, KEY))
    assert nearest_MD.dtype == rounded_MD.dtype == np.float32
    # Of a float64 difference: that of two large float32 may be infinite. What is clamped is within a step.
    slack = 1 + 1e-5
    for found_MD, steps in ((nearest_MD, 0.5), (rounded_MD, 1.0)):
        assert np.isfinite(found_MD).all()
        off_MD = np.abs(found_MD.astype(np.float64) - rows_MD)
        is_clamped_MD = np.abs(rows_MD) > HUGE * (1 - 2.0**-8)
        assert (off_MD <= np.where(is_clamped_MD, 1.0, steps) * step_of(wire, rows_MD) * slack).all()


@examples(40)
@given(rows_MD=rows)
def test_rows_in_bfloat16_are_those_of_torch(rows_MD):
    expected_MD = torch.from_numpy(rows_MD).to(torch.bfloat16).to(torch.float32).numpy()
    expected_MD = np.clip(expected_MD, -3.3895314e38, 3.3895314e38)  # where torch has an infinity
    assert decode(encode_rows("bfloat16", rows_MD)).tobytes() == expected_MD.tobytes()


@pytest.mark.parametrize("wire", WIRES)
def test_what_the_format_has_is_not_rounded(wire):
    rows_MD = np.array([[127, -127, 64, -1, 0, 3], [0, 0, 0, 0, 0, 0]], np.float32)
    for narrow in (encode_rows(wire, rows_MD), encode_gradients(wire, np.arange(2), rows_MD, KEY)):
        assert decode(narrow).tolist() == rows_MD.tolist()


@pytest.mark.parametrize("wire", WIRES)
def test_gradients_are_right_on_average_over_steps_ids_columns_and_ranks(wire):
    """Within five standard errors, and their sums as far apart as independent ones are."""
    random = np.random.default_rng(0)
    grad_D = random.normal(size=6).astype(np.float32)
    ids_M = random.integers(-(2**63), 2**63 - 1, 2_000)
    grads_MD = np.tile(grad_D, (len(ids_M), 1))
    found = [
        decode(encode_gradients(wire, ids_M, grads_MD, RoundingKey(1, rank, step)))
        for rank in range(2)
        for step in range(10)
    ]
    errors_ND = (np.concatenate(found).astype(np.float64) - grad_D) / step_of(wire, grad_D[None])[0]
    assert np.all(np.abs(errors_ND.mean(axis=0)) < 5 * 0.5 / np.sqrt(len(errors_ND)))
    # Independent of each other: a sum of all columns varies as the sum of their variances.
    ratio = errors_ND.sum(axis=1).var() / errors_ND.var(axis=0).sum()
    assert abs(ratio - 1) < 0.05
    assert errors_ND.var() > 0.01


@pytest.mark.parametrize("wire", WIRES)
def test_the_same_key_has_the_same_bits_whatever_else_is_sent(wire):
    random = np.random.default_rng(1)
    ids_M, grads_MD = np.arange(100, 110), random.normal(size=(10, 7)).astype(np.float32)

    def encoded(key, order=slice(None)):
        return decode(encode_gradients(wire, ids_M[order], grads_MD[order], key))

    assert encoded(KEY).tobytes() == encoded(KEY).tobytes()
    assert encoded(KEY, slice(None, None, -3)).tobytes() == encoded(KEY)[::-3].tobytes()
    for other in (KEY._replace(table_seed=4), KEY._replace(rank=0), KEY._replace(step=8)):
        assert encoded(other).tobytes() != encoded(KEY).tobytes()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_at_its_element(wire, value):
    grads_MD = np.ones((3, 5), np.float32)
    grads_MD[1, 3] = value
    for narrow in (encode_rows(wire, grads_MD), encode_gradients(wire, np.arange(3), grads_MD, KEY)):
        found_MD = decode(narrow)
        assert np.argwhere(~np.isfinite(found_MD)).tolist() == [[1, 3]]
        np.testing.assert_equal(found_MD[1, 3], np.float32(value))


def test_no_bits_of_a_nan_become_a_number():
    bits_MD = np.array([[0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF80FFFF]], np.uint32)
    for narrow in (
        encode_rows("bfloat16", bits_MD.view(np.float32)),
        encode_gradients("bfloat16", np.zeros(1, np.int64), bits_MD.view(np.float32), KEY),
    ):
        assert np.isnan(decode(narrow)).all()


@pytest.mark.parametrize(("wire", "num_bytes"), [("bfloat16", 2 * 64), ("int8_row", 64 + 4)])
def test_bytes_of_a_row(wire, num_bytes):
    narrow = encode_rows(wire, np.zeros((10, 64), np.float32))
    assert sum(array.nbytes for array in narrow if array is not None) == 10 * num_bytes
    assert narrow_bytes(wire, 10, 64) == 10 * num_bytes


@pytest.mark.parametrize("wire", WIRES)
def test_no_rows_are_no_bytes(wire):
    narrow = encode_gradients(wire, np.empty(0, np.int64), np.empty((0, 3), np.float32), KEY)
    assert decode(narrow).shape == (0, 3)
    assert isinstance(narrow, NarrowRows)
