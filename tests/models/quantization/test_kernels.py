"""Every kernel computes what the scheme means; which one is taken, and which are refused."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rayrec.models.quantization import kernels
from rayrec.models.quantization.kernels import KERNELS, chosen
from rayrec.models.quantization.schemes import product
from rayrec.platform.errors import InputError
from tests.models.quantization.layers import SCHEMES, made_layer, rows, settings

CPU = torch.device("cpu")
needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM"
)


@needs_fbgemm
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static"])
@pytest.mark.parametrize("shape", [(1, 64), (33, 64), (4, 5, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_fbgemm_gives_the_bits_of_the_reference(scheme, shape, bias):
    layer, _, _ = made_layer(settings(scheme, weight_bits=7), bias=bias)
    x = 3 * rows(*shape)

    assert layer.kernel == "fbgemm"
    assert torch.equal(layer(x), product(x, layer.quantized))


@needs_fbgemm
def test_the_largest_numbers_of_seven_bits_do_not_overflow():
    layer, _, _ = made_layer(settings("w8a8", weight_bits=7), bias=False)
    layer.weight.data.fill_(63)
    layer.forget_packed()

    outputs = layer(torch.ones(16, 64))

    assert torch.equal(outputs, product(torch.ones(16, 64), layer.quantized))


@needs_fbgemm
def test_eight_bits_are_held_as_float32_where_products_would_overflow(monkeypatch):
    layer, _, _ = made_layer(settings("w8a8", weight_bits=8))
    monkeypatch.setattr(kernels, "has_wide_int8_products", lambda device: False)

    assert layer.kernel == "float32"

    monkeypatch.setattr(kernels, "has_wide_int8_products", lambda device: True)
    layer.forget_packed()
    assert layer.kernel == "fbgemm"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_that_are_held_as_float32_give_the_bits_of_the_reference(scheme):
    layer, _, _ = made_layer(settings(scheme, kernel="float32"))
    x = rows(3, 7, 64)

    assert layer.kernel == "float32"
    assert torch.equal(layer(x), product(x, layer.quantized))


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_weights_are_multiplied_in_bfloat16(group_size):
    config = settings("w4a16", group_size=group_size, kernel="int4_weights")
    layer, _, _ = made_layer(config, inputs=128, outputs=64)
    x = rows(9, 128)

    assert layer.kernel == "int4_weights"
    expected = product(x, layer.quantized)
    assert (layer(x) - expected).norm() / expected.norm() < 2**-7


def test_outputs_that_a_kernel_cannot_pack_are_refused():
    layer, _, _ = made_layer(settings("w4a16", kernel="int4_weights"), outputs=20)

    with pytest.raises(InputError, match="cannot compute up: 20 outputs are no multiple of 16"):
        layer.after_load("up")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_device_can_compute_every_scheme(scheme):
    from rayrec.platform.devices import KINDS, device_named

    for kind in KINDS:
        able = [name for name in device_named(kind).quantized_kernels if scheme in KERNELS[name].schemes]
        assert able[-1] == "reference"


def test_a_kernel_that_the_device_lacks_is_refused_by_name():
    layer, _, _ = made_layer(settings("fp8", kernel="torch_fp8"))

    with pytest.raises(
        InputError, match=r"kernel is 'torch_fp8', which cannot compute a\.b: device 'cpu' has"
    ):
        chosen(layer.quantized, CPU, "a.b")


def test_a_kernel_of_another_scheme_is_refused_by_name():
    layer, _, _ = made_layer(settings("w8a16", kernel="fbgemm"))

    with pytest.raises(InputError, match="it is for w8a8, w8a8_static, not for w8a16"):
        layer.after_load("a.b")


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0])
def test_scales_that_are_no_scales_are_refused(broken):
    layer, _, _ = made_layer(settings("w8a8"))
    layer.weight_scale.data[3] = broken

    with pytest.raises(
        InputError, match="blocks\\.0\\.up: weight scales of the quantized layer are not finite"
    ):
        layer.after_load("blocks.0.up")


def test_an_npu_is_given_int8_rows_and_both_scales(monkeypatch):
    asked = []

    def npu_quant_matmul(x1, x2, scale, *, pertoken_scale, output_dtype):
        """As the documentation of torch_npu has it."""
        asked.append((x1.dtype, x2.shape, output_dtype))
        return (x1.float() @ x2.float() * scale * pertoken_scale[:, None]).to(output_dtype)

    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_quant_matmul=npu_quant_matmul))
    layer, _, _ = made_layer(settings("w8a8"))
    x = rows(2, 3, 64)

    outputs = KERNELS["ascend_int8"].pack(layer.quantized)(x)

    assert asked == [(torch.int8, (64, 48), torch.float16)]
    torch.testing.assert_close(outputs, product(x, layer.quantized), rtol=2e-3, atol=2e-2)


def test_int8_products_of_cuda_are_those_of_the_reference(monkeypatch):
    shapes = []

    def int_mm(left, right):
        shapes.append((tuple(left.shape), left.dtype))
        return (left.long() @ right.long()).int()

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    layer, _, _ = made_layer(settings("w8a8"))
    x = rows(5, 64)

    outputs = KERNELS["torch_int8"].pack(layer.quantized)(x)

    assert shapes == [((32, 64), torch.int8)]
    assert torch.equal(outputs, product(x, layer.quantized))


def test_a_layer_moves_and_copies_without_what_is_packed():
    import copy

    layer, _, _ = made_layer(settings("w8a8", weight_bits=7))
    x = rows(4, 64)
    expected = layer(x)

    copied = copy.deepcopy(nn.Sequential(layer))

    assert torch.equal(copied(x), expected)


def test_what_is_packed_is_forgotten_when_a_layer_moves():
    layer, _, _ = made_layer(settings("w8a8", weight_bits=7))
    assert layer.kernel == "fbgemm"

    layer.to("meta")

    assert layer._product is None
