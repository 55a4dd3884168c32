import numpy as np
import pytest
import torch

from rayrec.models.generative import prefix_rows
from rayrec.models.generative.prefix_rows import SparsePrefixDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.samples.features.prefix_paths import PrefixPaths
from tests.models.generative.networks import (
    CODES,
    CODES_IL,
    LEVEL_SIZES,
    NUM_ITEMS,
    ROWS,
    TREE,
    assert_same_gradients,
    pair,
    paths,
    rows_of,
)
from tests.models.networks import backbone, histories, shares, tensor_batch

TRAINED_I = np.array([True, False, True, False, False, True, True])


def batch_of(rows, sampled: PrefixPaths):
    (features,) = shares(rows, NUM_ITEMS, ("prefix",), CODES_IL, paths=sampled)
    return features, tensor_batch(features, training=True)


@pytest.mark.parametrize("trained_I", [None, TRAINED_I])
def test_rows_of_servers_give_the_loss_and_the_gradients_of_weights(trained_I):
    rows = ROWS if trained_I is None else [[0, 2, 5, 6], [5, 0]]
    dense, sparse = pair(trained_I)
    features, batch = batch_of(rows, paths(trained_I=trained_I))
    targets_NL, weights_N = CODES[batch.targets_N], torch.linspace(0.5, 2.0, len(batch.targets_N))

    losses = [network.loss(batch, targets_NL, weights_N) for network in (dense, sparse)]
    for loss in losses:
        loss.backward()

    torch.testing.assert_close(*losses)
    assert_same_gradients(dense, sparse, features, batch)


def test_a_sample_of_siblings_is_corrected_by_its_share():
    """One target, below a root with three children of which one is sampled: by hand."""
    _, sparse = pair()
    sampled = paths(num_siblings=1)
    _, batch = batch_of([[5, 3]], sampled)
    (level, *_), ids = sampled.levels(0, np.array([3]))
    drawn, target = level.codes_C[0], 1
    vectors = {code: sparse.shared_KD[0][code] + _row(TREE.prefix_ids(1)[code]) for code in range(3)}
    context_ND = sparse.encode_context(batch).vectors_BD

    loss = sparse.loss(batch, CODES[batch.targets_N])

    logit = context_ND[0] @ vectors[target]
    logits = [logit] if drawn == target else [logit, context_ND[0] @ vectors[drawn] - np.log(1 / 3)]
    first = torch.stack(logits).logsumexp(0) - logit
    # At the other levels, (1) has one child, and (1, 1) two of which one is sampled.
    last = batch.paths[2]
    lasts = {code: sparse.shared_KD[2][code] + _row(TREE.prefix_ids(3)[3 + code]) for code in range(2)}
    logit, drawn = context_ND[0] @ lasts[0], int(last.codes_C[0])
    logits = [logit] if drawn == 0 else [logit, context_ND[0] @ lasts[drawn] - np.log(1 / 2)]
    torch.testing.assert_close(loss, first + torch.stack(logits).logsumexp(0) - logit)
    assert ids[0] in TREE.prefix_ids(1)


def _row(ident: int) -> torch.Tensor:
    return torch.from_numpy(rows_of(np.array([ident])))[0]


def test_samples_as_large_as_families_are_the_whole_softmax():
    _, sparse = pair()
    (_, whole), (_, sampled) = batch_of(ROWS, paths()), batch_of(ROWS, paths(num_siblings=3))

    torch.testing.assert_close(
        sparse.loss(whole, CODES[whole.targets_N]), sparse.loss(sampled, CODES[sampled.targets_N])
    )


@pytest.mark.parametrize("num_siblings", [1, 2])
def test_logits_in_groups_are_those_in_a_matrix(num_siblings, monkeypatch):
    _, sparse = pair()
    _, batch = batch_of(ROWS, paths(num_siblings))
    expected = sparse.loss(batch, CODES[batch.targets_N])

    monkeypatch.setattr(prefix_rows, "MAX_EMPTY", 0)

    torch.testing.assert_close(sparse.loss(batch, CODES[batch.targets_N]), expected)


@pytest.mark.parametrize("max_held", [0, 3, 8, 100])
@pytest.mark.parametrize("most_read", [1, 1 << 19])
def test_items_are_generated_alike_by_weights_held_rows_and_rows_read_on_the_way(
    max_held, most_read, monkeypatch
):
    monkeypatch.setattr(prefix_rows, "MAX_READ", most_read)
    dense, sparse = pair(max_held=max_held)
    models = [GenerativeRecommender(network, CODES, NUM_ITEMS, 3) for network in (dense, sparse)]
    held = models[1].catalog_ids(np.arange(NUM_ITEMS))
    models[1].set_catalog(torch.from_numpy(rows_of(held)))
    models[1].set_row_reader(rows_of)
    batch = tensor_batch(histories(ROWS, NUM_ITEMS, ("prefix",), CODES_IL, paths=paths()))

    expected, found = (model.recommend(batch, NUM_ITEMS, None) for model in models)

    assert len(held) == {0: 0, 3: 3, 8: 8, 100: 15}[max_held]
    assert models[1].reads_rows == (max_held < 15)
    assert found.items_BK.tolist() == expected.items_BK.tolist()
    torch.testing.assert_close(found.scores_BK, expected.scores_BK)


def test_prefixes_that_came_after_training_are_not_asked_for():
    """What is held is of the prefixes that a model knows, in the order of its own tree."""
    grown = torch.cat([CODES, torch.tensor([[0, 2, 0], [1, 2, 1]])])
    known_I = torch.tensor([True] * NUM_ITEMS + [False] * 2)
    network = SparsePrefixDecoder(backbone(), grown, LEVEL_SIZES, known_I, max_held=100)

    expected = np.concatenate([TREE.prefix_ids(depth + 1) for depth in range(3)])
    assert network.catalog_ids().tolist() == expected.tolist()
