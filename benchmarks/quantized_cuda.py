"""How long products of int8 and float8 take on a GPU, beside those of bfloat16 and float32.

For layers of some widths and numbers of rows it prints microseconds of

* `bfloat16`, `float32`: `torch.nn.functional.linear` with weights and activations of this type;
* `int8`, `float8`: the product of matrices alone, of numbers that are there already;
* `w8a8`, `fp8`: a whole quantized layer, float32 in and out, which scales and rounds its rows first;
* `w8a8 compiled`, `fp8 compiled`: the same through `torch.compile`, which fuses what is around the product;

and how many times as fast as `bfloat16` each is. How near the layers are to what their schemes mean, tests
say (`tests/models/quantization/test_device_kernels.py`); here their distance is checked once for each shape.

    python -m benchmarks.quantized_cuda
    python -m benchmarks.quantized_cuda --device cpu --small      # checks the program itself
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.base.config import Scheme
from rayrec.models.quantization.linear import QuantizedLinear
from rayrec.models.quantization.network import QuantizationPlan
from rayrec.models.quantization.schemes import FLOAT8, QuantizedWeight, product, quantize_weight

SHAPES = [
    (rows, inputs, outputs)
    for inputs, outputs in ((256, 1024), (1024, 4096), (2048, 6144), (6144, 2048))
    for rows in (64, 256, 4096, 16384)
]
SMALL_SHAPES = [(256, 64, 128), (20, 128, 64)]
COMPILED_ROWS = (256, 4096)
"""Others are not compiled: each shape takes seconds."""
MOST_ERROR = 2**-7
"""Of a layer, relative to what its scheme means: outputs of float8 are rounded to bfloat16."""
REPEATS = 9


@torch.inference_mode()
def measure(
    device: torch.device, shapes: Sequence[tuple[int, int, int]], least_s: float
) -> list[dict[str, Any]]:
    """One entry for each shape."""
    return [_of_shape(device, shape, least_s) for shape in shapes]


def _of_shape(device: torch.device, shape: tuple[int, int, int], least_s: float) -> dict[str, Any]:
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    x, weight_OK = torch.randn(rows, inputs, device=device), torch.randn(outputs, inputs, device=device)
    calls = _plain(x, weight_OK) | _alone(x, weight_OK)
    layers = {scheme: _layer(weight_OK, scheme) for scheme in _schemes()}
    errors = {scheme: _error(layer, x) for scheme, layer in layers.items()}
    for scheme, layer in layers.items():
        calls[scheme] = partial(layer, x)
        if rows in COMPILED_ROWS:
            calls[f"{scheme} compiled"] = partial(torch.compile(layer, dynamic=False), x)
    us = {name: 1e6 * _seconds(device, call, least_s) for name, call in calls.items()}
    found = {
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "kernels": {scheme: layer.kernel for scheme, layer in layers.items()},
        "errors": errors,
        "us": us,
        "times_as_fast_as_bfloat16": {name: us["bfloat16"] / each for name, each in us.items()},
    }
    fast = ", ".join(f"{name} {us['bfloat16'] / each:.2f}" for name, each in us.items())
    said = f"{rows} x {inputs} x {outputs}: bfloat16 {us['bfloat16']:.1f} us; times as fast: {fast}"
    print(said, file=sys.stderr, flush=True)
    return found


def _schemes() -> tuple[Scheme, ...]:
    return ("w8a8", "fp8")


def _plain(x: Tensor, weight_OK: Tensor) -> dict[str, Callable[[], Tensor]]:
    half, half_OK = x.bfloat16(), weight_OK.bfloat16()
    return {
        "float32": lambda: functional.linear(x, weight_OK),
        "bfloat16": lambda: functional.linear(half, half_OK),
    }


def _alone(x: Tensor, weight_OK: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Products of numbers alone, of the GPU."""
    if x.device.type != "cuda":
        return {}
    eight, eight_KO = x.mul(20).to(torch.int8), weight_OK.mul(20).to(torch.int8).T
    small, small_KO = x.to(FLOAT8), weight_OK.to(FLOAT8).T
    scale_N1 = torch.ones(len(x), 1, device=x.device)
    scale_1O = torch.ones(1, len(weight_OK), device=x.device)
    return {
        "int8": lambda: torch._int_mm(eight, eight_KO),
        "float8": lambda: torch._scaled_mm(small, small_KO, scale_N1, scale_1O, out_dtype=torch.bfloat16),
    }


def _layer(weight_OK: Tensor, scheme: Scheme) -> QuantizedLinear:
    settings = QuantizationPlan(scheme).settings(("layer",), weight_OK.device)
    layer = QuantizedLinear(weight_OK.shape[1], len(weight_OK), False, settings, weight_OK.device)
    layer.take(QuantizedWeight(settings, *quantize_weight(weight_OK, settings)))
    layer.after_load("layer")
    return layer


def _error(layer: QuantizedLinear, x: Tensor) -> float:
    """Relative distance of a layer's outputs from what its scheme means.

    Raises:
        SystemExit: it is too large.
    """
    expected = product(x, layer.quantized)
    error = float((layer(x) - expected).norm() / expected.norm())
    if not error <= MOST_ERROR:
        raise SystemExit(f"{layer.kernel} is {error:.3g} from what {layer.settings.scheme} means")
    return error


def _seconds(device: torch.device, call: Callable[[], Tensor], least_s: float) -> float:
    """Of one call, the median of some repetitions, each of so many seconds at least."""
    call()
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    count = max(1, round(least_s / (time.perf_counter() - began)))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        found.append((time.perf_counter() - began) / count)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers, to see that it runs")
    options = parser.parse_args(arguments)
    shapes, least_s = (SMALL_SHAPES, 0.001) if options.small else (SHAPES, 0.02)
    print(json.dumps(measure(torch.device(options.device), shapes, least_s)))


if __name__ == "__main__":
    main()
