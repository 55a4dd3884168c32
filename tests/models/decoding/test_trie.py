import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.decoding.trie import CodeTrie


def children_of(trie, depth, node):
    start, end = trie.child_offsets[depth][node : node + 2].tolist()
    return {int(trie.child_codes[depth][child]): child for child in range(start, end)}


def item_at(trie, codes):
    node = 0
    for depth, code in enumerate(codes):
        node = children_of(trie, depth, node)[code]
    return int(trie.leaf_items_I[node])


def test_children_are_numbered_in_the_order_of_their_prefixes():
    trie = CodeTrie.from_codes(np.array([[2, 0], [0, 5], [2, 7], [0, 1], [2, 3]]))

    assert [offsets.tolist() for offsets in trie.child_offsets] == [[0, 2], [0, 2, 5]]
    assert [codes.tolist() for codes in trie.child_codes] == [[0, 2], [1, 5, 0, 3, 7]]
    assert trie.leaf_items_I.tolist() == [3, 1, 0, 4, 2]
    assert trie.max_children == (2, 3)
    assert [trie.num_nodes(depth) for depth in range(3)] == [1, 2, 5]


@given(
    st.integers(1, 4).flatmap(
        lambda depth: st.sets(st.tuples(*[st.integers(0, 6)] * depth), min_size=1, max_size=40)
    ),
    st.randoms(use_true_random=False),
)
def test_walking_an_items_codes_ends_at_that_item(tuples, random):
    tuples = sorted(tuples)
    random.shuffle(tuples)
    trie = CodeTrie.from_codes(np.array(tuples, dtype=np.int16))

    assert [item_at(trie, codes) for codes in tuples] == list(range(len(tuples)))
    assert trie.depth == len(tuples[0])
    assert trie.num_items == len(tuples)
    for depth in range(trie.depth):
        assert trie.num_nodes(depth + 1) == len({codes[: depth + 1] for codes in tuples})


@given(
    st.sets(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=40), st.randoms(use_true_random=False)
)
def test_codes_that_do_not_fit_into_one_number_make_the_same_tree(tuples, random):
    tuples = sorted(tuples)
    random.shuffle(tuples)
    codes_IL = np.array(tuples, dtype=np.int64)
    small, large = CodeTrie.from_codes(codes_IL), CodeTrie.from_codes(codes_IL << 20)

    assert [codes.tolist() for codes in large.child_codes] == [(c << 20).tolist() for c in small.child_codes]
    assert [each.tolist() for each in large.child_offsets] == [each.tolist() for each in small.child_offsets]
    assert [each.tolist() for each in large.first_leaves] == [each.tolist() for each in small.first_leaves]
    assert large.leaf_items_I.tolist() == small.leaf_items_I.tolist()


def test_items_that_share_a_tuple_are_refused_and_counted():
    with pytest.raises(ValueError, match="4 items have only 2 distinct code tuples"):
        CodeTrie.from_codes(torch.tensor([[1, 2], [1, 2], [3, 4], [1, 2]]))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((0, 3), dtype=np.int64), "shape"),
        (np.zeros(4, dtype=np.int64), "shape"),
        (np.zeros((2, 3)), "float64"),
        (np.array([[0, 1], [3, -1]]), r"\[3, -1\] at item 1"),
    ],
)
def test_codes_that_are_none_are_refused(codes, message):
    with pytest.raises(ValueError, match=message):
        CodeTrie.from_codes(codes)


def test_nodes_are_found_by_their_codes():
    codes_IL = np.array([[2, 0], [0, 1], [0, 3], [2, 4]])
    trie = CodeTrie.from_codes(codes_IL)
    nodes_IL = trie.nodes_IL

    first_I = trie.child(0, torch.zeros(4, dtype=torch.int64), torch.tensor(codes_IL[:, 0]))
    assert first_I.tolist() == nodes_IL[:, 0].tolist() == [1, 0, 0, 1]
    assert trie.child(1, first_I, torch.tensor(codes_IL[:, 1])).tolist() == nodes_IL[:, 1].tolist()
    assert trie.leaf_items_I[nodes_IL[:, 1]].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("node", "code"), [(0, 0), (0, 4), (0, 5), (0, 9), (1, 1), (-1, 1), (-1, 4)])
def test_there_is_no_node_for_a_code_that_no_item_has(node, code):
    trie = CodeTrie.from_codes(np.array([[2, 0], [0, 1], [0, 3], [2, 4]]))

    assert trie.child(1, torch.tensor([node]), torch.tensor([code])).tolist() == [-1]


def test_a_node_that_is_none_has_no_children():
    trie = CodeTrie.from_codes(np.array([[2, 0], [0, 1], [0, 3], [0, 4]]))

    children, is_child = trie.children(1, torch.tensor([[-1, 1, 0]]), 3)

    assert is_child.tolist() == [[[False] * 3, [True, False, False], [True] * 3]]
    assert children[0, 2].tolist() == [0, 1, 2]
    assert children[0, 1, 0].item() == 3


def test_a_trie_is_copied_to_a_device_once():
    trie = CodeTrie.from_codes(np.array([[2, 0], [0, 1]]))

    assert trie.to("cpu") is trie
    assert trie.to("meta").device.type == "meta"
    assert trie.to("meta") is trie.to(torch.device("meta"))
    assert copy.deepcopy([trie])[0] is trie


def test_what_is_made_while_ranking_may_be_trained_with():
    """Who asks first may do so in inference mode, whose tensors no gradient may need."""
    trie = CodeTrie.from_codes(np.array([[2, 0], [0, 1]]))

    with torch.inference_mode():
        made = [*vars(trie.to("meta")).values(), trie.leaf_of_I, trie.nodes_IL]

    tensors = [part for whole in made for part in (whole if isinstance(whole, tuple) else [whole])]
    assert not [part for part in tensors if torch.is_tensor(part) and part.is_inference()]
