"""Item vectors in files: what is written is read, whatever the items are called."""

import numpy as np
import pytest

from rayrec.models.tokenizers.vector_sources import (
    ItemData,
    dataset_of_vectors,
    vector_source,
    write_vectors,
)
from rayrec.platform.errors import InputError

KEYS = ["plain", "with space ", "next\u2028line", "form\x0cfeed", "", "ä"]


def test_vectors_are_read_as_they_were_written(tmp_path):
    vectors_ND = np.random.default_rng(0).normal(size=(len(KEYS), 3)).astype(np.float32)
    write_vectors(tmp_path / "of.npy", vectors_ND, KEYS, {"dataset_fingerprint": "abc"})
    assert dataset_of_vectors(tmp_path / "of.npy") == "abc"

    wanted = ["unknown", *reversed(KEYS)]
    items = ItemData("data", wanted, [None] * len(wanted), lambda: (np.arange(1), np.arange(2)))
    read_ID = vector_source("of", {"file": str(tmp_path / "of.npy")}).vectors(items)

    assert np.isnan(read_ID[0]).all()
    np.testing.assert_array_equal(read_ID[1:], vectors_ND[::-1])


@pytest.mark.parametrize("key", ["two\nlines", "end\r"])
def test_a_key_of_two_lines_is_refused_before_anything_is_written(key, tmp_path):
    with pytest.raises(InputError, match="has a line break in its id"):
        write_vectors(tmp_path / "of.npy", np.zeros((1, 2), np.float32), [key], {})
    assert not list(tmp_path.iterdir())
