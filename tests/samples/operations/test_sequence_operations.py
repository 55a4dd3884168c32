import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rayrec.platform.errors import InputError
from rayrec.samples.operations.behaviors import EventSource
from tests.helpers.feature_operations import computed

INTS, TEXTS = pa.list_(pa.int64()), pa.list_(pa.string())


def truncated(columns, **settings):
    return computed(columns, {"op": "truncate", "inputs": list(columns), **settings}).to_pydict()


def test_parallel_lists_are_truncated_alike():
    columns = {
        "items": pa.array([[1, 2, None], [4], [], None, [5, 6]], INTS),
        "kinds": pa.array([["a", "b", "c"], ["d"], [], ["e", "f", "g"], None], TEXTS),
    }

    assert truncated(columns, length=2) == {
        "items": [[2, None], [4], [], None, [5, 6]],
        "kinds": [["b", "c"], ["d"], [], ["f", "g"], None],
    }
    oldest = truncated(columns, length=1, keep="oldest", outputs=["i", "k"])
    assert oldest["i"] == [[1], [4], [], None, [5]]
    assert oldest["k"] == [["a"], ["d"], [], ["e"], None]
    assert oldest["items"] == columns["items"].to_pylist()


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 9)))), st.integers(1, 5), st.integers(0, 3))
def test_truncation_is_a_slice_of_every_list(lists, length, skipped):
    given_lists = pa.array(lists, INTS).slice(skipped)

    assert truncated({"x": given_lists}, length=length)["x"] == [
        None if values is None else values[-length:] for values in lists[skipped:]
    ]


def test_lists_that_are_not_parallel_are_refused():
    columns = {"items": pa.array([[1]], INTS), "kinds": pa.array([[]], TEXTS)}

    with pytest.raises(
        InputError, match=r"data\.features\.0 \(truncate\): columns 'items' and 'kinds' have 1 and 0"
    ):
        truncated(columns, length=5)
    columns = {"a": pa.array([None], INTS), "b": pa.array([[1]], INTS), "c": pa.array([[1, 2]], INTS)}
    with pytest.raises(InputError, match="'a' and 'b' and 'c' have 1 and 2 values in one row"):
        truncated(columns, length=5)
    with pytest.raises(InputError, match="there are 3 inputs and 1 outputs"):
        truncated(columns, length=5, outputs=["a"])
    with pytest.raises(InputError, match="two outputs have one name"):
        truncated(columns, length=5, outputs=["a", "b", "a"])
    with pytest.raises(InputError, match="column 'x' is int64, expected lists"):
        truncated({"x": pa.array([1])}, length=5)


def concat(columns):
    operation = {"op": "concat", "inputs": list(columns), "output": "all"}
    return computed(columns, operation).column("all").to_pylist()


def test_a_single_item_is_appended_to_a_history():
    columns = {"items": pa.array([[1, None], [], None, [5]], INTS), "target": pa.array([7, 8, 9, None])}

    assert concat(columns) == [[1, None, 7], [8], [9], [5]]


def test_lists_of_one_type_are_joined():
    columns = {name: pa.array([[name], None], TEXTS) for name in "abc"}

    assert concat(columns) == [["a", "b", "c"], []]
    with pytest.raises(InputError, match="'b' holds string and 'a' int64; a list needs one type"):
        concat({"a": pa.array([1]), "b": pa.array(["x"])})


def select(columns, values, **settings):
    operation = {"op": "select_events", "by": "kinds", "values": values, "inputs": list(columns), **settings}
    return computed(columns, operation).to_pydict()


def test_events_are_selected_by_behavior():
    columns = {
        "items": pa.array([[1, 2, 3], None, [4], [], [5]], INTS),
        "kinds": pa.array([["buy", None, "view"], ["buy"], ["view"], [], None], TEXTS),
    }

    assert select(columns, ["buy"]) == {
        "items": [[1], None, [], [], None],
        "kinds": [["buy"], ["buy"], [], [], None],
    }
    only_items = {"items": columns["items"]}
    with_kinds = select(columns, ["view", "buy"], inputs=["items"], outputs=["chosen"])
    assert with_kinds["chosen"] == [[1, 3], None, [4], [], None]
    assert with_kinds["items"] == only_items["items"].to_pylist()


def test_behaviors_may_be_numbers_and_must_be_of_their_type():
    columns = {"items": pa.array([[1, 2]], INTS), "kinds": pa.array([[0, 1]], pa.list_(pa.int16()))}

    assert select(columns, [1])["items"] == [[2]]
    with pytest.raises(InputError, match="among which 'buy' cannot be"):
        select(columns, ["buy"])
    with pytest.raises(InputError, match=f"among which {2**63} cannot be"):
        select(columns, [2**63])
    source = {"behavior": 2**63, "time": "times", "values": ["items"]}
    with pytest.raises(ValidationError, match="less than"):
        EventSource.model_validate(source)


def merge(columns, sources=("click", "buy")):
    operation = {
        "op": "merge_events",
        "sources": [
            {"behavior": code, "time": f"{name}_times", "values": [f"{name}_items"]}
            for code, name in enumerate(sources)
        ],
        "time": "times",
        "values": ["items"],
        "behavior": "behaviors",
    }
    made = computed(columns, operation)
    return [made.column(name).to_pylist() for name in ("times", "items", "behaviors")]


def lists(**columns):
    return {name: pa.array(values, INTS) for name, values in columns.items()}


def test_behaviors_are_merged_by_time_and_ties_by_source():
    columns = lists(
        click_times=[[1, 3, 3], [], None, [2]],
        click_items=[[10, 30, 31], [], [9], [20]],
        buy_times=[[3, 4], [7], None, None],
        buy_items=[[33, 40], [70], None, [1]],
    )

    times, items, behaviors = merge(columns)
    assert times == [[1, 3, 3, 3, 4], [7], [], [2]]
    assert items == [[10, 30, 31, 33, 40], [70], [], [20]]
    assert behaviors == [[0, 0, 0, 1, 1], [1], [], [0]]


def test_a_null_time_is_older_than_any_and_comes_through():
    columns = lists(
        click_times=[[5, None]], click_items=[[50, 51]], buy_times=[[None, 4]], buy_items=[[52, None]]
    )

    assert merge(columns) == [[[None, None, 4, 5]], [[51, 52, None, 50]], [[0, 1, 1, 0]]]


EVENTS = st.lists(st.integers(0, 5), max_size=8)


@given(st.lists(st.tuples(EVENTS, EVENTS), max_size=6), st.booleans())
def test_a_merge_is_the_stable_sort_of_all_events(rows, in_order):
    if in_order:
        rows = [(sorted(clicks), sorted(buys)) for clicks, buys in rows]
    clicks, buys = [list(times) for times in zip(*rows, strict=True)] or ([], [])
    numbered = [[list(range(len(times))) for times in lists] for lists in (clicks, buys)]
    columns = lists(click_times=clicks, click_items=numbered[0], buy_times=buys, buy_items=numbered[1])

    times, items, behaviors = merge(columns)

    for row, (row_clicks, row_buys) in enumerate(rows):
        events = [(time, place, 0) for place, time in enumerate(row_clicks)]
        events += [(time, place, 1) for place, time in enumerate(row_buys)]
        expected = sorted(events, key=lambda event: event[0])
        assert list(zip(times[row], items[row], behaviors[row], strict=True)) == expected


def test_sources_need_the_same_types():
    columns = lists(click_times=[[1]], click_items=[[1]], buy_times=[[1]])
    columns["buy_items"] = pa.array([["a"]])

    with pytest.raises(InputError, match=r"'click_items' .* and 'buy_items' .* do not go into one list"):
        merge(columns)
