"""How fast histories of very different lengths attend to themselves: forward and backward, per batch.

On a CPU, with torch's threads as they are. 128 histories of Zipf lengths, 2 heads of 32; once up to 512
events long and once up to 200. Bars, all of them ratios of batches per second:

* `attention-softmax-*`, `attention-hstu-*`: what the rule takes, against attention on padded rows in plain
  PyTorch: `scaled_dot_product_attention` for the softmax, and for HSTU's SiLU the matrix products and
  activations that its authors' reference implementation writes out. HSTU has its biases of place and time,
  but where the name says `unbiased`.
* `attention-chosen-*`: what a measurement takes, against each of the backends that could have been taken, the
  fastest of them in the first place: it must never be slower by more than a tenth.

On a GPU, `python -m benchmarks.attention` needs torch, numpy and triton alone (`python -m benchmarks.gpu`
runs it too; `--device cpu` checks the program itself on a tiny batch). It prints, as JSON, milliseconds and
TFLOP/s (of the pairs that are seen, 2 products forward and 5 backward) of HSTU, with its biases, with one
kind of them and without, and of softmax attention by our kernels, of FlexAttention and of padded
`scaled_dot_product_attention`, with and without what they need to prepare for a batch of new lengths, and
the share of the rate of large matrix products in the same process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.models.attention.bias import LOG_WIDTH, RelativeBias
from rayrec.models.attention.call import AttentionCall, Backend, Scoring, Silu, Softmax
from rayrec.models.attention.choice import AUTO, BACKENDS, Measured
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Causal

if TYPE_CHECKING:
    from benchmarks.harness import Bar, BenchOptions

ROWS, HEADS, WIDTH = 128, 2, 32
LONGEST = (512, 200)
TIME_BUCKETS = 64
TARGET, CHOSEN_TARGET = 2.0, 1 / 1.1
GPU_CASES = (
    # rows, longest, heads, width of a head
    (128, 512, 4, 64),
    (128, 2048, 4, 64),
    (32, 8192, 4, 64),
    (128, 2048, 4, 128),
)
CPU_CASES = ((3, 12, 2, 16),)
"""To check this program without a GPU."""


def bench(options: BenchOptions) -> list[Bar]:
    from benchmarks.harness import Bar

    bars = []
    for longest in LONGEST:
        for name, scoring, padded, biased in (
            ("softmax", Softmax(), padded_softmax, False),
            ("hstu-unbiased", Silu(float(longest)), padded_silu, False),
            ("hstu", Silu(float(longest)), padded_silu, True),
        ):
            batches = Batches(options.rows or ROWS, longest, scoring, biased=biased)
            ratios = _ratios(
                f"attention-{name}-{longest}",
                partial(batches.rate, lambda call: AUTO(call).attend(call)),
                partial(batches.rate, padded),
                options,
            )
            bars.append(Bar.of(f"attention-{name}-{longest}", ratios, "padded PyTorch", TARGET))
            bars.append(_chosen_bar(f"attention-chosen-{name}-{longest}", batches, options))
    return bars


def _chosen_bar(name: str, batches: Batches, options: BenchOptions) -> Bar:
    """Against the best single backend: the one that is fastest over the same batches."""
    from benchmarks.harness import Bar

    call = batches.call()
    able = [b for b in BACKENDS.values() if b.name != "reference" and b.why_not(call) is None]
    rates = {backend.name: batches.rate(backend.attend) for backend in able for _ in range(2)}
    best = BACKENDS[max(rates, key=lambda backend: rates[backend])]
    choice = Measured()
    ratios = _ratios(
        name,
        partial(batches.rate, lambda call: choice(call).attend(call)),
        partial(batches.rate, best.attend),
        options,
    )
    return Bar.of(name, ratios, f"the best single backend, {best.name}", CHOSEN_TARGET)


class Batches:
    """Batches of new lengths, one after the other; both sides of a pair are given the same."""

    def __init__(
        self,
        num_rows: int,
        longest: int,
        scoring: Scoring,
        heads: int = HEADS,
        width: int = WIDTH,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        biased: bool = False,
    ) -> None:
        self._biased = biased
        self._num_rows, self._longest, self._scoring = num_rows, longest, scoring
        self._shape, self._device, self._dtype = (heads, width), torch.device(device), dtype

    def call(self, number: int = 0) -> AttentionCall:
        random = np.random.default_rng([7, number])
        length_L = np.arange(1, self._longest + 1)
        share_L = 1 / length_L
        lengths_B = random.choice(length_L, self._num_rows, p=share_L / share_L.sum())
        lengths_B[0] = self._longest  # or the padded side would have it easier in some batches
        layout = JaggedLayout.from_offsets(np.cumsum([0, *lengths_B]), self._device)
        generator = torch.Generator().manual_seed(number)
        inputs = [
            torch.randn(layout.num_tokens, *self._shape, generator=generator)
            .to(self._device, self._dtype)
            .requires_grad_()
            for _ in range(3)
        ]
        bias = self._bias(layout, generator) if self._biased else None
        scale = self._shape[1] ** -0.5
        return AttentionCall(*inputs, layout, layout, self._scoring, Causal(), bias, scale)

    def _bias(self, layout: JaggedLayout, generator: torch.Generator) -> RelativeBias:
        """Tables as HSTU has them, and times that grow by anything from seconds to weeks."""
        apart_N = 10 ** (7 * torch.rand(layout.num_tokens, generator=generator, dtype=torch.float64))
        times_N = apart_N.cumsum(0).long().to(self._device)
        place_HP, time_HD = (
            torch.randn(self._shape[0], size, generator=generator).to(self._device).requires_grad_()
            for size in (2 * self._longest - 1, TIME_BUCKETS)
        )
        return RelativeBias(place_HP, time_HD, times_N, times_N)

    def rate(self, attend: Callable[[AttentionCall], Tensor], num_batches: int = 2) -> float:
        """Batches per second, forward and backward, of new lengths each."""
        calls = [self.call(number) for number in range(num_batches)]
        started = time.perf_counter()
        for call in calls:
            forward_backward(attend, call)
        return num_batches / (time.perf_counter() - started)


def forward_backward(attend: Callable[[AttentionCall], Tensor], call: AttentionCall) -> None:
    out_NHE = attend(call)
    torch.autograd.grad(out_NHE, call.inputs, torch.ones_like(out_NHE))


def padded_softmax(call: AttentionCall) -> Tensor:
    """Attention on padded rows as it is usually written."""
    query, key, value = (call.queries.pad(x).transpose(1, 2) for x in call.inputs)
    out_BHTE = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return call.queries.unpad(out_BHTE.transpose(1, 2))


def padded_silu(call: AttentionCall) -> Tensor:
    """HSTU's attention as its authors' reference implementation writes it in PyTorch."""
    assert isinstance(call.scoring, Silu)
    query, key, value = (call.queries.pad(x) for x in call.inputs[:3])
    scores_BHTS = torch.einsum("bthc,bshc->bhts", query, key) * call.scale
    if call.bias is not None:
        scores_BHTS = scores_BHTS + _padded_bias(call, call.bias)
    weights_BHTS = functional.silu(scores_BHTS) / call.scoring.length
    seen_TS = torch.ones(call.keys.longest, call.keys.longest, dtype=weights_BHTS.dtype, device=query.device)
    weights_BHTS = weights_BHTS * seen_TS.tril()
    return call.queries.unpad(torch.einsum("bhts,bshe->bthe", weights_BHTS, value))


def _padded_bias(call: AttentionCall, bias: RelativeBias) -> Tensor:
    """[B, H, T, T]: entries of two tables, by distance of places and by logarithm of that of times."""
    place_HP, time_HD, times_N = bias.place_HP, bias.time_HD, bias.query_time_N
    assert place_HP is not None
    assert time_HD is not None
    assert times_N is not None
    place_T = torch.arange(call.keys.longest, device=times_N.device)
    places_HTT = place_HP[:, place_T[:, None] - place_T + place_HP.shape[1] // 2]
    times_BT = call.queries.pad(times_N)
    apart_BTT = (times_BT[:, :, None] - times_BT[:, None]).abs().clamp(min=1)
    bucket_BTT = (apart_BTT.log() / LOG_WIDTH).long().clamp(max=time_HD.shape[1] - 1)
    return places_HTT + time_HD.T[bucket_BTT].permute(0, 3, 1, 2)


def _ratios(
    name: str, ours: Callable[[], float], peer: Callable[[], float], options: BenchOptions
) -> list[float]:
    from benchmarks.harness import interleaved
    from rayrec.platform.console import log

    def show(a: float, b: float) -> None:
        log.print(f"{name}: {a:.1f} batches/s, peer {b:.1f}, ratio {a / b:.2f}", highlight=False)

    interleaved(ours, peer, repeats=1)  # thrown away
    return interleaved(ours, peer, options.pairs, show)


def on_gpu(cases: Sequence[tuple[int, int, int, int]] = GPU_CASES, device: str = "cuda") -> dict[str, Any]:
    """Times and rates of the GPU's backends, over all cases.

    Args:
        device: "cpu" times the same calls with the host's clock, to check this program.
    """
    matrix_rate = matrix_products_per_s(device=device)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "bf16_matrix_tflops": matrix_rate / 1e12,
        "cases": [],
    }
    for num_rows, longest, heads, width in cases:
        for scoring, biases, names in (
            (Silu(float(longest)), "", ("triton",)),
            (Silu(float(longest)), "places and times", ("triton",)),
            (Silu(float(longest)), "places", ("triton",)),
            (Silu(float(longest)), "times", ("triton",)),
            (Softmax(), "", ("triton", "flex", "sdpa")),
        ):
            made = Batches(num_rows, longest, scoring, heads, width, device, torch.bfloat16, bool(biases))
            call = _with_biases(made.call(), biases)
            for name in names:
                label = f"{type(scoring).__name__} {name} {biases}".rstrip()
                case = {"rows": num_rows, "longest": longest, "heads": heads, "width": width, "what": label}
                try:
                    found["cases"].append(case | _gpu_case(BACKENDS[name], call, matrix_rate))
                except (RuntimeError, ValueError) as error:  # out of memory, on padded rows
                    found["cases"].append(case | {"error": str(error)[:200]})
                    if device == "cuda":
                        torch.cuda.empty_cache()
                print(json.dumps(found["cases"][-1]), file=sys.stderr, flush=True)
    return found


def _with_biases(call: AttentionCall, biases: str) -> AttentionCall:
    """The call with its biases, or one kind of them."""
    if call.bias is None or biases == "places and times":
        return call
    bias = call.bias
    alone = RelativeBias(bias.place_HP)
    if biases == "times":
        alone = RelativeBias(None, bias.time_HD, bias.query_time_N, bias.key_time_M)
    return replace(call, bias=alone)


def _gpu_case(backend: Backend, call: AttentionCall, matrix_rate: float) -> dict[str, Any]:
    if (reason := backend.why_not(call)) is not None:
        raise ValueError(reason)
    lengths_B = call.queries.lengths_B
    num_pairs = float((lengths_B * (lengths_B + 1) // 2).sum())
    operations = 7 * 2 * num_pairs * call.query_NHC.shape[1] * call.query_NHC.shape[2]
    offsets_B1, device = call.queries.offsets_B1, call.queries.device
    ready_s = device_seconds(partial(forward_backward, backend.attend, call), device)
    with torch.no_grad():
        forward_s = device_seconds(partial(backend.attend, call), device)

    def with_new_lengths() -> None:
        layout = JaggedLayout.from_offsets(offsets_B1, device)  # which has nothing prepared
        forward_backward(backend.attend, replace(call, queries=layout, keys=layout))

    return {
        "tokens": call.queries.num_tokens,
        "ms": 1e3 * ready_s,
        "forward_ms": 1e3 * forward_s,
        "ms_with_new_lengths": 1e3 * device_seconds(with_new_lengths, device),
        "tflops": operations / ready_s / 1e12,
        "share_of_matrix_rate": operations / ready_s / matrix_rate,
        "peak_mb": _peak_mb(backend, call),
    }


def _peak_mb(backend: Backend, call: AttentionCall) -> float | None:
    if call.queries.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward_backward(backend.attend, call)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def matrix_products_per_s(size: int = 8192, device: str = "cuda") -> float:
    """Floating-point operations per second of one large product in bfloat16."""
    size = size if device == "cuda" else 256
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / device_seconds(lambda: one @ other, torch.device(device))


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of the times between events on the device, after runs that compile and warm up."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    for _ in range(3):
        work()
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return float(np.median(times))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args(arguments).device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("this part needs a CUDA device; for the bars of a CPU, run: rayrec bench attention")
    print(json.dumps(on_gpu(GPU_CASES if device == "cuda" else CPU_CASES, device)))


if __name__ == "__main__":
    main()
