import dataclasses
import math

import numpy as np
import pytest
import torch

from rayrec.models.sequence import item_losses
from rayrec.models.sequence.backbones.history import contexts
from rayrec.models.sequence.item_losses import BinaryCrossEntropy, CrossEntropy, SampledSoftmax
from rayrec.models.sequence.next_item import DenseNextItemModel, NextItemModel, SparseNextItemModel
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.samples.base.batches import FeatureBatch
from rayrec.samples.features.features import SequenceFeatures
from tests.helpers.data import sample_batch
from tests.models.networks import DIM, backbone, tensor_batch

NUM_ITEMS = 9
ROWS = [[1, 4, 2], [3, 5], [0, 8, 7, 6]]
NEGATIVES = {"bce": {"negatives_per_event": 2}, "sampled": {"num_negatives": 4}, "full": {}}
LOSSES = {
    "bce": BinaryCrossEntropy,
    "sampled": lambda: SampledSoftmax(torch.linspace(-1, 1, NUM_ITEMS)),
    "full": CrossEntropy,
}


def item_rows() -> torch.Tensor:
    """The rows that `table_rows` gives to items."""
    return torch.tensor(
        np.stack([np.random.default_rng(item).normal(scale=0.3, size=DIM) for item in range(NUM_ITEMS)]),
        dtype=torch.float32,
    )


def features_for(loss: str, tables=()) -> FeatureBatch:
    features = SequenceFeatures(np.arange(NUM_ITEMS), max_length=6, tables=tables, **NEGATIVES[loss])
    return features(sample_batch(ROWS))[0]


def batch_for(loss: str) -> TensorBatch:
    return tensor_batch(features_for(loss))


def dense(loss: str, temperature: float | None = None) -> DenseNextItemModel:
    model = DenseNextItemModel(backbone(), LOSSES[loss](), NUM_ITEMS, DIM, temperature)
    with torch.no_grad():
        model.items_ID.copy_(item_rows())
    return model.eval()


def scores(model: NextItemModel, batch: TensorBatch) -> list[list[float]]:
    """[N][I] inner products of contexts and items, as numbers."""
    context_ND = contexts(model.backbone, model.embed_history(batch), batch).double()
    return (context_ND @ item_rows().double().T).tolist()


def test_bce_tells_each_target_from_its_own_negatives():
    model, batch = dense("bce"), batch_for("bce")

    by_hand = 0.0
    rows = zip(scores(model, batch), [4, 2, 5, 8, 7, 6], batch.negatives_NK.tolist(), strict=True)
    for scores_I, target, negatives_K in rows:
        assert len(negatives_K) == 2
        by_hand -= math.log(1 / (1 + math.exp(-scores_I[target])))
        by_hand -= sum(math.log(1 - 1 / (1 + math.exp(-scores_I[item]))) for item in negatives_K)

    assert model.loss(batch).item() == pytest.approx(by_hand, rel=1e-5)


def test_bce_moves_targets_and_negatives_by_their_probabilities():
    """With contexts c: the gradient of a target's row is (σ - 1) c, that of a negative's σ c."""
    model, batch = dense("bce"), batch_for("bce")
    items = model.items_ID.detach().clone().requires_grad_()
    context_ND = contexts(model.backbone, model.embed_history(batch), batch).detach()

    class Rows:
        def targets(self, batch):
            return items[batch.targets_N]

        def negatives(self, batch):
            return items[batch.negatives_NK]

    model.item_loss(context_ND, Rows(), batch).backward()

    expected_ID = torch.zeros(NUM_ITEMS, DIM)
    for context_D, target, negatives_K in zip(context_ND, batch.targets_N, batch.negatives_NK, strict=True):
        expected_ID[target] += (torch.sigmoid(context_D @ items[target]) - 1) * context_D
        for item in negatives_K:
            expected_ID[item] += torch.sigmoid(context_D @ items[item]) * context_D
    torch.testing.assert_close(items.grad, expected_ID)


def test_a_sampled_softmax_has_the_row_for_certain_and_each_negative_once_by_its_probability():
    """By hand: items of the row but the target by themselves; other distinct negatives over the probability
    that any of the four draws is it."""
    model, batch = dense("sampled"), batch_for("sampled")
    q_I = np.arange(1, NUM_ITEMS + 1) / np.arange(1, NUM_ITEMS + 1).sum()
    model.item_loss = SampledSoftmax.of_draws(np.log(q_I), 4)
    batch = dataclasses.replace(batch, negatives_S=torch.tensor([2, 5, 8]))

    by_hand = 0.0
    row_of_target = [ROWS[0]] * 2 + [ROWS[1]] + [ROWS[2]] * 3
    events = zip(scores(model, batch), batch.targets_N.tolist(), row_of_target, strict=True)
    for scores_I, target, row in events:
        weights = dict.fromkeys({*row} - {target}, 1.0)
        weights |= {item: 1 / (1 - (1 - q_I[item]) ** 4) for item in {2, 5, 8} - {*row}}
        others = sum(weight * math.exp(scores_I[item]) for item, weight in weights.items())
        by_hand += math.log(math.exp(scores_I[target]) + others) - scores_I[target]

    assert model.loss(batch).item() == pytest.approx(by_hand, rel=1e-5)


def test_where_all_negatives_are_of_the_row_gradients_are_numbers():
    model, batch = dense("sampled"), batch_for("sampled")
    batch = dataclasses.replace(batch, negatives_S=torch.tensor([0, 6, 7, 8]))

    model.loss(batch).backward()

    assert model.items_ID.grad.isfinite().all()
    assert model.items_ID.grad[8].any()


def test_an_item_that_a_row_has_twice_counts_once():
    rows = [[1, 4, 1, 4, 1], [2, 3]]
    model = dense("sampled")
    model.item_loss = SampledSoftmax.of_draws(np.full(NUM_ITEMS, -math.log(NUM_ITEMS)), 2)
    features = SequenceFeatures(np.arange(NUM_ITEMS), max_length=6, num_negatives=2)
    batch = dataclasses.replace(
        tensor_batch(features(sample_batch(rows))[0]), negatives_S=torch.tensor([1, 4])
    )

    by_hand = 0.0
    for scores_I, target in zip(scores(model, batch)[:4], [4, 1, 4, 1], strict=True):
        by_hand += math.log(math.exp(scores_I[1]) + math.exp(scores_I[4])) - scores_I[target]
    scores_I, weight = scores(model, batch)[4], 1 / (1 - (1 - 1 / NUM_ITEMS) ** 2)
    drawn = weight * (math.exp(scores_I[1]) + math.exp(scores_I[4]))
    by_hand += math.log(math.exp(scores_I[2]) + math.exp(scores_I[3]) + drawn) - scores_I[3]

    assert model.loss(batch).item() == pytest.approx(by_hand, rel=1e-5)


def test_of_a_long_row_the_newest_items_are_certain(monkeypatch):
    """The target of the first event is in the row, and not among its newest two: it counts once."""
    monkeypatch.setattr(item_losses, "MOST_CERTAIN", 1)
    rows = [[1, 4, 2, 3]]
    model = dense("sampled")
    q = 1 / NUM_ITEMS
    model.item_loss = SampledSoftmax.of_draws(np.full(NUM_ITEMS, math.log(q)), 3)
    features = SequenceFeatures(np.arange(NUM_ITEMS), max_length=6, num_negatives=3)
    batch = dataclasses.replace(
        tensor_batch(features(sample_batch(rows))[0]), negatives_S=torch.tensor([1, 4, 5])
    )

    by_hand = 0.0
    for scores_I, target in zip(scores(model, batch), [4, 2, 3], strict=True):
        weights = dict.fromkeys({2, 3} - {target}, 1.0)
        weights |= dict.fromkeys({1, 4, 5} - {target}, 1 / (1 - (1 - q) ** 3))
        others = sum(weight * math.exp(scores_I[item]) for item, weight in weights.items())
        by_hand += math.log(math.exp(scores_I[target]) + others) - scores_I[target]

    assert model.loss(batch).item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("negatives", [[3, 1, 5], [1, 1, 5]])
def test_negatives_in_another_order_or_twice_are_refused(negatives):
    features = dataclasses.replace(features_for("sampled"), negatives_S=np.array(negatives))

    with pytest.raises(ValueError, match="ascending"):
        tensor_batch(features)


@pytest.mark.parametrize("temperature", [None, 0.1])
@pytest.mark.parametrize("loss", ["bce", "sampled"])
def test_a_loss_is_the_same_wherever_the_item_matrix_is(loss, temperature):
    sparse = SparseNextItemModel(backbone(), LOSSES[loss](), temperature).eval()
    features, by_weights = features_for(loss, tables=("item",)), dense(loss, temperature)
    batch = tensor_batch(features, training=True)

    value, expected = sparse.loss(batch), by_weights.loss(batch_for(loss))
    value.backward()
    expected.backward()

    torch.testing.assert_close(value, expected)
    ids_M = features.lookups["item"].ids_M
    torch.testing.assert_close(batch.rows["item"].grad, by_weights.items_ID.grad[ids_M])


def test_with_a_temperature_lengths_of_vectors_do_not_count():
    model, batch = dense("full", temperature=0.5), batch_for("full")
    context_ND = contexts(model.backbone, model.embed_history(batch), batch)
    cosine_NI = torch.cosine_similarity(context_ND[:, None, :], item_rows()[None], dim=2)

    expected = torch.nn.functional.cross_entropy(cosine_NI / 0.5, batch.targets_N, reduction="sum")

    torch.testing.assert_close(model.loss(batch), expected)
    ranked = model.recommend(batch, NUM_ITEMS, None)
    torch.testing.assert_close(
        ranked.scores_BK, (cosine_NI[batch.layout.last_B] / 0.5).sort(descending=True)[0]
    )


def test_a_batch_without_the_losss_negatives_is_no_batch_for_it():
    batch = dataclasses.replace(batch_for("bce"), negatives_NK=None)

    with pytest.raises(AssertionError):
        dense("bce").loss(batch)
