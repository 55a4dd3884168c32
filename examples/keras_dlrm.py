"""DLRM in Keras: the architecture of `rayrec.models.ctr.dlrm`, as a builder that a run names.

    model:
      name: keras
      builder: keras_dlrm:build
      folder: examples
      dim: 16
      arguments: {bottom_dims: [128, 64], hidden_dims: [256, 128, 64]}

    numbers ─► bottom MLP ─► [D] ─┬──────────────────────────────┬─► top MLP ─► logits
    ids, means of lists ─► [K, D] ┴─► inner products of all pairs ┘

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv:1906.00091.

Axes: B impressions, K vectors that are multiplied with each other, P = K (K - 1) / 2 pairs, D width of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rayrec.models import ImpressionSchema

if TYPE_CHECKING:
    import keras


def build(
    schema: ImpressionSchema,
    dim: int,
    bottom_dims: Sequence[int] = (128, 64),
    hidden_dims: Sequence[int] = (256, 128, 64),
) -> keras.Model:
    """Needs a column of numbers, and one of ids or lists.

    Args:
        bottom_dims: hidden widths of the bottom MLP, whose last layer has `dim`.
        hidden_dims: of the top MLP.
    """
    import keras

    numbers = keras.Input((len(schema.numbers),), name="numbers")
    numbers_BD = _mlp(numbers, (*bottom_dims, dim), "bottom")
    inputs, vectors = [numbers], [keras.layers.Reshape((1, dim))(numbers_BD)]
    if schema.ids:
        inputs.append(keras.Input((len(schema.ids), dim), name="ids"))
        vectors.append(inputs[-1])
    for column in schema.lists:
        inputs.append(keras.Input((dim,), name=column))
        vectors.append(keras.layers.Reshape((1, dim))(inputs[-1]))
    vectors_BKD = keras.ops.concatenate(vectors, axis=1)
    products_BP = _pairwise_products(vectors_BKD)
    top = _mlp(keras.ops.concatenate([numbers_BD, products_BP], axis=1), hidden_dims, "top")
    return keras.Model(inputs, keras.layers.Dense(len(schema.labels), name="head")(top))


def _mlp(x: keras.KerasTensor, dims: Sequence[int], name: str) -> keras.KerasTensor:
    import keras

    for layer, width in enumerate(dims):
        x = keras.layers.Dense(width, activation="relu", name=f"{name}_{layer}")(x)
    return x


def _pairwise_products(vectors_BKD: keras.KerasTensor) -> keras.KerasTensor:
    """[B, P] inner products of vectors k < l, in the order (0, 1), (0, 2), ..., (1, 2), ..."""
    import keras

    num_vectors = vectors_BKD.shape[1]
    row_P, column_P = np.triu_indices(num_vectors, k=1)
    products_BKK = keras.ops.matmul(vectors_BKD, keras.ops.transpose(vectors_BKD, (0, 2, 1)))
    flat = keras.ops.reshape(products_BKK, (-1, num_vectors * num_vectors))
    return keras.ops.take(flat, (row_P * num_vectors + column_P).astype(np.int32), axis=1)


def from_torch(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of our `Dlrm` under the names of this model's: (`top.linears.0.weight` [out, in] is
    `top_0/kernel` [in, out])."""
    renamed = {}
    for name, weight in weights.items():
        *path, kind = name.split(".")
        layer = path[0] if len(path) == 1 else f"{path[0]}_{path[-1]}"
        renamed[f"{layer}/{'kernel' if kind == 'weight' else kind}"] = weight.T.copy()
    return renamed
