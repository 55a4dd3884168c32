import hashlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64, mix64
from rayrec.samples.prepare.ids import assign_ids, hash_strings, ids_of_kind, refuse_collisions


def column(values, kind=None):
    return pa.chunked_array([pa.array(values, kind)])


def test_mix64_is_the_finalizer_of_splitmix64():
    # First outputs of the reference generator seeded with 0: its state is a multiple of the golden ratio.
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, 2 * golden % 2**64], dtype=np.uint64)
    assert [hex(value) for value in mix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_combining_depends_on_the_order_and_broadcasts():
    first, second = combine64(1, 2), combine64(2, 1)
    assert first != second
    assert combine64(np.array([1, 2]), np.array([2, 1])).tolist() == [int(first), int(second)]
    assert combine64(7, np.arange(3)).tolist() == [int(combine64(7, number)) for number in range(3)]


def test_negative_integers_hash_like_their_bits():
    assert mix64(-1) == mix64(np.uint64(2**64 - 1)) == mix64(np.int32(-1))


def test_integers_stay_what_they_are_even_as_text():
    table, (from_text, from_integers) = assign_ids([column(["7", "-3", "7"]), column([12, -3])], "item")
    assert table.kind == "integer"
    assert from_text.tolist() == [7, -3, 7]
    assert from_integers.tolist() == [12, -3]
    assert table.keys.to_pylist() == ["7", "-3", "12"]
    assert table.positions(np.array([12, 7])).tolist() == [2, 0]


def test_leading_zeros_make_a_text():
    table, (ids,) = assign_ids([column(["007", "7"])], "item")
    assert table.kind == "string"
    assert ids[0] != ids[1]


def test_one_text_makes_all_ids_texts_in_both_tables():
    table, (first, second) = assign_ids([column([1, 2]), column(["1", "x"])], "user")
    assert table.kind == "string"
    assert first[0] == second[0] == hash_strings(["1"])[0]


def test_strings_are_hashed_by_blake2b():
    expected = int.from_bytes(hashlib.blake2b(b"x", digest_size=8).digest(), "little", signed=True)
    assert hash_strings(["x", "", "x"])[[0, 2]].tolist() == [expected, expected]


@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1))
def test_equal_strings_and_only_these_have_equal_ids(strings):
    ids = hash_strings(strings).tolist()
    assert len(set(ids)) == len(set(strings))
    assert len(set(zip(strings, ids, strict=True))) == len(set(strings))


def test_unsigned_ids_keep_their_bits():
    _, (ids,) = assign_ids([column(["10000169349117863715"])], "item")
    assert ids.view(np.uint64).tolist() == [10000169349117863715]


def test_integers_outside_64_bits_are_refused_by_name():
    with pytest.raises(InputError, match=f"item id {2**64} is outside 64 bits"):
        assign_ids([column(["1", str(2**64)])], "item")


def test_a_collision_is_refused_naming_both_strings():
    with pytest.raises(InputError, match="item ids 'b' and 'c' have the same 64-bit id 5"):
        refuse_collisions(pa.array(["a", "b", "c"]), np.array([4, 5, 5]), "item")


@pytest.mark.parametrize("kind", ["integer", "string"])
@pytest.mark.parametrize("dtype", [pa.string(), pa.int64()])
def test_no_keys_have_no_ids(kind, dtype):
    """Of texts that would be integers, it ended with an error of NumPy's."""
    ids = ids_of_kind(pa.array([], dtype), kind, "user")
    assert ids.dtype == np.int64
    assert not len(ids)
