"""What a scheme makes of a weight and of activations."""

import pytest
import torch
from torch.nn import functional

from rayrec.models.quantization.schemes import (
    MOST_INT8,
    packed_int32,
    product,
    quantize_rows,
    quantize_weight,
    rounded_weight,
    unpacked_int32,
)
from tests.models.quantization.layers import SCHEMES, made_layer, rows, settings


def test_int8_weights_have_a_scale_for_each_output():
    weight_OK = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])

    values_OK, scale_OG = quantize_weight(weight_OK, settings("w8a16"))

    assert values_OK.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert scale_OG[0, 0] == pytest.approx(2 / 127)
    assert torch.isfinite(scale_OG).all()


def test_seven_bits_use_half_of_the_range():
    values_OK, _ = quantize_weight(rows(8, 32), settings("w8a8", weight_bits=7))

    assert values_OK.abs().max() == 63


def test_int4_weights_have_a_scale_for_each_group_of_inputs():
    weight_OK = torch.cat([torch.full((1, 32), 7.0), torch.full((1, 32), 0.07)], dim=1)

    values_OK, scale_OG = quantize_weight(weight_OK, settings("w4a16"))

    assert values_OK.unique().tolist() == [7]
    assert scale_OG.tolist() == [[1.0, pytest.approx(0.01)]]


@pytest.mark.parametrize("bits", [4, 8])
def test_few_bits_are_packed_and_unpacked(bits):
    half = 1 << (bits - 1)
    values_OK = torch.randint(-half, half, (5, 64), generator=torch.Generator().manual_seed(0))

    packed = packed_int32(values_OK.to(torch.int8), bits)

    assert torch.equal(unpacked_int32(packed, bits), values_OK.to(torch.int8))
    assert packed.shape == (5, 64 * bits // 32)


def test_the_first_number_is_in_the_lowest_bits():
    packed = packed_int32(torch.tensor([[-8, -7, -8, -8, -8, -8, -8, -8]]), 4)

    assert packed.tolist() == [[0x10]]


def test_the_numbers_of_a_row_do_not_depend_on_the_rows_beside_it():
    x = rows(4, 16)
    beside = torch.cat([x[:1], 1000 * x[1:]])

    numbers, scale = quantize_rows(x, settings("w8a8"))
    others, other_scale = quantize_rows(beside, settings("w8a8"))

    assert torch.equal(numbers[0], others[0])
    assert torch.equal(scale[0], other_scale[0])
    assert numbers.abs().max() == MOST_INT8


def test_a_row_of_zeros_stays_zero():
    numbers, _ = quantize_rows(torch.zeros(1, 4), settings("w8a8"))

    assert numbers.tolist() == [[0, 0, 0, 0]]


def test_a_static_scale_clips_what_is_beyond_calibration():
    numbers, scale = quantize_rows(torch.tensor([[1.0, 5.0]]), settings("w8a8_static"), torch.tensor([0.01]))

    assert numbers.tolist() == [[100, 127]]
    assert scale.tolist() == [pytest.approx(0.01)]


ALLOWED = {"w8a8": 0.02, "w8a8_static": 0.02, "w8a16": 0.01, "w4a16": 0.15, "fp8": 0.06}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_is_near_that_of_float32(scheme):
    layer, weight_OK, bias_O = made_layer(settings(scheme))
    x = rows(20, 64)

    error = product(x, layer.quantized) - functional.linear(x, weight_OK, bias_O)

    assert error.norm() / (x @ weight_OK.T).norm() < ALLOWED[scheme]


def test_a_range_that_is_shrunk_clips_the_largest_weights():
    weight_OK = torch.tensor([[1.0, 0.5, 0.25, -1.0]])

    rounded_OK = rounded_weight(weight_OK, settings("w8a16"), torch.tensor([[0.5]]))

    assert rounded_OK.tolist() == [[0.5, 0.5, pytest.approx(0.25, abs=0.01), -0.5]]
