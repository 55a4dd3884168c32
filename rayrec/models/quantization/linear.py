"""The quantized layer: its numbers are parameters under the names of the compressed-tensors layout.

    weight          [O, K] int8; of fp8 its bytes, since NumPy has no such type
    weight_packed   [O, K / 8] int32, in the place of `weight`, of w4a16; with weight_shape [2]
    weight_scale    [O, G] float32
    input_scale     [1] float32, of w8a8_static
    bias            [O] float32

A kernel packs them in its own way when the layer is first asked, and again when the layer was moved. Code
that writes into the parameters later calls `after_load` or `forget_packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from rayrec.models.base.config import QuantizationConfig
from rayrec.models.quantization import kernels
from rayrec.models.quantization.schemes import (
    FLOAT8,
    QuantizedWeight,
    packed_int32,
    product,
    unpacked_int32,
)
from rayrec.platform.devices import without_autocast
from rayrec.platform.errors import InputError

_NAMELESS = "a quantized layer"


class QuantizedLinear(nn.Module):
    """[..., K] to [..., O], as `nn.Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        settings: QuantizationConfig,
        device: torch.device | None = None,
    ) -> None:
        """Without numbers: its weights are zero until they are loaded, or `take` is called.

        Raises:
            ValueError: groups do not divide the inputs.
        """
        super().__init__()
        self.in_features, self.out_features, self.settings = in_features, out_features, settings
        check_width(in_features, settings)
        num_groups = 1 if settings.group_size is None else in_features // settings.group_size

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            # Of `torch.empty`, which gives shapes alone where a network is made without memory.
            made = torch.empty(*shape, dtype=dtype, device=device)
            return nn.Parameter(made.zero_(), requires_grad=False)

        if settings.scheme == "w4a16":
            self.weight_packed = numbers(out_features, in_features // 8, dtype=torch.int32)
            self.weight_shape = numbers(2, dtype=torch.int64)
        else:
            dtype = torch.uint8 if settings.scheme == "fp8" else torch.int8
            self.weight = numbers(out_features, in_features, dtype=dtype)
        self.weight_scale = numbers(out_features, num_groups)
        self.input_scale = numbers(1) if settings.scheme == "w8a8_static" else None
        self.bias = numbers(out_features) if bias else None
        self._product: kernels.Product | None = None
        self._kernel: str | None = None

    def take(self, weight: QuantizedWeight) -> None:
        """Take the numbers of a layer of the same shape."""
        values_OK = weight.values_OK
        if self.settings.scheme == "w4a16":
            self.weight_packed.data = packed_int32(values_OK, 4)
            self.weight_shape.data = torch.tensor(values_OK.shape, device=values_OK.device)
        else:
            self.weight.data = values_OK.view(torch.uint8) if values_OK.dtype == FLOAT8 else values_OK
        self.weight_scale.data = weight.scale_OG
        if self.input_scale is not None:
            assert weight.input_scale is not None, "of a scheme with one"
            self.input_scale.data = weight.input_scale
        if self.bias is not None:
            assert weight.bias_O is not None, "of a layer with one"
            self.bias.data = weight.bias_O
        self.forget_packed()

    @property
    def quantized(self) -> QuantizedWeight:
        """Its numbers as they are now."""
        scheme = self.settings.scheme
        if scheme == "w4a16":
            values_OK = unpacked_int32(self.weight_packed.detach(), 4)
        else:
            values_OK = self.weight.detach()
            if scheme == "fp8":
                values_OK = values_OK.view(FLOAT8)
        return QuantizedWeight(
            self.settings,
            values_OK,
            self.weight_scale.detach(),
            None if self.bias is None else self.bias.detach(),
            None if self.input_scale is None else self.input_scale.detach(),
        )

    def forget_packed(self) -> None:
        """The parameters have changed, or moved to another device."""
        self._product = self._kernel = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        super()._apply(fn, recurse)
        self.forget_packed()  # what is packed stays where it was
        return self

    def after_load(self, name: str) -> None:
        """Choose the kernel and let it pack the numbers, as `TorchProgram` asks when it has loaded them.

        Args:
            name: of the layer, for messages.

        Raises:
            InputError: scales are not finite or not positive, or the kernel that the settings name cannot
                compute here.
        """
        weight = self.quantized
        for which, scale in (("weight", weight.scale_OG), ("input", weight.input_scale)):
            if scale is not None and not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise InputError(
                    f"{name}: {which} scales of the quantized layer are not finite and positive, so that it "
                    "computes nothing; quantize the run again"
                )
        kernel = kernels.chosen(weight, weight.scale_OG.device, name)
        with torch.inference_mode(False), torch.no_grad():
            self._product, self._kernel = kernel.pack(weight), kernel.name

    @property
    def kernel(self) -> str:
        """Name of the kernel that computes it."""
        if self._kernel is None:
            self.after_load(_NAMELESS)
        assert self._kernel is not None, "it is packed"
        return self._kernel

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return product(x, self.quantized)  # of tensors alone, which a program takes as inputs
        if self._product is None:
            self.after_load(_NAMELESS)
            assert self._product is not None, "it is packed"
        if x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type):
            return self._product(x)
        # Kernels take float32, and autocast would round the sums of those that hold numbers as float32.
        with without_autocast(x.device):
            return self._product(x.float()).to(x.dtype)

    def __getstate__(self) -> dict[str, object]:
        """Without what is packed, which is of this process."""
        return self.__dict__ | {"_product": None, "_kernel": None}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.settings.scheme}, kernel={self._kernel}"


def check_width(width: int, settings: QuantizationConfig, name: str = "a layer") -> None:
    """Refuse groups that do not divide the inputs of a layer.

    Raises:
        ValueError: names the layer and the widths.
    """
    if settings.group_size is not None and width % settings.group_size:
        fitting = [size for size in (128, 64, 32) if width % size == 0]
        otherwise = f"take groups of {fitting[0]}" if fitting else "take w8a16, which has no groups"
        raise ValueError(
            f"{name} has {width} inputs, which groups of {settings.group_size} do not divide; {otherwise}"
        )


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Those of a network, by name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def with_quantized_layers(model: nn.Module, settings: QuantizationConfig) -> nn.Module:
    """The network, its named linear layers replaced by quantized ones without numbers.

    Raises:
        InputError: there is no such linear layer, or groups do not divide its inputs.
    """
    layers = dict(model.named_modules())
    for name in settings.modules:
        layer = layers.get(name)
        if not isinstance(layer, nn.Linear):
            raise InputError(
                f"model.quantization.modules: the network has no linear layer {name!r}; the config was "
                "changed after the run was quantized"
            )
        try:
            replace_layer(model, name, empty_like(layer, settings))
        except ValueError as error:
            raise InputError(f"model.quantization: {name}: {error}") from error
    return model


def empty_like(layer: nn.Linear, settings: QuantizationConfig) -> QuantizedLinear:
    """A quantized layer of the shape of another, without numbers."""
    bias = layer.bias is not None
    return QuantizedLinear(layer.in_features, layer.out_features, bias, settings, layer.weight.device)


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)
