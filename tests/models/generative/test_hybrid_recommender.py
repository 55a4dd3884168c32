"""The hybrid of codes that are generated and item vectors that rank what was found."""

from __future__ import annotations

import pytest
import torch

from rayrec.models.generative.config import PrefixDecoderConfig
from rayrec.models.generative.flat_softmax import FlatPrefixModel, ItemSoftmax
from rayrec.models.generative.hybrid_recommender import HybridRecommender
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.catalog import Catalog
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from tests.helpers.runs import make_run
from tests.models.generative.networks import (
    CODES,
    CODES_IL,
    LEVEL_SIZES,
    NUM_ITEMS,
    ROWS,
    composed,
    network_of,
    prefix,
)
from tests.models.networks import histories, shares, tensor_batch

NETWORKS = pytest.mark.parametrize("kind", [prefix, composed])


def three(kind, trained_I=None, beam_width=NUM_ITEMS):
    """The hybrid, the decoder and the softmax over items, with one network."""
    network, _ = network_of(kind)
    items = ItemSoftmax(trained_I)
    generator = GenerativeRecommender(network, CODES, beam_width, len(LEVEL_SIZES))
    hybrid = HybridRecommender(network, CODES, beam_width, len(LEVEL_SIZES), items=items)
    return hybrid.eval(), generator.eval(), FlatPrefixModel(network, items).eval()


def by_item(top) -> torch.Tensor:
    """[B, I] score of each item."""
    order = top.items_BK.argsort(dim=1)
    assert top.items_BK.gather(1, order)[0].tolist() == list(range(NUM_ITEMS))
    return top.scores_BK.gather(1, order)


@NETWORKS
def test_the_loss_is_the_mean_of_both(kind):
    trained_I = torch.ones(NUM_ITEMS, dtype=torch.bool)
    trained_I[1] = False
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
        ({"prefix_matrix": "sparse"}, "softmax is 'hybrid'.*reads the vectors of all prefixes at every step"),
        ({"behavior_weights": {"LIKE": 2}}, "this one is 'hybrid', in which every target counts alike"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        PrefixDecoderConfig.parse({"name": "prefix_decoder", "softmax": "hybrid", **settings})


def test_a_run_is_trained_and_evaluated(tmp_path):
    run = make_run(tmp_path, "prefix", softmax="hybrid")

    report = evaluate(run, baselines=False)

    assert report.results[MODEL]["recall@50"].value > 0.9
    assert Recommender(TrainedModel.load(run)).num_beams(10) >= 10
