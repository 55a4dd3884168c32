"""Settings that all models share; those of one model are beside its network."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field

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


class ModelConfig(Config):
    """Settings of a model, a run's section `model`, and what the pipeline asks about the model.

    Derive from `SequenceModelConfig` (the next item of a history) or `ImpressionModelConfig` (labels of what
    is shown). `rayrec.models.registry.MODELS` says which class a name stands for.
    """

    name: str
    """Overridden as `name: Literal["..."]`; by this name a run's settings choose the model."""

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
