"""A network on its way to a quantized one: what is decided of each layer, put in place and taken back.

    choices: scales of each norm ─┐
             clipping             ├─► draft ─► the network as these choices make it ─► more choices
             layers in float32  ──┘                                              └─► finished: settings

The layers as they were trained are kept aside until it is finished, so that every choice can be undone to the
bit. Axes: as in `schemes`; S sample rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.models.base.config import QuantizationConfig
from rayrec.models.quantization import awq
from rayrec.models.quantization.folding import Readers, readers_of
from rayrec.models.quantization.linear import empty_like, replace_layer
from rayrec.models.quantization.observers import InputObserver
from rayrec.models.quantization.schemes import (
    MOST_INT8,
    QuantizedWeight,
    product,
    quantize_weight,
    reads_numbers,
)

_STATIC_SHARES = tuple(1.0 - step / 20 for step in range(15))
"""Of the largest input, that are tried as the end of the one range of `w8a8_static`."""


@dataclass(frozen=True)
class Seen:
    """Inputs of a layer, after what was folded."""

    largest_K: Tensor
    mean_K: Tensor
    sample_SK: Tensor

    @classmethod
    def of(cls, observer: InputObserver) -> Seen:
        return cls(observer.largest_K, observer.mean_K, observer.sample_SK)

    def over(self, scale_K: Tensor) -> Seen:
        return Seen(self.largest_K / scale_K, self.mean_K / scale_K, self.sample_SK / scale_K)


@dataclass
class Fold:
    """Scales that may move from what reads a norm into it."""

    readers: Readers
    trained: tuple[Tensor, Tensor | None]
    """Weight and bias of the norm."""
    scale_K: Tensor | None = None


class Draft:
    """Changes the network: of its layers, and norms before them, only as it is told."""

    def __init__(
        self,
        model: nn.Module,
        observers: Mapping[str, InputObserver],
        settings: QuantizationConfig,
        names: Sequence[str],
    ) -> None:
        """
        Args:
            settings: their `modules` say nothing yet.
            names: of the linear layers that may be quantized.
        """
        self.settings = settings
        self._model = model
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        self._seen = {name: Seen.of(observers[name]) for name in names}
        self._in_float: set[str] = set()
        self._clipped: set[str] = set()
        self.folds = [
            Fold(readers, _copied(readers.norm))
            for readers in readers_of(model)
            if set(readers.layers) <= set(names)
        ]
        self._fold_of = {name: fold for fold in self.folds for name in fold.readers.layers}

    @property
    def names(self) -> list[str]:
        return list(self._layers)

    @property
    def can_clip(self) -> bool:
        """Whether ranges of weights may be clipped: where activations are quantized too, they are not."""
        return not reads_numbers(self.settings)

    def num_weights(self, name: str) -> int:
        return int(self._layers[name].weight.numel())

    def is_clipped(self, name: str) -> bool:
        return name in self._clipped

    def seen(self, name: str) -> Seen:
        """Inputs of a layer, after what is folded."""
        found, scale_K = self._seen[name], self._scale_of(name)
        return found if scale_K is None else found.over(scale_K)

    def weight(self, name: str) -> Tensor:
        """[O, K] float32 of a layer, on the host, after what is folded."""
        weight_OK = self._layers[name].weight.detach().float().cpu()
        scale_K = self._scale_of(name)
        return weight_OK if scale_K is None else weight_OK * scale_K

    def fold(self, fold: Fold, scale_K: Tensor | None) -> None:
        """Move scales; None: leave the norm as it was trained. Layers that are in place follow."""
        fold.scale_K = scale_K
        _write(fold.readers.norm, fold.trained)
        if scale_K is not None:
            fold.readers.divide(scale_K)
        self._refresh(fold.readers.layers)

    def clip(self, name: str, clips: bool) -> None:
        (self._clipped.add if clips else self._clipped.discard)(name)
        self._refresh([name])

    def keep_in_float(self, name: str, keeps: bool) -> None:
        (self._in_float.add if keeps else self._in_float.discard)(name)
        self._refresh([name])

    def put_in_place(self) -> None:
        """From now on the network computes as the choices say."""
        for name in self._layers:
            replace_layer(self._model, name, self._made(name))

    def finish(self, on_layer: Callable[[int, int], None] | None = None) -> QuantizationConfig:
        """Put what is chosen in place for good; returns the settings that make the network again.

        Args:
            on_layer: called with (layers done, all).
        """
        names, total = self.names, len(self._layers)
        for done, name in enumerate(names, start=1):
            replace_layer(self._model, name, self._made(name))
            del self._layers[name]  # a large network is not held twice
            if on_layer is not None:
                on_layer(done, total)
        modules = tuple(name for name in names if name not in self._in_float)
        return self.settings.model_copy(update={"modules": modules})

    def _scale_of(self, name: str) -> Tensor | None:
        fold = self._fold_of.get(name)
        return None if fold is None else fold.scale_K

    def _refresh(self, names: Iterable[str]) -> None:
        for name in names:
            if self._model.get_submodule(name) is not self._layers[name]:
                replace_layer(self._model, name, self._made(name))

    def _made(self, name: str) -> nn.Module:
        layer = self._layers[name]
        if name in self._in_float:
            return self._float_layer(name)
        made = empty_like(layer, self.settings)
        made.take(self._quantized(name))
        return made

    def _float_layer(self, name: str) -> nn.Module:
        layer, scale_K = self._layers[name], self._scale_of(name)
        has_bias = layer.bias is not None
        made = nn.Linear(layer.in_features, layer.out_features, has_bias, device=layer.weight.device)
        weight_OK = layer.weight.detach()
        made.weight = nn.Parameter(
            weight_OK.clone() if scale_K is None else weight_OK * scale_K.to(weight_OK.device)
        )
        if has_bias:
            made.bias = nn.Parameter(layer.bias.detach().clone())
        return made.requires_grad_(False)

    def _quantized(self, name: str) -> QuantizedWeight:
        layer, seen, weight_OK = self._layers[name], self.seen(name), self.weight(name)
        shrink_OG = None
        if name in self._clipped:
            shrink_OG = awq.clipped(weight_OK, seen.sample_SK, self.settings)
        values_OK, scale_OG = quantize_weight(weight_OK, self.settings, shrink_OG)
        input_scale, bias_O, device = _input_scale(seen, self.settings), layer.bias, layer.weight.device
        return QuantizedWeight(
            self.settings,
            values_OK.to(device),
            scale_OG.to(device),
            None if bias_O is None else bias_O.detach().float().clone(),
            None if input_scale is None else input_scale.to(device),
        )


def error_of_outputs(seen: Seen, weights: Sequence[Tensor], settings: QuantizationConfig) -> float:
    """Sum of the squared errors of the layers' outputs."""
    total = 0.0
    for weight_OK in weights:
        made = QuantizedWeight(
            settings, *quantize_weight(weight_OK, settings), input_scale=_input_scale(seen, settings)
        )
        error_SO = product(seen.sample_SK, made) - seen.sample_SK @ weight_OK.T
        total += float(error_SO.square().sum())
    return total


def _input_scale(seen: Seen, settings: QuantizationConfig) -> Tensor | None:
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


def _copied(norm: Any) -> tuple[Tensor, Tensor | None]:
    bias = getattr(norm, "bias", None)
    return norm.weight.detach().clone(), None if bias is None else bias.detach().clone()


def _write(norm: Any, trained: tuple[Tensor, Tensor | None]) -> None:
    weight, bias = trained
    with torch.no_grad():
        norm.weight.copy_(weight)
        if bias is not None:
            norm.bias.copy_(bias)
