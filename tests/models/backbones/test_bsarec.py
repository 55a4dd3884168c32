import numpy as np
import pytest
import torch
from torch.nn import functional

from rayrec.models.base.keyed_random import token_keys
from rayrec.models.sequence.backbones.bsarec import BsaRec, low_pass
from rayrec.models.sequence.backbones.transformer import CausalTransformer
from tests.models.networks import DIM, layout

HEADS, LONGEST, NUM_LOW, SHARE = 2, 7, 2, 0.6


def network(share=SHARE, num_low=NUM_LOW, num_layers=2) -> BsaRec:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = BsaRec(DIM, num_layers, HEADS, 16, LONGEST, 0.0, num_low, share)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
    return made.double()


def contexts(made, x_ND, lengths):
    placed = layout(lengths)
    return made(x_ND, placed, token_keys(0, 0, placed.row_N, placed.place_N))


def events(num_events):
    random = torch.Generator().manual_seed(3)
    return torch.randn(num_events, DIM, dtype=torch.float64, generator=random)


def low_part(values_TD: np.ndarray, longest: int, num_low: int) -> np.ndarray:
    """Of the last event, by the transforms of numpy."""
    padded_TD = np.concatenate([np.zeros((longest - len(values_TD), values_TD.shape[1])), values_TD])
    waves_KD = np.fft.rfft(padded_TD, axis=0)
    waves_KD[num_low:] = 0
    return np.fft.irfft(waves_KD, n=longest, axis=0)[-1]


@pytest.mark.parametrize("longest", [8, 9])
@pytest.mark.parametrize("num_low", [1, 2, 3, 9])
def test_the_low_part_at_each_event_is_that_of_the_history_up_to_it(longest, num_low):
    values_TD = np.random.default_rng(0).normal(size=(longest, 3))

    found_TD = low_pass(longest, num_low) @ values_TD

    for last in range(longest):
        expected_D = low_part(values_TD[: last + 1], longest, num_low)
        np.testing.assert_allclose(found_TD[last], expected_D, atol=1e-12)


def test_a_short_history_has_fast_changes_too():
    values_TD = np.array([[1.0], [-1.0]])

    low_TD = low_pass(50, 3)[:2, :2] @ values_TD

    assert np.abs(values_TD - low_TD).min() > 0.5


def test_a_layer_is_its_equation_event_by_event():
    made, x_TD = network(num_layers=1), events(5)
    block = made.blocks[0]

    input_TD = made.input_norm(x_TD + made.positions_TD[:5])
    attention = torch.nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_weight.copy_(block.qkv.weight)
        attention.out_proj.weight.copy_(block.out.weight)
        attention.out_proj.bias.copy_(block.out.bias)
    normed = block.attention_norm(input_TD)[None]
    future_TT = torch.ones(5, 5, dtype=torch.bool).triu(1)
    attended_TD = attention(normed, normed, normed, attn_mask=future_TT, need_weights=False)[0][0]
    frequencies_TD = block.frequency_norm(input_TD)
    values_TD = frequencies_TD.detach().numpy()
    low_TD = torch.tensor(np.stack([low_part(values_TD[: last + 1], LONGEST, NUM_LOW) for last in range(5)]))
    rescaled_TD = low_TD + (1 + block.root_gain_offset_D) ** 2 * (frequencies_TD - low_TD)
    between_TD = input_TD + SHARE * rescaled_TD + (1 - SHARE) * attended_TD
    hidden_TD = functional.gelu(block.up(block.feedforward_norm(between_TD)))
    expected_TD = made.final_norm(between_TD + block.down(hidden_TD))

    torch.testing.assert_close(contexts(made, x_TD, [5]), expected_TD, rtol=1e-6, atol=1e-6)


def test_changing_a_later_event_changes_no_earlier_context():
    made, x_ND = network(), events(6)
    changed_ND = x_ND.clone()
    changed_ND[3:] = events(9)[6:]

    before, after = contexts(made, x_ND, [6]), contexts(made, changed_ND, [6])

    torch.testing.assert_close(after[:3], before[:3])
    assert (after[3:] - before[3:]).abs().amax(1).amin() > 1e-6


def test_rows_know_nothing_of_each_other():
    made, lengths = network(), [3, 0, 1, 7, 2]
    x_ND = events(sum(lengths))

    together = contexts(made, x_ND, lengths)

    start = 0
    for length in lengths:
        alone = contexts(made, x_ND[start : start + length], [length])
        torch.testing.assert_close(together[start : start + length], alone)
        start += length


def test_where_all_frequencies_are_low_there_is_no_gain():
    low, gained = network(num_low=LONGEST), network(num_low=LONGEST)
    with torch.no_grad():
        for block in gained.blocks:
            block.root_gain_offset_D.add_(5)
    x_ND = events(5)

    torch.testing.assert_close(contexts(low, x_ND, [5]), contexts(gained, x_ND, [5]))


def test_without_a_share_it_is_the_transformer():
    made, x_ND = network(share=0.0), events(5)
    transformer = CausalTransformer(DIM, 2, HEADS, 16, LONGEST, 0.0).double()
    own = ("root_gain_offset_D", "frequency_norm")
    weights = {name: w for name, w in made.state_dict().items() if not any(part in name for part in own)}
    transformer.load_state_dict(weights)

    torch.testing.assert_close(contexts(made, x_ND, [5]), contexts(transformer, x_ND, [5]))
