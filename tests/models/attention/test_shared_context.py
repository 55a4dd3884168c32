"""Attention of continuations to a shared context, against one softmax over the keys of both by hand."""

import pytest
import torch

from rayrec.models.attention.shared_context import shared_context_attention

LENGTH, WIDTH, SCALE = 5, 4, 0.5


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize(("num_key_heads", "num_heads"), [(1, 2), (2, 2), (2, 4)])
def test_queries_as_transformers_lays_them_meet_the_context_and_their_own_code(
    num_rows, num_sequences, num_key_heads, num_heads
):
    query = torch.randn(num_rows, num_sequences, num_heads, WIDTH).transpose(1, 2)
    keys, values = torch.randn(2, num_rows, num_key_heads, LENGTH, WIDTH)
    own_keys, own_values = torch.randn(2, num_rows, num_sequences, 1, num_key_heads, WIDTH)

    found = shared_context_attention(
        query, keys, values, torch.zeros(num_rows, 1, LENGTH), own_keys, own_values, SCALE
    )

    for row in range(num_rows):
        for sequence in range(num_sequences):
            for head in range(num_heads):
                group = head // (num_heads // num_key_heads)
                seen = torch.cat((keys[row, group], own_keys[row, sequence, :, group]))
                said = torch.cat((values[row, group], own_values[row, sequence, :, group]))
                expected = (SCALE * seen @ query[row, head, sequence]).softmax(0) @ said
                torch.testing.assert_close(found[row, sequence, head], expected)
