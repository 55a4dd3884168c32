import pytest
import torch

from rayrec.models.attention.masks import Causal, CausalGroups, Full, spans_of
from tests.models.attention.calls import TargetAware, layout


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


def test_targets_see_the_history_and_themselves():
    assert sight(TargetAware(torch.tensor([2])), [4]) == [["x...", "xx..", "xxx.", "xx.x"]]


def test_groups_see_what_their_key_sees():
    assert sight(CausalGroups(2), [4], [2]) == [["x.", "x.", "xx", "xx"]]
    assert sight(CausalGroups(2), [4, 2], [3, 1]) == [["xx.", "xx.", "xxx", "xxx"], ["x", "x"]]
    with pytest.raises(ValueError, match="do not hold 2"):
        CausalGroups(2).spans(layout([3]), layout([2]))


def test_spans_end_with_the_row():
    rows = layout([2])

    spans = spans_of(rows, rows, (torch.tensor([-1, 0]), torch.tensor([1, 9])))

    assert spans.first_WN.tolist() == [[0, 0]]
    assert spans.stop_WN.tolist() == [[1, 2]]
