"""A Keras model as a ranking model of ours, whichever backend it runs on.

The weights are PyTorch parameters under the names that Keras gives them (`dense/kernel`), so snapshots do not
say which backend wrote them. What Keras does not train (a frozen layer, the mean of a normalization) is no
weight of the snapshot: it is what the builder makes it.

Axes as in `rayrec.models.keras.inputs`, T labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.ctr.model import CtrModel
from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.models.keras.inputs import DeclaredInput, gather, match_inputs
from rayrec.models.keras.probabilities import ending_of
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema

HINT = "give one output [B, number of labels], or one [B, 1] for each label, named as it"


def output_order(keras_model: Any, labels: Sequence[str]) -> tuple[int, ...]:
    """Places of the outputs, flattened, whose columns one after the other are the logits of the labels.

    One output has the columns of all labels, in their order. Of several, each is of the label that it is
    called by: the key of a model that gives a dictionary, otherwise the name of the layer.

    Raises:
        InputError: they are not of the labels, or are no logits.
    """
    names = _names(keras_model)
    for name, output in zip(names, keras_model.outputs, strict=True):
        if (ending := ending_of(output)) is not None:
            raise InputError(
                f"the Keras model's output {name!r} ends with {ending}, but its losses and probabilities are "
                "made of logits; leave that activation out"
            )
        if output.dtype not in ("float32", "bfloat16"):
            raise InputError(
                f"the Keras model's output {name!r} is {output.dtype}, but logits are float32; give "
                "its last layer dtype='float32'"
            )
    shapes = [tuple(output.shape) for output in keras_model.outputs]
    if len(shapes) == 1:
        if shapes[0] != (None, len(labels)):
            raise InputError(
                f"the Keras model's output has the shape {shapes[0]}, and there are {len(labels)} labels; "
                f"{HINT}"
            )
        return (0,)
    if sorted(names) != sorted(labels):
        raise InputError(
            f"the Keras model's outputs are {', '.join(map(repr, names))}, and the labels "
            f"{', '.join(map(repr, labels))}; {HINT}"
        )
    for name, shape in zip(names, shapes, strict=True):
        if shape != (None, 1):
            raise InputError(f"the Keras model's output {name!r} has the shape {shape}; {HINT}")
    return tuple(names.index(label) for label in labels)


def _names(keras_model: Any) -> list[str]:
    structure = keras_model.output
    if not isinstance(structure, Mapping):
        return [output._keras_history.operation.name for output in keras_model.outputs]
    # Keras flattens a dictionary by its sorted keys.
    return sorted(structure)


class KerasModel(CtrModel):
    """What both backends have in common; each adds `_call`."""

    keras_model: Any
    """Functional `keras.Model`."""
    seed_variables: list[Any]
    """States of its random generators."""

    def __init__(self, keras_model: Any, schema: ImpressionSchema, dim: int, label_loss: LabelLoss) -> None:
        """
        Args:
            keras_model: a functional `keras.Model`, which gives logits.
            dim: width of the rows.

        Raises:
            InputError: inputs, outputs or weights are not what they have to be.
        """
        super().__init__(dim, label_loss)
        _check_model(keras_model)
        # Past nn.Module: on the backend torch a Keras model is one, too, and would add its weights once more.
        self.__dict__["keras_model"] = keras_model
        declared = [DeclaredInput(one.name, tuple(one.shape), one.dtype) for one in keras_model.inputs]
        self.inputs = match_inputs(declared, schema, dim)
        self.labels = schema.labels
        self.order = output_order(keras_model, schema.labels)
        self.seed_variables = _seeds(keras_model)
        self._trained = list(keras_model.trainable_variables)
        self._weights = list(keras_model.weights)
        for variable in self._trained:
            self.register_parameter(variable.path, self._as_parameter(variable))

    @property
    def trained_variables(self) -> list[Any]:
        """In the order of the parameters."""
        return self._trained

    @abstractmethod
    def _as_parameter(self, variable: Any) -> nn.Parameter:
        """The weight that stands for one of Keras's."""

    @abstractmethod
    def _call(self, inputs: list[Tensor], seeds: list[np.ndarray]) -> Tensor:
        """[B, T] logits.

        Args:
            seeds: [2] what each of the model's random generators begins with.
        """

    def logits(self, batch: ImpressionTensors) -> Tensor:
        return self._call(gather(self.inputs, batch), self._seeds(batch))

    def _seeds(self, batch: ImpressionTensors) -> list[np.ndarray]:
        """Random numbers hang on the seed of the run, the step and the first impression, which is what its
        key says: nothing of them has to be in a snapshot, and each trainer's are its own. Keras draws for all
        impressions at once, so other shares, as of another number of trainers, have other draws."""
        if not self.seed_variables or not self.training or not len(batch.keys_B):
            return self._no_seeds()
        key = int(batch.keys_B[0]) % 2**64
        draws = np.random.SeedSequence(key).generate_state(2 * len(self.seed_variables))
        return list((draws >> 1).astype(np.int64).reshape(-1, 2))

    def _values_in(self, scope: Any) -> list[Any]:
        """Of the weights, in a `keras.StatelessScope`; None of those that nobody has set there."""
        return [scope.get_current_value(variable) for variable in self._weights]

    def _check_unchanged(self, scope: Any, before: Sequence[Any]) -> None:
        """Refuse a model that changes its weights while it is called.

        Args:
            before: `_values_in` the scope, before the model was called.

        Raises:
            InputError: the call wrote to weights.
        """
        for variable, value in zip(self._weights, before, strict=True):
            if scope.get_current_value(variable) is value:
                continue
            if any(variable is trained for trained in self._trained):
                raise InputError(
                    f"the Keras model changes {variable.path!r} by other ways than its gradient, which "
                    "nobody would see: the optimizer has a copy of its own; leave the assignment out"
                )
            raise InputError(
                f"the Keras model changes {variable.path!r} while it is trained, as BatchNormalization does: "
                "an impression's logits would hang on those it shares a batch with, and trainers would drift "
                "apart; take LayerNormalization, say"
            )

    def _no_seeds(self) -> list[np.ndarray]:
        return [np.zeros(2, dtype=np.int64) for _ in self.seed_variables]

    def write_back(self) -> None:
        """Give the Keras model the weights as they are now: they are trained beside it."""
        parameters = dict(self.named_parameters())
        for variable in self._trained:
            variable.assign(parameters[variable.path].detach().cpu().numpy())


def _check_model(keras_model: Any) -> None:
    if not getattr(keras_model, "inputs", None):
        raise InputError(
            "the Keras model has no declared inputs, so nobody can tell what it reads; make it with "
            "keras.Input and keras.Model(inputs, outputs), around a subclass of your own if need be"
        )
    if keras_model.losses:
        raise InputError(
            "the Keras model adds losses of its own (a regularizer?), and each trainer would add them once "
            "more; leave them out and set training.optimizer.weight_decay"
        )
    for layer in keras_model._flatten_layers(include_self=False):  # those of layers and models inside, too
        if layer.compute_dtype == "float16":
            raise InputError(
                f"the Keras model's layer {layer.name!r} computes in float16, whose gradients vanish where "
                "nobody scales the loss, and nobody does; take 'mixed_bfloat16'"
            )
    for variable in keras_model.trainable_variables:
        if variable.dtype != "float32":
            raise InputError(
                f"the Keras model's weight {variable.path!r} is {variable.dtype}, but weights, like rows, "
                "are float32; leave out keras.config.set_floatx and give no layer another dtype (a policy "
                "such as 'mixed_bfloat16' is fine)"
            )
        if variable.constraint is not None:
            raise InputError(
                f"the Keras model's weight {variable.path!r} has a constraint, which only Keras's own "
                "optimizers apply; leave it out"
            )
    paths = [variable.path for variable in keras_model.trainable_variables]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise InputError(
            f"the Keras model has two weights {twice[0]!r}, which a snapshot could not tell apart; give "
            "their layers names of their own"
        )
    if dotted := [path for path in paths if "." in path]:
        raise InputError(f"the Keras model has a weight {dotted[0]!r}; give its layer a name without '.'")


def _seeds(keras_model: Any) -> list[Any]:
    """States of its random generators: variables, but none of its weights."""
    weights = {id(variable) for variable in keras_model.weights}
    return [variable for variable in keras_model.non_trainable_variables if id(variable) not in weights]


def ordered(outputs: Sequence[Any], order: Sequence[int], concatenate: Any) -> Any:
    """[B, T] of a model's outputs, flattened."""
    columns = [outputs[place] for place in order]
    return columns[0] if len(columns) == 1 else concatenate(columns)
