"""A Keras model on TensorFlow, inside PyTorch's gradients.

    rows, weights (PyTorch) ─DLPack─► tf.function, under a GradientTape ─DLPack─► logits ─► loss (PyTorch)
    their gradients         ◄─DLPack─ the tape's gradient               ◄─DLPack─ d loss / d logits

TensorFlow reads rows and weights where PyTorch has them: the function takes them as arguments, in the place
of the Keras model's own variables. One function for training and one for scoring are traced, once each, for
batches of any size; for serving, scoring functions of few numbers of rows may be compiled by XLA besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.keras.model import KerasModel, ordered
from rayrec.models.keras.tensors import to_tensorflow, to_torch
from rayrec.platform.impression_schema import ImpressionSchema


class TensorFlowModel(KerasModel):
    """Runs on the CPU, where its parameters are."""

    def __init__(
        self,
        tensorflow: Any,
        keras: Any,
        keras_model: Any,
        schema: ImpressionSchema,
        dim: int,
        label_loss: LabelLoss,
    ) -> None:
        """
        Args:
            tensorflow: the package, and `keras` on it.

        Raises:
            InputError: as `KerasModel`; or the model changes weights when it is called.
        """
        super().__init__(keras_model, schema, dim, label_loss)
        self._tensorflow = tensorflow
        self._keras = keras
        self.functions = {training: self._function(training) for training in (False, True)}
        self._compiled: dict[int, Any] = {}
        """Scoring functions by number of rows, in ascending order."""
        # Now, and not in the first step: whatever is wrong with the model shows before a run begins.
        for function in self.functions.values():
            function.get_concrete_function(*self._signature())

    def _as_parameter(self, variable: Any) -> nn.Parameter:
        return nn.Parameter(torch.tensor(variable.numpy()))

    def compile_scoring(self, row_counts: Sequence[int]) -> bool:
        """Have XLA compile scoring of batches of so many rows, now; smaller ones are filled up to the next.

        Returns:
            Whether it did. A model of inputs whose width is not declared would be compiled again and again
            while somebody waits, so it is not compiled at all.
        """
        if any(None in one.shape[1:] for one in self.keras_model.inputs):
            return False
        zeros = self._tensorflow.zeros
        compiled = {}
        for num_rows in sorted(set(row_counts)):
            signature = self._signature(num_rows)
            compiled[num_rows] = self._function(training=False, num_rows=num_rows)
            compiled[num_rows](
                *(tuple(zeros(spec.shape, spec.dtype) for spec in specs) for specs in signature)
            )
        self._compiled = compiled
        return True

    def _signature(self, num_rows: int | None = None) -> tuple[Any, ...]:
        spec = self._tensorflow.TensorSpec
        return (
            tuple(spec(variable.shape, "float32") for variable in self.trained_variables),
            tuple(spec((2,), variable.dtype) for variable in self.seed_variables),
            tuple(spec((num_rows, *one.shape[1:]), "float32") for one in self.keras_model.inputs),
        )

    def _function(self, training: bool, num_rows: int | None = None) -> Any:
        """The traced function of forward and backward.

        Args:
            num_rows: for so many alone, compiled by XLA; None: for any number.
        """
        tensorflow, keras, keras_model, order = self._tensorflow, self._keras, self.keras_model, self.order
        trained, seeds = self.trained_variables, self.seed_variables

        def run(weights: Any, states: Any, inputs: Any) -> Any:
            values = [*zip(trained, weights, strict=True), *zip(seeds, states, strict=True)]
            with keras.StatelessScope(state_mapping=values) as scope:
                before = self._values_in(scope)
                structured = keras.tree.pack_sequence_as(keras_model.input, list(inputs))
                outputs = keras.tree.flatten(keras_model(structured, training=training))
            self._check_unchanged(scope, before)
            logits_BT = ordered(outputs, order, lambda columns: tensorflow.concat(columns, axis=1))
            return tensorflow.cast(logits_BT, "float32")

        return tensorflow.function(
            run,
            input_signature=self._signature(num_rows),
            autograph=False,
            jit_compile=None if num_rows is None else True,
        )

    def _call(self, inputs: list[Tensor], seeds: list[np.ndarray]) -> Tensor:
        constant = self._tensorflow.constant
        states = tuple(
            constant(state, dtype=variable.dtype)
            for state, variable in zip(seeds, self.seed_variables, strict=True)
        )
        weights = [self.get_parameter(variable.path) for variable in self.trained_variables]
        function, num_rows = self.functions[self.training], len(inputs[0])
        if not self.training and not torch.is_grad_enabled():
            size = next((size for size in self._compiled if size >= num_rows), None)
            if size is not None:
                function, inputs = self._compiled[size], [_filled(each, size) for each in inputs]
        logits_BT: Tensor = _Call.apply(self._tensorflow, function, states, len(weights), *weights, *inputs)
        return logits_BT[:num_rows]

    def input_specs(self) -> dict[str, Any]:
        """By name, what `probabilities` takes."""
        declared = zip(self.inputs, self.keras_model.inputs, strict=True)
        return {
            one.name: self._tensorflow.TensorSpec(tensor.shape, "float32", name=one.name)
            for one, tensor in declared
        }

    def probabilities(self, given: dict[str, Any]) -> Any:
        """[B, T] of the Keras model's own weights, which are those of `write_back`; of tensors of
        TensorFlow."""
        tensorflow = self._tensorflow
        structured = self._keras.tree.pack_sequence_as(
            self.keras_model.input, [given[one.name] for one in self.inputs]
        )
        outputs = self._keras.tree.flatten(self.keras_model(structured, training=False))
        logits_BT = ordered(outputs, self.order, lambda columns: tensorflow.concat(columns, axis=1))
        return tensorflow.sigmoid(tensorflow.cast(logits_BT, "float32"))


def _filled(rows: Tensor, size: int) -> Tensor:
    """With rows of zeros at the end."""
    missing = size - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


class _Call(torch.autograd.Function):
    """TensorFlow's part of a step, as one operation of PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, tensorflow: Any, function: Any, states: Any, num_weights: int, *tensors: Tensor
    ) -> Tensor:
        # Held until the function has run, and by `ctx` until the gradients are there; see `to_tensorflow`.
        given = tuple(to_tensorflow(tensorflow, tensor) for tensor in tensors)
        arguments = (given[:num_weights], states, given[num_weights:])
        if not any(ctx.needs_input_grad):
            return to_torch(function(*arguments))
        with tensorflow.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([one for one, wanted in zip(given, ctx.needs_input_grad[4:], strict=True) if wanted])
            logits_BT = function(*arguments)
        ctx.tensorflow, ctx.num_weights = tensorflow, num_weights
        ctx.tape, ctx.given, ctx.logits_BT = tape, given, logits_BT
        return to_torch(logits_BT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor | None, ...]:
        tensorflow = ctx.tensorflow
        wanted = ctx.needs_input_grad[4:]
        watched = [one for one, is_wanted in zip(ctx.given, wanted, strict=True) if is_wanted]
        grads = iter(
            ctx.tape.gradient(ctx.logits_BT, watched, output_gradients=to_tensorflow(tensorflow, grad_BT))
        )
        results: list[Tensor | None] = [None] * 4
        for place, is_wanted in enumerate(wanted):
            grad = next(grads) if is_wanted else None
            if grad is None:  # not wanted, or the logits do not depend on it
                results.append(None)
                continue
            # Of a model that takes rows out of an input, the gradient is sparse.
            grad = to_torch(tensorflow.convert_to_tensor(grad))
            # PyTorch keeps gradients of weights and scales them where they are, and TensorFlow may have the
            # same memory elsewhere: as another gradient, or as a constant of the function.
            results.append(grad.clone() if place < ctx.num_weights else grad)
        del ctx.tape, ctx.given, ctx.logits_BT
        return tuple(results)
