"""A schema with every kind of column, and small batches of it, from which something can be learned."""

from __future__ import annotations

import numpy as np
import torch

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.program.program import ProgramPlacement
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.base.batches import TableLookup
from rayrec.samples.impressions.batches import ImpressionBatch

CPU = torch.device("cpu")
DIM = 4
NUM_IDS = 12

SCHEMA = ImpressionSchema(
    labels=("click", "buy"),
    numbers=("price", "age", "hour"),
    ids={"user": "user", "item": "item"},
    lists={"history": "item", "tags": "tag"},
)
SETTINGS = DenseOptimizerSettings(
    learning_rate=0.02, weight_decay=0.1, schedule=RateSchedule(warmup_steps=5), max_grad_norm=0.2, fused=True
)
PLACEMENT = ProgramPlacement(CPU, seed=5)


def batch(
    num_rows: int = 16, step: int = 0, num_labels: int = 2, rows: slice = slice(None)
) -> ImpressionBatch:
    """
    Args:
        rows: the share of one trainer.
    """
    random = np.random.default_rng(step)
    numbers_BF = random.normal(size=(num_rows, 3)).astype(np.float32)
    ids_BC = random.integers(NUM_IDS, size=(num_rows, 2))
    lengths = random.integers(0, 4, size=(2, num_rows))
    lists = [[random.integers(NUM_IDS, size=length) for length in lengths_B] for lengths_B in lengths]
    chance_B = 1 / (1 + np.exp(-2 * numbers_BF[:, 0] - ids_BC[:, 1] % 3))
    labels_BT = (random.random((num_rows, num_labels)) < chance_B[:, None]).astype(np.float32)
    labels_BT[random.random((num_rows, num_labels)) < 0.2] = np.nan

    lists = [of_column[rows] for of_column in lists]
    flat = np.concatenate([ids_BC[rows].ravel(), *(ids for of_column in lists for ids in of_column)])
    distinct_M, inverse = np.unique(flat.astype(np.int64), return_inverse=True)
    return ImpressionBatch(
        step=step,
        row_keys_B=np.arange(num_rows)[rows],
        num_targets=num_rows,
        numbers_BF=numbers_BF[rows],
        labels_BT=labels_BT[rows],
        lookups={FEATURE_TABLE: TableLookup(distinct_M, inverse, distinct_M)},
        num_id_columns=2,
        list_offsets_B1={
            column: np.cumsum([0, *map(len, of_column)])
            for column, of_column in zip(SCHEMA.lists, lists, strict=True)
        },
    )


def table_rows(features: ImpressionBatch) -> dict[str, np.ndarray]:
    table = np.random.default_rng(99).normal(size=(NUM_IDS, DIM)).astype(np.float32)
    return {FEATURE_TABLE: table[features.lookups[FEATURE_TABLE].ids_M]}
