"""What an instruction does to what is generated, and what leaving it out does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayrec.models.base.keyed_random import keyed_chance
from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
from rayrec.models.generative.recommender import GenerativeRecommender
from tests.models.generative.networks import (
    CODES,
    CODES_IL,
    NUM_ITEMS,
    ROWS,
    contexts_of,
    encoder_decoder,
    instructed_lazy,
    lazy,
    light,
    network_of,
    prefix,
    retrieving,
    shares,
    unbalanced_lazy,
)
from tests.models.networks import DIM, LABEL_SIZES, tensor_batch

EVERYTHING = CODES.expand(len(ROWS), -1, -1)
NOTHING = {"scenario": [-1] * 3, "behavior": [-1] * 3, "trigger_item": [-1] * 3}


def log_probs(network, tables, instruction=None):
    return network.sequence_logprob(contexts_of(network, tables, instruction=instruction), EVERYTHING)


@pytest.mark.parametrize("part", ["scenario", "behavior", "trigger_item"])
def test_an_instruction_changes_what_is_said_of_its_row_alone(part):
    network, tables = network_of(instructed_lazy)
    without = log_probs(network, tables)

    wanted = log_probs(network, tables, {part: [-1, 1, -1]})

    assert not torch.allclose(wanted[1], without[1], atol=1e-3)
    torch.testing.assert_close(wanted[[0, 2]], without[[0, 2]], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(log_probs(network, tables, {part: [0, 0, 0]})[1], wanted[1], atol=1e-3)


@pytest.mark.parametrize("make", [instructed_lazy, retrieving])
def test_to_want_nothing_is_to_send_no_instruction(make):
    network, tables = network_of(make)

    assert torch.equal(log_probs(network, tables, NOTHING), log_probs(network, tables))


def test_instructions_that_are_left_out_train_what_requests_without_get():
    network, tables = network_of(unbalanced_lazy)
    network.train()  # dropout is 0
    network.instruction.drop = 1.0
    (features,) = shares(ROWS, NUM_ITEMS, tables, CODES_IL)
    batch = tensor_batch(features)

    loss = network.loss(batch, CODES[batch.targets_N]).item()

    network.eval()
    by_hand = 0.0
    for row, items in enumerate(ROWS):
        for end in range(1, len(items)):
            shown = [items[:end] if other == row else [0] for other in range(len(ROWS))]
            codes_BWL = CODES[items[end]].expand(3, 1, -1)
            by_hand -= network.sequence_logprob(contexts_of(network, tables, shown), codes_BWL)[row].sum()
    assert loss == pytest.approx(by_hand.item(), rel=1e-5)


def test_parts_are_left_out_by_chance_each_on_its_own_and_all_at_once():
    prefix_network = InstructionPrefix(DIM, LABEL_SIZES, with_trigger=True, drop=0.3)
    (features,) = shares([[0, 3, 5, 2, 6, 1]] * 400, NUM_ITEMS, (), CODES_IL)
    batch = tensor_batch(features)
    said = prefix_network.of_targets(batch, torch.arange(len(batch.items_N)))

    left_out = torch.stack([said[part] == -1 for part in ("scenario", "behavior", "trigger_item")])

    assert left_out.float().mean(1).tolist() == pytest.approx([1 - 0.7**2] * 3, abs=0.03)
    # Without a chance of its own, all of them would be left out of 2.7 %.
    assert left_out.all(0).float().mean().item() == pytest.approx(0.3 + 0.7 * 0.3**3, abs=0.03)
    kept = ~left_out[1]
    assert torch.equal(said["behavior"][kept], batch.target_labels["behavior"][kept])
    assert torch.equal(said["trigger_item"][~left_out[2]], batch.items_N[~left_out[2]])


def test_an_event_whose_label_is_unknown_is_one_without_labels():
    labels = EventLabels(DIM, LABEL_SIZES)
    (features,) = shares([[0, 3, 5, 2]], NUM_ITEMS, (), CODES_IL)
    features.labels["behavior"] = np.array([2, -1, -1])
    features.labels["scenario"] = np.array([-1, 1, -1])

    vectors_ND = labels(tensor_batch(features).labels)

    torch.testing.assert_close(vectors_ND[0], labels.vectors["behavior"][2])
    torch.testing.assert_close(vectors_ND[1], labels.vectors["scenario"][1])
    assert not vectors_ND[2].any()
    assert {name: len(vectors) for name, vectors in labels.vectors.items()} == LABEL_SIZES


def test_chances_hang_on_key_and_index_alone():
    keys_N = torch.arange(1000) * 7919

    drawn_N = keyed_chance(keys_N, 0.5, 0)

    assert torch.equal(keyed_chance(keys_N.flip(0), 0.5, 0).flip(0), drawn_N)
    assert not torch.equal(keyed_chance(keys_N, 0.5, 1), drawn_N)
    assert not keyed_chance(keys_N, 0.0, 0).any()
    assert keyed_chance(keys_N, 1.0, 0).all()


def test_a_row_decodes_the_same_items_with_its_instruction_in_any_batch():
    network, tables = network_of(instructed_lazy)
    model = GenerativeRecommender(network, CODES, NUM_ITEMS, 3)
    wanted = {"behavior": [2, 0, 1], "trigger_item": [4, -1, 0]}
    context = contexts_of(network, tables, instruction=wanted)

    whole = model._search(context, [4] * 3, None).items_BW
    parts = [model._search(context.some_rows(slice(row, row + 1)), [4], None).items_BW for row in range(3)]

    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("make", [light, prefix, lazy, instructed_lazy])
def test_weights_multiply_the_losses_of_their_targets(make):
    """Rows of two events have one target each, so that a row's loss is that of its target."""
    network, tables = network_of(make)
    rows = [[0, 3], [6, 1], [4, 2]]

    def loss_of(some, weights_N=None):
        (features,) = shares(some, NUM_ITEMS, tables, CODES_IL)
        batch = tensor_batch(features)
        return network.loss(batch, CODES[batch.targets_N], weights_N).item()

    # Rows of no target keep the others in their places.
    single = [loss_of([rows[o] if o == row else [0] for o in range(3)]) for row in range(3)]

    weighted = loss_of(rows, torch.tensor([2.0, 0.0, 0.5]))

    assert weighted == pytest.approx(2 * single[0] + 0.5 * single[2], rel=1e-5)
    assert loss_of(rows, torch.ones(3)) == pytest.approx(loss_of(rows), rel=1e-6)


@pytest.mark.parametrize("make", [encoder_decoder, retrieving])
def test_weights_are_of_the_event_behind_the_cut(make):
    network, tables = network_of(make)
    (features,) = shares([[0, 3]], NUM_ITEMS, tables, CODES_IL)
    batch = tensor_batch(features)
    codes = CODES[batch.targets_N]

    assert network.loss(batch, codes, torch.tensor([3.0])).item() == pytest.approx(
        3 * network.loss(batch, codes).item()
    )


def test_behaviors_have_their_weights_and_unknown_ones_count_once():
    network, tables = network_of(lazy)
    model = GenerativeRecommender(network, CODES, NUM_ITEMS, 3, torch.tensor([2.0, 1.0, 0.5]))
    (features,) = shares([[0, 3], [6, 1], [4, 2]], NUM_ITEMS, tables, CODES_IL)
    features.target_labels["behavior"] = np.array([0, -1, 2])
    batch = tensor_batch(features)

    expected = network.loss(batch, CODES[batch.targets_N], torch.tensor([2.0, 1.0, 0.5]))

    torch.testing.assert_close(model.loss(batch), expected)
