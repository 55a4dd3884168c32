"""Beam search against the probabilities of every item, computed one by one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.decoding.beam import BeamResult, beam_search
from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.prefixes import ItemDistribution, item_log_probs
from rayrec.models.decoding.trie import CodeTrie
from tests.helpers.examples import examples

NUM_ROWS = 3

pytestmark = pytest.mark.usefixtures("rows_of_children")


def search(step, trie, width, num_rows, excluded_BE=None, renormalized=False) -> BeamResult:
    """Items in `excluded_BE` are left out, and the others keep their probabilities."""
    leaf_filter = None if excluded_BE is None else LeafFilter.excluding(trie, excluded_BE)
    distribution = ItemDistribution(step, trie, num_rows, leaf_filter, renormalized=renormalized)
    return beam_search(distribution, width)


class RandomModel:
    """Logits that depend on the row and on every code decoded so far; counts beams per depth."""

    def __init__(self, num_codes, depth, seed, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        self.tables = [
            torch.randn(NUM_ROWS, 97, num_codes, generator=generator, dtype=torch.float64).to(dtype) * 2
            for _ in range(depth)
        ]
        self.widths = []

    def __call__(self, depth, codes_BWd, parent_BW):
        self.widths.append(codes_BWd.shape[1])
        primes = torch.tensor([31, 17, 5, 3])[:depth]
        prefix_BW = (codes_BWd * primes).sum(2) % 97
        rows = torch.arange(len(codes_BWd))[:, None]
        return self.tables[depth][rows, prefix_BW]


def exhaustive_scores(step, codes_IL, num_rows=NUM_ROWS):
    """[B, I] log-probabilities: product over the levels, each normalized over the codes that items have."""
    tuples = [tuple(codes) for codes in codes_IL.tolist()]
    scores_BI = torch.zeros(num_rows, len(tuples), dtype=torch.float64)
    for item, codes in enumerate(tuples):
        for depth, code in enumerate(codes):
            allowed = sorted({other[depth] for other in tuples if other[:depth] == codes[:depth]})
            prefix_B1d = torch.tensor(codes[:depth], dtype=torch.int64).expand(num_rows, 1, depth)
            logits_BK = step(depth, prefix_B1d, None)[:, 0].double()
            normalizer_B = logits_BK[:, allowed].logsumexp(1)
            scores_BI[:, item] += logits_BK[:, code] - normalizer_B
    return scores_BI


@st.composite
def catalogs(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tuples = draw(st.sets(st.tuples(*[st.integers(0, size - 1) for size in sizes]), min_size=1, max_size=25))
    order = draw(st.permutations(sorted(tuples)))
    return np.array(order)


@examples(60)
@given(catalogs(), st.integers(0, 1000), st.integers(0, 6), st.data())
def test_a_beam_as_wide_as_the_catalog_ranks_every_item(codes_IL, seed, extra_width, data):
    num_items = len(codes_IL)
    model = RandomModel(6, codes_IL.shape[1], seed)
    excluded_BE = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(-1, num_items - 1), min_size=4, max_size=4),
                min_size=NUM_ROWS,
                max_size=NUM_ROWS,
            )
        )
    )
    expected_BI = exhaustive_scores(model, codes_IL)
    for row in range(NUM_ROWS):
        for item in excluded_BE[row].tolist():
            if item >= 0:
                expected_BI[row, item] = -math.inf

    found = search(model, CodeTrie.from_codes(codes_IL), num_items + extra_width, NUM_ROWS, excluded_BE)

    assert found.items_BW.shape == (NUM_ROWS, num_items + extra_width)
    for row in range(NUM_ROWS):
        count = int(found.num_valid_B[row])
        assert count == int((expected_BI[row] > -math.inf).sum())
        items = found.items_BW[row, :count]
        assert len(set(items.tolist())) == count
        torch.testing.assert_close(found.log_probs_BW[row, :count], expected_BI[row, items])
        assert (found.log_probs_BW[row, :count].diff() <= 0).all()
        assert (found.items_BW[row, count:] == -1).all()
        assert (found.log_probs_BW[row, count:] == -math.inf).all()


@examples(40)
@given(catalogs(), st.integers(0, 1000))
def test_the_probabilities_of_all_items_sum_to_one(codes_IL, seed):
    model = RandomModel(6, codes_IL.shape[1], seed)
    found = search(model, CodeTrie.from_codes(codes_IL), len(codes_IL), NUM_ROWS)

    torch.testing.assert_close(found.log_probs_BW.exp().sum(1), torch.ones(NUM_ROWS, dtype=torch.float64))


@examples(40)
@given(catalogs(), st.integers(0, 1000), st.integers(1, 8))
def test_a_narrow_beam_finds_real_items_no_better_than_the_best(codes_IL, seed, width):
    model = RandomModel(6, codes_IL.shape[1], seed)
    expected_BI = exhaustive_scores(model, codes_IL)
    model.widths.clear()
    found = search(model, CodeTrie.from_codes(codes_IL), width, NUM_ROWS)

    assert model.widths[0] == 1
    assert max(model.widths) <= width
    best_BI = expected_BI.sort(dim=1, descending=True).values
    for row in range(NUM_ROWS):
        count = int(found.num_valid_B[row])
        assert 1 <= count <= min(width, len(codes_IL))
        items = found.items_BW[row, :count]
        torch.testing.assert_close(found.log_probs_BW[row, :count], expected_BI[row, items])
        assert (found.log_probs_BW[row, :count] <= best_BI[row, :count] + 1e-9).all()


def test_worked_example():
    # Items (0, 0), (0, 1) and (1, 1); the first code is a coin toss, the second 3 : 1 under code 0.
    trie = CodeTrie.from_codes(np.array([[0, 0], [0, 1], [1, 1]]))

    def step(depth, codes_BWd, parent_BW):
        if depth == 0:
            return torch.zeros(1, 1, 2)
        return torch.tensor([math.log(3.0), 0.0]).expand(1, codes_BWd.shape[1], 2)

    found = search(step, trie, 4, 1)

    assert found.items_BW.tolist() == [[2, 0, 1, -1]]
    assert found.log_probs_BW.exp().tolist() == [pytest.approx([1 / 2, 3 / 8, 1 / 8, 0.0])]
    assert found.num_valid_B.tolist() == [3]


def test_each_row_is_decoded_as_if_it_were_alone():
    codes_IL = np.unique(np.random.default_rng(0).integers(0, 6, (60, 3)), axis=0)
    trie, model = CodeTrie.from_codes(codes_IL), RandomModel(6, 3, seed=4)
    together = search(model, trie, 5, NUM_ROWS)

    for row in range(NUM_ROWS):

        def one_row(depth, codes_BWd, parent_BW, row=row):
            widened = codes_BWd.expand(NUM_ROWS, -1, -1)
            return model(depth, widened, None)[row : row + 1]

        alone = search(one_row, trie, 5, 1)
        assert torch.equal(alone.items_BW[0], together.items_BW[row])
        assert torch.equal(alone.log_probs_BW[0], together.log_probs_BW[row])


def test_parents_say_which_beam_each_prefix_grew_from():
    codes_IL = np.unique(np.random.default_rng(1).integers(0, 5, (80, 4)), axis=0)
    model = RandomModel(5, 4, seed=2)
    before = []

    def step(depth, codes_BWd, parent_BW):
        if depth:
            grown = before[-1].gather(1, parent_BW[:, :, None].expand(-1, -1, depth - 1))
            assert torch.equal(grown, codes_BWd[:, :, :-1])
        else:
            assert parent_BW is None
        before.append(codes_BWd)
        return model(depth, codes_BWd, parent_BW)

    search(step, CodeTrie.from_codes(codes_IL), 7, NUM_ROWS)
    assert [codes.shape[2] for codes in before] == [0, 1, 2, 3]


@pytest.mark.parametrize("width", [1, 4, 11, 30])
def test_equal_scores_prefer_the_lower_leaf(width):
    # Two codes on every level: the scores of all leaves are equal to the last bit.
    codes_IL = np.array(np.meshgrid(*[[0, 1]] * 5)).reshape(5, -1).T
    codes_IL = codes_IL[np.random.default_rng(0).permutation(32)]
    trie = CodeTrie.from_codes(codes_IL)

    found = search(lambda depth, codes, parent: torch.zeros(2, codes.shape[1], 2), trie, width, 2)

    assert found.items_BW.tolist() == [trie.leaf_items_I[:width].tolist()] * 2


def test_single_precision_ranks_like_double():
    codes_IL = np.unique(np.random.default_rng(3).integers(0, 8, (200, 3)), axis=0)
    trie = CodeTrie.from_codes(codes_IL)
    double = search(RandomModel(8, 3, seed=7), trie, 200, NUM_ROWS)
    single = search(RandomModel(8, 3, seed=7, dtype=torch.float32), trie, 200, NUM_ROWS)

    assert single.log_probs_BW.dtype == torch.float32
    assert double.log_probs_BW.dtype == torch.float64
    torch.testing.assert_close(single.log_probs_BW.double(), double.log_probs_BW, atol=1e-5, rtol=0)
    assert torch.equal(single.items_BW[:, :10], double.items_BW[:, :10])


def test_half_precision_logits_are_normalized_in_single_precision():
    codes_IL = np.arange(8)[:, None]
    model = RandomModel(8, 1, seed=0, dtype=torch.bfloat16)
    found = search(model, CodeTrie.from_codes(codes_IL), 8, NUM_ROWS)

    assert found.log_probs_BW.dtype == torch.float32
    torch.testing.assert_close(found.log_probs_BW.exp().sum(1), torch.ones(NUM_ROWS))


def test_a_row_with_everything_excluded_is_empty():
    trie = CodeTrie.from_codes(np.array([[0], [1], [2]]))
    excluded_BE = torch.tensor([[2, 0, 1], [-1, 1, -1]])
    found = search(
        lambda depth, codes, parent: torch.tensor([[[0.0, 1.0, 2.0]]] * 2), trie, 3, 2, excluded_BE
    )

    assert found.items_BW.tolist() == [[-1, -1, -1], [2, 0, -1]]
    assert found.num_valid_B.tolist() == [0, 2]


def test_a_beam_with_nan_is_dropped_and_the_others_stand():
    trie = CodeTrie.from_codes(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]))

    def step(depth, codes_BWd, parent_BW):
        logits = torch.zeros(1, codes_BWd.shape[1], 2)
        return torch.where(codes_BWd[:, :, :1] == 1, torch.nan, logits) if depth else logits

    found = search(step, trie, 4, 1)
    assert found.items_BW.tolist() == [[0, 1, -1, -1]]


def test_a_beam_without_width_is_refused():
    trie = CodeTrie.from_codes(np.array([[0]]))
    with pytest.raises(ValueError, match="beam_width must be at least 1, got 0"):
        search(lambda depth, codes, parent: torch.zeros(1, 1, 1), trie, 0, 1)


def test_decoding_reads_no_value_back_to_the_host():
    # Tensors on the meta device have no values, so reading one raises.
    codes_IL = np.unique(np.random.default_rng(0).integers(0, 5, (60, 3)), axis=0)
    trie = CodeTrie.from_codes(codes_IL).to("meta")
    excluded_BE = torch.zeros(2, 4, dtype=torch.int64, device="meta")

    def step(depth, codes_BWd, parent_BW):
        return torch.empty(2, codes_BWd.shape[1], 5, device="meta")

    found = search(step, trie, 7, 2, excluded_BE)
    assert found.items_BW.shape == found.log_probs_BW.shape == (2, 7)


@examples(40)
@given(catalogs(), st.integers(0, 1000), st.booleans(), st.data())
def test_known_items_have_the_log_probabilities_that_a_wide_beam_finds(codes_IL, seed, renormalized, data):
    num_items, trie = len(codes_IL), CodeTrie.from_codes(codes_IL)
    positions = st.lists(st.integers(-1, num_items - 1), min_size=5, max_size=5)
    rows = st.lists(positions, min_size=NUM_ROWS, max_size=NUM_ROWS)
    items_BW, excluded_BE = torch.tensor(data.draw(rows)), torch.tensor(data.draw(rows))
    model = RandomModel(6, codes_IL.shape[1], seed)
    found = search(model, trie, num_items, NUM_ROWS, excluded_BE, renormalized)
    leaf_filter = LeafFilter.excluding(trie, excluded_BE)

    log_probs_BW = item_log_probs(
        ItemDistribution(model, trie, NUM_ROWS, leaf_filter, renormalized=renormalized), items_BW
    )

    for row in range(NUM_ROWS):
        known = dict(zip(found.items_BW[row].tolist(), found.log_probs_BW[row].tolist(), strict=True))
        expected = [known.get(item, -math.inf) if item >= 0 else -math.inf for item in items_BW[row].tolist()]
        assert log_probs_BW[row].tolist() == pytest.approx(expected)


def test_what_is_left_out_keeps_no_place_in_a_narrow_beam():
    """Everything below the best code is excluded: it competes with nothing at any depth."""
    trie = CodeTrie.from_codes(np.array([[0, 0], [0, 1], [1, 0], [2, 0]]))

    def step(depth, codes_BWd, parent_BW):
        return torch.tensor([9.0, 1.0, 0.0]).expand(1, codes_BWd.shape[1], 3)

    found = search(step, trie, 2, 1, torch.tensor([[0, 1]]))

    assert found.items_BW.tolist() == [[2, 3]]


def test_a_model_is_not_asked_about_prefixes_that_only_one_item_has():
    """Of four items, (1, ...) and (2, ...) are known by their first code, and all by their second."""
    trie = CodeTrie.from_codes(np.array([[0, 1, 0], [0, 0, 2], [1, 1, 1], [2, 0, 2]]))
    asked = []

    def step(depth, codes_BWd, parent_BW):
        asked.append((codes_BWd.tolist(), None if parent_BW is None else parent_BW.tolist()))
        return torch.full((1, codes_BWd.shape[1], 3), torch.nan if depth > 1 else 0.0)

    found = search(step, trie, 4, 1)

    assert asked == [([[[]]], None), ([[[0]]], [[0]])]
    assert found.items_BW.tolist() == [[2, 3, 1, 0]]
    torch.testing.assert_close(found.log_probs_BW.exp(), torch.tensor([[1 / 3, 1 / 3, 1 / 6, 1 / 6]]))


def test_what_only_one_item_has_is_certain_even_where_the_model_is_asked():
    """The first row goes on with a prefix of two items, so that the second row's closed one is asked too."""
    trie = CodeTrie.from_codes(np.array([[0, 0], [0, 1], [1, 0]]))

    def step(depth, codes_BWd, parent_BW):
        if depth:
            return torch.where(codes_BWd[:, :, :1] == 1, torch.nan, torch.zeros(2, 1, 2))
        return torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])

    found = search(step, trie, 1, 2)

    assert found.items_BW.tolist() == [[0], [2]]
