"""A text divided into labeled segments: whatever a model prefers, they are the text again."""

import json

import numpy as np
import pytest

from rayrec.models.generation.copy_grammar import CopyLabels
from rayrec.models.generation.sampler import Sampling, TokenSampler
from rayrec.models.generation.token_bytes import TokenBytes
from rayrec.platform.errors import InputError

END = 0
BYTES = TokenBytes([None, *(bytes([byte]) for byte in range(256))], [END])
MERGED = TokenBytes(
    [
        *BYTES.bytes_V,
        b'[["city", "',
        b'"], ["street", "',
        b'"], ["',
        b'"]]',
        b"Bern",
        b'n"]',
        b"er",
        b"ty",
    ],
    [END],
)
LABELS = ("street", "city", 'quo"ted')
TEXTS = ("Rosenweg 7, Bern", "x", 'a "b" \\ c\n\tBern', "東京都 Ünï 🙂", "\u2028\x7f\x01")


def said(tokens, text, limit, seed, temperature=2.0):
    grammar = CopyLabels(LABELS, tokens).begin(text)
    sampler = TokenSampler(Sampling(temperature, seed=seed), [END], grammar)
    random, written = np.random.default_rng(seed), []
    while len(written) < limit and not grammar.is_over:
        logits_V = random.normal(size=len(tokens)).astype(np.float32)
        written.append(sampler.choose(logits_V, limit - len(written)).token)
    assert grammar.is_complete
    return b"".join(tokens.bytes_V[token] for token in written).decode()


@pytest.mark.parametrize("tokens", [BYTES, MERGED], ids=["bytes", "merged"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(4))
def test_segments_are_the_text_again(tokens, text, seed):
    pairs = json.loads(said(tokens, text, 2000, seed))

    assert "".join(segment for _, segment in pairs) == text
    assert all(label in LABELS and segment for label, segment in pairs)


@pytest.mark.parametrize("text", TEXTS)
def test_the_shortest_answer_takes_as_many_tokens_as_its_ending(text):
    ending = CopyLabels(LABELS, MERGED).begin(text).ending

    for limit in range(len(ending), len(ending) + 12):
        for seed in range(3):
            assert "".join(pair[1] for pair in json.loads(said(MERGED, text, limit, seed))) == text


def test_what_may_come_is_the_text_or_a_label():
    grammar = CopyLabels(("a", "b"), BYTES).begin('o"')

    def allowed():
        return b"".join(sorted(BYTES.bytes_V[token] for token in np.flatnonzero(grammar.allowed_V())))

    assert allowed() == b"["
    for written in b'[["':
        grammar.advance(1 + written)
    assert allowed() == b"ab"
    for written in b'a", "':
        grammar.advance(1 + written)
    assert allowed() == b"o"
    grammar.advance(1 + ord("o"))
    assert allowed() == b'"\\'  # another label, or the quotation mark of the text, escaped
    for written in b'"], ["b", "\\"':
        grammar.advance(1 + written)
    assert allowed() == b'"'
    with pytest.raises(ValueError, match="not allowed"):
        grammar.advance(1 + ord("x"))
    for written in b'"]]':
        grammar.advance(1 + written)
    assert grammar.is_over
    assert allowed() == b""


def test_a_segment_has_a_character_and_no_half_of_one():
    grammar = CopyLabels(("a",), BYTES).begin("é!")
    for written in b'[["a", "':
        grammar.advance(1 + written)

    first, second = "é".encode()
    assert np.flatnonzero(grammar.allowed_V()).tolist() == [1 + first]
    grammar.advance(1 + first)
    assert np.flatnonzero(grammar.allowed_V()).tolist() == [1 + second]
    grammar.advance(1 + second)
    assert np.flatnonzero(grammar.allowed_V()).tolist() == [1 + ord("!"), 1 + ord('"')]


def test_a_token_may_cross_from_a_segment_into_the_glue():
    grammar = CopyLabels(("city", "street"), MERGED).begin("Bern")
    for written in b'[["city", "Ber':
        grammar.advance(1 + written)
    crossing = MERGED.bytes_V.index(b'n"]')

    assert grammar.allowed_V()[crossing]
    grammar.advance(crossing)
    assert list(grammar.ending) == [1 + ord("]")]


def test_what_leaves_too_few_tokens_does_not_fit():
    grammar = CopyLabels(("a",), BYTES).begin("xy")

    assert not grammar.fits(1 + ord("["), 11)
    assert grammar.fits(1 + ord("["), 12)  # ["a", "xy"]]
    assert not grammar.fits(1 + ord("x"), 100)


@pytest.mark.parametrize(
    ("labels", "text", "message"),
    [
        ((), "x", "expected one or more different ones"),
        (("a", "a"), "x", "expected one or more different ones"),
        (("a",), "", "the text is empty"),
        (("a",), "\ud800", "half a surrogate pair"),
        (("a",), "x" * 20_000, "the text is larger than 16,384 bytes"),
    ],
)
def test_labels_and_texts_that_cannot_be_are_named(labels, text, message):
    with pytest.raises(InputError, match=message):
        CopyLabels(labels, BYTES).begin(text)


def test_a_grammar_of_the_same_text_begins_anew():
    grammar = CopyLabels(LABELS, BYTES).begin("xy")
    ending = list(grammar.ending)
    for token in ending[:5]:
        grammar.advance(token)

    again = grammar.fresh()

    assert list(again.ending) == ending
    assert list(grammar.ending) == ending[5:]


def test_a_tokenizer_that_cannot_write_the_text_is_refused():
    few = TokenBytes([None, *(bytes([byte]) for byte in b'[]", abx')], [END])

    CopyLabels(("a",), few).begin("x")
    with pytest.raises(InputError, match="cannot write the text"):
        CopyLabels(("a",), few).begin("xyz")
    with pytest.raises(InputError, match="cannot write them"):
        CopyLabels(("city",), few)


def test_a_label_that_the_tokenizer_cannot_write_never_begins():
    few = TokenBytes([None, *(bytes([byte]) for byte in b'[]", abxcit')], [END])
    grammar = CopyLabels(("a", "city"), few).begin("x")
    for written in b'[["':
        grammar.advance(1 + b'[]", abxcit'.index(written))

    assert grammar.allowed_V()[1 + b'[]", abxcit'.index(b"c")]
    assert not grammar.fits(1 + b'[]", abxcit'.index(b"c"), 100)  # there is no y


def test_long_labels_are_read_once_and_bounded():
    """Each node of their trie kept the rest of it, and its tokens."""
    grammar = CopyLabels((*(f"{number:04}" * 50 for number in range(19)), "a"), MERGED).begin("xy")
    assert b"".join(MERGED.bytes_V[token] for token in grammar.ending) == b'[["a", "xy"]]'
    assert CopyLabels(("a" * 3000,), BYTES).begin("x").fits(1 + ord("["), 4000)

    with pytest.raises(InputError, match="labels: together longer than 4,096 characters"):
        CopyLabels(("a" * 5000,), BYTES)
