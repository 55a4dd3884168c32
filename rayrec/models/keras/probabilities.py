"""Whether an output of a Keras model is a probability, though it should be a logit.

The graph is walked back from the output: through what only moves values or changes their type, into models
inside of the model, and through products and means of probabilities. A layer of the user's own that ends in a
sigmoid is not seen through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

ENDINGS = {
    name.replace("_", ""): name
    for name in (
        "sigmoid",
        "hard_sigmoid",
        "sparse_sigmoid",
        "log_sigmoid",
        "softmax",
        "log_softmax",
        "sparsemax",
    )
}
"""What gives probabilities or their logarithms: by the name of the function, and of Keras's class for it."""

MOVES_VALUES = frozenset(
    [
        "activation",
        "cast",
        "clip",
        "concatenate",
        "copy",
        "dropout",
        "expanddims",
        "flatten",
        "getitem",
        "hstack",
        "identity",
        "moveaxis",
        "permute",
        "ravel",
        "reshape",
        "split",
        "squeeze",
        "stack",
        "stopgradient",
        "swapaxes",
        "take",
        "transpose",
        "unstack",
        "vstack",
    ]
)
"""Classes of Keras, in lower case, after which values are some of those before: probabilities, if one of the
tensors that are given is. An `Activation` gets here only if it is none of `ENDINGS`."""

MIXES_PROBABILITIES = frozenset(["average", "maximum", "mean", "minimum", "multiply"])
"""After which they are probabilities if all tensors that are given are: as in models that multiply the chance
of a click with the chance of a purchase after it. One factor alone may be a gate."""

Walk = Callable[[], str | None]


def ending_of(tensor: Any, given: Mapping[int, Walk] | None = None) -> str | None:
    """By which function a tensor is a probability or the logarithm of one; None if it seems to be a logit.

    Args:
        tensor: symbolic, of a model's graph.
        given: of a model inside of another one, by `id` of each of its inputs: what its argument ends with.
    """
    given = given or {}
    if id(tensor) in given:
        return given[id(tensor)]()
    # There is no public way from a tensor to what made it; Keras's own Functional goes this one.
    operation, node_index, tensor_index = tensor._keras_history
    name = _short_name(operation)
    if (ending := ENDINGS.get(name) or ENDINGS.get(_activation_of(operation))) is not None:
        return ending
    arguments = operation._inbound_nodes[node_index].input_tensors
    walks = [partial(ending_of, argument, given) for argument in arguments]
    if getattr(operation, "outputs", None) and getattr(operation, "inputs", None):  # a model
        inner = dict(zip(map(id, operation.inputs), walks, strict=False))
        return ending_of(operation.outputs[tensor_index], inner)
    if name in MOVES_VALUES and (name != "activation" or _activation_of(operation) == "linear"):
        return next((ending for walk in walks if (ending := walk()) is not None), None)
    if name in MIXES_PROBABILITIES and len(walks) > 1:
        endings = [walk() for walk in walks]
        return endings[0] if None not in endings else None
    return None


def _short_name(operation: Any) -> str:
    return type(operation).__name__.lower()


def _activation_of(layer: Any) -> str:
    """Of a layer that has one; it may be a function or a layer."""
    activation = getattr(layer, "activation", None)
    name: str = getattr(activation, "__name__", None) or _short_name(activation)
    return name.replace("_", "")
