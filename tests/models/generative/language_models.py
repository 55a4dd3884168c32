"""Tiny language models as generative recommenders."""

import numpy as np
import torch

from rayrec.models.generative.causal_lm_config import CausalLmConfig
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model

CODES_IL = np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1], [2, 0, 0], [2, 2, 0]])


LEVEL_SIZES = (3, 3, 2)


NUM_ITEMS, NUM_LEVELS = CODES_IL.shape


CATALOG = Catalog(NUM_ITEMS, CODES_IL, LEVEL_SIZES)


ROWS = [[0, 3, 5, 2], [6], [4, 0, 1, 1, 6, 2], [3, 3]]


SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}


NETWORKS = {
    "qwen3": {"kind": "qwen3", "dim": 16, "num_layers": 2, "num_heads": 2, "num_key_heads": 1},
    "llama": {"kind": "transformers", "settings": {"model_type": "llama", **SHAPE, "num_key_value_heads": 2}},
    "gpt2": {
        "kind": "transformers",
        "settings": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2},
    },
}


def recommender(network=None, beam_width=NUM_ITEMS, seed=0, dropout=0.0, **settings):
    """Weights are made large enough for every part to matter."""
    settings = {"name": "causal_lm", "beam_width": beam_width} | settings
    backbone = {"max_length": 6, "network": network or NETWORKS["qwen3"], "dropout": dropout}
    settings["backbone"] = backbone
    model = build_model(CausalLmConfig.parse(settings), CATALOG, seed)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
