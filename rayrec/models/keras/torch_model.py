"""A Keras model on Keras's PyTorch backend: its variables are PyTorch parameters already."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.keras.model import KerasModel, check_unchanged, ordered
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
            InputError: as `KerasModel`. Whether the model changes weights while it is trained shows in its
                first step.
        """
        super().__init__(keras_model, schema, dim, label_loss)
        self._keras = keras
        self._fixed = list(keras_model.non_trainable_weights)

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
            outputs = self._keras.tree.flatten(self.keras_model(structured, training=self.training))
        changed = [variable.path for variable in self._fixed if scope.get_current_value(variable) is not None]
        check_unchanged(self.keras_model, changed)
        logits_BT: Tensor = ordered(outputs, self.order, lambda columns: torch.cat(columns, dim=1))
        return logits_BT.float()
