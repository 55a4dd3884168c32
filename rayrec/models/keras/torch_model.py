"""A Keras model on Keras's PyTorch backend: its variables are PyTorch parameters already."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.keras.model import KerasModel, ordered
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
