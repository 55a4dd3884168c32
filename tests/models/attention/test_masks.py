import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.attention.masks import (
    Causal,
    Documents,
    Full,
    PrefixLM,
    SharedContextBeams,
    SlidingWindow,
    TargetAware,
)
from tests.models.attention.calls import layout


def sight(mask, lengths, key_lengths=None):
    """For each row, one string per query: `x` where it sees the key."""
    queries = layout(lengths)
    keys = queries if key_lengths is None else layout(key_lengths)
    dense_BTS = mask.spans(queries, keys).dense(queries, keys)
    sizes = zip(queries.lengths_B, keys.lengths_B, strict=True)
    return [
        ["".join("x" if seen else "." for seen in query) for query in row[:length, :num_keys].tolist()]
        for row, (length, num_keys) in zip(dense_BTS, sizes, strict=True)
    ]


def test_full_sees_the_row_and_no_padding():
    assert sight(Full(), [1, 2]) == [["x"], ["xx", "xx"]]
    rows = layout([1, 2])
    assert not Full().spans(rows, rows).dense(rows, rows)[0, :, 1].any()


def test_causal_sees_itself_and_what_came_before():
    assert sight(Causal(), [3]) == [["x..", "xx.", "xxx"]]


def test_queries_stand_at_the_end_of_longer_rows_of_keys():
    assert sight(Causal(), [2], [4]) == [["xxx.", "xxxx"]]
    assert sight(Causal(), [2], [1]) == [[".", "x"]]


def test_a_window_counts_the_querys_own_key():
    assert sight(SlidingWindow(2), [4]) == [["x...", "xx..", ".xx.", "..xx"]]


def test_a_prefix_is_seen_by_all():
    assert sight(PrefixLM(torch.tensor([2, 0])), [3, 2]) == [["xx.", "xx.", "xxx"], ["x.", "xx"]]


def test_targets_see_the_history_and_themselves():
    assert sight(TargetAware(torch.tensor([2])), [4]) == [["x...", "xx..", "xxx.", "xx.x"]]


def test_targets_alone_see_themselves():
    assert sight(TargetAware(torch.tensor([2])), [2]) == [["x.", ".x"]]


def test_documents_do_not_see_each_other():
    documents = Documents(torch.tensor([5, 5, 7, 7, 7, 2]))

    assert sight(documents, [3, 3]) == [["xx.", "xx.", "..x"], ["xx.", "xx.", "..x"]]
    assert sight(documents & Causal(), [3, 3]) == [["x..", "xx.", "..x"], ["x..", "xx.", "..x"]]


def test_beams_see_the_context_and_their_own_codes():
    assert sight(SharedContextBeams(1, 2), [2], [7]) == [["xxxxx..", "xxx..xx"]]
    assert sight(SharedContextBeams(2, 2), [4], [6]) == [["xxx...", "xxxx..", "xx..x.", "xx..xx"]]


def test_masks_are_joined():
    joined = TargetAware(torch.tensor([2])) & SlidingWindow(2)

    assert sight(joined, [4]) == [["x...", "xx..", ".xx.", "...x"]]
    assert joined.kind == "TargetAware&SlidingWindow"


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_a_joined_mask_is_the_intersection(lengths, size, data):
    counts = [data.draw(st.integers(0, length)) for length in lengths]
    rows = layout(lengths)
    one, other = TargetAware(torch.tensor(counts)), SlidingWindow(size)

    def dense(mask):
        return mask.spans(rows, rows).dense(rows, rows)

    assert torch.equal(dense(one & other), dense(one) & dense(other))


def test_two_masks_of_two_spans_cannot_be_joined():
    mask, rows = TargetAware(torch.tensor([1])), layout([3])

    with pytest.raises(ValueError, match="2 spans"):
        (mask & mask).spans(rows, rows)


@pytest.mark.parametrize(
    ("mask", "lengths", "key_lengths", "message"),
    [
        (PrefixLM(torch.tensor([1])), [1, 1], [1, 1], "2 rows"),
        (TargetAware(torch.tensor([1])), [1, 1], [1, 1], "2 rows"),
        (Documents(torch.tensor([1])), [1], [2], "self attention"),
        (SharedContextBeams(2, 2), [3], [6], "whole beams"),
        (SharedContextBeams(1, 3), [2], [5], "whole beams"),
    ],
)
def test_masks_that_do_not_fit_the_rows_are_refused(mask, lengths, key_lengths, message):
    with pytest.raises(ValueError, match=message):
        mask.spans(layout(lengths), layout(key_lengths))


def test_documents_need_a_number_for_each_token():
    rows = layout([2])

    with pytest.raises(ValueError, match="2 tokens"):
        Documents(torch.tensor([1])).spans(rows, rows)


def test_sizes_that_see_nothing_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        SlidingWindow(0)
    with pytest.raises(ValueError, match="own key"):
        SharedContextBeams(2, 1)


def test_spans_end_with_the_row():
    spans = PrefixLM(torch.tensor([9])).spans(layout([2]), layout([3]))

    assert spans.stop_WN.tolist() == [[3, 3]]
    assert np.all(spans.first_WN.numpy() == 0)
