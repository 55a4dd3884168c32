import math

import torch
from torch.nn import functional

from rayrec.models.base.keyed_random import token_keys
from rayrec.models.sequence.backbones.hstu import Hstu
from tests.models.networks import DIM, layout

HEADS, ATTENTION, VALUE, BUCKETS, LONGEST = 2, 3, 5, 9, 7
LENGTHS = [3, 1, 6, 2]
TIMES = [10, 10, 11, 0, 5, 6, 8, 8, 100, 10_000_000, 7, 9]


def network(dropout=0.0, num_time_buckets=BUCKETS, num_layers=2) -> Hstu:
    """With weights large enough for every part to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = Hstu(DIM, num_layers, HEADS, LONGEST, dropout, ATTENTION, VALUE, num_time_buckets)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
    return made.double()


def contexts(made, x_ND, lengths, times=None, row_keys=None, step=0):
    placed = layout(lengths)
    row_keys_B = torch.arange(len(lengths)) if row_keys is None else torch.tensor(row_keys)
    keys_N = token_keys(0, step, row_keys_B[placed.row_N], placed.place_N)
    return made(x_ND, placed, keys_N, None if times is None else torch.tensor(times))


def events(num_events, requires_grad=False):
    random = torch.Generator().manual_seed(3)
    x_ND = torch.randn(num_events, DIM, dtype=torch.float64, generator=random)
    return x_ND.requires_grad_(requires_grad)


def row_by_row(made: Hstu, x_ND, lengths, times):
    """Equations 1 to 4 of the paper, one row, head, query and key after the other."""
    found, start = [], 0
    for length in lengths:
        x_TD = made.input_norm(x_ND[start : start + length] + made.positions_TD[:length])
        for layer in made.layers:
            projected = functional.silu(layer.input_norm(x_TD) @ layer.uvqk.weight.T)
            u, v, q, k = projected.split(
                [HEADS * VALUE, HEADS * VALUE, HEADS * ATTENTION, HEADS * ATTENTION], 1
            )
            attended = []
            for query in range(length):
                heads = []
                for head in range(HEADS):
                    mine_A = slice(head * ATTENTION, (head + 1) * ATTENTION)
                    mine_C = slice(head * VALUE, (head + 1) * VALUE)
                    total = torch.zeros(VALUE, dtype=torch.float64)
                    for key in range(query + 1):
                        since = times[start + query] - times[start + key]
                        bucket = min(int(math.log(max(since, 1)) / 0.301), BUCKETS - 1)
                        bias = layer.place_bias_HP[head, LONGEST - 1 + query - key]
                        bias = bias + layer.time_bias_HK[head, bucket]
                        weight = functional.silu(q[query, mine_A] @ k[key, mine_A] + bias) / LONGEST
                        total = total + weight * v[key, mine_C]
                    heads.append(total)
                attended.append(torch.cat(heads))
            gated = layer.attended_norm(torch.stack(attended)) * u
            x_TD = x_TD + gated @ layer.out.weight.T + layer.out.bias
        found.append(made.final_norm(x_TD))
        start += length
    return torch.cat(found)


def test_values_and_gradients_are_those_of_the_papers_equations():
    made = network()
    mine, theirs = events(sum(LENGTHS), True), events(sum(LENGTHS), True)
    weight_ND = torch.randn(sum(LENGTHS), DIM, dtype=torch.float64)

    out = contexts(made, mine, LENGTHS, TIMES)
    (out * weight_ND).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in made.named_parameters()}
    made.zero_grad()
    expected = row_by_row(made, theirs, LENGTHS, TIMES)
    (expected * weight_ND).sum().backward()

    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-10, msg=name)
    assert all(gradients[f"layers.0.{name}"].any() for name in ("place_bias_HP", "time_bias_HK"))


def test_a_later_event_and_its_time_change_no_earlier_context():
    made, x_ND = network(), events(5)
    changed_ND = x_ND.clone()
    changed_ND[3, ::2] += 1.0

    before = contexts(made, x_ND, [5], [1, 2, 4, 8, 16])

    for after in (
        contexts(made, changed_ND, [5], [1, 2, 4, 8, 16]),
        contexts(made, x_ND, [5], [1, 2, 4, 9_000, 90_000]),
    ):
        assert torch.equal(after[:3], before[:3])
        assert (after[3:] - before[3:]).abs().amax(1).amin() > 1e-6


def test_only_how_long_ago_an_event_was_counts():
    made, x_ND = network(), events(4)

    before = contexts(made, x_ND, [4], [10, 11, 12, 14])

    assert torch.equal(contexts(made, x_ND, [4], [1010, 1011, 1012, 1014]), before)
    assert not torch.allclose(contexts(made, x_ND, [4], [10, 11, 15, 900]), before)


def test_a_network_without_buckets_reads_no_times():
    made, x_ND = network(num_time_buckets=0), events(4)

    assert "layers.0.time_bias_HK" not in dict(made.named_parameters())
    assert torch.equal(contexts(made, x_ND, [4]), contexts(made, x_ND, [4], [10, 11, 12, 14]))


def test_rows_know_nothing_of_each_other():
    made, x_ND = network(), events(sum(LENGTHS))

    together = contexts(made, x_ND, LENGTHS, TIMES)

    start = 0
    for length in LENGTHS:
        mine = slice(start, start + length)
        alone = contexts(made, x_ND[mine], [length], TIMES[mine])
        torch.testing.assert_close(together[mine], alone, rtol=1e-12, atol=1e-12)
        start += length


def test_empty_rows_between_others_change_nothing():
    made, x_ND = network(), events(5)

    with_empty = contexts(made, x_ND, [0, 3, 0, 2], TIMES[:5])

    torch.testing.assert_close(with_empty, contexts(made, x_ND, [3, 2], TIMES[:5]))


def test_a_row_drops_out_alike_alone_and_among_others():
    made, x_ND = network(dropout=0.4).train(), events(7)

    together = contexts(made, x_ND, [3, 4], TIMES[:7], row_keys=[11, 22])

    alone = contexts(made, x_ND[3:], [4], TIMES[3:7], row_keys=[22])
    torch.testing.assert_close(together[3:], alone)
    again = contexts(made, x_ND[3:], [4], TIMES[3:7], row_keys=[22], step=1)
    assert not torch.allclose(together[3:], again)


def test_every_dropout_has_an_index_of_its_own():
    made = network(dropout=0.5, num_layers=3)

    indices = [module.index for module in made.modules() if hasattr(module, "probability")]

    assert sorted(indices) == list(range(made.num_dropouts))
