import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rayrec.models.decoding import children
from rayrec.models.generative import prefix_decoder
from rayrec.models.generative.prefix_decoder import PrefixDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.backbones.history import contexts
from tests.models.networks import DIM, backbone, histories, shares, tensor_batch

CODES_IL = np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1], [2, 0, 0], [2, 2, 0]])
LEVEL_SIZES = (3, 3, 2)
NUM_ITEMS = len(CODES_IL)
ROWS = [[0, 3, 5, 2], [6, 1], [4, 0, 1]]


def decoder() -> PrefixDecoder:
    torch.manual_seed(0)
    network = PrefixDecoder(backbone(), torch.tensor(CODES_IL), LEVEL_SIZES)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network.eval()


def prefix_vector(network: PrefixDecoder, prefix: list[int]) -> torch.Tensor:
    """Of a prefix, found by counting distinct prefixes in their order."""
    depth = len(prefix) - 1
    known = sorted({tuple(codes) for codes in CODES_IL[:, : depth + 1].tolist()})
    return network.shared_KD[depth][prefix[-1]] + network.own_VD[depth][known.index(tuple(prefix))]


def item_log_prob(network: PrefixDecoder, context_D: torch.Tensor, item: int) -> torch.Tensor:
    """Sum over the levels, each normalized over the codes that lead to an item."""
    codes, total = CODES_IL[item].tolist(), torch.zeros(())
    for depth in range(len(codes)):
        below = CODES_IL[(CODES_IL[:, :depth] == codes[:depth]).all(axis=1), depth]
        allowed = sorted(set(below.tolist()))
        logits = torch.stack([context_D @ prefix_vector(network, [*codes[:depth], code]) for code in allowed])
        total = total + logits.log_softmax(0)[allowed.index(codes[depth])]
    return total


def test_an_event_is_the_sum_of_the_vectors_of_its_items_prefixes():
    network, (features,) = decoder(), shares([[3, 5]], NUM_ITEMS)

    (event_D,) = network.embed_history(tensor_batch(features))

    expected_D = sum(prefix_vector(network, CODES_IL[3].tolist()[: d + 1]) for d in range(3))
    torch.testing.assert_close(event_D, expected_D)


def test_loss_is_minus_the_log_probability_of_the_next_items_under_the_trie():
    network, (features,) = decoder(), shares(ROWS, NUM_ITEMS)
    batch = tensor_batch(features)
    context_ND = contexts(network.backbone, network.embed_history(batch), batch)

    loss = network.loss(batch, torch.tensor(CODES_IL)[batch.targets_N])

    targets = [3, 5, 2, 1, 0, 1]
    by_hand = -sum(item_log_prob(network, c, t) for c, t in zip(context_ND, targets, strict=True))
    torch.testing.assert_close(loss, by_hand)


def test_gradients_reach_every_weight():
    network, (features,) = decoder(), shares([[0, 3, 5, 2, 6, 1], [4, 0, 1]], NUM_ITEMS)
    batch = tensor_batch(features, training=True)

    network.loss(batch, torch.tensor(CODES_IL)[batch.targets_N]).backward()

    assert [name for name, weight in network.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("gather_cost", [0, 10**9])
def test_a_wide_beam_ranks_by_the_trained_probabilities(gather_cost, monkeypatch):
    """Whether vectors of prefixes are fetched one by one or multiplied all at once."""
    monkeypatch.setattr(prefix_decoder, "GATHER_COST", gather_cost)
    monkeypatch.setattr(prefix_decoder, "MAX_GATHERED", 3 * DIM)
    network = decoder()
    model = GenerativeRecommender(network, torch.tensor(CODES_IL), NUM_ITEMS, 3)
    batch = tensor_batch(histories(ROWS, NUM_ITEMS))

    ranking = model.recommend(batch, NUM_ITEMS, None)

    for row, context_D in enumerate(network.encode_context(batch).vectors_BD):
        scores_I = torch.stack([item_log_prob(network, context_D, item) for item in range(NUM_ITEMS)])
        assert ranking.items_BK[row].tolist() == scores_I.argsort(descending=True).tolist()
        torch.testing.assert_close(ranking.scores_BK[row], scores_I.sort(descending=True).values)


def test_known_sequences_are_scored_at_once_as_step_by_step():
    network, batch = decoder(), tensor_batch(histories(ROWS, NUM_ITEMS))
    context, codes_BWL = network.encode_context(batch), torch.tensor(CODES_IL).expand(3, -1, -1)
    step = network.start(context)

    logits = network.sequence_logits(context, codes_BWL)

    parent_BW = torch.arange(NUM_ITEMS).expand(3, -1)
    for depth in range(3):
        torch.testing.assert_close(logits[depth], step(depth, codes_BWL[:, :, :depth], parent_BW))


def test_items_that_came_later_are_scored_by_the_codes_they_share():
    """A trie with a tuple that training has not seen: no retraining, and no code is ruled out."""
    network, batch = decoder(), tensor_batch(histories(ROWS, NUM_ITEMS))
    context = network.encode_context(batch)
    codes_BWd = torch.tensor([[0, 2], [1, 1]]).expand(3, -1, -1)

    logits_BWK = network.step(context, None, 2, codes_BWd)

    shared_BK = context.vectors_BD @ network.shared_KD[2].T
    own_BK = (
        context.vectors_BD
        @ torch.stack(
            [prefix_vector(network, [1, 1, code]) - network.shared_KD[2][code] for code in range(2)]
        ).T
    )
    torch.testing.assert_close(logits_BWK[:, 0], shared_BK)
    torch.testing.assert_close(logits_BWK[:, 1], shared_BK + own_BK)


def test_a_batch_of_single_events_trains():
    """No event has a next one with siblings below its first code."""
    codes_IL = torch.tensor([[0, 0], [1, 0]])
    network = PrefixDecoder(backbone(), codes_IL, (2, 1))
    (features,) = shares([[0, 1]], 2)
    batch = tensor_batch(features)

    loss = network.loss(batch, codes_IL[batch.targets_N])

    context_ND = contexts(network.backbone, network.embed_history(batch), batch)
    logits_K = context_ND[0] @ (network.shared_KD[0] + network.own_VD[0]).T
    torch.testing.assert_close(loss, functional.cross_entropy(logits_K, torch.tensor(1)))


def test_a_model_knows_new_items_by_what_they_share_with_known_ones():
    """The last item came after training: the same weights, and its history means what its codes share."""
    network = decoder()
    grown_IL = torch.cat([torch.tensor(CODES_IL), torch.tensor([[1, 1, 0]]), torch.tensor([[1, 2, 1]])])
    known_I = torch.tensor([True] * NUM_ITEMS + [False] * 2)
    grown = PrefixDecoder(backbone(), grown_IL, LEVEL_SIZES, known_I).eval()
    grown.load_state_dict(network.state_dict())
    batch = tensor_batch(histories([[7], [8], [3]], NUM_ITEMS + 2))

    events_ND = grown.embed_history(batch)

    first_D = prefix_vector(network, [1])
    torch.testing.assert_close(events_ND[0], events_ND[2])  # the tuple of item 3
    torch.testing.assert_close(events_ND[1], first_D + network.shared_KD[1][2] + network.shared_KD[2][1])


def test_items_without_training_events_are_no_negatives():
    """Item 1 has siblings with events, items 3 and 4 share a prefix that nothing else has."""
    trained_I = torch.tensor([True, False, True, False, False, True, True])
    weights = decoder().state_dict()
    network = PrefixDecoder(backbone(), torch.tensor(CODES_IL), LEVEL_SIZES, trained_I=trained_I).eval()
    fresh_VD = [own_VD.clone() for own_VD in network.own_VD]
    network.load_state_dict(weights)
    (features,) = shares([[0, 2, 5, 6], [5, 0]], NUM_ITEMS)
    batch = tensor_batch(features)

    loss = network.loss(batch, torch.tensor(CODES_IL)[batch.targets_N])
    loss.backward()

    context_ND = contexts(network.backbone, network.embed_history(batch), batch)
    expected = torch.zeros(())
    for context_D, target in zip(context_ND, batch.targets_N.tolist(), strict=True):
        codes = CODES_IL[target].tolist()
        for depth in range(3):
            # The code 1 at the first level is the cold items' alone: it means nothing and stays a negative.
            kept_I = trained_I.numpy() | (depth == 0)
            below = CODES_IL[kept_I & (CODES_IL[:, :depth] == codes[:depth]).all(axis=1), depth]
            allowed = sorted(set(below.tolist()))
            logits = [context_D @ prefix_vector(network, [*codes[:depth], code]) for code in allowed]
            expected = expected - torch.stack(logits).log_softmax(0)[allowed.index(codes[depth])]
    torch.testing.assert_close(loss, expected)
    for depth, nodes in ((1, [2]), (2, [0, 3, 4])):
        assert not fresh_VD[depth][nodes].any(), "an item without events is what its codes say"
        assert not network.own_VD[depth].grad[nodes].any()
    assert fresh_VD[0].all()
    assert fresh_VD[2][1].all()


def test_a_target_without_counted_events_is_learned_all_the_same():
    trained_I = torch.tensor([False, *[True] * (NUM_ITEMS - 1)])
    network = PrefixDecoder(backbone(), torch.tensor(CODES_IL), LEVEL_SIZES, trained_I=trained_I).eval()
    (features,) = shares([[1, 0]], NUM_ITEMS)
    batch = tensor_batch(features)

    loss = network.loss(batch, torch.tensor(CODES_IL)[batch.targets_N])

    assert loss.isfinite()


def test_items_may_share_a_whole_tuple():
    codes_IL = torch.tensor([[0, 1], [0, 1], [1, 0]])
    network = PrefixDecoder(backbone(), codes_IL, (2, 2))

    assert network.nodes_IL.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_known_sequences_have_the_probabilities_that_were_trained():
    network, batch = decoder(), tensor_batch(histories(ROWS, NUM_ITEMS))
    context, codes_BWL = network.encode_context(batch), torch.tensor(CODES_IL).expand(3, -1, -1)

    log_probs_BWL = network.sequence_logprob(context, codes_BWL)

    torch.testing.assert_close(log_probs_BWL.sum(2).exp().sum(1), torch.ones(3))
    for row, context_D in enumerate(context.vectors_BD):
        expected_I = torch.stack([item_log_prob(network, context_D, item) for item in range(NUM_ITEMS)])
        torch.testing.assert_close(log_probs_BWL[row].sum(1), expected_I)
    unknown = network.sequence_logprob(context, torch.tensor([[[0, 2, 0]]]).expand(3, -1, -1))
    assert unknown[:, 0, 1].tolist() == [-torch.inf] * 3


def test_one_wide_node_costs_what_its_children_do():
    """A thousand items share all codes but the last: no matrix of all prefixes is as wide as their node."""
    narrow_IL = torch.cartesian_prod(torch.arange(40), torch.arange(25), torch.tensor([0]))
    wide_IL = torch.stack([torch.zeros(999), torch.zeros(999), torch.arange(1, 1000)], dim=1).long()
    codes_IL = torch.cat([narrow_IL, wide_IL])
    network = PrefixDecoder(backbone(), codes_IL, (40, 25, 1000)).eval()
    model = GenerativeRecommender(network, codes_IL, 50, 3).eval()
    batch = tensor_batch(histories([[1, 5, 1500], [7, 0]], len(codes_IL)))
    nothing_BE = torch.full((2, 1), -1)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    with torch.inference_mode():
        with Sizes():
            found = model.recommend(batch, 10, nothing_BE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(children, "is_uneven", lambda trie, depth: False)
            dense = model.recommend(batch, 10, nothing_BE)

    assert torch.equal(found.items_BK, dense.items_BK)
    torch.testing.assert_close(found.scores_BK, dense.scores_BK)
    assert max(sizes) < len(batch.layout.lengths_B) * 50 * 1000 / 2, "no matrix of all beams and children"


def test_the_loss_is_that_of_the_trie_where_one_node_is_wide(monkeypatch):
    network, (features,) = decoder(), shares(ROWS, NUM_ITEMS)
    batch = tensor_batch(features)
    codes_NL = torch.tensor(CODES_IL)[batch.targets_N]
    weights_N = torch.rand(len(codes_NL))
    losses = [network.loss(batch, codes_NL), network.loss(batch, codes_NL, weights_N)]
    monkeypatch.setattr(prefix_decoder, "is_uneven", lambda trie, depth: True)

    uneven = [network.loss(batch, codes_NL), network.loss(batch, codes_NL, weights_N)]

    torch.testing.assert_close(uneven, losses)
