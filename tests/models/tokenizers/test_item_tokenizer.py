import json

import numpy as np
import pytest

from rayrec.models.tokenizers.item_tokenizer import TOKENIZERS, ItemTokenizer
from rayrec.platform.errors import InputError
from tests.models.tokenizers.vectors import item_like_vectors

IDS_I = np.arange(200) * 7 - 300


def blocks(num_items=200, seed=0):
    """Interactions that know nothing of every tenth item, texts of all but the last."""
    known = {
        "interactions": item_like_vectors(num_items, 8, seed),
        "text": item_like_vectors(num_items, 12, 9),
    }
    out = {name: vectors_ID.numpy().copy() for name, vectors_ID in known.items()}
    out["interactions"][::10] = np.nan
    out["text"][-1] = np.nan
    return out


def fitted(name="rq_kmeans", seed=0):
    return ItemTokenizer.fit(name, blocks(), IDS_I, 2, 8, seed, 5, {"text": 2.0}, num_components=6)


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_a_saved_tokenizer_gives_the_same_codes_of_raw_blocks(name, tmp_path):
    tokenizer = fitted(name)
    codes_IL = tokenizer.encode(blocks(), IDS_I)
    tokenizer.save(tmp_path)
    loaded = ItemTokenizer.load(tmp_path)

    assert loaded.version == tokenizer.version
    assert np.array_equal(loaded.encode(blocks(), IDS_I), codes_IL)
    assert np.array_equal(loaded.decode(codes_IL), tokenizer.decode(codes_IL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer.safetensors"]
    # New items, of which only a text is known, are prepared as the others were.
    text_only = {"text": blocks()["text"][:3]}
    assert loaded.encode(text_only, IDS_I[:3]).shape == (3, 2)
    assert np.array_equal(
        loaded.encode(text_only, IDS_I[:3])[0], codes_IL[0]
    )  # as the fitted item without them


def test_the_version_is_a_checksum_of_preparation_and_codebooks():
    assert fitted().version == fitted().version
    assert len({fitted().version, fitted(seed=1).version, fitted("opq").version}) == 3


def test_files_that_were_changed_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"tokenizer\.json: cannot be read .* expected a saved item tokenizer"
    ):
        ItemTokenizer.load(tmp_path)
    fitted().save(tmp_path)
    manifest = json.loads((tmp_path / "tokenizer.json").read_text())

    def with_manifest(**changes):
        (tmp_path / "tokenizer.json").write_text(json.dumps(manifest | changes))
        return ItemTokenizer.load(tmp_path)

    assert with_manifest().version == manifest["version"]
    with pytest.raises(InputError, match="a file was changed or damaged, make the item tokenizer again"):
        with_manifest(seed=5)
    with pytest.raises(InputError, match="do not form an item tokenizer: there is no tokenizer 'vq'"):
        with_manifest(name="vq")
    with pytest.raises(InputError, match="do not form an item tokenizer"):
        with_manifest(name="opq")
    with pytest.raises(InputError, match="written in format 9, this program reads format 1"):
        with_manifest(format_version=9)


def test_items_without_data_are_counted():
    # The last item has no text, and of it the interactions are known; item 0 has a text alone.
    vectors = fitted().vectors({"text": blocks()["text"]}, IDS_I)
    assert vectors.num_without_data == 1
