"""Keras models of the schema of `tests.models.keras.impressions`, as builders."""

from __future__ import annotations

from typing import Any

from rayrec.platform.impression_schema import ImpressionSchema


def inputs_of(schema: ImpressionSchema, dim: int) -> list[Any]:
    """One for each column."""
    import keras

    return [
        *(keras.Input((1,), name=column) for column in schema.numbers),
        *(keras.Input((dim,), name=column) for column in (*schema.ids, *schema.lists)),
    ]


def mlp(schema: ImpressionSchema, dim: int, dropout: float = 0.0) -> Any:
    """Layers have no names of their own."""
    import keras

    inputs = inputs_of(schema, dim)
    x = keras.layers.Concatenate()(inputs)
    x = keras.layers.Dense(8, activation="relu")(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, keras.layers.Dense(len(schema.labels))(x))


def two_sums(schema: ImpressionSchema, dim: int) -> Any:
    """Linear, each weight there twice: their gradients are the same numbers."""
    import keras

    inputs = inputs_of(schema, dim)
    x = keras.layers.Concatenate()(inputs)
    once, again = (keras.layers.Dense(len(schema.labels), name=name)(x) for name in ("once", "again"))
    return keras.Model(inputs, keras.layers.Add()([once, again]))


def heads(schema: ImpressionSchema, dim: int) -> Any:
    """An output for each label, in another order, by name; reads all numbers and ids at once, and elements of
    lists."""
    import keras

    numbers = keras.Input((len(schema.numbers),), name="numbers")
    ids = keras.Input((len(schema.ids), dim), name="ids")
    tags = keras.Input((dim,), name="tags")
    history = keras.Input((None, dim), name="history")
    mask = keras.Input((None,), name="history_mask")
    scores = keras.ops.sum(history * ids[:, 1:2], axis=2) - 1e9 * (1.0 - mask)
    weights = keras.ops.softmax(scores, axis=1) * mask
    read = keras.ops.sum(history * keras.ops.expand_dims(weights, 2), axis=1)
    x = keras.layers.Concatenate()([numbers, keras.layers.Flatten()(ids), tags, read])
    outputs = [keras.layers.Dense(1, name=label)(x) for label in reversed(schema.labels)]
    return keras.Model([mask, history, tags, numbers, ids], outputs)


def heads_of_columns(schema: ImpressionSchema, dim: int) -> Any:
    """An output for each label, in another order, by name; of any columns, one input each."""
    import keras

    inputs = inputs_of(schema, dim)
    x = keras.layers.Concatenate()(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1, name=label)(x) for label in reversed(schema.labels)])
