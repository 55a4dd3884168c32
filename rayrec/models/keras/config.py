"""Settings of a ranking model that is written in Keras."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from rayrec.models.ctr.config import ImpressionModelConfig
from rayrec.platform.devices import Device
from rayrec.platform.functions import FunctionName
from rayrec.platform.impression_schema import ImpressionSchema

if TYPE_CHECKING:
    from rayrec.models.base.compute import ComputeSettings
    from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
    from rayrec.models.ctr.losses import LabelLoss
    from rayrec.models.keras.model import KerasModel
    from rayrec.models.program.program import ProgramSpec


class KerasModelConfig(ImpressionModelConfig):
    """A function of yours makes the model; it is trained as those that come with us are."""

    name: Literal["keras"]
    builder: FunctionName
    """`module:function`, called with the `ImpressionSchema`, `dim` and `arguments`; it returns a functional
    `keras.Model`, whose inputs have the names of columns (see `rayrec.models.keras.inputs`) and which gives
    logits, one for each label."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Of the function, by name."""
    folder: Path | None = None
    """Where its module is, if Python does not find it by itself."""
    backend: Literal["tensorflow", "torch"] = "tensorflow"
    """What Keras computes with. One process has one."""

    def with_absolute_paths(self) -> Self:
        return self if self.folder is None else self.model_copy(update={"folder": self.folder.resolve()})

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> KerasModel:
        raise AssertionError("a Keras model is built for a device; see `network` and `program`")

    def network(
        self, schema: ImpressionSchema, seed: int, device: Device, compute: ComputeSettings
    ) -> KerasModel:
        from rayrec.models.keras.build import build_keras_model
        from rayrec.models.keras.program import check_compute

        model = build_keras_model(self, schema, seed, device)
        check_compute(compute, model)
        return model

    def program(self, schema: ImpressionSchema, optimizer: DenseOptimizerSettings) -> ProgramSpec:
        from rayrec.models.keras.program import KerasProgramSpec

        return KerasProgramSpec(self, schema, optimizer)
