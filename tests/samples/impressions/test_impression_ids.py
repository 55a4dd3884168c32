"""Ids of impressions: one function of space and key, whoever computes it."""

import numpy as np
import pyarrow as pa
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.impressions.ids import id_of, ids_and_checks, ids_of, null_id, rare_id
from rayrec.samples.impressions.tally import IdCollisionError, IdTally
from rayrec.samples.impressions.vocabulary import Vocabulary
from rayrec.samples.operations.hashing import HashConfig
from rayrec.samples.operations.operation import RowContext


def test_spaces_share_no_id():
    ids = [id_of("user", "7"), id_of("item", "7"), null_id("user"), null_id("item"), rare_id("user")]
    assert len(set(ids)) == 5


def test_columns_get_the_ids_of_their_keys_whatever_their_type():
    expected = [id_of("item", "7"), None, id_of("item", "12")]
    for column in (
        pa.array(["7", None, "12"]),
        pa.array(["7", "", "12"]),
        pa.array([7, None, 12]),
        pa.array(["7", None, "12"]).dictionary_encode(),
        pa.chunked_array([["7"], [None, "12"]]),
    ):
        assert ids_of("item", column).to_pylist() == expected


def test_a_missing_key_has_the_id_of_null():
    assert id_of("item", None) == id_of("item", "") == null_id("item")


def test_the_operation_hash_computes_the_same_ids():
    schema = pa.schema({"item": pa.string()})
    hashed = HashConfig(input="item", salt="item").bind(schema)
    found = hashed({"item": pa.array(["7", "x"])}, RowContext(np.arange(2), seed=0, step=0))
    assert found["item"].to_pylist() == [id_of("item", "7"), id_of("item", "x")]


def test_floats_are_no_ids():
    with pytest.raises(InputError, match="column price has the type double"):
        ids_of("price", pa.array([1.5]))


def test_a_tally_counts_across_calls_and_finds_two_keys_of_one_id():
    tally = IdTally()
    tally.add(np.array([5, 2]), np.array([50, 20]), np.array([1, 3]))
    tally.add(np.array([2, 9]), np.array([20, 90]), np.array([4, 1]))
    assert tally.ids_D.tolist() == [2, 5, 9]
    assert tally.counts_D.tolist() == [7, 1, 1]
    tally.add(np.array([5]), np.array([51]), np.array([1]))
    with pytest.raises(IdCollisionError):
        _ = tally.ids_D


def test_a_collision_is_refused_by_space(monkeypatch):
    def all_alike(space, keys):
        _, checks_D = ids_and_checks(space, keys)
        return np.full(len(keys), 3), checks_D

    monkeypatch.setattr("rayrec.samples.impressions.vocabulary.ids_and_checks", all_alike)
    vocabulary = Vocabulary(["item"])
    vocabulary.ids("item", pa.array(["a", "b"]))
    with pytest.raises(InputError, match="two different keys of the space 'item'"):
        vocabulary.num_ids()


def test_rare_and_unseen_ids_become_one():
    counted = Vocabulary(["item"])
    counted.ids("item", pa.array(["a", "a", "b", None]))
    vocabulary, num_rare = Vocabulary.without_rare(counted, min_count=2)
    found = vocabulary.ids("item", pa.array(["a", "b", "new", None])).to_pylist()
    assert found == [id_of("item", "a"), rare_id("item"), rare_id("item"), None]
    assert num_rare == {"item": 1}
    assert vocabulary.num_ids() == {"item": 2}
