"""The softmax over all items that the hierarchical one of the prefix decoder is compared with."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rayrec.models.generative.flat_softmax import FlatPrefixModel
from rayrec.models.generative.prefix_decoder import PrefixSums
from rayrec.models.generative.prefix_decoder_config import PrefixDecoderConfig
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.backbones.history import contexts, last_contexts
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.item_losses import CrossEntropy
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.rl.policy import Policy
from tests.helpers.runs import make_run
from tests.models.generative.networks import CODES_IL, LEVEL_SIZES, NUM_ITEMS, ROWS, network_of, prefix
from tests.models.networks import histories, shares, tensor_batch


def flat(trained_I=None) -> FlatPrefixModel:
    network, _ = network_of(prefix)
    return FlatPrefixModel(network, CrossEntropy(trained_I)).eval()


def batch_of(rows=ROWS):
    (features,) = shares(rows, NUM_ITEMS)
    return tensor_batch(features)


def vector(network, item: int) -> torch.Tensor:
    """The sum of an item's prefixes, found by counting distinct prefixes in their order."""
    codes, total = CODES_IL[item].tolist(), torch.zeros(network.dim)
    for depth in range(len(codes)):
        known = sorted({tuple(each) for each in CODES_IL[:, : depth + 1].tolist()})
        own = network.own_VD[depth][known.index(tuple(codes[: depth + 1]))]
        total = total + network.shared_KD[depth][codes[depth]] + own
    return total


def test_an_item_is_scored_by_the_sum_of_its_prefixes():
    model, batch = flat(), tensor_batch(histories(ROWS, NUM_ITEMS))
    last_BD = last_contexts(model.backbone.backbone, model.backbone.embed_history(batch), batch)
    scores_BI = torch.stack(
        [
            torch.stack([context_D @ vector(model.backbone, item) for item in range(NUM_ITEMS)])
            for context_D in last_BD
        ]
    )

    top = model.recommend(batch, NUM_ITEMS + 1, None)

    torch.testing.assert_close(top.scores_BK[:, :NUM_ITEMS], scores_BI.sort(descending=True).values)
    assert top.items_BK[:, :NUM_ITEMS].tolist() == scores_BI.argsort(descending=True).tolist()
    assert top.items_BK[:, NUM_ITEMS].tolist() == [-1] * len(ROWS)
    seen = model.recommend(batch, NUM_ITEMS, torch.tensor([[0, 3], [6, -1], [4, 4]]))
    assert {0, 3}.isdisjoint(seen.items_BK[0].tolist())
    torch.testing.assert_close(model.first_log_probs(batch), scores_BI.log_softmax(1))


def test_loss_is_one_cross_entropy_over_the_items():
    model, batch = flat(), batch_of()
    context_ND = contexts(model.backbone.backbone, model.backbone.embed_history(batch), batch)
    items_ID = torch.stack([vector(model.backbone, item) for item in range(NUM_ITEMS)])

    expected = functional.cross_entropy(context_ND @ items_ID.T, batch.targets_N, reduction="sum")

    torch.testing.assert_close(model.loss(batch), expected)


def test_items_without_a_training_event_are_no_negatives():
    batch = batch_of()
    trained_I = torch.zeros(NUM_ITEMS, dtype=torch.bool)
    trained_I[batch.targets_N] = True
    trained_I[batch.items_N] = True
    trained_I[1] = trained_I[5] = False
    batch = batch_of([[0, 3, 2], [6, 2], [4, 0, 3]])
    model = flat(trained_I)
    context_ND = contexts(model.backbone.backbone, model.backbone.embed_history(batch), batch)
    items = PrefixSums(model.backbone, model.backbone.all_own_vectors())
    logits_NI = context_ND @ items.catalog().T
    logits_NI = logits_NI.masked_fill(~trained_I, -torch.inf)

    expected = functional.cross_entropy(logits_NI, batch.targets_N, reduction="sum")

    torch.testing.assert_close(model.loss(batch), expected)
    assert 1 in model.recommend(batch, NUM_ITEMS, None).items_BK[0]


def test_both_softmaxes_begin_with_the_same_weights_of_the_same_names():
    catalog = Catalog(num_items=NUM_ITEMS, codes_IL=CODES_IL, level_sizes=LEVEL_SIZES)
    settings = {
        "name": "prefix_decoder",
        "backbone": {"dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 6},
    }
    built = []
    for softmax in ("levels", "items"):
        torch.manual_seed(3)
        built.append(PrefixDecoderConfig.parse(settings | {"softmax": softmax}).build(catalog))
    levels, items = built

    assert isinstance(levels, GenerativeRecommender)
    assert isinstance(items, FlatPrefixModel)
    found, expected = dict(items.named_parameters()), dict(levels.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_matrix": "sparse"}, "reads the vectors of all prefixes at every step"),
        ({"behavior_weights": {"LIKE": 2}}, "every target counts alike"),
    ],
)
def test_what_one_softmax_cannot_do_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        PrefixDecoderConfig.parse({"name": "prefix_decoder", "softmax": "items", **settings})


def test_a_run_is_trained_evaluated_and_not_taken_for_one_that_generates(tmp_path):
    run = make_run(tmp_path, "prefix", softmax="items")

    report = evaluate(run, baselines=False)
    with pytest.raises(InputError, match="scores items one by one"):
        Policy(TrainedModel.load(run), exclude_seen=True)

    assert report.results[MODEL]["recall@50"].value > 0.9
    assert Recommender(TrainedModel.load(run)).num_beams(10) == 0
