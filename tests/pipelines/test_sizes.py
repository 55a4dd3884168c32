"""Sizes that the data choose, where the config asks for it."""

import logging

import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.sizes import with_sizes
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.manifest import Manifest

# What was measured: train_rows, items, train_events -> batch_size, dim, feedforward_dim, max_length.
MOVIELENS = (943, 1_682, 98_114), (32, 64, 256, 100)
DESKDROP = (1_895, 2_987, 60_000), (64, 64, 256, 50)
BEAUTY = (22_363, 12_101, 153_776), (256, 128, 256, 50)
LARGE = (5_000_000, 2_000_000, 900_000_000), (256, 256, 512, 200)


def config(**training):
    return RunConfig.parse(
        {"fit_to_data": True, "data": {"path": "data"}, "model": {"name": "sasrec"}, "training": training}
    )


@pytest.fixture
def data_of(monkeypatch):
    def use(counts):
        named = dict(zip(("train_rows", "items", "train_events"), counts, strict=True))
        monkeypatch.setattr(Manifest, "read", lambda path: Manifest.model_construct(counts=named))

    return use


@pytest.mark.parametrize(("counts", "sizes"), [MOVIELENS, DESKDROP, BEAUTY, LARGE])
def test_sizes_are_those_of_the_recipes_that_were_measured(data_of, counts, sizes):
    data_of(counts)
    found = with_sizes(config())
    backbone = found.model.backbone
    assert (found.training.batch_size, backbone.dim, backbone.feedforward_dim, backbone.max_length) == sizes


def test_what_is_given_stays_and_what_is_chosen_is_said(data_of, caplog):
    data_of(MOVIELENS[0])
    with caplog.at_level(logging.INFO, logger="rayrec"):
        found = with_sizes(config(batch_size=7))
        assert found.training.batch_size == 7
        assert "max_length 100 for 104.0 training events a user, dim 64 for 1,682 items" in caplog.text
        assert "batch_size" not in caplog.text
        caplog.clear()
        data_of((320, 10, 3_000))  # 16 rows a step, though 30 steps were aimed at
        assert with_sizes(config()).training.batch_size == 16
        assert "batch_size 16 for 20 steps an epoch with 320 users" in caplog.text
        # A run's own config has all sizes, so that it stays what it was when the data grow.
        data_of(LARGE[0])
        assert with_sizes(found).model == found.model


def test_a_config_that_does_not_ask_keeps_its_defaults():
    plain = RunConfig.parse({"data": {"path": "nowhere"}, "model": {"name": "sasrec"}})
    assert with_sizes(plain) is plain


def test_models_without_a_backbone_have_no_sizes_to_choose():
    with pytest.raises(InputError, match="fit_to_data: 'dlrm' has no backbone"):
        RunConfig.parse({"fit_to_data": True, "data": {"path": "data"}, "model": {"name": "dlrm"}})
