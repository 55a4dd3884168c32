"""Tiny networks and batches for them: item ids equal catalog positions, table rows are random."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.sequence.backbones.transformer import CausalTransformer
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.event_labels import Label, Part
from rayrec.samples.base.batches import FeatureBatch, SampleBatch
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.prefix_paths import PrefixPaths
from tests.helpers.data import sample_batch

CPU = torch.device("cpu")
DIM = 8


def backbone(dropout: float = 0.0, num_layers: int = 2, max_length: int = 6) -> CausalTransformer:
    """A transformer whose weights are large enough for its parts to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        network = CausalTransformer(DIM, num_layers, 2, 16, max_length, dropout)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return network


LABEL_SIZES: dict[Label, int] = {"behavior": 3, "scenario": 2}


def labeled(batch: SampleBatch) -> SampleBatch:
    """With labels that follow from each event's item and its place in its row."""
    lengths = np.diff(batch.offsets_B1)
    place_N = np.arange(len(batch.item_ids_N)) - np.repeat(batch.offsets_B1[:-1], lengths)
    return dataclasses.replace(
        batch,
        labels={label: (7 * batch.item_ids_N + place_N) % size for label, size in LABEL_SIZES.items()},
    )


def layout(lengths: Sequence[int]) -> JaggedLayout:
    return JaggedLayout.from_offsets(np.cumsum([0, *lengths]), CPU)


def shares(
    rows: Sequence[Sequence[int]],
    num_items: int,
    tables: Sequence[str] = (),
    codes_IL: np.ndarray | None = None,
    num_negatives: int = 0,
    num_trainers: int = 1,
    step: int = 0,
    paths: PrefixPaths | None = None,
) -> list[FeatureBatch]:
    """Training features of rows of items, one share per trainer."""
    features = SequenceFeatures(
        np.arange(num_items),
        max_length=6,
        tables=tables,
        codes_IL=codes_IL,
        num_negatives=num_negatives,
        num_trainers=num_trainers,
        label_sizes=LABEL_SIZES,
        paths=paths,
    )
    return features(labeled(sample_batch(rows, step)))


def histories(
    rows: Sequence[Sequence[int]],
    num_items: int,
    tables: Sequence[str] = (),
    codes_IL: np.ndarray | None = None,
    instruction: Mapping[Part, Sequence[int]] | None = None,
    paths: PrefixPaths | None = None,
) -> FeatureBatch:
    """Features to rank what follows rows of items.

    Args:
        instruction: by part, of each row.
    """
    features = SequenceFeatures(
        np.arange(num_items),
        max_length=6,
        tables=tables,
        codes_IL=codes_IL,
        label_sizes=LABEL_SIZES,
        paths=paths,
    )
    wanted = {part: np.array(values) for part, values in (instruction or {}).items()}
    return features.ranking(dataclasses.replace(labeled(sample_batch(rows)), instruction=wanted))


def table_rows(features: FeatureBatch, dim: int = DIM) -> dict[str, np.ndarray]:
    """A row for every looked-up id, which depends on the id alone."""
    return {
        name: np.array(
            [
                np.random.default_rng(ident % 2**64).normal(scale=0.3, size=dim)
                for ident in lookup.ids_M.tolist()
            ],
            dtype=np.float32,
        ).reshape(-1, dim)
        for name, lookup in features.lookups.items()
    }


def tensor_batch(features: FeatureBatch, training: bool = False) -> TensorBatch:
    return TensorBatch.build(features, table_rows(features), seed=3, device=CPU, training=training)
