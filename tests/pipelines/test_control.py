"""Quotas, diversity and candidates, of lists that are found in a small catalog, and by small models."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.inference.answers import (
    Answer,
    Control,
    ControlReport,
    Query,
    Quota,
    Recommendation,
    Wanted,
)
from rayrec.pipelines.inference.control import controlled, num_searched
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from tests.helpers.examples import examples
from tests.helpers.runs import make_run

NOBODY = Query(np.zeros(0, dtype=np.int64))


class Catalog:
    """Items with scores; its search gives the best that a query allows."""

    def __init__(self, scores):
        self.scores = list(scores)
        self.calls = []

    def mask(self, *items):
        found = np.zeros(len(self.scores), dtype=np.bool_)
        found[list(items)] = True
        return found

    def find(self, queries, wanted):
        self.calls.append([each.k for each in wanted])
        return [self._answer(query, each) for query, each in zip(queries, wanted, strict=True)]

    def _answer(self, query, wanted):
        assert wanted.control is None
        order = sorted(range(len(self.scores)), key=lambda item: -self.scores[item])
        items = [item for item in order if query.allowed_I is None or query.allowed_I[item]]
        return Answer(
            [
                Recommendation(f"i{item}", None, self.scores[item], position=item)
                for item in items[: wanted.k]
            ],
            1,
            0,
        )

    def asked(self, k, *quotas, diversity=0.0, num_candidates=None, query=NOBODY, **more):
        control = Control(tuple(quotas), diversity, num_candidates)
        (answer,) = controlled(self.find, [query], [Wanted(k, control=control)], **more)
        return [item.position for item in answer.items], answer.control


def test_at_most_leaves_out_what_is_too_much_and_looks_on_without_it():
    catalog = Catalog([9, 8, 7, 6, 5, 4])
    chosen, report = catalog.asked(3, Quota(catalog.mask(0, 1, 2), at_most=1))
    assert chosen == [0, 3, 4]
    assert report == ControlReport(quotas="exact")
    assert catalog.calls == [[3], [3]]


def test_at_least_takes_the_best_of_a_category_in_one_round():
    catalog = Catalog([9, 8, 7, 6, 5, 4])
    chosen, report = catalog.asked(3, Quota(catalog.mask(4, 5), at_least=1))
    assert chosen == [0, 1, 4]
    assert report == ControlReport(quotas="exact")
    assert catalog.calls == [[3, 3]]


def test_no_item_of_a_category_is_a_mask():
    catalog = Catalog([9, 8, 7, 6])
    chosen, _ = catalog.asked(2, Quota(catalog.mask(0, 1), at_most=0))
    assert chosen == [2, 3]
    assert catalog.calls == [[2]]


def test_what_is_missing_of_a_category_is_said_and_leaves_no_place_free():
    catalog = Catalog([9, 8, 7, 6])
    chosen, report = catalog.asked(3, Quota(catalog.mask(3), at_least=2), Quota(catalog.mask(0), at_least=1))
    assert chosen == [0, 1, 3]
    assert report == ControlReport(quotas="exact", unmet_quotas=(0,))


def test_filters_hold_for_quotas_and_those_that_leave_nothing_give_nothing():
    catalog = Catalog([9, 8, 7, 6])
    odd = Query(NOBODY.history_ids, allowed_I=catalog.mask(1, 3))
    chosen, _ = catalog.asked(2, Quota(catalog.mask(2, 3), at_least=1), query=odd)
    assert chosen == [1, 3]
    nothing = Query(NOBODY.history_ids, allowed_I=catalog.mask())
    chosen, report = catalog.asked(2, Quota(catalog.mask(2, 3), at_least=1), query=nothing)
    assert chosen == []
    assert report == ControlReport(quotas="exact", unmet_quotas=(0,))


def test_requests_with_and_without_control_are_searched_together():
    catalog = Catalog([9, 8, 7, 6])
    control = Control((Quota(catalog.mask(0), at_most=0),))
    plain, other = controlled(catalog.find, [NOBODY] * 2, [Wanted(2), Wanted(2, control=control)])
    assert [item.position for item in plain.items] == [0, 1]
    assert plain.control is None
    assert [item.position for item in other.items] == [1, 2]
    assert catalog.calls == [[2, 2]]


def test_items_of_several_quotas_and_candidates_of_a_stage_are_reranked():
    catalog = Catalog([9, 8, 7, 6, 5])
    overlapping = (Quota(catalog.mask(0, 1), at_most=1), Quota(catalog.mask(1, 4), at_least=1))
    chosen, report = catalog.asked(3, *overlapping)
    assert chosen == [0, 2, 4]
    assert report.quotas == "reranked"
    _, report = catalog.asked(2, Quota(catalog.mask(0), at_most=1), reranks=True)
    assert report.quotas == "reranked"
    _, report = catalog.asked(9, Quota(catalog.mask(0), at_most=1), reranks=True)
    assert report.quotas == "exact", "the stage saw the whole catalog"


def best_list(scores, quotas, k):
    """The highest sum of scores of a list that keeps to the quotas, by trying all."""
    best = -np.inf
    for chosen in itertools.combinations(range(len(scores)), k):
        counts = [sum(bool(quota.mask_I[item]) for item in chosen) for quota in quotas]
        if all(
            quota.at_least <= count <= (k if quota.at_most is None else quota.at_most)
            for count, quota in zip(counts, quotas, strict=True)
        ):
            best = max(best, sum(scores[item] for item in chosen))
    return best


@given(st.data())
@examples(200)
def test_lists_are_the_best_that_keep_to_disjoint_quotas(data):
    num_items = data.draw(st.integers(1, 9))
    scores = data.draw(st.permutations(range(num_items)))
    category_I = np.array(data.draw(st.lists(st.integers(0, 3), min_size=num_items, max_size=num_items)))
    k = data.draw(st.integers(1, num_items))
    quotas, room = [], k
    for category in range(3):
        at_least = data.draw(st.integers(0, room))
        at_most = data.draw(st.none() | st.integers(at_least, k))
        room -= at_least
        quotas.append(Quota(category_I == category, at_least, at_most))
    catalog = Catalog(scores)
    chosen, report = catalog.asked(k, *quotas)
    expected = best_list(scores, quotas, k)
    assert report.quotas == "exact"
    assert len(set(chosen)) == len(chosen) <= k
    assert chosen == sorted(chosen, key=lambda item: -scores[item])
    for place, quota in enumerate(quotas):
        count = sum(bool(quota.mask_I[item]) for item in chosen)
        assert quota.at_most is None or count <= quota.at_most
        assert (count < quota.at_least) == (place in report.unmet_quotas)
    if expected > -np.inf:
        assert sum(scores[item] for item in chosen) == expected
        assert report.unmet_quotas == ()


def test_diversity_prefers_what_is_unlike_to_what_came_before():
    codes_IL = np.array([[0, 0], [0, 0], [0, 1], [1, 0], [2, 0]])
    catalog = Catalog([1.0, 0.99, 0.98, 0.9, 0.0])
    assert catalog.asked(3, diversity=0.0)[0] == [0, 1, 2]
    chosen, report = catalog.asked(3, diversity=0.5, codes_IL=codes_IL)
    assert chosen == [0, 3, 2]
    assert report == ControlReport(diversity="exact"), "the catalog is smaller than what it looks at"
    assert catalog.calls[-1] == [15]
    assert catalog.asked(3, diversity=1.0, codes_IL=codes_IL)[0] == [0, 3, 4]


def test_diversity_keeps_to_quotas():
    codes_IL = np.array([[0, 0], [0, 0], [0, 1], [1, 0], [2, 0]])
    catalog = Catalog([1.0, 0.99, 0.98, 0.9, 0.0])
    quotas = Quota(catalog.mask(3), at_most=0), Quota(catalog.mask(1), at_least=1)
    chosen, report = catalog.asked(2, *quotas, diversity=0.5, codes_IL=codes_IL)
    assert chosen == [0, 1]
    assert report.quotas == "reranked"


def test_as_many_are_searched_as_control_needs():
    assert num_searched(10, 0.0, None) == 10
    assert num_searched(10, 0.0, 200) == 200
    assert num_searched(10, 0.5, None) == 50
    assert num_searched(10, 0.5, 20) == 50
    assert num_searched(600, 0.5, None) == 600


@pytest.fixture(scope="module")
def generative(tmp_path_factory):
    return Recommender.load(make_run(tmp_path_factory.mktemp("run"), "generative", beam_width=4))


def test_candidates_have_the_exact_score_of_the_model(generative):
    """Whatever its beams are: those of this run are fewer than the candidates."""
    dataset = generative.dataset
    query = generative.query_of_user("u3")
    positions = np.arange(0, len(dataset.items), 2)
    allowed_I = np.zeros(len(dataset.items), dtype=np.bool_)
    allowed_I[positions] = True
    control = Control(num_candidates=len(positions))
    (answer,) = generative.answer_each(
        [Query(query.history_ids, query.user_id, allowed_I=allowed_I)],
        [Wanted(len(positions), exclude_seen=False, control=control)],
    )
    exact = generative.item_log_probs([query], positions[None])[0]
    assert answer.control == ControlReport(candidates="exact")
    assert {item.position for item in answer.items} == set(positions.tolist())
    by_position = dict(zip(positions.tolist(), exact.tolist(), strict=True))
    assert [item.score for item in answer.items] == pytest.approx(
        [by_position[item.position] for item in answer.items], abs=1e-4
    )
    (few,) = generative.answer_each(
        [Query(query.history_ids, query.user_id, allowed_I=allowed_I)],
        [Wanted(2, exclude_seen=False, control=control)],
    )
    assert [item.position for item in few.items] == [item.position for item in answer.items[:2]]


def test_diversity_of_a_model_without_semantic_ids_is_refused(tmp_path):
    recommender = Recommender.load(make_run(tmp_path))
    with pytest.raises(InputError, match="has no semantic IDs, which say how alike items are"):
        recommender.answer_each(
            [recommender.query_of_user("u3")], [Wanted(3, control=Control(diversity=0.5))]
        )
