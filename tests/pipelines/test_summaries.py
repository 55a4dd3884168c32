"""A trained model that reads summaries of old events, with and without what was computed before."""

from dataclasses import replace

import numpy as np
import pytest

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.pipelines.inference.answers import Budget, Query, Wanted
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.summaries import Summaries
from rayrec.platform.errors import InputError
from tests.helpers.runs import BACKBONE, NUM_ITEMS, make_run

SIZE, NEWEST = 4, 3
LONG = {"chunk_events": SIZE, "summary_tokens": 2, "newest": NEWEST, "max_chunks": 8}


@pytest.fixture(scope="module")
def recommender(tmp_path_factory) -> Recommender:
    backbone = {key: value for key, value in BACKBONE.items() if key != "max_length"}
    folder = tmp_path_factory.mktemp("run")
    return Recommender.load(make_run(folder, "lazy", backbone=backbone, long_history=LONG))


@pytest.fixture
def queries(recommender) -> list[Query]:
    random = np.random.default_rng(4)
    ids_I = recommender.dataset.items.ids_I
    return [Query(ids_I[random.integers(0, len(ids_I), length)]) for length in (2, 19, 0, 30, 7)]


def scores_of(answer):
    return [item.score for item in answer.items]


def test_answers_with_summaries_are_those_without(recommender, queries):
    summaries = recommender.summarize(queries)

    assert [len(each.hashes_F) for each in summaries] == [0, 4, 0, 6, 1]
    plain = recommender.answer(queries, NUM_ITEMS)
    known = [replace(query, summaries=each) for query, each in zip(queries, summaries, strict=True)]
    for answer, expected in zip(recommender.answer(known, NUM_ITEMS), plain, strict=True):
        assert [item.item_key for item in answer.items] == [item.item_key for item in expected.items]
        assert scores_of(answer) == pytest.approx(scores_of(expected), abs=1e-5)
        assert (answer.num_read, answer.num_unread) == (expected.num_read, expected.num_unread)
        assert not answer.lacks_long_history
    assert plain[3].num_read == 30


def test_a_refresh_computes_the_chunks_that_are_new(recommender, queries, monkeypatch):
    query = queries[3]
    shorter = replace(query, history_ids=query.history_ids[:22])
    (before,) = recommender.summarize([shorter])
    marked = Summaries(before.hashes_F, before.vectors_FKD + 1000)

    (after,) = recommender.summarize([replace(query, summaries=marked)])

    (expected,) = recommender.summarize([query])
    np.testing.assert_array_equal(after.hashes_F, expected.hashes_F)
    assert len(before.hashes_F) < len(after.hashes_F)
    kept = len(before.hashes_F)
    np.testing.assert_array_equal(after.vectors_FKD[:kept], marked.vectors_FKD)
    np.testing.assert_allclose(after.vectors_FKD[kept:], expected.vectors_FKD[kept:], atol=1e-6)


def test_a_budget_leaves_out_the_oldest_chunks_that_would_have_to_be_computed(recommender, queries):
    query = queries[3]
    (summaries,) = recommender.summarize([query])
    some = Summaries(summaries.hashes_F[:2], summaries.vectors_FKD[:2])

    def answer_of(known, most):
        asked = replace(query, summaries=known)
        (found,) = recommender.answer([asked], NUM_ITEMS, budget=Budget(max_new_chunks=most))
        return found

    whole = answer_of(None, None)
    nothing = answer_of(None, 0)
    assert nothing.lacks_long_history
    assert (nothing.num_read, nothing.num_unread) == (30 - 6 * SIZE, 6 * SIZE)
    assert scores_of(nothing) != pytest.approx(scores_of(whole), abs=1e-6)
    assert answer_of(some, 3).num_read == 30 - SIZE
    assert not answer_of(summaries, 0).lacks_long_history
    assert scores_of(answer_of(some, 4)) == pytest.approx(scores_of(whole), abs=1e-5)


def test_the_budgets_of_a_batch_are_those_of_its_rows(recommender, queries):
    budgets = [Budget(), Budget(max_new_chunks=0), Budget(), Budget(max_new_chunks=2), Budget(max_events=5)]
    wanted = [Wanted(5, budget=budget) for budget in budgets]

    together = recommender.answer_each(queries, wanted)

    alone = [recommender.answer_each([query], [each])[0] for query, each in zip(queries, wanted, strict=True)]
    for answer, expected in zip(together, alone, strict=True):
        assert [item.item_key for item in answer.items] == [item.item_key for item in expected.items]
        assert scores_of(answer) == pytest.approx(scores_of(expected), abs=1e-5)
    assert [each.lacks_long_history for each in together] == [False, True, False, True, False]


def test_summaries_are_alike_in_their_bits_whatever_else_is_summarized(recommender, queries):
    alone = [recommender.summarize([query])[0] for query in queries]

    for together, expected in zip(recommender.summarize(queries), alone, strict=True):
        np.testing.assert_array_equal(together.vectors_FKD, expected.vectors_FKD)


def test_summaries_of_another_width_are_told(recommender, queries):
    (summaries,) = recommender.summarize([queries[3]])
    other = Summaries(summaries.hashes_F, summaries.vectors_FKD[:, :1])

    with pytest.raises(ValueError, match="summaries of 6 chunks have the shape"):
        recommender.answer(
            [replace(queries[3], summaries=summaries), replace(queries[3], summaries=other)], 5
        )


def test_the_prefix_cache_says_why_it_keeps_nothing(recommender):
    with pytest.raises(InputError, match=r"summaries of old events.*leave out --prefix-cache-mib"):
        recommender.use_prefix_cache(CacheSizes(1 << 20))


def test_a_budget_counts_events_that_the_catalog_knows(recommender, queries):
    """Else one unknown event would move all chunks, and all would have to be summarized again."""
    query = queries[3]
    (summaries,) = recommender.summarize([query])
    unknown = replace(query, history_ids=np.append([12345], query.history_ids), summaries=summaries)

    (answer,) = recommender.answer([unknown], 5, budget=Budget(max_events=17, max_new_chunks=0))

    (expected,) = recommender.answer([query], 5, budget=Budget(max_events=17))
    assert not answer.lacks_long_history
    assert scores_of(answer) == pytest.approx(scores_of(expected), abs=1e-5)
