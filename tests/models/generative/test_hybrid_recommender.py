"""The hybrid of codes that are generated and item vectors that rank what was found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayrec.models.generative.flat_softmax import FlatPrefixModel
from rayrec.models.generative.hybrid_recommender import HybridRecommender
from rayrec.models.generative.prefix_decoder import PrefixDecoder
from rayrec.models.generative.prefix_decoder_config import PrefixDecoderConfig
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.config import Negatives
from rayrec.models.sequence.item_losses import CrossEntropy, SampledSoftmax
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.item_ranker import item_ranker_of
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from rayrec.rl.run import train_policy
from tests.helpers.runs import make_run
from tests.models.generative.networks import (
    CODES,
    CODES_IL,
    LEVEL_SIZES,
    NUM_ITEMS,
    ROWS,
    assert_same_gradients,
    composed,
    network_of,
    pair,
    paths,
    prefix,
    rows_of,
)
from tests.models.networks import backbone, histories, shares, tensor_batch

NETWORKS = pytest.mark.parametrize("kind", [prefix, composed])


def three(kind, trained_I=None, beam_width=NUM_ITEMS):
    """The hybrid, the decoder and the softmax over items, with one network."""
    network, _ = network_of(kind)
    items = CrossEntropy(trained_I)
    generator = GenerativeRecommender(network, CODES, beam_width, len(LEVEL_SIZES))
    hybrid = HybridRecommender(network, items, CODES, beam_width, len(LEVEL_SIZES))
    return hybrid.eval(), generator.eval(), FlatPrefixModel(network, items).eval()


def by_item(top) -> torch.Tensor:
    """[B, I] score of each item."""
    order = top.items_BK.argsort(dim=1)
    assert top.items_BK.gather(1, order)[0].tolist() == list(range(NUM_ITEMS))
    return top.scores_BK.gather(1, order)


@NETWORKS
def test_the_loss_is_the_mean_of_both(kind):
    trained_I = torch.ones(NUM_ITEMS, dtype=torch.bool)
    trained_I[6] = False
    hybrid, generator, scorer = three(kind, trained_I)
    (features,) = shares(ROWS[::2], NUM_ITEMS)
    batch = tensor_batch(features)

    expected = (generator.loss(batch) + scorer.loss(batch)) / 2

    torch.testing.assert_close(hybrid.loss(batch), expected)


@NETWORKS
def test_items_are_ranked_by_the_product_of_both_distributions(kind):
    hybrid, generator, scorer = three(kind)
    batch = tensor_batch(histories(ROWS, NUM_ITEMS))
    of_codes_BI = by_item(generator.recommend(batch, NUM_ITEMS, None))
    of_items_BI = by_item(scorer.recommend(batch, NUM_ITEMS, None))

    top = hybrid.recommend(batch, NUM_ITEMS, None)

    torch.testing.assert_close(by_item(top), of_codes_BI + of_items_BI)
    assert (top.scores_BK.diff(dim=1) <= 0).all()
    torch.testing.assert_close(hybrid.first_log_probs(batch), generator.first_log_probs(batch))


def test_items_that_came_later_are_ranked_by_what_they_share():
    grown_IL = torch.cat([CODES, torch.tensor([[1, 2, 1], [2, 2, 1]])])
    num_items = len(grown_IL)
    known_I = torch.arange(num_items) < NUM_ITEMS
    network = PrefixDecoder(backbone(), grown_IL, LEVEL_SIZES, known_I)
    num_levels, items = len(LEVEL_SIZES), CrossEntropy()
    batch = tensor_batch(histories(ROWS, num_items))
    tops = [
        model.eval().recommend(batch, num_items, None)
        for model in (
            HybridRecommender(network, items, grown_IL, num_items, num_levels),
            GenerativeRecommender(network, grown_IL, num_items, num_levels),
            FlatPrefixModel(network, items),
        )
    ]
    hybrid_BI, of_codes_BI, of_items_BI = (top.scores_BK.gather(1, top.items_BK.argsort(1)) for top in tops)

    torch.testing.assert_close(hybrid_BI, of_codes_BI + of_items_BI)
    assert torch.isfinite(hybrid_BI).all()


def on_servers(max_held=100, num_negatives=500, codes_IL=CODES, known_I=None):
    """The hybrid with vectors as weights, and with the same as rows of a table; sampled negatives are all."""
    hybrids = [
        HybridRecommender(network, items, codes_IL, len(codes_IL), len(LEVEL_SIZES)).eval()
        for network, items in zip(
            pair(max_held=max_held, codes_IL=codes_IL, known_I=known_I),
            (CrossEntropy(), SampledSoftmax(torch.zeros(NUM_ITEMS))),
            strict=True,
        )
    ]
    hybrids[1].set_catalog(torch.from_numpy(rows_of(hybrids[1].catalog_ids(np.arange(NUM_ITEMS)))))
    hybrids[1].set_row_reader(rows_of)
    (features,) = shares(ROWS, NUM_ITEMS, ("prefix",), CODES_IL, num_negatives=num_negatives, paths=paths())
    return hybrids, features


def test_rows_of_servers_give_the_loss_and_the_gradients_of_weights():
    (dense, sparse), features = on_servers()
    assert features.negatives_S.tolist() == list(range(NUM_ITEMS))
    batch = tensor_batch(features, training=True)

    losses = [hybrid.loss(batch) for hybrid in (dense, sparse)]
    for loss in losses:
        loss.backward()

    torch.testing.assert_close(*losses)
    assert_same_gradients(dense.backbone, sparse.backbone, features, batch)


def test_rows_of_servers_make_the_vectors_that_weights_make():
    hybrids, features = on_servers(num_negatives=3)
    batch = tensor_batch(features)

    (_, dense, _), (_, sparse, _) = (
        hybrid.backbone.parts_of_loss(batch, CODES[batch.targets_N]) for hybrid in hybrids
    )

    for items in ("inputs", "targets", "negatives"):
        torch.testing.assert_close(getattr(sparse, items)(batch), getattr(dense, items)(batch), msg=items)


def test_negatives_are_drawn_by_popularity_and_corrected_by_the_probability_that_they_are_there():
    settings = {"name": "prefix_decoder", "softmax": "hybrid", "prefix_matrix": "sparse", "num_negatives": 2}
    config = PrefixDecoderConfig.parse(settings | {"backbone": {"dim": 8, "num_layers": 1, "num_heads": 2}})
    share_I = np.array([0.5, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0])
    with np.errstate(divide="ignore"):
        catalog = Catalog(NUM_ITEMS, CODES_IL, LEVEL_SIZES, negative_log_q_I=np.log(share_I))

    hybrid = config.build(catalog)

    assert config.negatives == Negatives(per_batch=2, sampling="popularity")
    # One of two draws is the item, or both: 1 - (1 - share)².
    there_I = hybrid.item_loss.log_inclusion_I.exp()
    torch.testing.assert_close(there_I, torch.tensor([0.75, 0.4375, 0, 0.4375, 0, 0, 0]))


def test_trainers_that_share_negatives_have_the_loss_of_one():
    (_, sparse), whole = on_servers(num_negatives=3)
    parts = shares(ROWS, NUM_ITEMS, ("prefix",), CODES_IL, num_negatives=3, num_trainers=2, paths=paths())
    batches = [tensor_batch(features, training=True) for features in (whole, *parts)]

    losses = [sparse.loss(batch) for batch in batches]
    for loss in losses:
        loss.backward()

    torch.testing.assert_close(losses[1] + losses[2], losses[0])
    grads = [
        dict(zip(features.lookups["prefix"].ids_M.tolist(), batch.rows["prefix"].grad, strict=True))
        for features, batch in zip((whole, *parts), batches, strict=True)
    ]
    for ident, grad_D in grads[0].items():
        found = [each[ident] for each in grads[1:] if ident in each]
        torch.testing.assert_close(torch.stack(found).sum(0), grad_D)


def test_parts_of_a_batch_have_the_loss_of_the_whole():
    (_, sparse), features = on_servers(num_negatives=3)
    assert len(features.negatives_S) < NUM_ITEMS
    batch = tensor_batch(features)

    parts = [sparse.loss(batch.some_rows(slice(row, row + 1))) for row in range(len(ROWS))]

    torch.testing.assert_close(torch.stack(parts).sum(), sparse.loss(batch))
    assert torch.isfinite(sparse.loss(batch.stand_in()))


@pytest.mark.parametrize("max_held", [0, 3, 100])
def test_rows_of_servers_rank_as_weights_do_and_items_that_came_later_too(max_held):
    grown_IL = torch.cat([CODES, torch.tensor([[1, 2, 1], [2, 2, 1]])])
    known_I = torch.arange(len(grown_IL)) < NUM_ITEMS
    (dense, sparse), _ = on_servers(max_held, codes_IL=grown_IL, known_I=known_I)
    batch = tensor_batch(histories(ROWS, len(grown_IL), ("prefix",), grown_IL.numpy(), paths=paths()))

    expected, found = (hybrid.recommend(batch, len(grown_IL), None) for hybrid in (dense, sparse))

    assert torch.isfinite(found.scores_BK).all()

    assert found.items_BK.tolist() == expected.items_BK.tolist()
    torch.testing.assert_close(found.scores_BK, expected.scores_BK)


def test_items_with_one_tuple_keep_the_order_in_which_they_were_found():
    digits = torch.tensor([1, 0, 0, 0, 0, 0, 0, 2])
    codes_IL = torch.cat([torch.cat([CODES, CODES[:1]]), digits[:, None]], dim=1)  # items 0 and 7 share one
    codes_IL[1] = codes_IL[0]
    codes_IL[1, 3] = 0
    network = PrefixDecoder(backbone(), codes_IL[:, :3], LEVEL_SIZES)
    hybrid = HybridRecommender(network, CrossEntropy(), codes_IL, 8, len(LEVEL_SIZES)).eval()
    generator = GenerativeRecommender(network, codes_IL, 8, len(LEVEL_SIZES)).eval()
    batch = tensor_batch(histories(ROWS, 8))

    top, found = hybrid.recommend(batch, 8, None), generator.recommend(batch, 8, None)

    for items, generated in zip(top.items_BK.tolist(), found.items_BK.tolist(), strict=True):
        assert sorted(items) == list(range(8))
        alike = [item for item in items if item in (0, 1, 7)]
        assert alike == [item for item in generated if item in (0, 1, 7)] == [1, 0, 7]
        first = items.index(1)
        assert items[first : first + 3] == [1, 0, 7]


def test_only_what_beams_found_is_ranked_and_nothing_excluded_comes_back():
    hybrid, generator, scorer = three(prefix, beam_width=3)
    batch = tensor_batch(histories(ROWS, NUM_ITEMS))
    excluded_BE = torch.tensor([[0, 3], [6, -1], [4, 4]])
    found_BW = generator.recommend(batch, 3, excluded_BE).items_BK
    of_items_BI = by_item(scorer.recommend(batch, NUM_ITEMS, None))
    of_codes_BI = by_item(generator.recommend(batch, NUM_ITEMS, None, [NUM_ITEMS] * 3))
    scores_BI = (of_items_BI + of_codes_BI).tolist()

    top = hybrid.recommend(batch, 2, excluded_BE)

    for row, items in enumerate(found_BW.tolist()):
        assert top.items_BK[row].tolist() == sorted(items, key=scores_BI[row].__getitem__, reverse=True)[:2]


def test_rows_of_few_beams_are_padded_and_rows_of_many_give_k():
    hybrid, _, _ = three(prefix)
    batch = tensor_batch(histories(ROWS, NUM_ITEMS))

    top = hybrid.recommend(batch, 4, None, beams_B=[6, 2, 2])

    assert (top.items_BK >= 0).sum(dim=1).tolist() == [4, 2, 2]
    assert top.items_BK.shape == (3, 4)
    assert torch.isneginf(top.scores_BK[1:, 2:]).all()


def test_it_begins_with_the_weights_of_the_decoder():
    catalog = Catalog(num_items=NUM_ITEMS, codes_IL=CODES_IL, level_sizes=LEVEL_SIZES)
    settings = {
        "name": "prefix_decoder",
        "backbone": {"dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 6},
    }
    built = []
    for softmax in ("levels", "hybrid"):
        torch.manual_seed(3)
        built.append(PrefixDecoderConfig.parse(settings | {"softmax": softmax}).build(catalog))
    expected, found = (dict(each.named_parameters()) for each in built)

    assert isinstance(built[1], HybridRecommender)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_negatives": 8}, "num_negatives is of the softmax 'hybrid' with the prefix_matrix 'sparse'"),
        ({"behavior_weights": {"LIKE": 2}}, "this one is 'hybrid', in which every target counts alike"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        PrefixDecoderConfig.parse({"name": "prefix_decoder", "softmax": "hybrid", **settings})


@pytest.mark.parametrize(
    "settings", [{}, {"prefix_matrix": "sparse", "num_negatives": 8, "held_prefixes": 4}]
)
def test_a_run_recommends_by_both(settings, tmp_path):
    run = make_run(tmp_path, "prefix", softmax="hybrid", **settings)
    model = TrainedModel.load(run)
    recommender, ranker = Recommender(model), item_ranker_of(model)
    ids_I = model.assembly.task.dataset.items.ids_I
    query = Query(history_ids=ids_I[[3, 5]])

    (found,) = recommender.recommend([query], len(ids_I), exclude_seen=False)

    assert isinstance(ranker.model, HybridRecommender)
    assert len(found) == len(ids_I)  # beams as wide as the catalog
    places = np.array([[each.position for each in found]])
    products = np.array([each.score for each in found]) - recommender.item_log_probs([query], places)[0]
    assert np.ptp(products) > 1e-3
    assert evaluate(run, baselines=False).results[MODEL]["recall@50"].value == 1.0


def test_reinforcement_learning_says_what_it_does_not_learn(tmp_path, caplog):
    run = make_run(tmp_path, "prefix", softmax="hybrid")
    config = RlConfig.parse(
        {
            "init_from": str(run),
            "snapshot": "last",
            "steps": 1,
            "algorithm": {"name": "grpo"},
            "rewards": {"parts": [{"kind": "hit"}]},
        }
    )

    with pytest.raises(InputError):  # the folder is not empty
        train_policy(config, tmp_path)

    assert "recommendations are ranked by a softmax over items as well" in caplog.text
