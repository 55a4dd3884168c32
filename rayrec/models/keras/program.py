"""A Keras model as a program: whatever trains and serves PyTorch's ranking models does so with these.

Gradients are summed over trainers, judged, limited and applied as of any other `CtrModel`: by the same AdamW,
on weights that TensorFlow reads where they lie. So there is one meaning of learning rate, weight decay,
epsilon and clipping, one state of the optimizer in snapshots, and trainers of both frameworks take the same
steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.ctr.program import CtrProgram
from rayrec.models.keras.build import KerasModelSettings, build_keras_model
from rayrec.models.keras.model import KerasModel
from rayrec.models.program.program import ProgramPlacement
from rayrec.platform.devices import device_of
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema


class KerasProgram(CtrProgram):
    """Training and scoring of a `KerasModel`. FLOPs are not counted."""

    def __init__(
        self, model: KerasModel, settings: DenseOptimizerSettings, placement: ProgramPlacement
    ) -> None:
        """
        Raises:
            InputError: the run asks for what only PyTorch's own models can do.
        """
        check_compute(placement.compute, model)
        super().__init__(model, settings, placement)


@dataclass(frozen=True)
class KerasProgramSpec:
    """A model of settings, for impressions of a schema."""

    model: KerasModelSettings
    schema: ImpressionSchema
    optimizer: DenseOptimizerSettings

    def build(self, placement: ProgramPlacement) -> KerasProgram:
        """Build the model on the device of a placement.

        Raises:
            InputError: as `build_keras_model`, or the run asks for what only PyTorch's own models can do.
        """
        model = build_keras_model(self.model, self.schema, placement.seed, device_of(placement.device))
        return KerasProgram(model, self.optimizer, placement)


def check_compute(compute: ComputeSettings, model: KerasModel) -> None:
    """Refuse compute settings that Keras models do not have.

    Raises:
        InputError: what only PyTorch's own models can do, or this one cannot.
    """
    if compute.micro_batches > 1 and model.seed_variables:
        raise InputError(
            f"training.micro_batches is {compute.micro_batches}, and the Keras model draws random numbers "
            "(Dropout?) for a piece as a whole, not row by row, so that other pieces would make another run; "
            "set micro_batches to 1, or leave out what draws"
        )
    if compute.precision != PLAIN.precision:
        raise InputError(
            f"training.precision is {compute.precision!r}, which is for PyTorch's own models; leave it out, "
            "and set keras.mixed_precision in the builder"
        )
    if compute.compile:
        raise InputError(
            "training.compile is for PyTorch's own models; leave it out: TensorFlow compiles by itself"
        )
    if compute.is_split:
        raise InputError(
            f"training.parallel is {compute.parallel!r}, which is for PyTorch's own models; take 'replicated'"
        )
