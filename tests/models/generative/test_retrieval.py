"""Which events are retrieved, and what learns to retrieve."""

from __future__ import annotations

import math

import pytest
import torch

from rayrec.models.generative.retrieval import HistoryRetrieval, RetrievalSettings
from tests.models.generative.networks import (
    CODES,
    CODES_IL,
    NUM_ITEMS,
    contexts_of,
    network_of,
    retrieving,
    shares,
)
from tests.models.networks import layout, tensor_batch


def retrieval(num_events: int, num_recent: int) -> HistoryRetrieval:
    """Scores are inner products of the first half of what is asked with the event's vector."""
    made = HistoryRetrieval(
        2, RetrievalSettings(num_events, num_recent, 1.0, q2i_temperature=0.5), with_instruction=True
    )
    with torch.no_grad():
        made.query.weight.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]))
        made.key.weight.copy_(torch.eye(2))
    return made


def test_the_newest_events_and_the_best_of_the_others_come_in_order_of_time():
    rows = [
        [[5.0, 0.0], [1.0, 9.0], [4.0, 0.0], [3.0, 0.0], [0.0, 0.0]],  # scores are the first numbers
        [[7.0, 2.0], [7.0, 1.0]],  # no more than are chosen
        [[1.0, 1.0], [1.0, 8.0], [1.0, 3.0], [1.0, 3.0]],  # scores are the second numbers
    ]
    vectors_ED = torch.tensor([event for row in rows for event in row])
    asked_R = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 1.0, 0, 0]])

    chosen_C, lengths_R = retrieval(3, 1).choose(asked_R, vectors_ED, layout([5, 2, 4]))

    assert lengths_R.tolist() == [3, 2, 3]
    assert chosen_C.tolist() == [0, 2, 4, 5, 6, 8, 9, 10]


def test_of_equal_events_the_newer_is_taken_wherever_their_row_stands():
    vectors_ED = torch.randn(1, 2).repeat(6, 1)
    asked = torch.randn(1, 4)
    alone, _ = retrieval(3, 1).choose(asked, vectors_ED, layout([6]))

    others, vectors = torch.randn(4, 4), torch.randn(9, 2)
    among, _ = retrieval(3, 1).choose(
        torch.cat([others, asked]), torch.cat([vectors, vectors_ED]), layout([1, 2, 4, 2, 6])
    )

    assert alone.tolist() == [3, 4, 5]
    assert among[-3:].tolist() == [12, 13, 14]


def test_what_is_asked_is_the_instruction_and_the_mean_of_the_newest_events():
    recent_RJD = torch.tensor(
        [[[2.0, 4.0], [4.0, 0.0]], [[6.0, 8.0], [99.0, 99.0]], [[9.0, 9.0], [9.0, 9.0]]]
    )
    is_there_RJ = torch.tensor([[True, True], [True, False], [False, False]])
    prefix_RPD = torch.tensor([[[1.0, 0.0], [2.0, 5.0]]]).repeat(3, 1, 1).requires_grad_()

    asked_R = retrieval(3, 2).asked(recent_RJD, is_there_RJ, prefix_RPD)

    assert asked_R.tolist() == [[3.0, 5.0, 3.0, 2.0], [3.0, 5.0, 6.0, 8.0], [3.0, 5.0, 0.0, 0.0]]
    assert not asked_R.requires_grad


def test_the_loss_is_a_softmax_over_the_target_and_the_negatives_but_for_itself():
    asked_R = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    vectors_SD = torch.tensor([[0.5, 0.0], [9.0, 0.0], [0.0, 3.0]])

    (loss,) = retrieval(3, 1).q2i_losses(
        asked_R, torch.tensor([7]), torch.tensor([4, 7, 2]), torch.tensor([[1.0, 1.0]]), vectors_SD
    )

    # Inner products 1, 0.5 and 0 over a temperature of 0.5.
    assert loss.item() == pytest.approx(math.log(math.exp(2) + math.exp(1) + 1) - 2)


def gradients(q2i_weight: float) -> dict[str, torch.Tensor]:
    network, tables = network_of(lambda dropout: retrieving(dropout, q2i_weight))
    (features,) = shares([[0, 3, 5, 2, 6, 1], [4, 0, 1]], NUM_ITEMS, tables, CODES_IL)
    batch = tensor_batch(features, training=True)
    network.loss(batch, CODES[batch.targets_N]).backward()
    return {name: weight.grad for name, weight in network.named_parameters()} | {
        f"rows of {table}": rows.grad for table, rows in batch.rows.items()
    }


def test_its_gradient_reaches_the_projections_and_nothing_else():
    with_loss, without = gradients(0.5), gradients(0.0)

    for name, gradient in with_loss.items():
        if name.startswith("retrieval."):
            assert gradient.abs().sum() > 0
            assert without[name] is None
        else:
            assert torch.equal(gradient, without[name]), name


def test_an_instruction_changes_which_events_are_encoded():
    """Six events, of which the newest and two others are encoded: contexts differ in what they hold."""
    network, tables = network_of(retrieving)
    history = [[0, 3, 5, 2, 6, 1]]

    found = {
        tuple(
            contexts_of(network, tables, history, {"behavior": [b], "trigger_item": [t]})
            .layers[0][0]
            .flatten()
            .tolist()
        )
        for b in range(-1, 3)
        for t in range(-1, NUM_ITEMS)
    }

    assert len(found) > 1
    layouts = contexts_of(network, tables, history).layout
    assert layouts.lengths_B.tolist() == [3 * 3]  # three events of three codes


def test_histories_no_longer_than_is_encoded_are_encoded_whole():
    network, tables = network_of(retrieving)
    short = [[0, 3, 5]]

    contexts = [
        contexts_of(network, tables, short, {"behavior": [behavior]}).layers[0][0] for behavior in range(3)
    ]

    assert torch.equal(contexts[0], contexts[1])
    assert torch.equal(contexts[0], contexts[2])


def test_queries_and_keys_are_float32_whatever_autocast_says():
    torch.manual_seed(1)
    made = HistoryRetrieval(64, RetrievalSettings(8, 2, 0.1, 1.0), with_instruction=False)
    asked_R, vectors_RD, vectors_SD = torch.randn(4, 64), torch.randn(4, 64), torch.randn(9, 64)
    arguments = (asked_R, torch.arange(4), torch.arange(9), vectors_RD, vectors_SD)
    expected_R = made.q2i_losses(*arguments)

    with torch.autocast("cpu", torch.bfloat16):
        losses_R = made.q2i_losses(*arguments)

    assert losses_R.dtype == torch.float32
    assert torch.equal(losses_R, expected_R)


def test_what_is_asked_does_not_depend_on_the_order_of_a_sum():
    """Of float32 sums, small values would be lost beside a large one, or not."""
    recent_RJD = torch.tensor([[[1e8, 1.0], [1.0, 1.0], [-1e8, 1.0]], [[1e8, 1.0], [-1e8, 1.0], [1.0, 1.0]]])

    asked_R = retrieval(4, 3).asked(recent_RJD, torch.ones(2, 3, dtype=torch.bool), None)

    assert asked_R[:, 0].tolist() == pytest.approx([1 / 3] * 2)
