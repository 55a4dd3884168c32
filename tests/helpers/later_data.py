"""Data sets that came after that of `runs.make_run`, and semantic IDs that go on with its own."""

from pathlib import Path

import numpy as np
import torch

from rayrec.models.tokenizers.extend import NewItems, extend_registry
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.runs import NUM_ITEMS, NUM_USERS

NUM_NEW = 3
"""Items that `grown_dataset` has and that of `make_run` has not."""


def grown_dataset(folder: Path) -> Dataset:
    """That of `make_run`, and three more items that two further users have met."""
    keys = [f"i{item}" for item in range(NUM_ITEMS + NUM_NEW)]
    events = random_events(NUM_USERS, NUM_ITEMS)
    events += [
        (user, key, 2000 + n) for user in ("x", "y") for n, key in enumerate(["i0", *keys[NUM_ITEMS:]])
    ]
    titles = [f"Title of {key}" for key in keys]
    source = write_source(folder / "grown-source", events, items={"item_id": keys, "title": titles})
    prepare(source, folder / "grown", PrepareConfig(num_partitions=3))
    return Dataset.open(folder / "grown")


def extend(registry: SemanticIdRegistry, dataset: Dataset, vectors_of_new: np.ndarray) -> SemanticIdRegistry:
    """Semantic IDs that give codes to the items of a later data set, too, written into it."""
    assert registry.codebooks_CKD is not None
    quantizer = ResidualKMeans(2, registry.codebooks_CKD.shape[1]).restore(
        {"codebooks_LKD": registry.codebooks_CKD}
    )
    ids_I = dataset.items.ids_I
    new_ids = ids_I[~np.isin(ids_I, registry.item_ids_I)]
    new = NewItems(new_ids, torch.from_numpy(vectors_of_new))
    extended = extend_registry(registry, quantizer, new, ids_I, dataset.fingerprint)
    extended.save(dataset.root / SEMANTIC_IDS_FOLDER)
    return extended


def described_dataset(folder: Path, name: str, keys: list[str], titles: list[str]) -> Dataset:
    """Old items have the events of `make_run`; the others are met once, by further users."""
    old = [f"i{item}" for item in range(NUM_ITEMS)]
    events = random_events(NUM_USERS, NUM_ITEMS)
    fresh = [key for key in keys if key not in old]
    events += [
        (user, key, 2000 + n) for user in "xyz" * bool(fresh) for n, key in enumerate([*fresh, *old[:3]])
    ]
    source = write_source(folder / f"{name}-source", events, items={"item_id": keys, "title": titles})
    prepare(source, folder / name, PrepareConfig(num_partitions=3))
    return Dataset.open(folder / name)


def dataset_with_brands(folder: Path) -> Dataset:
    """That of `make_run`, which knows a brand of each item, too."""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    items = {"item_id": keys, "title": [f"Title of {key}" for key in keys], "brand": ["b"] * NUM_ITEMS}
    source = write_source(folder / "later-source", random_events(NUM_USERS, NUM_ITEMS), items=items)
    prepare(source, folder / "later", PrepareConfig())
    return Dataset.open(folder / "later")
