import hashlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64, mix64
from rayrec.samples.operations.text_hash import hash_texts
from rayrec.samples.prepare.ids import hash_strings
from tests.helpers.feature_operations import column, computed

TEXTS, INTS = pa.list_(pa.string()), pa.list_(pa.int64())


def id_of(text):
    return int(hash_strings([text])[0])


def signed(value):
    return int(np.uint64(value).astype(np.int64))


@given(st.lists(st.one_of(st.text(max_size=300), st.none())))
@example(["", "x" * 127, "x" * 128, "x" * 129, "x" * 256, None, ""])
def test_texts_hash_as_blake2b_does(texts):
    hashes = hash_texts(pa.array(texts, pa.string())).tolist()

    for text, found in zip(texts, hashes, strict=True):
        if text is not None:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            assert found == int.from_bytes(digest, "little", signed=True)


def test_a_text_gets_the_id_that_preparation_gives_it():
    assert column(["Berlin", None, "München"], pa.string(), op="hash") == [
        id_of("Berlin"),
        None,
        id_of("München"),
    ]


def test_integers_hash_by_their_bits_whatever_their_width():
    wide = column([5, -1, None], pa.int64(), op="hash")

    assert wide == [signed(mix64(5)), signed(mix64(-1)), None]
    assert column([5, -1, None], pa.int8(), op="hash") == wide
    assert column([5, 2**64 - 1, None], pa.uint64(), op="hash") == wide
    assert column([True, False, None], pa.bool_(), op="hash") == [
        signed(mix64(1)),
        signed(mix64(0)),
        None,
    ]


def test_hashed_lists_keep_their_nulls_and_lengths():
    found = column([["a", None], [], None, ["b"]], TEXTS, op="hash")

    assert found == [[id_of("a"), None], [], None, [id_of("b")]]


def test_buckets_are_the_unsigned_hash_modulo_their_number():
    texts = [f"city {n}" for n in range(100)]
    found = column(texts, pa.string(), op="hash", buckets=7)

    assert found == [id_of(text) % 2**64 % 7 for text in texts]
    assert set(found) == set(range(7))
    assert column([3, 4], pa.int64(), op="hash", buckets=1) == [0, 0]


def test_salts_give_other_ids():
    assert column(["a"], pa.string(), op="hash", salt="s") == [signed(combine64(id_of("s"), id_of("a")))]
    assert column([9], pa.int64(), op="hash", salt="s") == [signed(combine64(id_of("s"), 9))]


def test_dictionaries_and_large_lists_hash_like_any():
    values = [["a", "b"], None, ["a"]]
    plain = column(values, TEXTS, op="hash")

    assert column(values, pa.large_list(pa.large_string()), op="hash") == plain
    encoded = pa.array(["a", None, "b"]).dictionary_encode()
    assert column(encoded, encoded.type, op="hash") == [id_of("a"), None, id_of("b")]


def test_slices_hash_like_whole_columns():
    values = pa.array([["a"], None, ["b", "c"], [], ["d"]], TEXTS)

    assert column(values.slice(1, 3), TEXTS, op="hash") == column(values, TEXTS, op="hash")[1:4]


def test_floats_are_not_hashed():
    with pytest.raises(InputError, match=r"data\.features\.0 \(hash\): column 'x' is double.*bucketize"):
        column([1.5], pa.float64(), op="hash")


def cross(columns, **settings):
    inputs = list(columns)
    return (
        computed(columns, {"op": "cross", "inputs": inputs, "output": "id", **settings})
        .column("id")
        .to_pylist()
    )


def test_a_cross_combines_texts_and_integers_in_order():
    columns = {"city": pa.array(["a", "b", None]), "hour": pa.array([1, None, 3])}

    assert cross(columns) == [signed(combine64(id_of("a"), 1)), None, None]
    assert cross(dict(reversed(columns.items())))[0] == signed(combine64(1, id_of("a")))
    assert cross(columns, buckets=10)[0] == int(combine64(id_of("a"), 1)) % 10
    assert cross(columns, salt="s")[0] == signed(combine64(id_of("s"), id_of("a"), 1))


def test_a_scalar_is_crossed_with_every_event_of_parallel_lists():
    columns = {
        "city": pa.array(["a", "b", None, "d", "e"]),
        "items": pa.array([[1, 2], [3, None], [4], None, [5]], INTS),
        "kinds": pa.array([["x", "y"], ["x", "y"], ["x"], ["x"], None], TEXTS),
    }
    a, x, y, b = id_of("a"), id_of("x"), id_of("y"), id_of("b")

    assert cross(columns) == [
        [signed(combine64(a, 1, x)), signed(combine64(a, 2, y))],
        [signed(combine64(b, 3, x)), None],
        None,
        None,
        None,
    ]


def test_lists_of_different_lengths_are_not_crossed():
    columns = {"items": pa.array([[1], [1, 2]], INTS), "kinds": pa.array([["x"], ["x"]], TEXTS)}

    with pytest.raises(InputError, match="'items' and 'kinds' have 2 and 1 values in one row"):
        cross(columns)
