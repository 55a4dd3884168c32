"""Who computes the products of a quantized layer, on which device.

    fbgemm        w8a8, w8a8_static  cpu   torch.ops.quantized, of FBGEMM
    int4_weights  w4a16              cpu   aten._weight_int4pack_mm_for_cpu, in bfloat16
    torch_int8    w8a8, w8a8_static  cuda  torch._int_mm
    torch_fp8     fp8                cuda  torch._scaled_mm
    ascend_int8   w8a8, w8a8_static  npu   torch_npu.npu_quant_matmul
    float32       all                all   numbers held as float32: the bits of the reference, but faster
    reference     all                all   `schemes.product`, the meaning

`rayrec.platform.devices` says which kernels a device has, the preferred one first.

FBGEMM multiplies activations of 8 bits without a sign by weights with one, and adds two of these products in
16 bits where the CPU has no VNNI. 255 · 127 · 2 does not fit there and would be cut off without a word;
255 · 63 · 2 does. So weights of the whole range of int8 go to `float32` on such a CPU, and `rayrec quantize`
takes 7 bits for CPUs unless it is told otherwise.

Weights alone in few bits make products no faster on a CPU: from a few rows on, torch's kernels for them take
several times as long as those for float32. There `auto` holds them as float32, and what is saved is disk,
network and the time to load; `int4_weights` saves memory, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.base.config import Scheme
from rayrec.models.quantization.schemes import (
    FLOAT8,
    QuantizedWeight,
    product,
    quantize_rows,
    reads_numbers,
    scaled,
    scaled_rows,
)
from rayrec.platform.devices import (
    ascend_quantized_product,
    device_of,
    has_float8_products,
    has_wide_int8_products,
)
from rayrec.platform.errors import InputError

Product = Callable[[Tensor], Tensor]
"""[..., K] activations to [..., O] outputs."""
_ZERO_POINT = 128
"""Added to activations, which FBGEMM wants without a sign; it takes the same off the sums."""


@dataclass(frozen=True)
class Kernel:
    """One way to compute."""

    name: str
    schemes: frozenset[Scheme]
    pack: Callable[[QuantizedWeight], Product]
    why_not: Callable[[QuantizedWeight, torch.device], str | None] = lambda weight, device: None
    """A reason against a layer of one of the schemes; None: it can compute it."""


def chosen(weight: QuantizedWeight, device: torch.device, name: str) -> Kernel:
    """The kernel for a layer.

    Args:
        name: of the layer, for messages.

    Raises:
        InputError: the settings name one that cannot compute it here.
    """
    wanted, available = weight.settings.kernel, device_of(device).quantized_kernels
    if wanted == "auto":
        found = (KERNELS[each] for each in available)
        return next(each for each in found if _why_not(each, weight, device) is None)
    kernel = KERNELS[wanted]
    reason: str | None = f"device {device.type!r} has {', '.join(available)}"
    if wanted in available:
        reason = _why_not(kernel, weight, device)
    if reason is not None:
        raise InputError(
            f"model.quantization.kernel is {wanted!r}, which cannot compute {name}: {reason}; set it to "
            "'auto'"
        )
    return kernel


def _why_not(kernel: Kernel, weight: QuantizedWeight, device: torch.device) -> str | None:
    scheme = weight.settings.scheme
    if scheme not in kernel.schemes:
        return f"it is for {', '.join(sorted(kernel.schemes))}, not for {scheme}"
    return kernel.why_not(weight, device)


def _like_rows(outputs_NO: Tensor, x: Tensor) -> Tensor:
    """[..., O] float32, of the rows of activations [..., K], of which there may be none."""
    return outputs_NO.float().view(*x.shape[:-1], outputs_NO.shape[1])


def _reference(weight: QuantizedWeight) -> Product:
    return lambda x: product(x, weight)


def _float32(weight: QuantizedWeight) -> Product:
    if not reads_numbers(weight.settings):
        weight_OK = weight.dequantized_OK
        return lambda x: functional.linear(x, weight_OK, weight.bias_O)
    values_OK, scale_O = weight.values_OK.float(), weight.scale_OG[:, 0].contiguous()

    def compute(x: Tensor) -> Tensor:
        numbers, scale = quantize_rows(x, weight.settings, weight.input_scale)
        return scaled(functional.linear(numbers, values_OK) * scale_O, scale, weight.bias_O)

    return compute


def _fbgemm(weight: QuantizedWeight) -> Product:
    zeros_O = torch.zeros(len(weight.values_OK), dtype=torch.int64)
    with warnings.catch_warnings():
        # The types of quantized tensors are to go; the kernels' packed weights are made of nothing else yet.
        warnings.simplefilter("ignore", UserWarning)
        as_torch_has_it = torch._make_per_channel_quantized_tensor(
            weight.values_OK.contiguous(), weight.scale_OG[:, 0].double(), zeros_O, 0
        )
    packed = torch.ops.quantized.linear_prepack(as_torch_has_it, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    def compute(x: Tensor) -> Tensor:
        rows, scale = scaled_rows(x, weight.settings, weight.input_scale)
        # It rounds to even and clips, as the reference does. Its own scale would be one for all rows.
        return scaled(multiply(rows, 1.0, _ZERO_POINT, packed), scale, weight.bias_O)

    return compute


def _no_fbgemm(weight: QuantizedWeight, device: torch.device) -> str | None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this torch was built without FBGEMM"
    if weight.settings.weight_bits == 8 and not has_wide_int8_products(device):
        return "weights have 8 bits, and this CPU has no VNNI: products would overflow"
    return None


def _int4_weights(weight: QuantizedWeight) -> Product:
    group_size = weight.settings.group_size
    assert group_size is not None, "of w4a16"
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.values_OK.to(torch.int32) + 8, 1)
    # [G, O, 2]: scales, and what 8 stands for.
    scale_GO = weight.scale_OG.T
    scales_and_zeros = torch.stack([scale_GO, torch.zeros_like(scale_GO)], dim=2).to(torch.bfloat16)
    scales_and_zeros = scales_and_zeros.contiguous()

    def compute(x: Tensor) -> Tensor:
        rows_NK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        outputs: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows_NK, packed, group_size, scales_and_zeros
        )
        outputs = _like_rows(outputs, x)
        return outputs if weight.bias_O is None else outputs + weight.bias_O

    return compute


def _no_int4_weights(weight: QuantizedWeight, device: torch.device) -> str | None:
    num_outputs = len(weight.values_OK)
    return f"{num_outputs} outputs are no multiple of 16" if num_outputs % 16 else None


def _torch_int8(weight: QuantizedWeight) -> Product:
    values_KO = weight.values_OK.contiguous().T

    def compute(x: Tensor) -> Tensor:
        numbers, scale = quantize_rows(x, weight.settings, weight.input_scale)
        rows_NK = numbers.to(torch.int8).reshape(-1, x.shape[-1])
        # It takes more than 16 rows.
        missing = max(_LEAST_ROWS - len(rows_NK), 0)
        sums = torch._int_mm(functional.pad(rows_NK, (0, 0, 0, missing)), values_KO)[: len(rows_NK)]
        outputs = _like_rows(sums, x) * weight.scale_OG[:, 0]
        return scaled(outputs, scale, weight.bias_O)

    return compute


_LEAST_ROWS = 32


def _no_eights(weight: QuantizedWeight, device: torch.device) -> str | None:
    outputs, inputs = weight.values_OK.shape
    return None if outputs % 8 == inputs % 8 == 0 else f"{inputs} and {outputs} are no multiples of 8"


def _torch_fp8(weight: QuantizedWeight) -> Product:
    values_KO, scale_1O = weight.values_OK.contiguous().T, weight.scale_OG.T.contiguous()

    def compute(x: Tensor) -> Tensor:
        numbers, scale = quantize_rows(x, weight.settings)
        rows_NK = numbers.reshape(-1, x.shape[-1]).to(FLOAT8)
        outputs = torch._scaled_mm(
            rows_NK, values_KO, scale.reshape(-1, 1), scale_1O, out_dtype=torch.bfloat16
        )
        outputs = _like_rows(outputs, x)
        return outputs if weight.bias_O is None else outputs + weight.bias_O

    return compute


def _no_torch_fp8(weight: QuantizedWeight, device: torch.device) -> str | None:
    outputs, inputs = weight.values_OK.shape
    if outputs % 16 or inputs % 16:
        return f"{inputs} and {outputs} are no multiples of 16"
    return None if has_float8_products(device) else "this card has no products of float8"


def _ascend_int8(weight: QuantizedWeight) -> Product:
    values_KO, scale_O = weight.values_OK.T.contiguous(), weight.scale_OG[:, 0].contiguous()
    matmul = ascend_quantized_product()

    def compute(x: Tensor) -> Tensor:
        numbers, scale = quantize_rows(x, weight.settings, weight.input_scale)
        rows_NK = numbers.reshape(-1, x.shape[-1]).to(torch.int8)
        scale_N = scale.expand(*x.shape[:-1], 1).reshape(-1).contiguous()
        outputs = matmul(rows_NK, values_KO, scale_O, pertoken_scale=scale_N, output_dtype=torch.float16)
        outputs = _like_rows(outputs, x)
        return outputs if weight.bias_O is None else outputs + weight.bias_O

    return compute


_INT8: frozenset[Scheme] = frozenset({"w8a8", "w8a8_static"})
_ALL: frozenset[Scheme] = frozenset({*_INT8, "w8a16", "w4a16", "fp8"})
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("fbgemm", _INT8, _fbgemm, _no_fbgemm),
        Kernel("int4_weights", frozenset({"w4a16"}), _int4_weights, _no_int4_weights),
        Kernel("torch_int8", _INT8, _torch_int8, _no_eights),
        Kernel("torch_fp8", frozenset({"fp8"}), _torch_fp8, _no_torch_fp8),
        Kernel("ascend_int8", _INT8, _ascend_int8),
        Kernel("float32", _ALL, _float32),
        Kernel("reference", _ALL, _reference),
    )
}
"""By name."""
