"""Cleaning: duplicates, near duplicates, contamination and rules, whatever the order of records."""

import random

import pytest

from rayrec.samples.text.cleaning import (
    CleaningConfig,
    NearDuplicatesConfig,
    RulesConfig,
    RuleSet,
    bands_of,
    clean,
    words_of,
)
from rayrec.samples.text.prepare import silent
from rayrec.samples.text.records import record_of

WORDS = [f"w{n}" for n in range(500)]


def text(content):
    return record_of({"text": content})


def sentence(seed, length=40):
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def cleaned(records, **settings):
    return clean(records, CleaningConfig(**settings), silent)


def texts(found):
    return {record.text for record, _ in found.records}


def test_duplicates_differ_in_case_blanks_and_forms_of_unicode_alone():
    same = ["Café  Noir", "cafe\u0301 noir", "CAFÉ\nNOIR "]
    found = cleaned([(text(one), "train") for one in [*same, "cafe noir"]])

    assert len(found.records) == 2
    assert found.removed["exact duplicates"] == 2


def test_a_duplicate_with_another_answer_is_kept_and_counted():
    records = [record_of({"prompt": "Sky?", "completion": one}) for one in ("blue", "grey", "Blue")]
    found = cleaned([(record, "train") for record in records])

    assert len(found.records) == 2
    assert found.conflicting == 2


def test_what_is_held_out_is_kept_before_what_trains():
    for order in (1, -1):
        records = [(text("The same."), "train"), (text("the same."), "test")][::order]
        ((record, split),) = cleaned(records).records
        assert (record.text, split) == ("the same.", "test")


def test_what_is_left_does_not_depend_on_the_order():
    records = []
    for seed in range(60):
        whole = sentence(seed)
        changed = whole.replace(whole.split()[20], "other", 1)
        records += [(text(whole), "train"), (text(changed), ("train", "test")[seed % 2])]
    records += [(text(sentence(seed).upper()), "train") for seed in range(10)]
    settings = {"near_duplicates": {"threshold": 0.7}, "contamination": "drop_train"}
    expected = cleaned(records, **settings)

    for seed in range(3):
        random.Random(seed).shuffle(records)
        found = cleaned(records, **settings)
        assert found == expected
    assert len(expected.records) < 100
    assert [record.key for record, _ in expected.records] == sorted(
        record.key for record, _ in expected.records
    )


def shingles(content):
    words = content.split()
    return {tuple(words[n : n + 3]) for n in range(len(words) - 2)}


def test_near_duplicates_are_those_that_reach_the_similarity():
    pairs = []
    for seed in range(200):
        words = sentence(seed, 60).split()
        for n in range(seed % 8):
            words[(n * 7) % 60] = f"new{n}"
        pairs.append((sentence(seed, 60), " ".join(words)))
    records = [(text(one), "train") for pair in pairs for one in set(pair)]
    left = texts(cleaned(records, near_duplicates={"threshold": 0.7}))

    missed = 0
    for first, second in pairs:
        similarity = len(shingles(first) & shingles(second)) / len(shingles(first) | shingles(second))
        both = first in left and second in left
        if similarity < 0.7:
            assert both, f"removed at a similarity of {similarity:.2f}"
        elif first != second:
            missed += both
    assert missed <= 3  # one in a hundred of those at the threshold, by the bands


def test_choices_with_other_answers_are_no_near_duplicates():
    asked = sentence(1)
    records = [
        record_of({"text": asked + end, "options": ["a", "b"], "choice": one})
        for end, one in [(" x", "a"), (" y", "b"), (" z", "b")]
    ]
    found = cleaned([(record, "train") for record in records], near_duplicates={"threshold": 0.8})

    assert sorted(record.answer for record, _ in found.records) == ["a", "b"]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold(threshold):
    bands, rows = bands_of(threshold, NearDuplicatesConfig().permutations)

    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


def test_contamination_is_counted_on_both_sides_and_left_out_where_it_is_asked_for():
    copied = sentence(7, 13)
    train = [text(f"before {copied} behind"), *(text(sentence(seed)) for seed in range(20, 25))]
    test = [text(f"quoted {copied} too"), text(sentence(30))]
    records = [(one, "train") for one in train] + [(one, "test") for one in test]

    reported = cleaned(records)
    assert (reported.contaminated["train"], reported.contaminated["test"]) == (1, 1)
    assert len(reported.records) == 8
    without_train = cleaned(records, contamination="drop_train")
    assert texts(without_train) == {one.text for one in [*train[1:], *test]}
    without_test = cleaned(records, contamination="drop_held_out")
    assert texts(without_test) == {one.text for one in [*train, test[1]]}
    assert without_test.removed["contamination"] == 1


def test_twelve_words_in_common_are_no_contamination():
    copied = sentence(7, 12)
    records = [(text(f"before {copied} behind"), "train"), (text(f"quoted {copied} too"), "test")]

    assert not any(cleaned(records).contaminated.values())


def test_a_form_that_many_records_have_is_no_contamination():
    form = sentence(8, 15)
    records = [(text(f"{form} {n} {sentence(n, 5)}"), "train") for n in range(11)] + [
        (text(f"{form} 99 x"), "test")
    ]

    assert not any(cleaned(records).contaminated.values())
    assert cleaned(records, common_above=11).contaminated["train"] == 11


@pytest.mark.parametrize(
    ("settings", "content", "broken"),
    [
        ({"min_characters": 5}, "four", "too short"),
        ({"max_characters": 5}, "sixsix", "too long"),
        ({"max_repeated_lines": 0.4}, "a\nb\na\nb\n\n", "repeated lines"),
        ({"max_repeated_words": 0.4}, "go on now go on now go on now", "repeated words"),
        ({"max_odd_characters": 0.1}, "ab\ufffdc", "odd characters"),
        ({"scripts": ["LATIN"]}, "Привет, мир", "other scripts"),
    ],
)
def test_each_rule_leaves_out_what_breaks_it_and_nothing_else(settings, content, broken):
    rules = RuleSet(RulesConfig(**settings))

    assert rules.broken_by(text(content)) == broken
    assert rules.broken_by(text("fives")) is None


def test_scripts_are_judged_by_letters_alone():
    rules = RuleSet(RulesConfig(scripts=["CJK", "HIRAGANA"]))

    assert rules.broken_by(text("2026: 東京へ!")) is None
    assert rules.broken_by(text("123 !")) is None


def test_ideographs_are_words():
    assert words_of("東京へ行く tokyo2 ab東") == ["東", "京", "へ", "行", "く", "tokyo2", "ab", "東"]
