"""Which output of a Keras model is the logits of which label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayrec.models.keras.probabilities import ending_of
from rayrec.platform.errors import InputError

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
