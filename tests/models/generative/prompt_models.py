"""A tiny model of words and codes, and prompts for it by hand."""

from __future__ import annotations

import numpy as np
import torch

from rayrec.models.generative.item_language_config import ItemLanguageConfig
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model
from rayrec.samples.base.batches import FeatureBatch, PromptTokens, TableLookup
from tests.models.generative.language_models import CODES_IL, LEVEL_SIZES, NUM_ITEMS, SHAPE

WORDS = 20
FIRST_TOKENS = (20, 23, 26)
VOCABULARY = Vocabulary(num_tokens=32, first_new=WORDS, pad=0, ends=(1,))
"""28 and more only fill up."""
CATALOG = Catalog(NUM_ITEMS, CODES_IL, LEVEL_SIZES, vocabulary=VOCABULARY)
LLAMA = {"model_type": "llama", **SHAPE, "num_key_value_heads": 2}
DIM = 4
USER = 0
"""Token in whose place a row of a user is read; here, whatever stands there."""
ROWS = [
    # tokens, from where on they are predicted: codes behind words, words behind codes, both
    ([USER, 5, 20, 23, 27, 21, 24, 26], 5),
    ([20, 23, 27, 7, 9, 1], 3),
    ([USER, 3, 22, 23, 26, 4, 22, 25, 26, 1], 2),
    ([6, 8, 20, 24, 26], 2),
]


def model(**changed):
    settings = {
        "name": "item_language",
        "base": {"kind": "settings", "settings": LLAMA},
        "prompt": "{table:user}{history}",
        "table_dim": DIM,
        "max_tokens": 16,
        "beam_width": NUM_ITEMS,
        "attention": "reference",
    }
    made = build_model(ItemLanguageConfig.parse(settings | changed), CATALOG, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def features(rows=ROWS, step=0):
    tokens_N = np.concatenate([tokens for tokens, _ in rows])
    is_target_N = np.concatenate([np.arange(len(tokens)) >= given for tokens, given in rows])
    places_P = np.flatnonzero(tokens_N == USER)
    users = np.arange(10, 10 + len(places_P))
    return FeatureBatch(
        step=step,
        row_keys_B=np.arange(len(rows)),
        offsets_B1=np.arange(len(rows) + 1),
        items_N=np.zeros(len(rows), dtype=np.int64),
        targets_N=None,
        num_targets=int(is_target_N.sum()),
        lookups={"user": TableLookup(users, np.arange(len(users)), users)},
        prompts=PromptTokens(
            tokens_N, np.cumsum([0, *(len(tokens) for tokens, _ in rows)]), is_target_N, {"user": places_P}
        ),
    )


def users_of(batch):
    return {
        table: np.sin(np.arange(DIM) + lookup.ids_M[:, None]).astype(np.float32)
        for table, lookup in batch.lookups.items()
    }
