"""Every kernel that a device has, held to the meaning of its scheme on that device."""

import pytest
import torch
from torch import nn

from rayrec.models.quantization.kernels import KERNELS, chosen
from rayrec.models.quantization.network import QuantizationPlan, quantize
from rayrec.models.quantization.observers import observed
from rayrec.models.quantization.schemes import product
from rayrec.platform.devices import KINDS, device_named, has_float8_products, why_missing
from rayrec.platform.errors import InputError
from tests.models.quantization.layers import SCHEMES, made_layer, rows, settings

SHAPES = [(1, 64), (16, 64), (17, 64), (3, 11, 64), (0, 64)]
INEXACT = {"torch_fp8": 2**-7, "int4_weights": 2**-7, "ascend_int8": 2**-9}
"""Kernels whose outputs are rounded to 16 bits: relative errors that are allowed. Sums of integers are exact
in the others."""
CASES = [
    (kind, name, scheme)
    for kind in KINDS
    for name in device_named(kind).quantized_kernels
    for scheme in sorted(KERNELS[name].schemes)
]
OF_INT8 = ("w8a8", "w8a8_static")


def device_of_kind(kind) -> torch.device:
    if (missing := why_missing(kind)) is not None:
        pytest.skip(f"no kernels of {kind}: {missing}")
    return device_named(kind).torch


@pytest.fixture(params=KINDS)
def device(request) -> torch.device:
    return device_of_kind(request.param)


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request):
    """(Device, name of one of its kernels, a scheme that the kernel is for)."""
    kind, name, scheme = request.param
    return device_of_kind(kind), name, scheme


def layer_of(case, bias=True):
    """A layer that this kernel computes; skips where the device cannot."""
    device, name, scheme = case
    bits = 7 if name == "fbgemm" else 8
    layer, _, _ = made_layer(settings(scheme, bits, name), bias=bias)
    layer = layer.to(device)
    try:
        chosen(layer.quantized, device, "a layer")
    except InputError as error:
        pytest.skip(str(error))
    return layer


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_a_kernel_computes_what_its_scheme_means(case, bias):
    device, name, _ = case
    layer = layer_of(case, bias)
    for shape in SHAPES:
        x = 3 * rows(*shape).to(device)

        outputs = layer(x)

        assert layer.kernel == name
        expected = product(x, layer.quantized)
        assert outputs.shape == expected.shape
        assert outputs.dtype == expected.dtype
        if name in INEXACT:
            assert (outputs - expected).norm() <= INEXACT[name] * expected.norm()
        else:
            torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-5)


def test_a_row_is_computed_alike_alone_and_among_others(case):
    layer = layer_of(case)
    x = rows(40, 64).to(case[0])

    together, alone = layer(x), layer(x[7:8])

    torch.testing.assert_close(alone, together[7:8], rtol=2**-7, atol=2**-7)


def test_the_largest_numbers_do_not_overflow(case):
    device, _, scheme = case
    if scheme not in OF_INT8:
        pytest.skip("numbers of this scheme are not added up as integers")
    layer = layer_of(case, bias=False)
    layer.weight.data.fill_(layer.weight.abs().amax())
    layer.forget_packed()
    x = torch.ones(16, 64, device=device)

    torch.testing.assert_close(layer(x), product(x, layer.quantized), rtol=2**-9, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activations_of_bfloat16_are_taken(device, scheme):
    """As autocast has them."""
    layer, _, _ = made_layer(settings(scheme, 7 if scheme in OF_INT8 else 8))
    layer = layer.to(device)
    x = rows(33, 64).to(device)
    expected = product(x, layer.quantized)

    with torch.autocast(device.type, torch.bfloat16):
        outputs = layer(x.bfloat16())

    assert (outputs.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_network_is_quantized_where_it_is_and_moves(device, scheme):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    x = rows(50, 64).to(device)
    with torch.inference_mode():
        before = network(x)
        with observed(network) as observers:
            network(x)
        quantize(network, observers, QuantizationPlan(scheme))
        there = network(x)
        here = network.cpu()(x.cpu())

    assert (there - before).norm() < (0.12 if scheme in ("w4a16", "fp8") else 0.05) * before.norm()
    torch.testing.assert_close(there.cpu(), here, rtol=0.05, atol=0.05)


def test_float8_of_this_card_is_said(device):
    """An H100 has products of float8; here is what is printed where a card has none."""
    layer, _, _ = made_layer(settings("fp8"), outputs=48)
    kernel = chosen(layer.to(device).quantized, device, "a layer").name

    can = device.type == "cuda" and has_float8_products(device)
    assert kernel == ("torch_fp8" if can else "float32")
