"""Vectors of pictures, by a tiny vision model in a folder."""

import numpy as np
import pytest

from rayrec.models.tokenizers.image_vectors import ImageVectors
from rayrec.models.tokenizers.vector_sources import ItemData
from rayrec.platform.errors import InputError

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

COLORS = {"r1": (250, 20, 20), "r2": (240, 30, 10), "b1": (10, 20, 250), "b2": (20, 10, 240)}
KEYS = [*COLORS, "nothing", "../r1", "n" * 300]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Pictures in two colors, and a model with random weights."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "images").mkdir()
    for number, (key, color) in enumerate(COLORS.items()):
        Image.new("RGB", (20 + number, 24), color).save(folder / "images" / f"{key}.png")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder / "model")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(folder / "model")
    return folder


def source(shop, **changed):
    settings = {"images": str(shop / "images"), "model": str(shop / "model"), "batch_size": 3}
    return ImageVectors.parse(settings | changed)


def items(keys=KEYS):
    return ItemData("data", keys, [None] * len(keys), lambda: None)


def test_pictures_that_are_alike_have_vectors_that_are_alike(shop):
    seen = []

    vectors_ID = source(shop).vectors(items(), lambda done, total: seen.append((done, total)))

    assert vectors_ID.shape == (7, 16)
    assert np.isnan(vectors_ID[4:]).all()
    alike = vectors_ID[:4] @ vectors_ID[:4].T
    np.testing.assert_allclose(np.diag(alike), 1.0, atol=1e-5)
    assert min(alike[0, 1], alike[2, 3]) > max(alike[0, 2], alike[1, 3])
    assert seen == [(3, 4), (4, 4)]


def test_a_picture_has_the_same_vector_alone(shop):
    together = source(shop).vectors(items())
    alone = source(shop).vectors(items(["b2"]))

    np.testing.assert_allclose(alone[0], together[3], atol=1e-6)


def test_items_that_came_later_without_any_picture_have_rows_of_the_same_width(shop):
    """As a part of a large catalog may have: it stands beside parts with pictures."""
    later = ItemData("data", ["nothing", "else"], [None] * 2, None)

    vectors_ID = source(shop).vectors(later)

    assert vectors_ID.shape == (2, 16)
    assert np.isnan(vectors_ID).all()


def test_a_picture_that_is_damaged_behind_its_beginning_is_named(shop, tmp_path):
    """Of a PNG with a damaged piece, Pillow raises a SyntaxError."""
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    file = tmp_path / "r1.png"
    Image.fromarray(noise).save(file)
    content = file.read_bytes()
    second = content.index(b"IDAT", content.index(b"IDAT") + 1)
    file.write_bytes(content[:second] + b"\xff" + content[second + 1 :])
    with pytest.raises(InputError, match=r"r1\.png: not a readable picture"):
        source(shop, images=str(tmp_path)).vectors(items())


def test_what_cannot_be_read_is_named(shop, tmp_path):
    (tmp_path / "r1.jpg").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"r1\.jpg: not a readable picture"):
        source(shop, images=str(tmp_path)).vectors(items())
    with pytest.raises(InputError, match="has no picture of any item"):
        source(shop).vectors(items(["x"]))
    with pytest.raises(InputError, match=r"no folder with a config\.json"):
        source(shop, model="google/vit").vectors(items())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot load a vision model"):
        source(shop, model=str(tmp_path)).vectors(items())
