import torch
from torch import nn
from torch.nn import functional

from rayrec.models.base.keyed_random import token_keys
from tests.models.networks import DIM, backbone, layout


def contexts(network, x_ND, lengths, row_keys=None, step=0):
    placed = layout(lengths)
    row_keys_B = torch.arange(len(lengths)) if row_keys is None else torch.tensor(row_keys)
    return network(x_ND, placed, token_keys(0, step, row_keys_B[placed.row_N], placed.place_N))


def padded_reference(network, x_ND, lengths):
    """The same transformer from torch's own layers, on a padded batch with an explicit mask."""
    longest = max(lengths)
    rows = x_ND.split(lengths)
    x_BTD = torch.stack([functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
    x_BTD = network.input_norm(x_BTD + network.positions_TD[:longest])
    future_TT = torch.ones(longest, longest, dtype=torch.bool).triu(1)
    for block in network.blocks:
        # Its biases of queries, keys and values start as zeros, which is what the block has: none.
        attention = nn.MultiheadAttention(DIM, block.num_heads, batch_first=True, dtype=x_BTD.dtype)
        with torch.no_grad():
            attention.in_proj_weight.copy_(block.qkv.weight)
            attention.out_proj.weight.copy_(block.out.weight)
            attention.out_proj.bias.copy_(block.out.bias)
        normed = block.attention_norm(x_BTD)
        x_BTD = x_BTD + attention(normed, normed, normed, attn_mask=future_TT, need_weights=False)[0]
        x_BTD = x_BTD + block.down(functional.gelu(block.up(block.feedforward_norm(x_BTD))))
    x_BTD = network.final_norm(x_BTD)
    return torch.cat([row[:length] for row, length in zip(x_BTD, lengths, strict=True)])


def test_jagged_batch_equals_a_padded_reference():
    network = backbone(num_layers=3).double()
    lengths = [3, 1, 6, 2]
    x_ND = torch.randn(sum(lengths), DIM, dtype=torch.float64)

    torch.testing.assert_close(
        contexts(network, x_ND, lengths), padded_reference(network, x_ND, lengths), rtol=1e-10, atol=1e-10
    )


def test_changing_a_later_event_changes_no_earlier_context():
    network = backbone()
    x_ND = torch.randn(5, DIM)
    changed_ND = x_ND.clone()
    changed_ND[3] = torch.randn(DIM)

    before, after = contexts(network, x_ND, [5]), contexts(network, changed_ND, [5])

    torch.testing.assert_close(after[:3], before[:3])
    assert (after[3:] - before[3:]).abs().amin() > 1e-6


def test_rows_know_nothing_of_each_other():
    network = backbone()
    x_ND = torch.randn(7, DIM)

    together = contexts(network, x_ND, [3, 4])

    torch.testing.assert_close(together[:3], contexts(network, x_ND[:3], [3]))
    torch.testing.assert_close(together[3:], contexts(network, x_ND[3:], [4]))


def test_empty_rows_between_others_change_nothing():
    network = backbone()
    x_ND = torch.randn(7, DIM)

    torch.testing.assert_close(contexts(network, x_ND, [3, 0, 4, 0]), contexts(network, x_ND, [3, 4]))


def test_a_row_drops_out_alike_alone_and_among_others():
    network = backbone(dropout=0.4).train()
    x_ND = torch.randn(7, DIM)

    together = contexts(network, x_ND, [3, 4], row_keys=[11, 22])

    torch.testing.assert_close(together[3:], contexts(network, x_ND[3:], [4], row_keys=[22]))
    assert not torch.allclose(together[3:], contexts(network, x_ND[3:], [4], row_keys=[22], step=1))


def test_every_dropout_has_an_index_of_its_own():
    network = backbone(dropout=0.5, num_layers=3)

    indices = [module.index for module in network.modules() if hasattr(module, "probability")]

    assert sorted(indices) == list(range(network.num_dropouts))
