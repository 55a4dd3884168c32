"""Vectors of items by words and values."""

import numpy as np
import pytest
import torch

from rayrec.models.generative.prefix_content import PrefixContent
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.config import SasRecConfig
from rayrec.models.sequence.item_content import ItemContent
from rayrec.models.sequence.item_losses import CrossEntropy
from rayrec.models.sequence.next_item import DenseNextItemModel
from rayrec.platform.item_bags import ItemBags
from tests.models.networks import DIM, backbone, histories, shares, tensor_batch

BAGS = ItemBags(
    np.array([0, 2, 3, 3, 5]),
    np.array([1, 4, 1, 0, 4]),
    np.array([0.5, 1.0, 2.0, 1.0, 0.25], dtype=np.float32),
)
"""Of four items; the third has nothing."""


def content() -> ItemContent:
    torch.manual_seed(0)
    return ItemContent(BAGS, 6, DIM)


def expected(rows_VD):
    nothing_D = torch.zeros(DIM)
    return torch.stack(
        [
            0.5 * rows_VD[1] + rows_VD[4],
            2.0 * rows_VD[1],
            nothing_D,
            rows_VD[0] + 0.25 * rows_VD[4],
        ]
    )


def test_an_item_is_the_weighted_sum_of_what_is_said_of_it():
    network = content()

    torch.testing.assert_close(network.catalog(), expected(network.rows_VD))
    items = torch.tensor([[3, 0], [3, 2]])
    torch.testing.assert_close(network(items), expected(network.rows_VD)[items])


def test_gradients_are_those_of_the_sums():
    network, weights_ID = content(), torch.randn(4, DIM)
    (expected(network.rows_VD) * weights_ID).sum().backward()
    by_hand = network.rows_VD.grad.clone()

    for vectors_ID in (network.catalog(), network(torch.arange(4))):
        network.zero_grad()
        (vectors_ID * weights_ID).sum().backward()
        torch.testing.assert_close(network.rows_VD.grad, by_hand)


def test_items_are_read_and_scored_by_their_rows_and_what_is_said_of_them():
    torch.manual_seed(1)
    model = DenseNextItemModel(backbone(), CrossEntropy(), 4, DIM, content=content()).eval()
    rows = [[0, 3], [1, 2, 0]]
    (features,) = shares(rows, 4)
    batch = tensor_batch(features)
    vectors_ID = model.items_ID + expected(model.content.rows_VD)
    plain = DenseNextItemModel(backbone(), CrossEntropy(), 4, DIM).eval()
    with torch.no_grad():
        plain.items_ID.copy_(vectors_ID)

    torch.testing.assert_close(model.loss(batch), plain.loss(batch))
    ranked, same = (each.recommend(tensor_batch(histories(rows, 4)), 4, None) for each in (model, plain))
    assert ranked.items_BK.tolist() == same.items_BK.tolist()


def test_a_prefix_is_described_as_its_items_are_on_average():
    """Items 0 and 1 share a first code; what both have counts as often as each, and lengths stay."""
    nodes_IL = np.array([[0, 0], [0, 1], [1, 2], [-1, -1]])

    first, leaves = (BAGS.of_groups(nodes_IL[:, depth], size) for depth, size in enumerate((2, 3)))

    assert first.offsets_I1.tolist() == [0, 2, 2]
    assert first.features_P.tolist() == [1, 4]
    lengths = np.sqrt(1.25), 2.0
    together = np.array([2.5, 1.0])
    np.testing.assert_allclose(
        first.weights_P, together * np.mean(lengths) / np.linalg.norm(together), rtol=1e-6
    )
    assert leaves.offsets_I1.tolist() == [0, 2, 3, 3]
    np.testing.assert_allclose(leaves.weights_P, BAGS.weights_P[:3], rtol=1e-6)
    network = PrefixContent(BAGS, nodes_IL, (2, 3), 6, DIM)
    with torch.no_grad():
        network.gates_LD[1] = 2.0
    torch.testing.assert_close(network(1), 2.0 * expected(network.rows_VD)[:3])


@pytest.mark.parametrize("reads_words", [True, False])
def test_items_that_nobody_has_met_are_negatives_where_no_words_speak_for_them(reads_words):
    """As negatives alone, they would lose what their words say of them."""
    trained_I = np.array([True, False, False, True])  # of the others, one has a word and one has nothing
    catalog = Catalog(4, trained_I=trained_I, content=BAGS)
    settings = {"name": "sasrec", "backbone": {"dim": DIM, "num_layers": 1, "max_length": 6}}
    content = {"buckets": 6} if reads_words else None
    model = SasRecConfig.parse({**settings, "content": content}).build(catalog)
    (features,) = shares([[0, 3], [3, 0, 3]], 4)

    model.loss(tensor_batch(features)).backward()

    is_pushed_I = model.items_ID.grad.abs().sum(1) > 0
    assert is_pushed_I.tolist() == [True, not reads_words, True, True]
    stands_alone_I = (model.items_ID == 0.0).all(1)
    assert stands_alone_I.tolist() == [False, reads_words, False, False]


def test_an_item_that_does_not_compete_is_no_target():
    loss = CrossEntropy(torch.tensor([True, False, True, True]))
    model = DenseNextItemModel(backbone(), loss, 4, DIM)
    (features,) = shares([[0, 1]], 4)

    with pytest.raises(RuntimeError, match="out of bounds"):
        model.loss(tensor_batch(features))
