"""Lists of ids in blocks of one memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.table import id_lists
from rayrec.embeddings.table.id_lists import BLOCK_BYTES, IdLists
from tests.helpers.examples import examples


@examples(60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.lists(st.integers(0, 4), max_size=90)),
            st.tuples(st.just("take"), st.tuples(st.integers(0, 4), st.integers(0, 100))),
        ),
        max_size=12,
    )
)
def test_lists_hold_what_was_put_in_and_use_blocks_again(calls):
    lists, expected, next_id = IdLists(), [[] for _ in range(5)], -3
    numbers = np.array([lists.make() for _ in range(5)])
    most = 0
    for what, arguments in calls:
        if what == "add":
            ids_M = np.arange(next_id, next_id + len(arguments))
            next_id += len(arguments)
            lists.add(ids_M, numbers, np.array(arguments, dtype=np.int64) if arguments else numbers[:0])
            for number, one in zip(arguments, ids_M.tolist(), strict=True):
                expected[number].append(one)
        else:
            number, count = arguments
            kept = max(0, len(expected[number]) - count)
            assert lists.take(int(numbers[number]), count).tolist() == expected[number][kept:][::-1]
            del expected[number][kept:]
        assert [sorted(lists.ids(int(number)).tolist()) for number in numbers] == expected
        most = max(most, sum(-(-len(ids) // 31) for ids in expected))
        assert lists.num_bytes <= BLOCK_BYTES * most
    lists.put(int(numbers[0]), np.arange(40))
    assert lists.count(int(numbers[0])) == len(expected[0]) + 40


def test_memory_is_given_back_when_there_are_no_ids(monkeypatch):
    monkeypatch.setattr(id_lists, "_KEPT_BLOCKS", 2)
    lists = IdLists()
    number = lists.make()
    lists.put(number, np.arange(100))
    assert lists.num_bytes == 4 * BLOCK_BYTES
    lists.take(number, 100)
    assert lists.num_bytes == 0
    lists.put(number, np.arange(100, 140))
    assert sorted(lists.ids(number).tolist()) == list(range(100, 140))
    lists.take(number, 40)
    lists.drop(number)
    assert lists.make() == number
