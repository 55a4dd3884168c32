"""The picture of a recommender, as a user asks for it."""

import numpy as np
import pytest
from matplotlib.image import imread

from examples import draw
from tests.runs import NUM_ITEMS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "prefix")


def test_a_picture_is_drawn_of_a_run(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "picture.png"
    monkeypatch.setattr("sys.argv", ["draw.py", str(run), "--user", "u3", "--out", str(out)])

    draw.main()

    assert f"wrote {out}" in capsys.readouterr().out
    pixels = imread(out)
    assert pixels.shape[0] > 1000
    assert pixels.shape[1] > 2000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 1000


def test_what_is_drawn_is_what_the_model_says(run):
    scene = draw.load(run, "u3")

    assert scene.title == "user u3"
    assert scene.probability_I.sum() == pytest.approx(1.0)
    assert not scene.probability_I[scene.history].any()
    assert len(scene.titles_I) == len(scene.codes_IL) == len(scene.place_I2) == NUM_ITEMS


def test_a_user_who_is_not_there_is_named(run):
    with pytest.raises(SystemExit, match="nobody"):
        draw.load(run, "nobody")
