"""Settings that all models share; those of one model are beside its network."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rayrec.models.base.dense_optimizer import Decayed
from rayrec.platform.config import Config
from rayrec.platform.devices import Device

Attention = Literal[
    "auto", "measured", "reference", "sdpa", "flex", "bucketed", "grouped", "triton", "ascend"
]
"""Which backend computes attention. `auto` follows a fixed rule of device and lengths, so that runs repeat to
the bit. `measured` times the backends in each trainer, once for each class of shapes, and writes its choice
into the run's folder, from which a resumed run reads it. A name demands one backend; see
`rayrec.models.attention`."""

Scheme = Literal["w8a8", "w8a8_static", "w8a16", "w4a16", "fp8"]
"""`w8a8`: weights int8 by output channel, activations int8 by row, scaled when they are computed.
`w8a8_static`: one scale for all activations of a layer, from calibration. `w8a16`, `w4a16`: weights int8
by output channel, or int4 by groups of inputs; activations stay as they are. `fp8`: both float8 (e4m3),
weights by output channel, activations by row."""
GroupSize = Literal[32, 64, 128]
KernelName = Literal[
    "auto", "reference", "float32", "fbgemm", "int4_weights", "torch_int8", "torch_fp8", "ascend_int8"
]
"""What computes the products. `auto`: the first that the device has for the scheme. A name demands one, and
is refused where it cannot compute."""


class QuantizationConfig(Config):
    """How linear layers of a network are quantized. `rayrec quantize` writes it; nothing trains with it."""

    scheme: Scheme
    group_size: GroupSize | None = None
    """Inputs that share a scale, of `w4a16`."""
    weight_bits: Literal[7, 8] = 8
    """Of `w8a8` and `w8a8_static`: 7 uses half of the range of int8, which CPUs without VNNI can multiply
    without overflow; see `rayrec.models.quantization.kernels`."""
    modules: tuple[str, ...] = Field(min_length=1)
    """Names of the linear layers that are quantized; all others stay as they were trained."""
    kernel: KernelName = "auto"

    @model_validator(mode="after")
    def _groups_are_of_int4(self) -> Self:
        if (self.group_size is not None) != (self.scheme == "w4a16"):
            raise ValueError(
                f"model.quantization.group_size is {self.group_size} and the scheme {self.scheme!r}: "
                "w4a16 has groups of 32, 64 or 128 inputs, and no other scheme has any"
            )
        return self

    @model_validator(mode="after")
    def _half_ranges_are_of_int8_products(self) -> Self:
        if self.weight_bits == 7 and self.scheme not in ("w8a8", "w8a8_static"):
            raise ValueError(
                f"model.quantization.weight_bits is 7 and the scheme {self.scheme!r}: it is about products "
                "of int8, which w8a8 and w8a8_static have"
            )
        return self


class ModelConfig(Config):
    """Settings of a model, a run's section `model`, and what the pipeline asks about the model.

    Derive from `SequenceModelConfig` (the next item of a history) or `ImpressionModelConfig` (labels of what
    is shown). `rayrec.models.registry.MODELS` says which class a name stands for.
    """

    name: str
    """Overridden as `name: Literal["..."]`; by this name a run's settings choose the model."""
    quantization: QuantizationConfig | None = None
    """How its linear layers are quantized: of a run that `rayrec quantize` wrote. None: they are not."""

    not_compiled_because: ClassVar[str | None] = None
    """Why `training.compile` would have no effect; None where it has one."""
    not_sharded_because: ClassVar[str | None] = None
    """Why `training.parallel` cannot be `fsdp2`; None where it can."""

    @property
    def tables(self) -> dict[str, int]:
        """Embedding tables whose rows the model reads: width of the rows by name."""
        return {}

    @property
    def init_scales(self) -> dict[str, float]:
        """Of tables whose new rows are not of the size that `sparse.init_scale` says: theirs, by name."""
        return {}

    def check_device(self, device: Device) -> None:
        """Refuse settings that the device cannot train.

        Raises:
            ValueError: the settings ask for what cannot be trained on the device.
        """

    def with_absolute_paths(self) -> Self:
        """The same settings, readable from any working directory."""
        return self

    def for_inference(self) -> Self:
        """The same model without what matters in training only, and for any device."""
        return self


class DenseOptimizerConfig(Config):
    """AdamW of the dense weights."""

    learning_rate: float = Field(1e-3, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    decayed: Decayed = "all"
    """What the weight decay reaches: `all` weights, `matrices` (no norms and biases), or `linear` (neither
    those nor rows of embeddings: words of a pretrained language model would shrink in every step)."""
    max_grad_norm: float | None = Field(None, gt=0.0)
