"""Decoding steps on a device without values: whoever asks it for one fails, and so would wait for a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.decoding import sampling
from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.sampling import constrained_sample, stochastic_beam_search
from rayrec.models.generative.causal_lm_config import CausalLmConfig
from rayrec.models.generative.cross_decoder import CrossDecoder
from rayrec.models.generative.encoder_decoder import EncoderDecoder
from rayrec.models.generative.experts import MOST_DENSE, ExpertSettings
from rayrec.models.generative.lazy_decoder import LazyDecoder
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.prefix_decoder import PrefixDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model
from rayrec.models.sequence.tensor_batch import TensorBatch
from tests.helpers.examples import cases
from tests.models.networks import DIM, backbone, histories, tensor_batch

META = torch.device("meta")
LEVEL_SIZES = (16, 16, 8)
CODES_IL = np.unique(np.random.default_rng(0).integers(LEVEL_SIZES, size=(2_000, 3)), axis=0)
CODES = torch.tensor(CODES_IL)
NUM_ITEMS = len(CODES)
ROWS = [[0, 3, 5, 2], [6, 1], [4, 0, 1]]
BEAMS = 500
EXPERTS = ExpertSettings(4, per_token=2, balance_weight=0.0)


def cross_decoder(experts):
    return CrossDecoder(DIM, 2, 2, 16, LEVEL_SIZES, 0.0, experts=experts)


def prefix():
    return PrefixDecoder(backbone(), CODES, LEVEL_SIZES), ()


def light():
    return LightDecoder(backbone(), CodeDecoder(DIM, LEVEL_SIZES, 16, 0.0, 100)), ("code",)


def lazy(experts=None):
    return LazyDecoder(cross_decoder(experts), CODES, 6, 0.0), ("user",)


def encoder_decoder(experts=None):
    network = EncoderDecoder(
        cross_decoder(experts),
        CODES,
        num_layers=1,
        num_heads=2,
        feedforward_dim=16,
        max_length=6,
        dropout=0.0,
    )
    return network, ("user",)


def causal_lm():
    network = {"kind": "qwen3", "dim": 16, "num_layers": 2, "num_heads": 2, "num_key_heads": 1}
    config = CausalLmConfig.parse({"name": "causal_lm", "backbone": {"max_length": 6, "network": network}})
    return build_model(config, Catalog(NUM_ITEMS, CODES_IL, LEVEL_SIZES), seed=0).backbone, ()


BACKBONES = {
    "prefix": prefix,
    "light": light,
    "lazy": lazy,
    "lazy, experts": partial(lazy, EXPERTS),
    "encoder-decoder": encoder_decoder,
    "encoder-decoder, experts": partial(encoder_decoder, EXPERTS),
    "causal_lm": causal_lm,
}


def without_values(batch: TensorBatch) -> TensorBatch:
    moved = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if torch.is_tensor(value):
            value = value.to(META)
        elif isinstance(value, dict):
            value = {name: tensor.to(META) for name, tensor in value.items()}
        moved[field.name] = value
    return TensorBatch(**moved | {"layout": JaggedLayout.from_offsets(batch.layout.offsets_B1, META)})


DECODERS = (beam_search, constrained_sample, stochastic_beam_search)


@pytest.mark.parametrize(
    ("name", "decode"),
    cases(
        itertools.product(BACKBONES, DECODERS),
        {
            *((name, DECODERS[number % 3]) for number, name in enumerate(BACKBONES)),
            *itertools.product(("prefix",), DECODERS),
        },
    ),
)
def test_no_step_of_decoding_asks_the_device_for_a_value(name, decode, monkeypatch):
    """Nor does it copy anything there from the host, which would be waited for, too."""
    assert len(ROWS) * BEAMS > MOST_DENSE
    network, tables = BACKBONES[name]()
    model = GenerativeRecommender(network, CODES, BEAMS, 3).eval().to(META)
    batch = without_values(tensor_batch(histories(ROWS, NUM_ITEMS, tables, CODES_IL)))
    # Random numbers it has none either.
    monkeypatch.setattr(sampling, "_gumbel", lambda like, generator: torch.zeros_like(like))
    more = () if decode is beam_search else (None,)
    with torch.inference_mode():
        context, trie = model.backbone.encode_context(batch), model.trie
        leaf_filter = LeafFilter.excluding(trie, torch.empty(len(ROWS), 4, dtype=torch.int64, device=META))
        for copies in ("from_numpy", "tensor", "as_tensor"):
            monkeypatch.delattr(torch, copies)

        found = decode(model.distribution(context, leaf_filter), BEAMS, *more)

    assert found.items_BW.shape == (len(ROWS), BEAMS)
    assert found.items_BW.is_meta
