"""What may be recommended is recommended, and nothing else, by models of both kinds."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.pipelines.inference import recommender as recommenders
from rayrec.pipelines.inference.item_filter import FilterMasks, ItemFilter, NamedList
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from tests.helpers.runs import make_run


@pytest.fixture(scope="module", params=["sasrec", "generative", "prefix"])
def recommender(request, tmp_path_factory) -> Recommender:
    # A beam of two: what leads nowhere would take the place of what may be given.
    settings = {} if request.param == "sasrec" else {"beam_width": 2}
    return Recommender.load(make_run(tmp_path_factory.mktemp("run"), request.param, **settings))


@pytest.fixture(params=["as sets", "one by one"])
def most_denied(request, monkeypatch):
    """Whether what a set lacks is left out one by one, which depends on how much it is."""
    monkeypatch.setattr(recommenders, "MOST_DENIED", -1 if request.param == "as sets" else 1000)


def keys(answer) -> list[str]:
    return [item.item_key for item in answer.items]


def with_sets(recommender: Recommender, users, masks):
    queries = [recommender.query_of_user(user) for user in users]
    return [
        query if mask is None else type(query)(query.history_ids, query.user_id, allowed_I=mask)
        for query, mask in zip(queries, masks, strict=True)
    ]


@pytest.mark.usefixtures("most_denied")
@pytest.mark.parametrize("exclude_seen", [False, True])
def test_each_row_gets_the_best_of_its_own_set_and_of_nothing_else(recommender, exclude_seen):
    num_items = len(recommender.dataset.items)
    rng = np.random.default_rng(0)
    few, half, none = (rng.random(num_items) < share for share in (0.1, 0.5, 0.0))
    users, masks = ["u1", "u2", "u3", "u4", "u5"], [few, None, half, none, few]
    full = recommender.answer([recommender.query_of_user(user) for user in users], num_items, exclude_seen)

    found = recommender.answer(with_sets(recommender, users, masks), 3, exclude_seen)

    position = {key: place for place, key in enumerate(recommender.dataset.items.keys.to_pylist())}
    for mask, whole, answer in zip(masks, full, found, strict=True):
        allowed = [key for key in keys(whole) if mask is None or mask[position[key]]]
        assert len(answer.items) == min(3, len(allowed))
        assert set(keys(answer)) <= set(allowed)
        if recommender.num_beams(3) == 0:
            assert keys(answer) == allowed[:3]


@pytest.mark.usefixtures("most_denied")
def test_a_beam_as_wide_as_the_set_finds_all_of_it_in_the_order_of_the_whole_catalog(recommender):
    num_items = len(recommender.dataset.items)
    (whole,) = recommender.answer([recommender.query_of_user("u1")], num_items, exclude_seen=False)
    mask = np.arange(num_items) % 3 == 0
    allowed = set(np.array(recommender.dataset.items.keys.to_pylist())[mask])

    (found,) = recommender.answer(with_sets(recommender, ["u1"], [mask]), num_items, exclude_seen=False)

    assert keys(found) == [key for key in keys(whole) if key in allowed]
    scores = {item.item_key: item.score for item in whole.items}
    assert [item.score for item in found.items] == pytest.approx([scores[key] for key in keys(found)])


@pytest.mark.parametrize("exclude_seen", [False, True])
def test_left_out_one_by_one_or_as_a_set_the_answers_are_the_same(recommender, monkeypatch, exclude_seen):
    num_items = len(recommender.dataset.items)
    masks = [None, *(np.random.default_rng(0).random((4, num_items)) > np.array([[0], [0.1], [0.5], [1]]))]
    queries = with_sets(recommender, ["u1", "u2", "u3", "u4", "u5"], masks)

    def answers(most_denied: int):
        monkeypatch.setattr(recommenders, "MOST_DENIED", most_denied)
        return recommender.answer(queries, 3, exclude_seen)

    as_sets = answers(-1)

    assert answers(1000) == as_sets
    assert answers(num_items // 4) == as_sets  # the first two one by one, the others not


def test_popular_items_are_of_the_set(recommender):
    mask = np.arange(len(recommender.dataset.items)) < 4
    assert len(recommender.popular(10, allowed_I=mask)) == 4


def test_programs_that_were_compiled_have_no_sets_and_are_not_asked(recommender, monkeypatch):
    asked = []

    class Compiled:
        def recommend(self, features, rows, k, excluded_BE, beams_B):
            asked.append(excluded_BE)  # and has no program

    program = recommender._ranker
    assert isinstance(program, SequenceProgram)
    monkeypatch.setattr(program, "compiled", Compiled())
    mask = np.arange(len(recommender.dataset.items)) != 5
    query = with_sets(recommender, ["u1"], [mask])

    monkeypatch.setattr(recommenders, "MOST_DENIED", 0)
    recommender.answer(query, 3)
    assert not asked
    monkeypatch.setattr(recommenders, "MOST_DENIED", 1)
    recommender.answer(query, 3)
    assert [excluded_BE[0, -1] for excluded_BE in asked] == [5]


class SomeItems:
    """A catalog of four, with columns."""

    def __init__(self):
        self.item_table = pa.table(
            {
                "item_key": list("abcd"),
                "brand": pa.array(["x", "y", None, "x"]).dictionary_encode(),
                "price": [1, 2, 3, 4],
                "tags": pa.array([["new"], ["new", "sale"], None, []], pa.list_(pa.string())),
            }
        )
        self.items = type("Items", (), {"keys": self.item_table["item_key"]})


def shown(masks: FilterMasks, **parts) -> str:
    return "".join(itertools.compress("abcd", masks.allowed(ItemFilter(**parts)).allowed_I))


def test_every_part_of_a_filter_has_to_let_an_item_through():
    masks = FilterMasks(SomeItems())
    stock = NamedList("stock", "1", {"a", "b", "c", "sold long ago"})
    region = NamedList("region", "1", {"b", "c", "d"})

    assert shown(masks) == "abcd"
    assert shown(masks, allow=("d", "a", "?")) == "ad"
    assert shown(masks, allow=()) == ""
    assert shown(masks, deny=("d",)) == "abc"
    assert shown(masks, allow_lists=(stock, region)) == "bc"
    assert shown(masks, allow_lists=(stock,), deny_lists=(region,)) == "a"
    assert shown(masks, where={"brand": ["x"]}) == "ad"
    assert shown(masks, where={"brand": ["x", None]}) == "acd"
    assert shown(masks, where={"price": [2, 4]}) == "bd"
    assert shown(masks, where={"price": ["2"]}) == "b"  # as the command line gives it
    assert shown(masks, where={"tags": ["sale", None]}) == "b"
    assert shown(masks, where={"tags": ["new"], "brand": ["x"]}) == "a"


def test_columns_and_values_that_are_not_there_are_named():
    masks = FilterMasks(SomeItems())
    with pytest.raises(InputError, match="no column 'colour'; it has item_key, brand, price, tags"):
        shown(masks, where={"colour": ["red"]})
    with pytest.raises(InputError, match="'price' has values of type int64, not"):
        shown(masks, where={"price": ["cheap"]})
    with pytest.raises(InputError, match="'price' has values of type int64, not"):
        shown(masks, where={"price": [2**64]})
    with pytest.raises(InputError, match="'brand' has values of type string, not"):
        shown(masks, where={"brand": ["\ud800"]})


def test_values_that_no_item_has_now_are_counted_and_said():
    masks = FilterMasks(SomeItems())
    found = masks.allowed(ItemFilter(where={"brand": ["x", "z"], "tags": ["new", "", "old"]}))
    assert (shown(masks, where={"brand": ["x", "z"]}), found.num_unknown) == ("ad", 3)
    assert found.unknown_value == "where: no item of the catalog has 'z' in 'brand'; there are x, y"
    none = masks.allowed(ItemFilter(where={"brand": ["z"]}))
    assert (none.allowed_I.any(), none.num_unknown) == (False, 1)
    assert masks.allowed(ItemFilter(where={"brand": ["x", None]})).unknown_value is None


def test_ids_that_are_not_in_the_catalog_are_counted():
    masks = FilterMasks(SomeItems())
    stock = NamedList("stock", "1", {"a", "sold long ago"})

    def unknown(**parts):
        return masks.allowed(ItemFilter(**parts)).num_unknown

    assert unknown() == unknown(allow=("a",), deny=("b",)) == 0
    assert unknown(allow=("7", "7", "8"), deny=("9",), allow_lists=(stock,), deny_lists=(stock,)) == 5
    many = [f"{number}\ud800" for number in range(300)]  # half of a surrogate pair, which is no text
    assert unknown(allow=tuple(many)) == 300
    assert shown(masks, allow=(*many, "b")) == "b"


def test_a_mask_is_made_once_for_a_filter_and_anew_for_another_version_of_a_list():
    masks = FilterMasks(SomeItems())
    one, other = (NamedList("stock", version, {version}) for version in "ab")

    first = masks.allowed(ItemFilter(allow_lists=(one,)))

    assert masks.allowed(ItemFilter(allow_lists=(one,))) is first
    assert shown(masks, allow_lists=(other,)) == "b"
