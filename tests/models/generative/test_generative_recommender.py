import numpy as np
import pytest
import torch
from torch.nn import functional

from rayrec.models.decoding.beam import searches_of
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.code_softmax import CodeSoftmax
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.backbones.history import contexts
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.samples.features.features import code_ids
from tests.models.networks import DIM, backbone, histories, shares, tensor_batch
from tests.models.recipes import config_of

CODES_IL = np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1], [2, 0, 0], [2, 2, 0]])
LEVEL_SIZES = (3, 3, 2)
NUM_ITEMS = len(CODES_IL)
ROWS = [[0, 3, 5, 2], [6, 1], [4, 0, 1]]
TABLES = ("item", "code")


def recommender(
    beam_width: int = NUM_ITEMS, label_smoothing: float = 0.0, among_children: bool = False
) -> GenerativeRecommender:
    torch.manual_seed(0)
    network = backbone()
    decoder = CodeDecoder(DIM, LEVEL_SIZES, 16, 0.0, network.num_dropouts)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    trie = CodeTrie.from_codes(CODES_IL) if among_children else None
    light = LightDecoder(network, decoder, CodeSoftmax(trie, label_smoothing))
    return GenerativeRecommender(light, torch.tensor(CODES_IL), beam_width, 3).eval()


def all_contexts(model: GenerativeRecommender, batch: TensorBatch) -> torch.Tensor:
    """[N, D] what is known after each event."""
    light = model.backbone
    return contexts(light.backbone, light.embed_history(batch), batch)


def code_log_probs(model: GenerativeRecommender, context_D: torch.Tensor, item: int) -> list[float]:
    """Log-probability of each code of an item, every level normalized over all of its codes."""
    state_D, log_probs = context_D, []
    for level, code in enumerate(CODES_IL[item].tolist()):
        log_probs.append(model.backbone.decoder.logits(state_D, level).log_softmax(0)[code].item())
        if level + 1 < len(LEVEL_SIZES):
            state_D = model.backbone.decoder.condition(state_D, level, torch.tensor(code))
    return log_probs


def item_log_probs(model: GenerativeRecommender, context_D: torch.Tensor) -> list[float]:
    """Log-probability of every item, each level normalized over the codes that lead to an item."""
    scores = []
    for codes in CODES_IL:
        state_D, score = context_D, 0.0
        for level, code in enumerate(codes.tolist()):
            same_prefix = (CODES_IL[:, :level] == codes[:level]).all(axis=1)
            allowed = sorted(set(CODES_IL[same_prefix, level].tolist()))
            log_probs = model.backbone.decoder.logits(state_D, level)[allowed].log_softmax(0)
            score += log_probs[allowed.index(code)].item()
            if level + 1 < len(LEVEL_SIZES):
                state_D = model.backbone.decoder.condition(state_D, level, torch.tensor(code))
        scores.append(score)
    return scores


def test_an_event_is_the_sum_of_its_code_rows_and_its_item_row():
    (features,) = shares([[3, 5]], NUM_ITEMS, TABLES, CODES_IL)
    batch = tensor_batch(features)

    rows = {
        name: dict(zip(lookup.ids_M.tolist(), batch.rows[name], strict=True))
        for name, lookup in features.lookups.items()
    }
    expected_D = rows["item"][3] + sum(rows["code"][ident] for ident in code_ids(CODES_IL)[3].tolist())

    torch.testing.assert_close(recommender().backbone.embed_history(batch), expected_D[None, :])


def test_loss_is_minus_the_log_probability_of_the_next_items_codes():
    model, (features,) = recommender(), shares(ROWS, NUM_ITEMS, TABLES, CODES_IL)
    batch = tensor_batch(features)

    loss = model.loss(batch).item()

    targets = [3, 5, 2, 1, 0, 1]
    by_hand = -sum(
        sum(code_log_probs(model, context_D, target))
        for context_D, target in zip(all_contexts(model, batch), targets, strict=True)
    )
    assert loss == pytest.approx(by_hand, rel=1e-5)


def test_a_softmax_over_children_is_trained_as_items_are_found():
    model, (features,) = recommender(among_children=True), shares(ROWS, NUM_ITEMS, TABLES, CODES_IL)
    batch = tensor_batch(features)
    weights_N = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 3.0])

    loss = model.loss(batch)
    loss.backward()
    weighted = model.backbone.loss(batch, torch.tensor(CODES_IL)[batch.targets_N], weights_N).item()

    targets = [3, 5, 2, 1, 0, 1]
    by_hand = [
        -item_log_probs(model, context_D)[target]
        for context_D, target in zip(all_contexts(model, batch), targets, strict=True)
    ]
    assert loss.item() == pytest.approx(sum(by_hand), rel=1e-5)
    assert weighted == pytest.approx(np.dot(by_hand, weights_N.numpy()), rel=1e-5)
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


OF_CODES = ["light_decoder", "lazy_decoder", "encoder_decoder", "causal_lm"]
"""Models that give every code of a level a logit."""


def of_codes(name, codes_IL=CODES_IL, **changed):
    """One of them, with settings changed."""
    plain = {"behavior_weights": {}} if name == "causal_lm" else {"user_embedding": False}
    config = config_of(name, **plain, **changed)
    return config, build_model(config, Catalog(NUM_ITEMS, codes_IL, LEVEL_SIZES), seed=1).eval()


@pytest.mark.parametrize("name", OF_CODES)
def test_a_setting_says_what_a_level_is_normalized_over(name):
    """The same weights: fewer codes compete, so each is more probable; what is found is the same."""
    (features,) = shares(ROWS, NUM_ITEMS, TABLES, CODES_IL)
    batch = tensor_batch(features)
    plain, codes = of_codes(name)
    among_children, children = of_codes(name, softmax="children")
    smoothed, smooth = of_codes(name, label_smoothing=0.1)

    # Near their first weights all codes are as probable: smoothing takes from the target what it has above.
    losses = [model.loss(batch).item() for model in (codes, children, smooth)]
    assert losses[1] < 0.9 * losses[0]
    assert losses[2] != pytest.approx(losses[0], rel=1e-7)
    for one, other in zip(codes.recommend(batch, 3, None), children.recommend(batch, 3, None), strict=True):
        assert one.equal(other)
    # A service finds items by the trie of the recommender and needs no other.
    assert among_children.for_inference() == smoothed.for_inference() == plain.for_inference()


@pytest.mark.parametrize("name", OF_CODES)
def test_a_level_that_numbers_items_is_not_trained(name):
    """Two items of one tuple compete with all others as that tuple."""
    numbered_IL = np.array([[*codes, 0] for codes in CODES_IL])
    numbered_IL[4] = [*CODES_IL[3], 1]
    batch = tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, numbered_IL[:, :3]))
    _, model = of_codes(name, numbered_IL, softmax="children")

    context = model.backbone.encode_context(batch)
    learned_IL = torch.tensor(numbered_IL[:, :3])
    probs_BI = model.backbone.sequence_logprob(context, learned_IL.expand(len(ROWS), -1, -1)).sum(2).exp()

    ranking = model.recommend(batch, NUM_ITEMS, None)
    found_BI = torch.zeros(len(ROWS), NUM_ITEMS).scatter(1, ranking.items_BK, ranking.scores_BK.exp())
    found_BI[:, [3, 4]] = found_BI[:, [3, 4]].sum(1, keepdim=True)
    torch.testing.assert_close(found_BI, probs_BI)


def test_label_smoothing_mixes_in_the_mean_loss_over_all_codes():
    (features,) = shares([[3, 5]], NUM_ITEMS, TABLES, CODES_IL)
    batch, model = tensor_batch(features), recommender(label_smoothing=0.1)

    loss = model.loss(batch).item()

    state_D, by_hand = all_contexts(model, batch)[0], 0.0
    for level, code in enumerate(CODES_IL[5].tolist()):
        log_probs = functional.log_softmax(model.backbone.decoder.logits(state_D, level), dim=0)
        by_hand -= 0.9 * log_probs[code].item() + 0.1 * log_probs.mean().item()
        if level + 1 < len(LEVEL_SIZES):
            state_D = model.backbone.decoder.condition(state_D, level, torch.tensor(code))
    assert loss == pytest.approx(by_hand, rel=1e-5)


def test_a_beam_as_wide_as_the_catalog_ranks_exhaustively():
    model, batch = recommender(), tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, CODES_IL))

    ranking = model.recommend(batch, NUM_ITEMS, None)

    for row, context_D in enumerate(model.backbone.encode_context(batch).vectors_BD):
        scores = item_log_probs(model, context_D)
        assert ranking.items_BK[row].tolist() == sorted(range(NUM_ITEMS), key=lambda item: -scores[item])
        torch.testing.assert_close(ranking.scores_BK[row].exp().sum(), torch.tensor(1.0))
        np.testing.assert_allclose(
            ranking.scores_BK[row].detach(), sorted(scores, reverse=True), rtol=1e-5, atol=1e-5
        )


def test_a_call_may_have_fewer_beams_but_as_many_as_items_asked_for():
    model, narrow = recommender(), recommender(beam_width=1)
    batch = tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, CODES_IL))

    beams = {(1, None): NUM_ITEMS, (1, 2): 2, (3, 2): 3, (5, 2): 5, (1, 99): NUM_ITEMS, (9, 2): 16}
    assert {asked: model.num_beams(*asked) for asked in beams} == beams
    # Fewer beams at most are never more beams.
    assert model.num_beams(4, 1) <= model.num_beams(4, 4)
    for k in (1, 3):
        beams_B = [model.num_beams(k, 1)] * len(ROWS)
        assert model.recommend(batch, k, None, beams_B).items_BK.equal(
            narrow.recommend(batch, k, None).items_BK
        )


@pytest.mark.parametrize("waste", [0, 1, 100], ids=["searches of their own", "some together", "one search"])
def test_each_row_has_its_own_beams_and_finds_what_it_finds_alone(waste, monkeypatch):
    for name in ("SEARCH_BEAMS", "JAGGED_SEARCH_BEAMS"):
        monkeypatch.setattr(f"rayrec.models.decoding.beam.{name}", waste)
    model = recommender()
    rows = [ROWS[number % len(ROWS)] for number in range(8)]
    beams_B = [5, 4, 4, 3, 2, 2, 1, 1]
    excluded_BE = torch.tensor([[number % NUM_ITEMS, -1] for number in range(len(rows))])

    found = model.recommend(
        tensor_batch(histories(rows, NUM_ITEMS, TABLES, CODES_IL)), 4, excluded_BE, beams_B
    )

    for number, (row, beams) in enumerate(zip(rows, beams_B, strict=True)):
        batch = tensor_batch(histories([row], NUM_ITEMS, TABLES, CODES_IL))
        alone = model.recommend(batch, 4, excluded_BE[number : number + 1], [beams])
        assert found.items_BK[number].tolist() == alone.items_BK[0].tolist()
        torch.testing.assert_close(found.scores_BK[number], alone.scores_BK[0], atol=1e-5, rtol=1e-5)
        assert (alone.items_BK[0] >= 0).sum() <= beams


def test_rows_are_searched_together_where_a_search_of_their_own_is_more_work():
    assert searches_of([]) == []
    assert searches_of([20, 20, 20]) == [(slice(0, 3), 20)]
    assert searches_of([20, 18, 16]) == [(slice(0, 3), 20)]
    assert searches_of([64, 8, 8, 8, 8]) == [(slice(0, 1), 64), (slice(1, 5), 8)]
    assert searches_of([64, 8, 8, 8, 8], is_jagged=True) == [(slice(0, 5), 64)]
    assert searches_of([1000, 10, 10], is_jagged=True) == [(slice(0, 1), 1000), (slice(1, 3), 10)]
    assert searches_of([8, 64, 8]) == [(slice(0, 1), 8), (slice(1, 2), 64), (slice(2, 3), 8)]
    widths = sorted(np.random.default_rng(0).integers(1, 100, 40).tolist(), reverse=True)
    rows = [row for search, _ in searches_of(widths) for row in range(search.start, search.stop)]
    assert rows == list(range(40))
    assert all(max(widths[search]) == width for search, width in searches_of(widths))


@pytest.mark.parametrize("beam_width", [1, 2, NUM_ITEMS])
def test_only_real_items_come_out_each_once(beam_width):
    model = recommender(beam_width)

    ranking = model.recommend(tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, CODES_IL)), 4, None)

    for items_K in ranking.items_BK.tolist():
        found = [item for item in items_K if item >= 0]
        assert found
        assert len(set(found)) == len(found)
        assert all(item < NUM_ITEMS for item in found)


def test_excluded_items_never_come_out():
    excluded = [[0, 3, 5, 2], [6, 1, -1, -1], [4, 0, 1, -1]]

    ranking = recommender().recommend(
        tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, CODES_IL)), NUM_ITEMS, torch.tensor(excluded)
    )

    for items_K, scores_K, left_out in zip(
        ranking.items_BK.tolist(), ranking.scores_BK.tolist(), excluded, strict=True
    ):
        allowed = set(range(NUM_ITEMS)) - set(left_out)
        assert set(items_K) == allowed | {-1}
        assert scores_K[len(allowed) :] == [-np.inf] * (NUM_ITEMS - len(allowed))


def test_a_rows_ranking_does_not_depend_on_the_rows_beside_it(monkeypatch):
    """One row excludes much more than the others, and few beams fit at once."""
    monkeypatch.setattr("rayrec.models.generative.recommender.MAX_LOGITS", 3)
    excluded_BE = torch.tensor([[0, 3, 5, 2, 4], [6, -1, -1, -1, -1], [-1, 4, 0, -1, -1]])
    model = recommender(beam_width=1)
    together = model.recommend(tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, CODES_IL)), 2, excluded_BE)

    for row, history in enumerate(ROWS):
        batch = tensor_batch(histories([history], NUM_ITEMS, TABLES, CODES_IL))
        alone = model.recommend(batch, 2, excluded_BE[row : row + 1])
        assert together.items_BK[row].tolist() == alone.items_BK[0].tolist()
        torch.testing.assert_close(together.scores_BK[row], alone.scores_BK[0])


@pytest.mark.parametrize("ranks_again", [False, True], ids=["as found", "ranked again"])
def test_rows_of_fewer_beams_may_be_all_that_is_left_of_a_search(ranks_again, monkeypatch):
    """A search that is done in parts: the last of them have no row of as many beams as the first."""
    monkeypatch.setattr("rayrec.models.generative.recommender.MAX_LOGITS", 5 * max(LEVEL_SIZES))
    model = recommender()
    model.ranks_as_it_generates = not ranks_again
    rows, beams_B = [ROWS[0], ROWS[1], ROWS[2]], [5, 4, 2]
    batch = tensor_batch(histories(rows, NUM_ITEMS, TABLES, CODES_IL))

    found = model.recommend(batch, 4, None, beams_B)

    for number, (row, beams) in enumerate(zip(rows, beams_B, strict=True)):
        batch = tensor_batch(histories([row], NUM_ITEMS, TABLES, CODES_IL))
        alone = model.recommend(batch, 4, None, [beams])
        num_found = alone.items_BK.shape[1]
        assert found.items_BK[number, :num_found].tolist() == alone.items_BK[0].tolist()
        assert (found.items_BK[number, num_found:] == -1).all()


def test_gradients_reach_every_code_and_item_row_of_the_inputs():
    (features,) = shares(ROWS, NUM_ITEMS, TABLES, CODES_IL)
    batch = tensor_batch(features, training=True)
    model = recommender()

    model.loss(batch).backward()

    for name in TABLES:
        assert (batch.rows[name].grad.abs().sum(1) > 0).all(), name
    untrained = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert untrained == []


SHARED_CODES_IL = np.array([[0, 1, 0], [2, 0, 1], [0, 1, 2], [2, 0, 0], [1, 1, 0], [0, 1, 1], [2, 2, 0]])
"""Items 0, 5 and 2 share a tuple, in this order, and so do items 3 and 1."""


def recommender_of_shared_tuples(codes_IL=SHARED_CODES_IL) -> GenerativeRecommender:
    """The last level has no part in the decoder."""
    network = backbone()
    decoder = CodeDecoder(DIM, LEVEL_SIZES[:2], 16, 0.0, network.num_dropouts)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    light = LightDecoder(network, decoder)
    return GenerativeRecommender(light, torch.tensor(codes_IL), NUM_ITEMS, 2).eval()


def test_items_that_share_a_tuple_share_its_probability():
    model = recommender_of_shared_tuples()
    batch = tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, SHARED_CODES_IL[:, :2]))
    ranking = model.recommend(batch, NUM_ITEMS, None)
    # The same model of the tuples alone.
    tuples = GenerativeRecommender(
        model.backbone, torch.tensor([[0, 1], [1, 1], [2, 0], [2, 2]]), beam_width=4, num_learned_levels=2
    ).eval()
    of_tuples = tuples.recommend(batch, 4, None)

    for row in range(len(ROWS)):
        score = dict(zip(ranking.items_BK[row].tolist(), ranking.scores_BK[row].exp().tolist(), strict=True))
        tuple_score = dict(
            zip(of_tuples.items_BK[row].tolist(), of_tuples.scores_BK[row].exp().tolist(), strict=True)
        )
        expected = {
            **dict.fromkeys((0, 5, 2), tuple_score[0] / 3),
            **dict.fromkeys((3, 1), tuple_score[2] / 2),
            4: tuple_score[1],
            6: tuple_score[3],
        }
        assert score == pytest.approx(expected, rel=1e-5)
        order = ranking.items_BK[row].tolist()
        assert [item for item in order if item in (0, 5, 2)] == [0, 5, 2]
        assert order.index(3) + 1 == order.index(1)


def test_what_a_shared_tuple_is_worth_goes_to_those_of_it_that_are_not_excluded():
    model = recommender_of_shared_tuples()
    batch = tensor_batch(histories(ROWS[:1], NUM_ITEMS, TABLES, SHARED_CODES_IL[:, :2]))
    ranking = model.recommend(batch, NUM_ITEMS, torch.tensor([[0, 2]]))
    assert set(ranking.items_BK[0].tolist()) == {1, 3, 4, 5, 6, -1}


def test_the_order_of_a_tuples_items_is_nothing_to_learn():
    def loss_of(codes_IL):
        model = recommender_of_shared_tuples(codes_IL)
        (features,) = shares(ROWS, NUM_ITEMS, TABLES, codes_IL[:, :2])
        return model.loss(tensor_batch(features)).item()

    other_IL = SHARED_CODES_IL.copy()
    other_IL[[0, 5, 2], 2] = [2, 0, 1]
    torch.manual_seed(1)
    first = loss_of(SHARED_CODES_IL)
    torch.manual_seed(1)
    assert loss_of(other_IL) == first


def test_a_catalog_that_has_grown_needs_no_other_weights():
    """A longer list of items under a tuple is no other shape of any weight."""
    grown_IL = np.concatenate([SHARED_CODES_IL, [[0, 1, 3], [1, 0, 0]]])
    model, grown = recommender_of_shared_tuples(), recommender_of_shared_tuples(grown_IL)
    grown.load_state_dict(model.state_dict())
    batch = tensor_batch(histories(ROWS, NUM_ITEMS, TABLES, SHARED_CODES_IL[:, :2]))

    ranking = grown.recommend(batch, NUM_ITEMS + 2, None)

    assert set(ranking.items_BK[0].tolist()) == set(range(NUM_ITEMS + 2))
    torch.testing.assert_close(ranking.scores_BK.exp().sum(1), torch.ones(len(ROWS)))
