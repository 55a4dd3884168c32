"""Data sets that came after that of `runs.make_run`, and semantic IDs that go on with its own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rayrec.models.tokenizers.extend import NewItems, extend_registry
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.runs import MODELS, NUM_ITEMS, NUM_USERS, trained

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


def trained_on_words(
    data: Path, run: Path, model: str = "sasrec", snapshots_after: Sequence[int] = ()
) -> Path:
    """A run of a model that reads words of items."""
    config = {
        "data": {"path": str(data)},
        "model": MODELS[model] | {"content": {"min_items": 2}},
        "pipeline": {"trainer_threads": 1},
        "training": {"batch_size": 16, "epochs": 1},
    }
    return trained(RunConfig.parse(config), run, snapshots_after)


def run_of_words(
    folder: Path, model: str = "sasrec", snapshots_after: Sequence[int] = ()
) -> tuple[Path, Dataset]:
    """(A run that knows items by words, too; a later data set: three more items with words that others have,
    and one without a known word.)"""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"w{item % 7} w{item % 3}" for item in range(NUM_ITEMS)]
    described = described_dataset(folder, "data", keys, titles)
    run = trained_on_words(described.root, folder / "run", model, snapshots_after)
    fresh = [f"a{n}" for n in range(NUM_NEW + 1)]
    grown = described_dataset(folder, "grown", fresh + keys, ["w1 w2", "w3 x", "w0 x", "unknown x", *titles])
    return run, grown
