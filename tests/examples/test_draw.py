"""The picture of a recommender, as a user asks for it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.models.tokenizers.fit import quantized_registry
from rayrec.models.tokenizers.item_tokenizer import ItemTokenizer
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.features import registry_folder
from tests.helpers.runs import NUM_ITEMS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "prefix")


@pytest.fixture(scope="module")
def draw():
    # matplotlib is imported where these tests run, not wherever they are collected.
    from examples import draw

    return draw


@pytest.mark.slow
def test_a_picture_is_drawn_of_a_run(draw, run, tmp_path, monkeypatch, capsys):
    from matplotlib.image import imread

    out = tmp_path / "picture.png"
    monkeypatch.setattr("sys.argv", ["draw.py", str(run), "--user", "u3", "--out", str(out)])

    draw.main()

    assert f"wrote {out}" in capsys.readouterr().out
    pixels = imread(out)
    assert pixels.shape[0] > 1000
    assert pixels.shape[1] > 2000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 1000


def test_what_is_drawn_is_what_the_model_says(draw, run):
    scene = draw.load(run, "u3")

    assert scene.title == "user u3"
    assert scene.probability_I.sum() == pytest.approx(1.0)
    assert not scene.probability_I[scene.history].any()
    assert len(scene.titles_I) == len(scene.codes_IL) == len(scene.place_I2) == NUM_ITEMS


@pytest.mark.parametrize("quantizer", ["rq_kmeans", "opq"])
def test_the_map_is_of_what_the_tokenizer_keeps(draw, run, quantizer):
    folder = Path(registry_folder(RunFolder.open(run).config))
    vectors_ID = np.repeat([[0.0, 1.0, 0.0, 2.0], [5.0, -1.0, 7.0, 0.0]], NUM_ITEMS // 2, axis=0)
    vectors_ID += np.random.default_rng(0).normal(scale=0.01, size=vectors_ID.shape)
    ids_I = np.arange(len(vectors_ID))
    tokenizer = ItemTokenizer.fit(quantizer, {"text": vectors_ID.astype(np.float32)}, ids_I, 2, 4)
    registry = quantized_registry(
        tokenizer.quantizer, torch.from_numpy(vectors_ID).float(), ids_I, "f00d", "share"
    )
    tokenizer.save(folder)

    place_I2 = draw._map(folder, registry)

    (folder / "tokenizer.json").unlink()
    half = len(ids_I) // 2
    apart = np.linalg.norm(place_I2[:half].mean(axis=0) - place_I2[half:].mean(axis=0))
    assert apart > 0.4


def test_a_user_who_is_not_there_is_named(draw, run):
    with pytest.raises(SystemExit, match="nobody"):
        draw.load(run, "nobody")
