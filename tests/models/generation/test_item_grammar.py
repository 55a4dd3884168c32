"""Items as what a model says: each tuple is an item, none comes twice, and all are whole."""

import numpy as np
import pytest

from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generation.item_grammar import ItemGrammar, ItemTokens
from rayrec.models.generation.sampler import Sampling, TokenSampler
from rayrec.platform.errors import InputError

CODES_IL = [[0, 1], [0, 2], [1, 0], [2, 2]]
FIRST, END = 10, 1
TOKENS = ItemTokens(CodeTrie.from_codes(CODES_IL), (FIRST, FIRST + 3), (3, 3), FIRST + 6, frozenset({END}))


def said(limit, seed, **settings):
    grammar = ItemGrammar(TOKENS, **settings)
    sampler = TokenSampler(Sampling(seed=seed), [END], grammar)
    random, tokens = np.random.default_rng(seed), []
    while len(tokens) < limit and not grammar.is_over:
        token = sampler.choose(
            random.normal(size=TOKENS.num_tokens).astype(np.float32), limit - len(tokens)
        ).token
        if token == END:
            break
        tokens.append(token)
    assert grammar.is_complete
    return grammar, tokens


@pytest.mark.parametrize("seed", range(6))
def test_all_items_of_a_catalog_come_once_in_some_order(seed):
    grammar, tokens = said(8, seed, least=4, most=4)

    assert sorted(grammar.items) == [0, 1, 2, 3]
    codes = np.array(tokens).reshape(-1, 2) - [FIRST, FIRST + 3]
    assert codes.tolist() == [CODES_IL[item] for item in grammar.items]


@pytest.mark.parametrize("limit", [4, 5, 9, 30])
@pytest.mark.parametrize("seed", range(4))
def test_items_that_are_demanded_come_in_a_text_of_any_length(seed, limit):
    grammar, tokens = said(limit, seed, least=2, most=3, in_text=True)

    assert 2 <= len(grammar.items) <= 3
    is_code = [token >= FIRST for token in tokens]
    assert sum(is_code) == 2 * len(grammar.items)
    assert END not in tokens


def test_an_item_that_has_begun_is_ended_first():
    grammar = ItemGrammar(TOKENS, least=1, most=2, in_text=True)
    grammar.advance(FIRST + 0)

    assert np.flatnonzero(grammar.allowed_V()).tolist() == [FIRST + 3 + 1, FIRST + 3 + 2]
    assert not grammar.is_complete
    assert grammar.ending == [FIRST + 3 + 1]


def test_what_leaves_too_few_tokens_does_not_fit():
    grammar = ItemGrammar(TOKENS, least=2, most=2, in_text=True)

    assert not grammar.fits(5, 3)
    assert grammar.fits(5, 4)
    assert not grammar.fits(FIRST, 2)
    assert grammar.fits(FIRST, 3)


def test_a_tuple_that_is_no_item_is_refused():
    grammar = ItemGrammar(TOKENS)
    grammar.advance(FIRST + 1)

    with pytest.raises(ValueError, match="not allowed"):
        grammar.advance(FIRST + 3 + 1)


def test_more_items_than_there_are_cannot_be_demanded():
    with pytest.raises(InputError, match="from 5 to 5 items of 4"):
        ItemGrammar(TOKENS, 5, 5)
