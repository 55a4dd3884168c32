import math

import pytest
import torch

from rayrec.models.attention.bias import LOG_WIDTH, RelativeBias, place_buckets, time_bounds, time_buckets
from tests.models.attention.calls import layout

CPU = torch.device("cpu")


def test_places_have_a_bucket_for_each_distance_up_to_the_largest():
    own_BT, place_S = torch.tensor([[0, 3]]), torch.arange(4)

    # Five buckets: 2 is the query's own place, 4 everything from two places before it.
    assert place_buckets(own_BT, place_S, 5).tolist() == [[[2, 1, 0, 0], [4, 4, 3, 2]]]


def test_time_buckets_are_logarithms_of_the_difference():
    apart = torch.tensor([0, 1, 2, 3, 10, 1000, 10**6, 10**9, 2**61])

    buckets = time_buckets(apart[None], torch.zeros(1, 1, dtype=torch.int64), 128)[0, :, 0]

    expected = [math.floor(math.log(max(difference, 1)) / LOG_WIDTH) for difference in apart.tolist()]
    assert buckets[:-1].tolist() == expected[:-1]


def test_time_differences_count_either_way_and_the_last_bucket_takes_the_rest():
    query_BT, key_BS = torch.tensor([[100]]), torch.tensor([[0, 200, 10**15]])

    first, second, last = time_buckets(query_BT, key_BS, 30)[0, 0].tolist()

    assert first == second == math.floor(math.log(100) / LOG_WIDTH)
    assert last == 29


def test_a_difference_at_a_bound_is_in_the_bucket_that_begins_there():
    bounds_D = time_bounds(60, CPU)

    at = time_buckets(bounds_D[None], torch.zeros(1, 1, dtype=torch.int64), 60)[0, :, 0]

    # Some of the first buckets are empty: their bound is the next one's.
    assert torch.equal(bounds_D[at], bounds_D)
    assert torch.equal(time_bounds(145, CPU).diff() >= 0, torch.ones(144, dtype=torch.bool))


def test_the_bias_of_a_pair_is_the_sum_of_its_entries():
    rows = layout([2])
    place_HP = torch.tensor([[10.0, 20.0, 30.0], [1.0, 2.0, 3.0]])
    time_HD = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])
    times = torch.tensor([5, 7])

    dense = RelativeBias(place_HP, time_HD, times, times).dense(rows, rows)

    # Two seconds are the bucket 2 and places one apart the first or the last.
    expected = [[[20.1, 10.3], [30.3, 20.1]], [[2.5, 1.7], [3.7, 2.5]]]
    torch.testing.assert_close(dense, torch.tensor([expected]))


def test_tables_without_a_middle_and_half_given_times_are_refused():
    with pytest.raises(ValueError, match="odd"):
        RelativeBias(place_HP=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="come together"):
        RelativeBias(time_HD=torch.zeros(2, 4))
