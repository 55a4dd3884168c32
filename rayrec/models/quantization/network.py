"""A trained network to a quantized one.

    network, inputs that were observed
      ─► which layers          those that were asked, heads of vocabularies aside
      ─► scales                folded into norms: SmoothQuant or AWQ, chosen by the error of outputs
      ─► clipping              of weights alone
      ─► numbers               of every layer, in the place of the layer

The network is changed. Axes: as in `schemes`; S sample rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.models.base.config import GroupSize, KernelName, QuantizationConfig, Scheme
from rayrec.models.quantization import awq, smoothing
from rayrec.models.quantization.folding import Readers, readers_of
from rayrec.models.quantization.linear import check_width, empty_like, replace_layer
from rayrec.models.quantization.observers import InputObserver
from rayrec.models.quantization.schemes import (
    MOST_INT8,
    QuantizedWeight,
    product,
    quantize_weight,
    reads_numbers,
)
from rayrec.platform.devices import device_of
from rayrec.platform.errors import InputError

_STATIC_SHARES = tuple(1.0 - step / 20 for step in range(15))
"""Of the largest input, that are tried as the end of the one range of `w8a8_static`."""


@dataclass(frozen=True)
class QuantizationPlan:
    """What is wanted of a network."""

    scheme: Scheme
    group_size: GroupSize | None = None
    """None: 32, of `w4a16`."""
    weight_bits: int | None = None
    """None: 7 where products of int8 are to be computed by a CPU, whichever it is, else 8."""
    kernel: KernelName = "auto"
    scales: bool = True
    """Whether scales are moved into norms, and ranges clipped; without, it is plain rounding."""
    strength: float | None = None
    """Exponent of SmoothQuant; None: chosen for each norm."""

    def settings(self, modules: Iterable[str], device: torch.device) -> QuantizationConfig:
        """The section `model.quantization` of what comes of it.

        Args:
            device: where the network computes.

        Raises:
            InputError: the plan's parts do not fit together.
        """
        is_of_int8 = self.scheme in ("w8a8", "w8a8_static")
        bits = 7 if is_of_int8 and not device_of(device).has_own_memory else 8
        values: dict[str, Any] = {
            "scheme": self.scheme,
            "group_size": self.group_size or (32 if self.scheme == "w4a16" else None),
            "weight_bits": self.weight_bits or bits,
            "modules": tuple(modules),
            "kernel": self.kernel,
        }
        return QuantizationConfig.parse(values, "quantization")


def quantize(
    model: nn.Module,
    observers: Mapping[str, InputObserver],
    plan: QuantizationPlan,
    on_layer: Callable[[int, int], None] | None = None,
) -> QuantizationConfig:
    """Quantize a network in its place.

    Args:
        observers: of `observers.observed`, on inputs as they will be.
        on_layer: called with (layers done, all).

    Returns:
        The settings by which it is made again (`linear.with_quantized_layers`).

    Raises:
        InputError: no linear layer was asked, groups do not divide one's inputs, or weights or inputs are
            not finite.
    """
    names = layers_to_quantize(model, observers)
    device: Any = model.get_submodule(names[0]).weight.device
    settings = plan.settings(names, device)
    for name in names:
        layer: Any = model.get_submodule(name)
        try:
            check_width(layer.in_features, settings, name)
        except ValueError as error:
            raise InputError(str(error)) from error
        _check_finite(name, layer, observers[name])
    seen = {name: _Seen.of(observers[name]) for name in names}
    if plan.scales:
        for readers in readers_of(model):
            if set(readers.layers) <= set(names):
                _fold_best(model, readers, seen, settings, plan.strength)
    for done, name in enumerate(names, start=1):
        layer = model.get_submodule(name)
        made = empty_like(layer, settings)
        made.take(_quantized(layer, seen[name], settings, plan.scales))
        replace_layer(model, name, made)
        if on_layer is not None:
            on_layer(done, len(names))
    return settings


def layers_to_quantize(model: nn.Module, observers: Mapping[str, InputObserver]) -> list[str]:
    """Linear layers that are asked for their products, but for heads of vocabularies.

    A layer whose weight is read by the module around it, and that is never called, computes in its own way.
    Rounding a head moves all scores, and its rows are those of the embeddings in many networks.

    Raises:
        InputError: there is none.
    """
    heads = {
        id(module.get_output_embeddings())  # type: ignore[operator]
        for module in model.modules()
        if hasattr(module, "get_output_embeddings")
    }
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name in observers and id(module) not in heads
    ]
    if not names:
        raise InputError(
            f"{type(model).__name__} has no linear layer that answers, so that nothing can be quantized; its "
            "products are of tables and vectors alone"
        )
    return names


@dataclass(frozen=True)
class _Seen:
    """Inputs of a layer, after what was folded."""

    largest_K: Tensor
    mean_K: Tensor
    sample_SK: Tensor

    @classmethod
    def of(cls, observer: InputObserver) -> _Seen:
        return cls(observer.largest_K, observer.mean_K, observer.sample_SK)

    def over(self, scale_K: Tensor) -> _Seen:
        return _Seen(self.largest_K / scale_K, self.mean_K / scale_K, self.sample_SK / scale_K)


def _fold_best(
    model: nn.Module,
    readers: Readers,
    seen: dict[str, _Seen],
    settings: QuantizationConfig,
    strength: float | None,
) -> None:
    """Fold the scales with the least error of the layers' outputs, if there are better ones than none."""
    first = seen[readers.layers[0]]
    layers: list[Any] = [model.get_submodule(name) for name in readers.layers]
    weights = [layer.weight.detach().float().cpu() for layer in layers]
    if reads_numbers(settings):
        tried = smoothing.candidates(first.largest_K, weights, strength)
    else:
        tried = awq.candidates(first.mean_K)
    best: Tensor | None = None
    least = _error(first, weights, settings) if strength is None else torch.inf
    for scale_K in tried:
        error = _error(first.over(scale_K), [weight * scale_K for weight in weights], settings)
        if error < least:
            best, least = scale_K, error
    if best is None:
        return
    readers.fold(model, best.to(layers[0].weight.device))
    for name in readers.layers:
        seen[name] = seen[name].over(best)


def _error(seen: _Seen, weights: Sequence[Tensor], settings: QuantizationConfig) -> float:
    """Sum of the squared errors of the layers' outputs."""
    total = 0.0
    for weight_OK in weights:
        made = QuantizedWeight(
            settings, *quantize_weight(weight_OK, settings), input_scale=_input_scale(seen, settings)
        )
        error_SO = product(seen.sample_SK, made) - seen.sample_SK @ weight_OK.T
        total += float(error_SO.square().sum())
    return total


def _quantized(layer: Any, seen: _Seen, settings: QuantizationConfig, clips: bool) -> QuantizedWeight:
    weight_OK = layer.weight.detach().float().cpu()
    shrink_OG = None
    if clips and not reads_numbers(settings):
        shrink_OG = awq.clipped(weight_OK, seen.sample_SK, settings)
    values_OK, scale_OG = quantize_weight(weight_OK, settings, shrink_OG)
    input_scale, bias_O, device = _input_scale(seen, settings), layer.bias, layer.weight.device
    return QuantizedWeight(
        settings,
        values_OK.to(device),
        scale_OG.to(device),
        None if bias_O is None else bias_O.detach().float().clone(),
        None if input_scale is None else input_scale.to(device),
    )


def _input_scale(seen: _Seen, settings: QuantizationConfig) -> Tensor | None:
    """[1] the one scale of all inputs of `w8a8_static`: of the least squared error on the sample."""
    if settings.scheme != "w8a8_static":
        return None
    largest = seen.largest_K.amax().clamp(min=1e-6)
    best, least = largest / MOST_INT8, torch.inf
    for share in _STATIC_SHARES:
        scale = share * largest / MOST_INT8
        numbers_SK = (seen.sample_SK / scale).round().clamp(-MOST_INT8, MOST_INT8)
        error = float((numbers_SK * scale - seen.sample_SK).square().sum())
        if error < least:
            best, least = scale, error
    return best[None]


def _check_finite(name: str, layer: Any, observer: InputObserver) -> None:
    if not bool(torch.isfinite(layer.weight).all()):
        raise InputError(
            f"{name}: the weights are not finite, so that no scale can be had of them; take an earlier "
            "snapshot"
        )
    if not observer.is_finite:
        raise InputError(
            f"{name}: its inputs on the calibration data are not finite, so that no scale can be had of "
            "them; take an earlier snapshot, or look at the run's loss"
        )
