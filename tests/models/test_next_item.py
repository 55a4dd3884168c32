from itertools import product

import numpy as np
import pytest
import torch

from rayrec.models.sequence.backbones.history import contexts, last_contexts
from rayrec.models.sequence.item_losses import CrossEntropy, SampledSoftmax
from rayrec.models.sequence.next_item import DenseNextItemModel, SparseNextItemModel
from rayrec.models.sequence.sequence_model import top_items
from rayrec.models.sequence.tensor_batch import TensorBatch
from tests.models.networks import CPU, DIM, backbone, histories, shares, table_rows, tensor_batch

NUM_ITEMS = 9
ROWS = [[1, 4, 2], [3, 5], [0, 8, 7, 6]]


def item_rows(item_ids) -> torch.Tensor:
    """The rows that `table_rows` gives to items."""
    return torch.tensor(
        np.stack([np.random.default_rng(item).normal(scale=0.3, size=DIM) for item in item_ids]),
        dtype=torch.float32,
    )


def full_softmax() -> DenseNextItemModel:
    torch.manual_seed(0)
    model = DenseNextItemModel(backbone(), CrossEntropy(), NUM_ITEMS, DIM)
    with torch.no_grad():
        model.items_ID.copy_(item_rows(range(NUM_ITEMS)))
    return model.eval()


def sampled_batch(negatives: list[int], rows=ROWS, training=False) -> TensorBatch:
    """A batch whose sampled negatives are the given ones."""
    (features,) = shares(rows, NUM_ITEMS, tables=("item",), num_negatives=len(negatives))
    ids = np.concatenate([features.items_N, features.targets_N, negatives])
    ids_M, inverse = np.unique(ids, return_inverse=True)
    return TensorBatch(
        **{
            **vars(tensor_batch(features)),
            "negatives_S": torch.tensor(negatives),
            "inverse": {"item": torch.tensor(inverse)},
            "rows": {"item": item_rows(ids_M).requires_grad_(training)},
        }
    )


def test_loss_is_the_summed_log_loss_of_the_next_items():
    model, (features,) = full_softmax(), shares(ROWS, NUM_ITEMS)
    batch = tensor_batch(features)

    loss = model.loss(batch)

    logits_NI = (contexts(model.backbone, model.embed_history(batch), batch) @ model.items_ID.T).tolist()
    by_hand = 0.0
    for logits_I, target in zip(logits_NI, [4, 2, 5, 8, 7, 6], strict=True):
        by_hand += np.log(np.exp(logits_I).sum()) - logits_I[target]
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


def test_sampled_softmax_with_every_item_once_is_the_full_softmax():
    """Drawn for certain, no correction is left."""
    batch = sampled_batch(list(range(NUM_ITEMS)))
    sampled = SparseNextItemModel(backbone(), SampledSoftmax(torch.zeros(NUM_ITEMS))).eval()

    torch.testing.assert_close(sampled.loss(batch), full_softmax().loss(batch))


def test_sampled_softmax_estimates_the_partition_function_without_bias():
    """Over all pairs of draws, the mean of the corrected mass is the whole catalog's."""
    probabilities_I = np.random.default_rng(1).dirichlet(np.full(NUM_ITEMS, 5.0))
    model = SparseNextItemModel(backbone(), SampledSoftmax.of_draws(np.log(probabilities_I), 2)).eval()
    rows = [[1, 4]]

    mean = 0.0
    for first, second in product(range(NUM_ITEMS), repeat=2):
        estimate = model.loss(sampled_batch(sorted({first, second}), rows)).exp().item()
        mean += probabilities_I[first] * probabilities_I[second] * estimate

    # The exponential of a loss is the partition function, relative to the target's mass.
    assert mean == pytest.approx(full_softmax().loss(sampled_batch([0], rows)).exp().item(), rel=1e-5)


def test_a_negative_that_is_of_the_row_does_not_count():
    model = SparseNextItemModel(backbone(), SampledSoftmax(torch.zeros(NUM_ITEMS))).eval()

    with_hit = model.loss(sampled_batch([1, 4, 7], rows=[[1, 4]]))

    torch.testing.assert_close(with_hit, model.loss(sampled_batch([7], rows=[[1, 4]])))


def test_gradients_reach_inputs_targets_and_negatives():
    batch = sampled_batch([0, 8], rows=[[1, 4, 2]], training=True)
    SparseNextItemModel(backbone(), SampledSoftmax(torch.zeros(NUM_ITEMS))).loss(batch).backward()

    rows_touched = batch.rows["item"].grad.abs().sum(1) > 0
    assert rows_touched.tolist() == [True] * 5  # items 0, 1, 2, 4 and 8


@pytest.mark.parametrize("sampled", [False, True])
def test_rank_is_the_order_of_inner_products_without_excluded_items(sampled):
    catalog_ID = item_rows(range(NUM_ITEMS))
    model = full_softmax()
    if sampled:
        model = SparseNextItemModel(backbone(), SampledSoftmax(torch.zeros(NUM_ITEMS))).eval()
        model.set_catalog(catalog_ID)
    features = histories(ROWS, NUM_ITEMS, tables=("item",))
    batch = TensorBatch.build(features, table_rows(features), seed=0, device=CPU, training=False)
    excluded_BE = torch.tensor([[1, 4, 2], [3, 5, -1], [-1, -1, -1]])

    ranking = model.recommend(batch, NUM_ITEMS, excluded_BE)

    scores_BI = (last_contexts(model.backbone, model.embed_history(batch), batch) @ catalog_ID.T).detach()
    for row, excluded in enumerate([{1, 4, 2}, {3, 5}, set()]):
        allowed = sorted(set(range(NUM_ITEMS)) - excluded, key=lambda item: -float(scores_BI[row, item]))
        padding = [-1] * len(excluded)
        assert ranking.items_BK[row].tolist() == allowed + padding
        torch.testing.assert_close(ranking.scores_BK[row, : len(allowed)], scores_BI[row, allowed])
        assert ranking.scores_BK[row, len(allowed) :].tolist() == [-torch.inf] * len(padding)


def test_no_more_items_are_ranked_than_there_are():
    ranking = top_items(torch.tensor([[1.0, 3.0, 2.0]]), k=10, excluded_BE=None)

    assert ranking.items_BK.tolist() == [[1, 2, 0, *[-1] * 7]]
    assert ranking.scores_BK.tolist() == [[3.0, 2.0, 1.0, *[-torch.inf] * 7]]


def test_the_users_row_is_added_to_every_event():
    (features,) = shares(ROWS, NUM_ITEMS, tables=("user",))
    batch = tensor_batch(features)
    model = full_softmax()

    shifted_ND = model.embed_history(batch) + batch.rows["user"][batch.inverse["user"]][batch.layout.row_N]

    contexts_ND = contexts(model.backbone, model.embed_history(batch), batch)
    torch.testing.assert_close(contexts_ND, model.backbone(shifted_ND, batch.layout, batch.keys_N))
