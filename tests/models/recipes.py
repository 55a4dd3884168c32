"""The sequence models that recipes of training are tested on, with batches for them."""

from __future__ import annotations

import dataclasses

import numpy as np

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.neighbors import NeighborFinder
from rayrec.samples.features.prefix_paths import PrefixPaths
from rayrec.samples.graph import TemporalGraph
from tests.helpers.data import sample_batch
from tests.models.networks import DIM

NUM_ITEMS, LEVELS = 9, (4, 4)


CODES_IL = np.array([[0, 0], [0, 3], [1, 1], [1, 2], [1, 3], [2, 0], [3, 0], [3, 1], [3, 2]])
"""No prefix has all codes below it."""


ROWS = [[1, 4, 2], [3, 5], [0, 8, 7, 6], [2, 3], [4], [8, 1, 1, 2, 3, 5]]


SETTINGS = DenseOptimizerSettings(0.01, 0.01, RateSchedule(), max_grad_norm=1.0, fused=True)


BACKBONE = {"dim": DIM, "num_layers": 2, "num_heads": 2, "feedforward_dim": 16, "max_length": 6}


MODELS = {
    "sasrec": {"name": "sasrec"},
    "sampled": {"name": "sasrec", "item_matrix": "sparse", "num_negatives": 5, "user_embedding": True},
    "bsarec": {"name": "bsarec"},
    "hstu": {"name": "hstu", "item_matrix": "sparse", "loss": "bce", "negatives_per_event": 3},
    "hstu, dense": {"name": "hstu", "temperature": 0.5},
    "gnn": {"name": "gnn", "neighbors": {"count": 3}},
    "gnn, sparse": {"name": "gnn", "item_matrix": "sparse", "num_negatives": 5, "neighbors": {"count": 2}},
    "gnn, bce": {"name": "gnn", "item_matrix": "sparse", "loss": "bce", "negatives_per_event": 3},
    **{
        name: {"name": name, "user_embedding": True}
        for name in ("prefix_decoder", "light_decoder", "lazy_decoder", "encoder_decoder")
    },
    "causal_lm": {"name": "causal_lm", "behavior_weights": {"LIKE": 2.0}},
    "prefix_decoder, weighted": {"name": "prefix_decoder", "behavior_weights": {"LIKE": 2.0}},
    **{
        f"{name}, among children": {"name": name, "softmax": "children"}
        for name in ("light_decoder", "lazy_decoder", "encoder_decoder", "causal_lm")
    },
    "light_decoder, weighted": {"name": "light_decoder", "behavior_weights": {"LIKE": 2.0}},
    "lazy_decoder, instructed": {
        "name": "lazy_decoder",
        "instruction": {"parts": ["scenario", "behavior"], "drop": 0.3},
        "event_labels": ["behavior", "scenario"],
        "behavior_weights": {"LIKE": 2.0, "VIEW": 0.5},
        "experts": {"count": 4, "per_token": 2},
    },
    "encoder_decoder, instructed": {
        "name": "encoder_decoder",
        "instruction": {"parts": ["behavior", "trigger_item"], "drop": 0.3},
        "event_labels": ["scenario"],
        "behavior_weights": {"VIEW": 0.5},
        "experts": {"count": 3, "per_token": 1},
        "retrieval": {"max_length": 6, "num_events": 3, "num_recent": 1, "q2i_negatives": 5},
    },
}


MODELS |= {
    "prefix_decoder, sparse": {"name": "prefix_decoder", "prefix_matrix": "sparse", "user_embedding": True},
    "prefix_decoder, sampled": {
        "name": "prefix_decoder",
        "prefix_matrix": "sparse",
        "num_siblings": 2,
        "behavior_weights": {"LIKE": 2.0},
    },
    "prefix_decoder, hybrid": {"name": "prefix_decoder", "softmax": "hybrid", "user_embedding": True},
    "prefix_decoder, hybrid, sparse": {
        "name": "prefix_decoder",
        "softmax": "hybrid",
        "prefix_matrix": "sparse",
        "num_negatives": 5,
    },
}


LONG_HISTORY = {"chunk_events": 2, "summary_tokens": 2, "newest": 2, "max_chunks": 3}

MODELS |= {
    "lazy_decoder, long": {
        "name": "lazy_decoder",
        "user_embedding": True,
        "event_labels": ["behavior"],
        "long_history": LONG_HISTORY,
    },
    "encoder_decoder, long": {"name": "encoder_decoder", "long_history": LONG_HISTORY},
}


ONE_OF_EACH_KIND = (
    "bsarec",
    "sampled",
    "hstu",
    "gnn, sparse",
    "light_decoder",
    "prefix_decoder, sampled",
    "prefix_decoder, hybrid, sparse",
    "lazy_decoder, instructed",
    "encoder_decoder, long",
)
"""Between them all layers, losses and inputs; what others add to these is another combination."""


LANGUAGE_MODEL = {"max_length": 6, "dropout": 0.1, "network": {"kind": "qwen3", "dim": DIM, "num_heads": 2}}


LABELS = {"behavior": ("LIKE", "SHARE", "VIEW"), "scenario": ("home", "search")}


def config_of(name: str, **changed):
    backbone = LANGUAGE_MODEL if name.startswith("causal_lm") else BACKBONE
    if MODELS[name]["name"] == "hstu":
        backbone = {key: value for key, value in BACKBONE.items() if key != "feedforward_dim"}
    if "long_history" in MODELS[name]:  # which says how much is read
        backbone = {key: value for key, value in BACKBONE.items() if key != "max_length"}
    values = MODELS[name] | {"backbone": backbone} | changed
    return RunConfig.parse({"data": {"path": "data"}, "model": values}).model


def model_of(name: str, **changed):
    config = config_of(name, **changed)
    rates = np.full(NUM_ITEMS, -np.log(NUM_ITEMS))
    catalog = Catalog(NUM_ITEMS, CODES_IL, LEVELS, negative_log_q_I=rates, labels=LABELS)
    return build_model(config, catalog, seed=1)


def neighbors_of(settings):
    """What finds neighbors, among the events of users who met an item and its next ones long ago."""
    if settings is None:
        return None
    graph = TemporalGraph()
    items_E = np.repeat(np.arange(NUM_ITEMS - 2), 3) + np.tile(np.arange(3), NUM_ITEMS - 2)
    graph.append(np.arange(len(items_E)) // 3, items_E, 10**8 + np.arange(len(items_E)))
    return NeighborFinder(lambda: graph, settings.count)


def features_of(name: str, step: int = 0, rows=ROWS, num_trainers: int = 1):
    config = config_of(name)
    features = SequenceFeatures(
        np.arange(NUM_ITEMS),
        max_length=6 if config.summarized is None else config.history_length,
        window_step=config.windows_begin_at,
        chunk_events=0 if config.summarized is None else config.summarized.chunk_events,
        max_chunks=0 if config.summarized is None else config.summarized.max_chunks,
        tables=tuple(config.tables),
        codes_IL=CODES_IL,
        num_negatives=5 if config.negatives.per_batch else 0,
        negatives_per_event=3 if config.negatives.per_event else 0,
        label_sizes={label: len(LABELS[label]) for label in config.needs_labels},
        neighbors=neighbors_of(config.event_neighbors),
        paths=PrefixPaths(CODES_IL, config.siblings_per_prefix, None, seed=0),
        num_trainers=num_trainers,
    )
    batch = sample_batch(rows, step)
    if config.needs_times:
        batch = dataclasses.replace(batch, times_N=10**9 + 1000 * np.arange(len(batch.item_ids_N)))
    random, num_events = np.random.default_rng(2), len(batch.item_ids_N)
    labels = {label: random.integers(-1, len(LABELS[label]), num_events) for label in config.needs_labels}
    batch = dataclasses.replace(batch, labels=labels)
    return features(batch)
