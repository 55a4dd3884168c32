import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.attention.jagged import JaggedLayout
from tests.models.networks import CPU, layout

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def test_layout_places_every_token():
    placed = JaggedLayout.from_offsets(np.array([0, 2, 2, 5]), CPU)

    assert (placed.num_rows, placed.longest) == (3, 3)
    assert placed.row_N.tolist() == [0, 0, 2, 2, 2]
    assert placed.place_N.tolist() == [0, 1, 0, 1, 2]
    assert placed.slot_N.tolist() == [0, 1, 6, 7, 8]
    assert placed.last_B.tolist() == [1, 1, 4]


def test_a_leading_row_without_tokens_points_at_the_first_token():
    assert layout([0, 2]).last_B.tolist() == [0, 1]


@given(LENGTHS)
def test_unpad_is_the_inverse_of_pad(lengths):
    x_ND = torch.randn(sum(lengths), 3)
    placed = layout(lengths)

    padded_BTD = placed.pad(x_ND)

    assert padded_BTD.shape == (len(lengths), max(lengths), 3)
    assert torch.equal(placed.unpad(padded_BTD), x_ND)
    for row, length in enumerate(lengths):
        assert not padded_BTD[row, length:].any()


def test_what_is_derived_from_a_layout_is_made_once():
    placed, made = layout([2]), []

    assert placed.derived("it", lambda: made.append(1) or "first") == "first"
    assert placed.derived("it", lambda: made.append(2) or "second") == "first"
    assert made == [1]


@given(LENGTHS)
def test_the_last_of_a_row_without_tokens_is_zero(lengths):
    x_ND = torch.randn(sum(lengths), 3)

    last_BD = layout(lengths).last(x_ND)

    assert last_BD.shape == (len(lengths), 3)
    end = 0
    for row, length in enumerate(lengths):
        end += length
        assert torch.equal(last_BD[row], x_ND[end - 1] if length else torch.zeros(3))


@given(st.integers(0, 4), st.integers(0, 4))
def test_rows_of_one_length_are_a_layout_like_others(num_rows, length):
    even, expected = JaggedLayout.even(num_rows, length, CPU), layout([length] * num_rows)

    assert (even.num_rows, even.longest) == (expected.num_rows, expected.longest)
    assert even.offsets_B1.tolist() == expected.offsets_B1.tolist()
    for name in ("row_N", "place_N", "slot_N", "last_B"):
        assert torch.equal(getattr(even, name), getattr(expected, name))
    assert torch.equal(even.lengths_on_device_B(), expected.lengths_on_device_B())
