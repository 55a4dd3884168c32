import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from rayrec.models.attention.bias import RelativeBias
from rayrec.models.attention.call import Silu, Softmax
from rayrec.models.attention.choice import choice_named
from rayrec.models.attention.uni_attention import attend
from tests.models.attention.calls import SCORINGS, layout


def inputs(queries, keys, dtype=torch.float64):
    shapes = (queries.num_tokens, 2, 4), (keys.num_tokens, 2, 4), (keys.num_tokens, 2, 6)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2))
def test_padded_values_give_what_jagged_ones_do(lengths, more_padding):
    rows = layout(lengths)
    jagged = [tensor.detach() for tensor in inputs(rows, rows)]
    length = rows.longest + more_padding
    padded = []
    for x in jagged:
        x_BTHC = torch.full((len(lengths), length, *x.shape[1:]), torch.nan, dtype=x.dtype)
        x_BTHC[rows.row_N, rows.place_N] = x
        padded.append(x_BTHC)

    out_BTHE = attend(*padded, rows)

    assert out_BTHE.shape == (len(lengths), length, 2, 6)
    torch.testing.assert_close(out_BTHE[rows.row_N, rows.place_N], attend(*jagged, rows))
    out_BTHE[rows.row_N, rows.place_N] = 0
    assert not out_BTHE.any()


@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
@pytest.mark.parametrize(
    ("lengths", "key_lengths"), [([], []), ([0, 0], [0, 0]), ([0, 0], [1, 2]), ([1, 2], [0, 0])]
)
def test_without_queries_or_keys_there_are_zeros_and_gradients(lengths, key_lengths, scoring):
    queries, keys = layout(lengths), layout(key_lengths)
    query, key, value = inputs(queries, keys)

    out_NHE = attend(query, key, value, queries, keys, scoring=scoring)
    gradients = torch.autograd.grad(out_NHE.sum(), (query, key, value))

    assert out_NHE.shape == (sum(lengths), 2, 6)
    assert not out_NHE.any()
    assert not any(gradient.any() for gradient in gradients)


def test_the_scale_is_one_over_the_root_of_the_width_unless_it_is_given():
    rows = layout([3])
    query, key, value = inputs(rows, rows)

    torch.testing.assert_close(attend(query, key, value, rows), attend(query, key, value, rows, scale=0.5))
    assert not torch.allclose(attend(query, key, value, rows), attend(query, key, value, rows, scale=1.0))


def test_a_silus_output_does_not_depend_on_the_rows_beside_it():
    rows, alone = layout([3, 40]), layout([3])
    query, key, value = inputs(rows, rows)

    together = attend(query, key, value, rows, scoring=Silu(50.0))

    single = attend(query[:3], key[:3], value[:3], alone, scoring=Silu(50.0))
    torch.testing.assert_close(together[:3], single)


def test_fewer_heads_of_keys_are_each_there_for_their_neighbors_among_the_queries():
    rows = layout([2, 3])
    query = torch.randn(5, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 5, 2, 8, dtype=torch.float64)

    seen = attend(query, key, value, rows)

    for head in range(4):
        alone = attend(query[:, [head]], key[:, [head // 2]], value[:, [head // 2]], rows)
        torch.testing.assert_close(seen[:, [head]], alone)


def test_the_default_has_the_bits_of_pytorchs_kernel_on_rows_of_one_length():
    rows = layout([50, 50, 50])
    query, key, value = inputs(rows, rows, torch.float32)
    padded_BHTC = [rows.pad(x).transpose(1, 2) for x in (query, key, value)]

    padded = functional.scaled_dot_product_attention(*padded_BHTC, is_causal=True)

    assert torch.equal(attend(query, key, value, rows), rows.unpad(padded.transpose(1, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 2, 4)}, r"query must be jagged, \[3, heads"),
        ({"value": torch.zeros(1, 2, 2, 4)}, "3 or more"),
        ({"key": torch.zeros(3, 2, 5)}, "agree in width"),
        ({"value": torch.zeros(3, 1, 4)}, "key and value in heads"),
        ({"value": torch.zeros(3, 2, 4, dtype=torch.float64)}, "one dtype"),
        ({"key_layout": layout([1, 2])}, "1 rows and keys 2"),
        ({"bias": RelativeBias(torch.zeros(3, 5))}, "must have 2 heads"),
        (
            {"bias": RelativeBias(None, torch.zeros(2, 5), torch.zeros(2), torch.zeros(3))},
            "must have 3 times",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x_NHC = torch.zeros(3, 2, 4)

    with pytest.raises(ValueError, match=message):
        attend(**({"query": x_NHC, "key": x_NHC, "value": x_NHC, "layout": layout([3])} | change))


def test_a_demanded_backend_that_cannot_is_refused():
    rows = layout([3])

    with pytest.raises(ValueError, match="'sdpa' cannot compute this call"):
        attend(*inputs(rows, rows), rows, scoring=Silu(3.0), choice=choice_named("sdpa"))
    attend(*inputs(rows, rows), rows, scoring=Softmax(), choice=choice_named("sdpa"))
