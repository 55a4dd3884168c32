"""Items drawn from small tries, held to the probabilities of every item, computed one by one."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given as drawn_from
from hypothesis import strategies as st

from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.prefixes import ItemDistribution, item_code_log_probs
from rayrec.models.decoding.sampling import constrained_sample, stochastic_beam_search
from rayrec.models.decoding.trie import CodeTrie
from tests.helpers.examples import examples

CODES_IL = np.array([[2, 0, 1], [0, 5, 0], [2, 7, 0], [0, 1, 3], [2, 3, 4], [0, 1, 0], [1, 1, 1]])
NUM_ITEMS = len(CODES_IL)

pytestmark = pytest.mark.usefixtures("rows_of_children")


def step_of(num_rows: int, num_codes: int = 8, seed: int = 0, temperature: float = 1.0):
    """Logits that depend on the row and on every code so far."""
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randn(4, num_rows, 97, num_codes, generator=generator, dtype=torch.float64) / temperature

    def step(depth, codes_BWd, parent_BW):
        primes = torch.tensor([31, 17, 5])[:depth]
        rows = torch.arange(len(codes_BWd))[:, None]
        return tables[depth][rows, (codes_BWd * primes).sum(2) % 97]

    return step


def exact(step, codes_IL, allowed_BI) -> torch.Tensor:
    """[B, I] probabilities, normalized over those codes at every level that lead to an allowed item."""
    tuples = [tuple(codes) for codes in codes_IL.tolist()]
    probs_BI = torch.zeros(allowed_BI.shape, dtype=torch.float64)
    for row, item in itertools.product(range(len(allowed_BI)), range(len(tuples))):
        if not allowed_BI[row, item]:
            continue
        given_items = [
            t for t, is_allowed in zip(tuples, allowed_BI[row].tolist(), strict=True) if is_allowed
        ]
        log_prob = 0.0
        for depth, code in enumerate(tuples[item]):
            choices = sorted({t[depth] for t in given_items if t[:depth] == tuples[item][:depth]})
            prefix = torch.tensor(tuples[item][:depth], dtype=torch.int64).expand(len(allowed_BI), 1, depth)
            logits_K = step(depth, prefix, None)[row, 0]
            log_prob += (logits_K[code] - logits_K[choices].logsumexp(0)).item()
        probs_BI[row, item] = np.exp(log_prob)
    return probs_BI


def given(step, num_rows: int, temperature: float = 1.0) -> ItemDistribution:
    return ItemDistribution(step, CodeTrie.from_codes(CODES_IL), num_rows, temperature=temperature)


def everything(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, NUM_ITEMS, dtype=torch.bool)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_items_are_drawn_as_often_as_is_said():
    step, num_samples = step_of(2), 20_000
    probs_BI = exact(step, CODES_IL, everything(2))

    drawn = constrained_sample(given(step, 2), num_samples, random())

    torch.testing.assert_close(probs_BI.sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(drawn.log_probs_BW.exp(), probs_BI.gather(1, drawn.items_BW))
    for row in range(2):
        frequencies_I = drawn.items_BW[row].bincount(minlength=NUM_ITEMS) / num_samples
        deviation_I = (probs_BI[row] * (1 - probs_BI[row]) / num_samples).sqrt()
        assert ((frequencies_I - probs_BI[row]).abs() < 4.5 * deviation_I).all()


def test_temperature_is_in_the_probabilities_too():
    warm = constrained_sample(given(step_of(1), 1, temperature=2.0), 50, random())
    probs_BI = exact(step_of(1, temperature=2.0), CODES_IL, everything(1))
    torch.testing.assert_close(warm.log_probs_BW.exp(), probs_BI.gather(1, warm.items_BW))


def without_replacement(probs_I: torch.Tensor, num_samples: int) -> dict[tuple[int, ...], float]:
    """Probability of every ordered sample: each item by its share of what is left."""
    found = {}
    for items in itertools.permutations(range(len(probs_I)), num_samples):
        left, probability = 1.0, 1.0
        for item in items:
            probability *= probs_I[item].item() / left
            left -= probs_I[item].item()
        found[items] = probability
    return found


def test_distinct_items_come_in_the_order_and_as_often_as_without_replacement():
    """Kool et al., 2019: the k largest perturbed log-probabilities are such a sample."""
    num_rows = 20_000
    one = step_of(1)

    def step(depth, codes_BWd, parent_BW):
        return one(depth, codes_BWd.flatten(0, 1)[None], None).view(num_rows, -1, 8)

    probs_I = exact(one, CODES_IL, everything(1))[0]
    drawn = stochastic_beam_search(given(step, num_rows), 2, random(3))

    torch.testing.assert_close(drawn.log_probs_BW.exp(), probs_I[drawn.items_BW])
    expected = without_replacement(probs_I, 2)
    assert sum(expected.values()) == pytest.approx(1.0)
    pairs = (drawn.items_BW[:, 0] * NUM_ITEMS + drawn.items_BW[:, 1]).bincount(minlength=NUM_ITEMS**2)
    for (first, second), probability in expected.items():
        deviation = (probability * (1 - probability) / num_rows) ** 0.5
        assert abs(pairs[first * NUM_ITEMS + second].item() / num_rows - probability) < 4.5 * deviation

    # And weighing by inclusion estimates sums over all items without bias.
    values_I = torch.arange(NUM_ITEMS, dtype=torch.float64)
    weights_BW = (drawn.log_probs_BW - drawn.log_inclusion_BW()).exp()
    estimates_B = (weights_BW * values_I[drawn.items_BW]).sum(1)
    deviation = estimates_B.std() / num_rows**0.5
    assert abs(estimates_B.mean() - (probs_I * values_I).sum()) < 4.5 * deviation


@examples(60)
@drawn_from(st.data(), st.integers(0, 1000), st.booleans())
def test_nothing_that_may_not_be_given_is_drawn_and_all_that_may_is_found(data, seed, allowing):
    items = st.lists(st.integers(-1, NUM_ITEMS - 1), min_size=5, max_size=5)
    items_BE = torch.tensor(data.draw(st.lists(items, min_size=3, max_size=3)))
    named_BI = torch.zeros(3, NUM_ITEMS + 1, dtype=torch.bool).scatter_(1, items_BE % (NUM_ITEMS + 1), True)
    allowed_BI = named_BI[:, :-1] if allowing else ~named_BI[:, :-1]
    trie, step = CodeTrie.from_codes(CODES_IL), step_of(3, seed=seed)
    make = LeafFilter.allowing if allowing else LeafFilter.excluding
    leaf_filter = make(trie, items_BE)
    distribution = ItemDistribution(step, trie, 3, leaf_filter)
    probs_BI = exact(step, CODES_IL, allowed_BI)

    distinct = stochastic_beam_search(distribution, NUM_ITEMS + 2, random(seed))
    drawn = constrained_sample(distribution, 20, random(seed))

    for row in range(3):
        may = set(allowed_BI[row].nonzero()[:, 0].tolist())
        found = distinct.items_BW[row].tolist()
        assert sorted(found[: len(may)]) == sorted(may)
        assert found[len(may) :] == [-1] * (NUM_ITEMS + 2 - len(may))
        assert set(drawn.items_BW[row].tolist()) <= may or not may
        assert (drawn.items_BW[row] < 0).all() == (not may)
    assert (distinct.log_threshold_B == -torch.inf).all()
    for sample in (distinct, drawn):
        expected_BW = probs_BI.gather(1, sample.items_BW.clamp(min=0)).masked_fill(sample.items_BW < 0, 0.0)
        torch.testing.assert_close(sample.log_probs_BW.exp(), expected_BW)


def test_all_items_are_included_for_sure_where_nothing_is_left():
    drawn = stochastic_beam_search(given(step_of(2), 2), NUM_ITEMS, random())
    assert (drawn.log_inclusion_BW() == 0).all()


def test_the_same_noise_draws_the_same_items():
    for draw in (constrained_sample, stochastic_beam_search):
        first, again, other = (draw(given(step_of(2), 2), 5, random(seed)) for seed in (1, 1, 2))
        assert first.items_BW.tolist() == again.items_BW.tolist()
        assert first.items_BW.tolist() != other.items_BW.tolist()


def test_parents_say_which_prefix_each_grew_from():
    asked = []

    def step(depth, codes_BWd, parent_BW):
        if depth:
            assert (
                codes_BWd[:, :, :-1] == asked[-1].gather(1, parent_BW[:, :, None].expand(-1, -1, depth - 1))
            ).all()
        asked.append(codes_BWd)
        return step_of(2)(depth, codes_BWd, parent_BW)

    stochastic_beam_search(given(step, 2), 3, random())
    asked.clear()
    constrained_sample(given(step, 2), 3, random())


@pytest.mark.parametrize("draw", [constrained_sample, stochastic_beam_search])
def test_what_makes_no_sense_is_refused(draw):
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        draw(given(step_of(1), 1), 0, random())
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        given(step_of(1), 1, temperature=0.0)


@pytest.mark.parametrize("draw", [constrained_sample, stochastic_beam_search])
def test_a_learner_finds_the_log_probability_of_each_code_that_was_drawn(draw):
    step, num_rows = step_of(3), 3
    trie = CodeTrie.from_codes(CODES_IL)
    seen = LeafFilter.excluding(trie, torch.tensor([[0, 2, -1], [3, -1, -1], [6, 5, 1]]))

    drawn = draw(ItemDistribution(step, trie, num_rows, seen), NUM_ITEMS, random())
    found_BWL = item_code_log_probs(ItemDistribution(step, trie, num_rows, seen), drawn.items_BW)

    is_item_BW = drawn.items_BW >= 0
    assert is_item_BW.any()
    assert torch.equal(found_BWL[is_item_BW], drawn.code_log_probs_BWL[is_item_BW])
    torch.testing.assert_close(drawn.code_log_probs_BWL.sum(2)[is_item_BW], drawn.log_probs_BW[is_item_BW])
    assert (found_BWL[~is_item_BW] == -torch.inf).all()


def test_a_code_without_an_alternative_is_certain_to_the_bit():
    trie = CodeTrie.from_codes(CODES_IL)
    only_of_1 = torch.tensor([[6]])
    log_probs_BWL = item_code_log_probs(ItemDistribution(step_of(1), trie, 1), only_of_1)
    assert log_probs_BWL[0, 0, 0] < 0
    assert (log_probs_BWL[0, 0, 1:] == 0).all()
