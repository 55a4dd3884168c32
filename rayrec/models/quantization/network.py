"""A trained network to a quantized one.

    network, inputs that were observed
      ─► which layers          those that were asked, heads of vocabularies aside
      ─► scales                folded into norms: SmoothQuant or AWQ
      ─► clipping              of weights alone
      ─► layers in float32     where the answers are too far without
      ─► numbers               of every other layer, in the place of the layer

How these are chosen is in `choices`. The network is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.models.base.config import GroupSize, KernelName, QuantizationConfig, Scheme
from rayrec.models.quantization.choices import (
    Divergence,
    choose_by_divergence,
    choose_by_outputs,
    keep_in_float,
)
from rayrec.models.quantization.draft import Draft
from rayrec.models.quantization.linear import check_width
from rayrec.models.quantization.observers import InputObserver
from rayrec.models.quantization.schemes import reads_numbers
from rayrec.platform.devices import device_of
from rayrec.platform.errors import InputError

_WANTED = 5e-5
"""Lists of ten then share about 98 % of their items: of the models that were measured."""


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
    """Exponent of SmoothQuant, for all norms; None: chosen for each norm, which may also have no scales."""
    most_divergence: float | None = None
    """Nats that first choices may be away by: until then, layers stay in float32. None: 5e-5 of schemes that
    quantize activations to 8 bits, and any of others, which lose more by their weights."""

    @property
    def divergence_wanted(self) -> float:
        if self.most_divergence is not None:
            return self.most_divergence
        return _WANTED if self.scheme in ("w8a8", "w8a8_static") else math.inf

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
    divergence: Divergence | None = None,
) -> QuantizationConfig:
    """Quantize a network in its place.

    Args:
        observers: of `observers.observed`, on inputs as they will be.
        on_layer: called with (layers done, all).
        divergence: of the network as it is when this is called from what it was; None: layers are looked at
            one by one.

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
    draft = Draft(model, observers, settings, names)
    if plan.scales:
        choose_by_outputs(draft, plan.strength)
    if plan.scales and divergence is not None:
        # AWQ has no strength: its scales are chosen in any case.
        is_given = plan.strength is not None and reads_numbers(settings)
        least = choose_by_divergence(draft, divergence, scales_are_fixed=is_given)
        keep_in_float(draft, divergence, least, plan.divergence_wanted)
    return draft.finish(on_layer)


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
