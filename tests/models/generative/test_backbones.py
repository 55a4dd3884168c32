"""What every generative backbone promises, whatever its network."""

import pytest
import torch

from rayrec.models.decoding.prefixes import ItemDistribution, item_log_probs
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.recommender import GenerativeRecommender
from tests.helpers.data import sample_batch
from tests.models.generative.networks import (
    CODES,
    CODES_IL,
    NUM_ITEMS,
    ROWS,
    composed,
    contexts_of,
    described_encoder_decoder,
    described_lazy,
    described_light,
    encoder_decoder,
    encoder_decoder_among_children,
    instructed_lazy,
    lazy,
    lazy_among_children,
    light,
    light_among_children,
    network_of,
    prefix,
    retrieving,
    shares,
    unbalanced_lazy,
)
from tests.models.networks import histories, labeled, tensor_batch

DESCRIBED = [composed, described_light, described_lazy, described_encoder_decoder]
"""Networks that read what the catalog says of items."""
AMONG_CHILDREN = [light_among_children, lazy_among_children, encoder_decoder_among_children]
"""Networks that are trained over the codes that lead to an item."""
ALL = [
    *(light, prefix, lazy, encoder_decoder, instructed_lazy, retrieving),
    *AMONG_CHILDREN,
    *DESCRIBED,
]


def instruction_behind(items, end, num_rows):
    """What the event at a place says of itself, for all rows of a batch."""
    labels = labeled(sample_batch([items])).labels
    said = {label: int(codes_N[end]) for label, codes_N in labels.items()} | {"trigger_item": items[end - 1]}
    return {part: [value] * num_rows for part, value in said.items()}


@pytest.mark.parametrize("make", ALL)
def test_steps_with_caches_score_as_whole_sequences_do(make):
    network, tables = network_of(make)
    context = contexts_of(network, tables)
    logits = network.sequence_logits(context, CODES.expand(len(ROWS), -1, -1))
    step = network.start(context)

    ordinals = torch.arange(NUM_ITEMS).expand(len(ROWS), -1)
    for depth in range(3):
        codes_BWd = CODES[:, :depth].expand(len(ROWS), -1, -1) if depth else CODES[:1, :0].expand(3, -1, -1)
        parent_BW = None if depth == 0 else ordinals * 0 if depth == 1 else ordinals
        step_logits = step(depth, codes_BWd, parent_BW)
        expected = logits[depth][:, :1] if depth == 0 else logits[depth]
        torch.testing.assert_close(step_logits.expand_as(expected), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", ALL)
def test_reordered_beams_take_their_caches_along(make):
    """First codes 2, 1 and 0; then the beams swap places, and one of them goes on twice."""
    network, tables = network_of(make)
    context = contexts_of(network, tables)
    first_BW1 = torch.tensor([[2], [1], [0]]).expand(3, -1, -1)
    grown_BW2 = torch.tensor([[1, 1], [2, 2], [2, 0]]).expand(3, -1, -1)
    step = network.start(context)
    step(0, first_BW1[:, :1, :0], None)
    step(1, first_BW1, torch.zeros(3, 3, dtype=torch.int64))

    logits_BWK = step(2, grown_BW2, torch.tensor([[1, 0, 0]] * 3))

    whole = network.sequence_logits(context, torch.nn.functional.pad(grown_BW2, (0, 1)))
    torch.testing.assert_close(logits_BWK, whole[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", ALL)
def test_a_wide_beam_ranks_exhaustively(make):
    network, tables = network_of(make)
    model = GenerativeRecommender(network, CODES, NUM_ITEMS, 3)
    batch = tensor_batch(histories(ROWS, NUM_ITEMS, tables, CODES_IL))
    context = network.encode_context(batch)
    items_BW = torch.arange(NUM_ITEMS).expand(len(ROWS), -1)

    scores_BI = item_log_probs(ItemDistribution(network.start(context), model.trie, 3), items_BW)
    ranking = model.recommend(batch, NUM_ITEMS, None)

    torch.testing.assert_close(scores_BI.exp().sum(1), torch.ones(3))
    assert ranking.items_BK.tolist() == scores_BI.argsort(dim=1, descending=True).tolist()
    torch.testing.assert_close(ranking.scores_BK, scores_BI.sort(dim=1, descending=True).values)


@pytest.mark.parametrize("make", [prefix, *AMONG_CHILDREN])
def test_items_are_drawn_from_the_distribution_that_was_trained(make):
    network, tables = network_of(make)
    context = contexts_of(network, tables)
    items_BW = torch.arange(NUM_ITEMS).expand(len(ROWS), -1)

    drawn_BI = item_log_probs(
        ItemDistribution(network.start(context), CodeTrie.from_codes(CODES), 3), items_BW
    )

    log_probs_BIL = network.sequence_logprob(context, CODES.expand(len(ROWS), -1, -1))
    torch.testing.assert_close(log_probs_BIL.sum(2), drawn_BI)


@pytest.mark.parametrize("make", ALL)
def test_rows_know_nothing_of_each_other(make):
    network, tables = network_of(make)
    codes_BWL = CODES[None]
    together = network.sequence_logprob(contexts_of(network, tables), codes_BWL.expand(3, -1, -1))

    for row, history in enumerate(ROWS):
        # The same batch without the other rows' events: users and their rows stay.
        rows = [history if other == row else [history[0]] for other in range(len(ROWS))]
        alone = network.sequence_logprob(contexts_of(network, tables, rows), codes_BWL.expand(3, -1, -1))
        torch.testing.assert_close(alone[row], together[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", ALL)
def test_some_rows_of_a_context_are_those_rows(make):
    network, tables = network_of(make)
    context = contexts_of(network, tables)
    whole = network.sequence_logprob(context, CODES.expand(3, -1, -1))

    part = network.sequence_logprob(context.some_rows(slice(1, 3)), CODES.expand(2, -1, -1))

    torch.testing.assert_close(part, whole[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [light, lazy, unbalanced_lazy, *AMONG_CHILDREN[:2]])
def test_training_predicts_behind_every_event_what_decoding_says_there(make):
    network, tables = network_of(make)
    (features,) = shares(ROWS, NUM_ITEMS, tables, CODES_IL)
    batch = tensor_batch(features)

    loss = network.loss(batch, CODES[batch.targets_N])

    by_hand = 0.0
    for row, items in enumerate(ROWS):
        for end in range(1, len(items)):
            rows = [items[:end] if other == row else [0] for other in range(len(ROWS))]
            codes_BWL = CODES[items[end]].expand(3, 1, -1)
            context = contexts_of(network, tables, rows, instruction_behind(items, end, 3))
            by_hand -= network.sequence_logprob(context, codes_BWL)[row].sum().item()
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


def retrieving_alone(dropout):
    """Without the losses that belong to no sequence."""
    network, tables = retrieving(dropout, q2i_weight=0.0)
    return network, tables


@pytest.mark.parametrize("make", [encoder_decoder, encoder_decoder_among_children, retrieving_alone])
def test_an_encoder_decoder_is_trained_behind_one_event_of_each_row(make):
    """It sees the events before that one, and of the target what its instruction says."""
    network, tables = network_of(make)
    rows = [[0, 3, 5, 2], [6, 1]]
    (features,) = shares(rows, NUM_ITEMS, tables, CODES_IL)
    batch = tensor_batch(features)

    loss = network.loss(batch, CODES[batch.targets_N]).item()

    def log_prob(row, end):
        shown = [rows[row][:end] if other == row else [0] for other in range(2)]
        codes_BWL = CODES[rows[row][end]].expand(2, 1, -1)
        instruction = instruction_behind(rows[row], end, 2)
        context = contexts_of(network, tables, shown, instruction)
        return network.sequence_logprob(context, codes_BWL)[row].sum().item()

    # Three places of the first row may be drawn, each for all three; of the second there is one.
    possible = [-3 * log_prob(0, end) - log_prob(1, 1) for end in (1, 2, 3)]
    assert min(abs(loss - value) for value in possible) < 1e-4


def test_every_cut_of_a_row_is_drawn_alike():
    network, tables = network_of(encoder_decoder)
    drawn = []
    with torch.no_grad():
        for step in range(60):
            (features,) = shares([[0, 3, 5, 2]], NUM_ITEMS, tables, CODES_IL, step=step)
            batch = tensor_batch(features)
            drawn.append(round(network.loss(batch, CODES[batch.targets_N]).item(), 4))
    assert len(set(drawn)) == 3
    assert min(drawn.count(value) for value in set(drawn)) >= 10


@pytest.mark.parametrize("make", ALL)
def test_a_step_is_the_same_however_it_is_split_over_trainers(make):
    network, tables = network_of(make, dropout=0.4)
    network.train()

    def loss_of(num_trainers):
        parts = shares(ROWS, NUM_ITEMS, tables, CODES_IL, num_trainers=num_trainers, step=5)
        batches = [tensor_batch(part, training=True) for part in parts]
        return sum(network.loss(batch, CODES[batch.targets_N]) for batch in batches)

    torch.testing.assert_close(loss_of(1), loss_of(2))


@pytest.mark.parametrize("make", ALL)
def test_gradients_reach_every_weight(make):
    network, tables = network_of(make)
    total = 0.0
    for step in range(4):
        (features,) = shares([[0, 3, 5, 2, 6, 1], [4, 0, 1]], NUM_ITEMS, tables, CODES_IL, step=step)
        batch = tensor_batch(features, training=True)
        total = total + network.loss(batch, CODES[batch.targets_N])
    total.backward()

    assert [name for name, weight in network.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("make", ALL)
def test_rows_without_events_do_no_harm(make):
    network, tables = network_of(make)
    context = contexts_of(network, tables, [ROWS[0], [], ROWS[2]])
    together = contexts_of(network, tables)
    codes_BWL = CODES.expand(3, -1, -1)

    log_probs = network.sequence_logprob(context, codes_BWL)

    assert log_probs.isfinite().all()
    expected = network.sequence_logprob(together, codes_BWL)
    torch.testing.assert_close(log_probs[[0, 2]], expected[[0, 2]], atol=1e-5, rtol=1e-5)
