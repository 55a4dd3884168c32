"""Tables of a trie's top levels say bit for bit what its sparse rows say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.decoding import dense_levels
from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.prefixes import ItemDistribution
from rayrec.models.decoding.trie import CodeTrie
from tests.helpers.examples import examples
from tests.models.decoding.test_beam import NUM_ROWS, RandomModel, catalogs


@pytest.fixture
def without_tables(monkeypatch):
    """Makes a trie that has sparse rows alone."""

    def make(codes_IL):
        trie = CodeTrie.from_codes(codes_IL)
        monkeypatch.setattr(dense_levels, "MOST_ENTRIES", 0)
        assert not any(table is not None for table in (*trie.child_tables, *trie.children_by_code))
        monkeypatch.undo()
        return trie

    return make


@examples(60)
@given(catalogs(), st.data())
def test_children_and_their_codes_are_those_of_the_sparse_rows(codes_IL, data):
    trie = CodeTrie.from_codes(codes_IL)
    for depth in range(min(trie.depth, dense_levels.DENSE_LEVELS)):
        assert trie.child_tables[depth] is not None
        num_nodes, count = trie.num_nodes(depth), trie.max_children[depth]
        places = st.lists(st.integers(-1, num_nodes - 1), min_size=4, max_size=4)
        nodes = torch.tensor(data.draw(st.lists(places, min_size=2, max_size=2)))

        children, is_child = trie.children(depth, nodes, count)

        expected, is_expected = trie._sparse_children(depth, nodes, count)
        assert torch.equal(children, expected)
        assert torch.equal(is_child, is_expected)
        codes = trie.codes_of_children(depth, nodes, children)
        assert torch.equal(codes, trie.child_codes[depth][children])


@examples(60)
@given(catalogs())
def test_the_child_by_a_code_is_that_of_the_binary_search(codes_IL):
    trie, sparse = CodeTrie.from_codes(codes_IL), CodeTrie.from_codes(codes_IL)
    sparse.__dict__["children_by_code"] = (None,) * trie.depth
    for depth in range(trie.depth):
        nodes = torch.arange(-1, trie.num_nodes(depth))[:, None].expand(-1, 9)
        codes = torch.arange(9).expand_as(nodes)  # with such as no item has

        assert torch.equal(trie.child(depth, nodes, codes), sparse.child(depth, nodes, codes))
    assert trie.children_by_code[0] is not None


@pytest.mark.parametrize("width", [1, 7, 40, 500])
def test_a_beam_search_finds_the_same_bits(width, without_tables):
    codes_IL = np.unique(np.random.default_rng(0).integers(0, 12, (500, 4)), axis=0)
    model = RandomModel(12, 4, seed=3, dtype=torch.float32)
    dense, sparse = CodeTrie.from_codes(codes_IL), without_tables(codes_IL)
    assert [table is not None for table in dense.child_tables] == [True, True, False, False]

    found, expected = (
        beam_search(ItemDistribution(model, trie, NUM_ROWS), width) for trie in (dense, sparse)
    )

    assert torch.equal(found.items_BW, expected.items_BW)
    assert torch.equal(found.log_probs_BW, expected.log_probs_BW)


def test_tables_that_would_be_large_or_mostly_empty_are_not_made(monkeypatch):
    # One first code has a hundred second ones, and fifty have one each.
    codes_IL = np.array([[0, code] for code in range(100)] + [[code, 0] for code in range(1, 51)])

    trie = CodeTrie.from_codes(codes_IL)
    assert trie.child_tables[0] is not None
    assert trie.child_tables[1] is None
    monkeypatch.setattr(dense_levels, "MOST_ENTRIES", 50)
    assert CodeTrie.from_codes(codes_IL).child_tables[0] is None
