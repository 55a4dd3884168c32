"""What the inputs of a model get; neither Keras nor TensorFlow is needed to know."""

import numpy as np
import pytest
import torch

from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.models.keras.inputs import DeclaredInput, gather, match_inputs
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema
from rayrec.samples.base.batches import TableLookup
from rayrec.samples.impressions.batches import ImpressionBatch

CPU = torch.device("cpu")
SCHEMA = ImpressionSchema(
    labels=("click",), numbers=("price", "age"), ids={"user": "u", "item": "i"}, lists={"history": "i"}
)

ROWS = {FEATURE_TABLE: np.array([[1, 1], [2, 2], [3, 3], [40, 50]], dtype=np.float32)}
FEATURES = ImpressionBatch(
    step=0,
    row_keys_B=np.arange(2),
    num_targets=2,
    numbers_BF=np.array([[0.5, 7], [0.25, 8]], dtype=np.float32),
    labels_BT=np.zeros((2, 1), dtype=np.float32),
    # Two impressions with user and item each; the first has the history 1, 2, 3, the second none.
    lookups={FEATURE_TABLE: TableLookup(np.arange(4), np.array([0, 3, 1, 3, 1, 2, 3]), np.arange(4))},
    num_id_columns=2,
    list_offsets_B1={"history": np.array([0, 3, 3])},
)


def declared(**shapes: tuple[int | None, ...]) -> list[DeclaredInput]:
    return [DeclaredInput(name, (None, *shape), "float32") for name, shape in shapes.items()]


def given(inputs: list[DeclaredInput]) -> dict[str, list]:
    batch = ImpressionTensors.build(FEATURES, ROWS, 0, CPU, training=False)
    matched = match_inputs(inputs, SCHEMA, 2)
    tensors = gather(matched, batch)
    return {one.name: tensor.tolist() for one, tensor in zip(matched, tensors, strict=True)}


def test_each_input_gets_the_column_of_its_name():
    got = given(declared(history=(2,), item=(2,), user=(2,), age=(1,), price=(1,)))

    assert got == {
        "history": [[15.0, pytest.approx(55 / 3)], [0, 0]],
        "item": [[40, 50], [40, 50]],
        "user": [[1, 1], [2, 2]],
        "age": [[7], [8]],
        "price": [[0.5], [0.25]],
    }


def test_columns_of_a_kind_come_together_where_that_is_asked():
    got = given(declared(numbers=(2,), ids=(2, 2), history=(2,)))

    assert got["numbers"] == [[0.5, 7], [0.25, 8]]
    assert got["ids"] == [[[1, 1], [40, 50]], [[2, 2], [40, 50]]]


def test_an_input_of_three_axes_gets_the_elements_of_lists():
    got = given(declared(numbers=(2,), ids=(2, 2), history=(None, 2), history_mask=(None,)))

    assert got["history"] == [[[2, 2], [3, 3], [40, 50]], [[0, 0], [0, 0], [0, 0]]]
    assert got["history_mask"] == [[1, 1, 1], [0, 0, 0]]


def test_an_input_of_a_length_gets_the_newest_elements():
    got = given(declared(numbers=(2,), ids=(2, 2), history=(2, 2), history_mask=(2,)))
    longer = given(declared(numbers=(2,), ids=(2, 2), history=(4, 2)))

    assert got["history"] == [[[3, 3], [40, 50]], [[0, 0], [0, 0]]]
    assert got["history_mask"] == [[1, 1], [0, 0]]
    assert longer["history"][0] == [[2, 2], [3, 3], [40, 50], [0, 0]]


def test_gradients_of_all_inputs_add_up_in_the_rows():
    batch = ImpressionTensors.build(FEATURES, ROWS, 0, CPU, training=True)
    inputs = declared(user=(2,), item=(2,), history=(2, 2), numbers=(2,))
    sum(tensor.sum() for tensor in gather(match_inputs(inputs, SCHEMA, 2), batch)).backward()

    # Row 1 is a user's and too old for two elements; row 3 is both items and the newest element.
    assert batch.rows_MD.grad is not None
    assert batch.rows_MD.grad.tolist() == [[1, 1], [1, 1], [1, 1], [3, 3]]


REST = {"price": (1,), "age": (1,), "user": (2,), "item": (2,)}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (declared(**REST), "no input for 'history'; add keras.Input"),
        (
            [DeclaredInput("user", (None,), "int64"), *declared(**REST)],
            r"'user' is int64, but rows are looked up already: declare keras.Input\(\(2,\), name='user'\)",
        ),
        (declared(**REST, history=(2,), color=(2,)), "input 'color', which is no column .* 'history'"),
        (declared(**REST, history=(3,)), r"'history' has the shape \(None, 3\), but gets \(None, 2\)"),
        (declared(**REST | {"age": (2,)}, history=(2,)), r"'age' has the shape .* gets \(None, 1\)"),
        (declared(**REST, history=(2,), history_mask=(None,)), "none 'history' of the shape"),
        (declared(**REST, history=(5, 2), history_mask=(4,)), "the lengths 5 and 4; give them the same"),
        (
            [*declared(**REST), DeclaredInput("history", (None, 2), "float64")],
            "'history' is float64, but gets float32; declare it with dtype='float32'",
        ),
        ([*declared(**REST), DeclaredInput("history", (8, 2), "float32")], r"has the shape \(8, 2\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_a_sentence(inputs, message):
    with pytest.raises(InputError, match=message) as raised:
        match_inputs(inputs, SCHEMA, 2)

    assert "\n" not in str(raised.value)
