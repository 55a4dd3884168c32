"""From settings to a Keras model with its initial weights."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.ctr.losses import LabelLoss, LabelWeights, label_loss
from rayrec.models.keras.builder import Builder
from rayrec.models.keras.model import KerasModel, ordered
from rayrec.models.keras.runtime import check_device, load_keras, load_tensorflow
from rayrec.models.keras.tensorflow_model import TensorFlowModel
from rayrec.platform.devices import HOST, Device
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema


class KerasTorchModel(KerasModel):
    """Its parameters are those of the Keras model, which needs no writing back."""

    def __init__(
        self, keras: Any, keras_model: Any, schema: ImpressionSchema, dim: int, label_loss: LabelLoss
    ) -> None:
        """
        Args:
            keras: the package, on this backend.

        Raises:
            InputError: as `KerasModel`; or the model changes weights when it is called.
        """
        super().__init__(keras_model, schema, dim, label_loss)
        self._keras = keras
        # Now, and not in the first step: whatever is wrong with the model shows before a run begins.
        sizes = [[2, *(size or 1 for size in one.shape[1:])] for one in keras_model.inputs]
        for training in (False, True):
            with torch.no_grad():
                self.train(training)._call([torch.zeros(size) for size in sizes], self._no_seeds())

    def _as_parameter(self, variable: Any) -> nn.Parameter:
        parameter: nn.Parameter = variable.value
        return parameter

    def _call(self, inputs: list[Tensor], seeds: list[np.ndarray]) -> Tensor:
        device = inputs[0].device
        states = [
            (variable, torch.tensor(state, device=device))
            for variable, state in zip(self.seed_variables, seeds, strict=True)
        ]
        structured = self._keras.tree.pack_sequence_as(self.keras_model.input, inputs)
        # Keras would move everything to a GPU as soon as there is one.
        with self._keras.device(str(device)), self._keras.StatelessScope(state_mapping=states) as scope:
            before = self._values_in(scope)
            outputs = self._keras.tree.flatten(self.keras_model(structured, training=self.training))
        self._check_unchanged(scope, before)
        logits_BT: Tensor = ordered(outputs, self.order, lambda columns: torch.cat(columns, dim=1))
        return logits_BT.float()


class KerasModelSettings(LabelWeights, Protocol):
    """What this needs of a `KerasModelSettings`."""

    @property
    def dim(self) -> int: ...
    @property
    def builder(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def folder(self) -> Path | None: ...
    @property
    def backend(self) -> str: ...


def build_keras_model(
    config: KerasModelSettings,
    schema: ImpressionSchema,
    seed: int,
    device: Device,
    num_threads: int | None = None,
) -> KerasModel:
    """The model on the host; its initial weights depend on the seed and on what the builder does.

    Args:
        device: where it will run.
        num_threads: of TensorFlow; None: as many as PyTorch has.

    Raises:
        InputError: TensorFlow or Keras is missing or does not fit, no Keras model runs on the device, there
            is no such builder, or what it gives is no model that fits the schema.
    """
    check_device(device)
    loss = label_loss(config, schema)
    builder = Builder(config.builder, config.folder)
    if config.backend == "torch":
        keras = load_keras("torch")
        with builder.running(), keras.device(HOST.kind), _own_random_state():
            keras_model = _built(keras, builder, config, schema, seed)
            return KerasTorchModel(keras, keras_model, schema, config.dim, loss)
    tensorflow = load_tensorflow(num_threads or torch.get_num_threads())
    keras = load_keras("tensorflow")
    with builder.running(), _own_random_state():
        keras_model = _built(keras, builder, config, schema, seed)
        return TensorFlowModel(tensorflow, keras, keras_model, schema, config.dim, loss)


def _built(
    keras: Any, builder: Builder, config: KerasModelSettings, schema: ImpressionSchema, seed: int
) -> Any:
    # Layers without a name are numbered by process; snapshots need the same names in each.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed % 2**32)
    keras_model = builder(schema, config.dim, config.arguments)
    if not isinstance(keras_model, keras.Model):
        raise InputError(
            f"model.builder: {config.builder} must return a keras.Model, and gave "
            f"{type(keras_model).__name__}"
        )
    if isinstance(keras_model, keras.Sequential) and getattr(keras_model, "inputs", None):
        # The same layers, as a model that says how its inputs and outputs are nested.
        keras_model = keras.Model(keras_model.inputs, keras_model.outputs)
    return keras_model


@contextlib.contextmanager
def _own_random_state() -> Iterator[None]:
    """Keras seeds every generator of the process, and others draw from those."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)
