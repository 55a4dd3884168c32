"""Experts against their dense definition, and a balance that adds up."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.generative import experts as experts_module
from rayrec.models.generative.experts import MOST_DENSE, Experts, ExpertSettings, Gates, balance_losses
from tests.models.networks import layout

DIM, HIDDEN, COUNT = 6, 10, 4
NO_DROPOUT = KeyedDropout(0.0, 0)


def experts(per_token: int) -> Experts:
    torch.manual_seed(3)
    made = Experts(DIM, HIDDEN, ExpertSettings(COUNT, per_token, 0.01))
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_()
    return made


def gates_of(probs_NE: torch.Tensor) -> Gates:
    """Of one expert per token."""
    best_NK = probs_NE.argmax(1, keepdim=True)
    return Gates(probs_NE, torch.zeros_like(probs_NE, dtype=torch.bool).scatter(1, best_NK, True), best_NK)


class Waits(TorchDispatchMode):
    """Notes operations for whose results a host has to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("nonzero", "_local_scalar_dense", "bincount", "masked_select")):
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def dense(mixture: Experts, x_ND: torch.Tensor, per_token: int) -> torch.Tensor:
    """Every expert for every token, times a probability that is zero for those not chosen."""
    probs_NE = (x_ND @ mixture.gate_ED.T).softmax(1)
    smallest_N1 = probs_NE.topk(per_token, dim=1).values[:, -1:]
    factors_NE = probs_NE * (probs_NE >= smallest_N1)
    outs = [
        functional.linear(
            functional.gelu(functional.linear(x_ND, mixture.up_EFD[e], mixture.up_bias_EF[e])),
            mixture.down_EDF[e],
            mixture.down_bias_ED[e],
        )
        for e in range(COUNT)
    ]
    return (torch.stack(outs, dim=1) * factors_NE[:, :, None]).sum(1)


@pytest.mark.parametrize("per_token", [1, 2])
def test_experts_are_their_dense_definition_in_values_and_gradients(per_token):
    mixture, x_ND = experts(per_token), torch.randn(20, DIM)
    direction_ND = torch.randn(20, DIM)
    leaves = (x_ND.requires_grad_(), *mixture.parameters())

    y_ND, gates = mixture(x_ND, NO_DROPOUT)

    expected_ND = dense(mixture, x_ND, per_token)
    torch.testing.assert_close(y_ND, expected_ND, atol=1e-4, rtol=1e-4)
    assert gates.is_chosen_NE.sum(1).tolist() == [per_token] * 20
    ours = torch.autograd.grad((y_ND * direction_ND).sum(), leaves)
    theirs = torch.autograd.grad((expected_ND * direction_ND).sum(), leaves)
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-3, rtol=1e-4)


def test_an_expert_that_no_token_chooses_is_not_computed():
    mixture = experts(1)
    with torch.no_grad():
        mixture.gate_ED[2] = 0.0
        mixture.gate_ED[0] = torch.ones(DIM)
        mixture.gate_ED[[1, 3]] = -torch.ones(DIM)
        mixture.up_EFD[2] = torch.nan

    y_ND, gates = mixture(torch.rand(9, DIM), NO_DROPOUT)

    assert gates.is_chosen_NE.sum(0).tolist() == [9, 0, 0, 0]
    assert y_ND.isfinite().all()


def test_equal_gates_choose_the_first_experts():
    mixture = experts(2)
    with torch.no_grad():
        mixture.gate_ED.zero_()

    _, gates = mixture(torch.randn(5, DIM), NO_DROPOUT)

    assert gates.is_chosen_NE.tolist() == [[True, True, False, False]] * 5


def test_the_balance_of_a_row_is_that_of_its_tokens():
    """Two sequences of two tokens: of four choices, three are of the first of two experts."""
    probs_NE = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    gates = gates_of(probs_NE)

    losses_S = balance_losses(gates, layout([2]))

    # T E Σ f P, with P the means 0.6 and 0.4.
    assert losses_S.sum().item() == pytest.approx(2 * 2 * (0.75 * 0.6 + 0.25 * 0.4))
    assert losses_S.shape == (2,)


def test_the_balance_adds_up_over_rows_and_is_least_when_experts_are_equally_busy():
    probs_NE = torch.randn(12, COUNT).softmax(1)
    gates = gates_of(probs_NE)

    whole_S = balance_losses(gates, layout([1, 0, 3]))

    one = balance_losses(Gates(*(part[:3] for part in gates)), layout([1]))
    three = balance_losses(Gates(*(part[3:] for part in gates)), layout([0, 3]))
    torch.testing.assert_close(torch.cat([one, three]), whole_S)
    even = torch.full((4, COUNT), 1 / COUNT)
    best_NK = torch.arange(COUNT)[:, None]
    gates = Gates(even, torch.eye(COUNT, dtype=torch.bool), best_NK)
    assert balance_losses(gates, layout([1])).item() == pytest.approx(1.0)


@pytest.mark.parametrize("per_token", [1, 2])
def test_few_tokens_without_gradients_go_through_all_experts_and_wait_for_nothing(per_token):
    mixture, x_ND = experts(per_token), torch.randn(20, DIM)
    expected_ND, _ = mixture(x_ND, NO_DROPOUT)

    with torch.no_grad(), Waits() as waits:
        y_ND, _ = mixture(x_ND, NO_DROPOUT)

    torch.testing.assert_close(y_ND, expected_ND, atol=1e-5, rtol=1e-5)
    assert waits.operations == []


@pytest.mark.parametrize("num_tokens", [1, 127, 700])
@pytest.mark.parametrize("per_token", [1, 2])
def test_blocks_of_one_expert_each_give_what_its_tokens_give(per_token, num_tokens, monkeypatch):
    monkeypatch.setattr(experts_module, "MAX_WEIGHTS", 3 * DIM * HIDDEN)  # several passes
    mixture, x_ND = experts(per_token), torch.randn(num_tokens, DIM)
    expected_ND, gates = mixture(x_ND, NO_DROPOUT)

    with Waits() as waits:
        y_ND = mixture.in_blocks(x_ND, gates)

    torch.testing.assert_close(y_ND, expected_ND, atol=1e-5, rtol=1e-5)
    assert waits.operations == []


def test_blocks_do_not_mind_experts_that_nobody_or_everybody_chooses():
    mixture = experts(1)
    with torch.no_grad():
        mixture.gate_ED.zero_()
        mixture.up_EFD[1:] = torch.nan
    x_ND = torch.randn(300, DIM)
    expected_ND, gates = mixture(x_ND, NO_DROPOUT)

    torch.testing.assert_close(mixture.in_blocks(x_ND, gates), expected_ND, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [20, MOST_DENSE + 1])
def test_an_accelerator_is_not_waited_for_without_gradients(num_tokens):
    """A tensor of this device has no values: whoever asks for one fails."""
    mixture = experts(2).to("meta")

    with torch.no_grad():
        y_ND, _ = mixture(torch.empty(num_tokens, DIM, device="meta"), NO_DROPOUT)

    assert y_ND.shape == (num_tokens, DIM)


def test_dropout_of_hidden_values_is_that_of_the_token():
    mixture, x_ND, keys_N = experts(2), torch.randn(20, DIM), torch.arange(20) * 7919
    dropout = KeyedDropout(0.5, 0)

    y_ND, _ = mixture(x_ND, dropout, keys_N)

    for token in (0, 7, 19):
        alone_1D, _ = mixture(x_ND[token : token + 1], dropout, keys_N[token : token + 1])
        torch.testing.assert_close(y_ND[token], alone_1D[0], atol=1e-5, rtol=1e-5)


def test_training_finds_tokens_without_a_search_for_each_expert():
    mixture, x_ND = experts(2), torch.randn(20, DIM)

    with Waits() as waits:
        mixture(x_ND, NO_DROPOUT)

    # The counts are read as one list; on the host that is no operation.
    assert waits.operations == []
