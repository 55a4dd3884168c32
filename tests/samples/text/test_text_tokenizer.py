"""Tokenizers with codes: one token each, in any text, with numbers that stay."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rayrec.platform.errors import InputError
from rayrec.samples.text.tokens import TextTokenizer
from tests.helpers.text_tokenizers import tokenizer_folder

SIZES = (300, 40, 7)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizers") / "base")


@pytest.fixture(scope="module")
def made(base):
    return TextTokenizer.extended(base, SIZES, multiple=64, semantic_ids_version="v1")


def codes():
    return st.tuples(*(st.integers(0, size - 1) for size in SIZES))


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), codes()), max_size=8
    )
)
def test_texts_with_codes_come_back_and_every_code_is_one_token(made, parts):
    text = "".join(made.code_text(part) if isinstance(part, tuple) else part for part in parts)
    ids = made.encode(text)

    assert made.decode(ids) == text
    expected = [made.code_ids(np.array([part]))[0].tolist() for part in parts if isinstance(part, tuple)]
    assert [one for one in ids if one >= made.info.first_new] == [one for each in expected for one in each]


def test_numbers_of_the_base_stay_and_new_ones_are_behind_them(base, made):
    before = Tokenizer.from_file(str(base / "tokenizer.json"))
    num_before = before.get_vocab_size()

    assert made.encode("What is the capital?") == before.encode("What is the capital?").ids
    assert made.info.first_new == num_before
    assert made.tokenizer.token_to_id("<a_0>") == num_before
    assert made.tokenizer.token_to_id("<c_6>") == num_before + sum(SIZES) - 1
    assert made.info.num_tokens % 64 == 0
    assert 0 <= made.info.num_tokens - num_before - sum(SIZES) < 64


def test_a_saved_tokenizer_is_the_same_for_others_too(made, tmp_path):
    made.save(tmp_path)
    loaded, theirs = TextTokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "Paris <a_12><b_3><c_0>, of course!"

    assert loaded.info == made.info
    assert loaded.version == made.version
    assert loaded.encode(text) == made.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert loaded.info.ends == (theirs.eos_token_id,)


def test_another_version_of_semantic_ids_is_another_version_of_the_tokenizer(base, made):
    assert TextTokenizer.extended(base, SIZES, 64, "v2").version != made.version
    assert TextTokenizer.extended(base, SIZES, 64, "v1").version == made.version


def test_a_tokenizer_that_was_changed_after_it_was_saved_is_refused(made, tmp_path):
    made.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"<b_39>"', '"<b_3900>"'))

    with pytest.raises(InputError, match="not the tokenizer that was saved"):
        TextTokenizer.load(tmp_path)


def test_another_format_is_refused(made, tmp_path):
    made.save(tmp_path)
    info = json.loads((tmp_path / "rayrec_tokenizer.json").read_text())
    (tmp_path / "rayrec_tokenizer.json").write_text(json.dumps(info | {"format": 9}))

    with pytest.raises(InputError, match="format 9, this version reads 1"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("token", "code"),
    [("x<", "<a_0>"), (":<a", "<a_0>"), ("\n<", "<a_0>"), ("<a_1>0", "<a_1>"), ("[<a_2>", "<a_2>")],
)
def test_a_tokenizer_that_splits_a_code_is_refused(tmp_path, token, code):
    folder = tokenizer_folder(tmp_path / "base", more=[token])

    with pytest.raises(InputError, match=f"splits the code {code}"):
        TextTokenizer.extended(folder, (4,))


def test_a_tokenizer_that_has_a_code_already_is_refused(tmp_path):
    folder = tokenizer_folder(tmp_path / "base", more=["<a_1>"])

    with pytest.raises(InputError, match="has a token <a_1> already"):
        TextTokenizer.extended(folder, (4,))


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([300, 0, 0], "code 300 of level 0: the tokenizer knows 300"),
        ([0, -1, 0], "code -1 of level 1"),
        ([0] * 4, "4 codes"),
    ],
)
def test_codes_that_no_token_stands_for_are_refused(made, codes, said):
    with pytest.raises(InputError, match=said):
        made.code_ids(np.array([codes]))


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    folder = tokenizer_folder(tmp_path / "base", eos_token=None)

    with pytest.raises(InputError, match="names no eos_token"):
        TextTokenizer.extended(folder)


def test_rows_are_padded_with_the_token_for_it_and_end_where_generation_does(tmp_path):
    folder = tokenizer_folder(tmp_path / "base", more=["<pad>"], pad_token={"content": "<pad>"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    made = TextTokenizer.extended(folder)

    assert made.info.pad == made.tokenizer.token_to_id("<pad>")
    assert made.info.ends == (2, 0)


def test_a_token_across_the_beginning_of_a_completion_is_not_learned(made):
    text = "the capital"
    ids = made.encode(text)
    first = made.tokenizer.id_to_token(ids[0])
    assert len(first) > 1, "a token of several letters"
    found = made.marked(text, [(1, len(text))])

    assert found.num_across == 1
    assert not found.is_completion_T[0]
    assert found.is_completion_T[1:].all()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file; give a folder with the tokenizer"):
        TextTokenizer.extended(tmp_path)
