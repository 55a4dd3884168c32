"""Small schemas, batches of impressions and networks for them, made by hand and in float64.

A row of the table is a distinct id; which one an impression has is random, so that ids repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.ctr.config import (
    DcnV2Config,
    DeepFmConfig,
    DinConfig,
    DlrmConfig,
    ImpressionModelConfig,
    MmoeConfig,
)
from rayrec.models.ctr.model import CtrModel
from rayrec.models.ctr.program import build_ctr_model
from rayrec.models.ctr.tensors import IdLists, ImpressionTensors
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema

CPU = torch.device("cpu")
SCHEMA = ImpressionSchema(
    labels=("click", "like"),
    numbers=("age", "price"),
    ids={"user": "user", "item": "item", "brand": "brand"},
    lists={"clicked": "item", "tags": "tag"},
)
"""Everything that there is, once or twice."""
LENGTHS = {"clicked": (3, 0, 1, 2), "tags": (0, 2, 0, 1)}
"""Of the lists of four impressions."""

SMALL = {"dim": 3, "hidden_dims": (5, 4)}
CONFIGS: dict[str, ImpressionModelConfig] = {
    "dlrm": DlrmConfig(name="dlrm", bottom_dims=(6,), **SMALL),
    "deepfm": DeepFmConfig(name="deepfm", **SMALL),
    "dcn_stacked": DcnV2Config(name="dcn_v2", num_cross_layers=2, **SMALL),
    "dcn_parallel": DcnV2Config(name="dcn_v2", num_cross_layers=2, structure="parallel", rank=2, **SMALL),
    "din_dice": DinConfig(name="din", attention={"clicked": "item"}, attention_dims=(4, 3), **SMALL),
    "din_prelu": DinConfig(name="din", attention={"clicked": "item"}, activation="prelu", **SMALL),
    "mmoe": MmoeConfig(name="mmoe", num_experts=3, tower_dims=(2,), **SMALL),
}
"""A tiny network of each kind, for `SCHEMA`."""


def model(name: str, schema: ImpressionSchema = SCHEMA, **settings: object) -> CtrModel:
    """In float64, with every parameter moved from where it begins: zeros would hide mistakes."""
    built = build_ctr_model(CONFIGS[name].model_copy(update=settings), schema, seed=1).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return built


def impressions(
    row_dim: int,
    schema: ImpressionSchema = SCHEMA,
    lengths: Mapping[str, Sequence[int]] = LENGTHS,
    num_rows: int = 4,
    num_ids: int = 7,
    seed: int = 0,
) -> ImpressionTensors:
    """Random impressions; of the labels of four, one is not known.

    Args:
        lengths: of each impression's lists, by column.
    """
    rng = np.random.default_rng(seed)
    rows_MD = torch.tensor(rng.normal(size=(num_ids, row_dim)))
    labels_BT = rng.integers(2, size=(num_rows, len(schema.labels))).astype(np.float32)
    labels_BT[1::4, 0] = np.nan
    return ImpressionTensors(
        keys_B=torch.tensor(rng.integers(2**62, size=num_rows)),
        numbers_BF=torch.tensor(rng.normal(size=(num_rows, len(schema.numbers)))),
        inverse_BC=torch.tensor(rng.integers(num_ids, size=(num_rows, len(schema.ids)))),
        lists={column: _lists(rng, lengths[column], num_ids) for column in schema.lists},
        labels_BT=torch.tensor(labels_BT),
        rows={FEATURE_TABLE: rows_MD.requires_grad_()},
    )


def _lists(rng: np.random.Generator, lengths: Sequence[int], num_ids: int) -> IdLists:
    layout = JaggedLayout.from_offsets(np.cumsum([0, *lengths]), CPU)
    return IdLists(torch.tensor(rng.integers(num_ids, size=layout.num_tokens)), layout)


def some_rows(batch: ImpressionTensors, rows: slice) -> ImpressionTensors:
    """Neighboring impressions alone, with the same table."""
    lists = {}
    for column, ids in batch.lists.items():
        layout, tokens = ids.layout.some_rows(rows)
        lists[column] = IdLists(ids.inverse_N[tokens], layout)
    return dataclasses.replace(
        batch,
        keys_B=batch.keys_B[rows],
        numbers_BF=batch.numbers_BF[rows],
        inverse_BC=batch.inverse_BC[rows],
        labels_BT=batch.labels_BT[rows],
        lists=lists,
    )


def list_rows(batch: ImpressionTensors, column: str, row: int) -> list[torch.Tensor]:
    """The table's rows of one impression's list."""
    ids = batch.lists[column]
    start, stop = ids.layout.offsets_B1[row : row + 2]
    return [batch.rows_MD[place] for place in ids.inverse_N[start:stop].tolist()]


def mean(vectors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return sum(vectors) / len(vectors) if vectors else torch.zeros(dim, dtype=torch.float64)


def fields(batch: ImpressionTensors, row: int) -> list[torch.Tensor]:
    """The vectors of one impression: its ids', then the means of its lists."""
    ids = [batch.rows_MD[place] for place in batch.inverse_BC[row].tolist()]
    lists = [mean(list_rows(batch, column, row), batch.rows_MD.shape[1]) for column in batch.lists]
    return [*ids, *lists]
