"""From settings to a ranking model with its initial weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rayrec.models.ctr.dcn_v2 import DcnV2
from rayrec.models.ctr.deepfm import DeepFm
from rayrec.models.ctr.din import Din
from rayrec.models.ctr.dlrm import Dlrm
from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.ctr.mmoe import Mmoe
from rayrec.models.ctr.model import CtrModel
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema

if TYPE_CHECKING:  # the settings are pydantic models, which this room does not need to run
    from rayrec.models.ctr.config import (
        AnyCtrConfig,
        DcnV2Config,
        DeepFmConfig,
        DinConfig,
        DlrmConfig,
        MmoeConfig,
    )


class WeighedLabels(Protocol):
    """Settings of how often the loss of each label counts; those that are not named count once."""

    @property
    def label_weights(self) -> Mapping[str, float]: ...
    @property
    def positive_weights(self) -> Mapping[str, float]: ...


def build_ctr_model(config: AnyCtrConfig, schema: ImpressionSchema, seed: int) -> CtrModel:
    """The network; its initial weights depend on the seed and the shapes alone.

    It is made on torch's default device: the CPU, or `meta` to know its shapes without their memory.

    Raises:
        InputError: settings name a column that there is not, or nothing could be learned.
    """
    loss = label_loss(config, schema)
    if config.name == "din":
        _check_attention(config, schema)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MODELS[config.name](config, schema, loss)


def label_loss(config: WeighedLabels, schema: ImpressionSchema) -> LabelLoss:
    """The loss of the schema's labels, weighed as the settings say.

    Raises:
        InputError: settings name a label that there is not, or nothing could be learned.
    """
    if not schema.labels or not schema.features:
        what = "column of labels" if not schema.labels else "column of numbers, ids or lists"
        raise InputError(f"a ranking model needs at least one {what}; name those of the data")
    for name, weights in (
        ("label_weights", config.label_weights),
        ("positive_weights", config.positive_weights),
    ):
        _check_names(f"model.{name}", weights, schema.labels, "column of labels")
    if not any(config.label_weights.get(label, 1.0) for label in schema.labels):
        raise InputError("model.label_weights is 0 for every label; leave out those that are to be learned")
    return LabelLoss(
        [config.label_weights.get(label, 1.0) for label in schema.labels],
        [config.positive_weights.get(label, 1.0) for label in schema.labels],
    )


def _check_attention(config: DinConfig, schema: ImpressionSchema) -> None:
    _check_names("model.attention", config.attention, schema.lists, "column of lists")
    _check_names("model.attention", config.attention.values(), schema.ids, "column of ids")
    for column, target in config.attention.items():
        if schema.lists[column] != schema.ids[target]:
            raise InputError(
                f"model.attention weighs {column!r} by {target!r}, whose ids are of other spaces "
                f"({schema.lists[column]!r} and {schema.ids[target]!r}), so that no id of one can be told "
                "from those of the other; pair columns of one space, or give both the same"
            )


def _check_names(setting: str, named: Iterable[str], known: Iterable[str], what: str) -> None:
    missing = [name for name in named if name not in known]
    if missing:
        there_are = ", ".join(map(repr, known)) or "none"
        raise InputError(f"{setting} names {missing[0]!r}, which is no {what}; there are: {there_are}")


def _dlrm(config: DlrmConfig, schema: ImpressionSchema, label_loss: LabelLoss) -> Dlrm:
    return Dlrm(schema, label_loss, config.dim, config.bottom_dims, config.hidden_dims, config.dropout)


def _deepfm(config: DeepFmConfig, schema: ImpressionSchema, label_loss: LabelLoss) -> DeepFm:
    return DeepFm(schema, label_loss, config.dim, config.hidden_dims, config.dropout)


def _dcn_v2(config: DcnV2Config, schema: ImpressionSchema, label_loss: LabelLoss) -> DcnV2:
    return DcnV2(
        schema,
        label_loss,
        config.dim,
        config.num_cross_layers,
        config.rank,
        config.structure,
        config.hidden_dims,
        config.dropout,
    )


def _din(config: DinConfig, schema: ImpressionSchema, label_loss: LabelLoss) -> Din:
    return Din(
        schema,
        label_loss,
        config.dim,
        config.attention,
        config.attention_dims,
        config.activation,
        config.hidden_dims,
        config.dropout,
    )


def _mmoe(config: MmoeConfig, schema: ImpressionSchema, label_loss: LabelLoss) -> Mmoe:
    return Mmoe(
        schema,
        label_loss,
        config.dim,
        config.num_experts,
        config.hidden_dims,
        config.tower_dims,
        config.dropout,
    )


_MODELS: dict[str, Callable[[Any, ImpressionSchema, LabelLoss], CtrModel]] = {
    "dlrm": _dlrm,
    "deepfm": _deepfm,
    "dcn_v2": _dcn_v2,
    "din": _din,
    "mmoe": _mmoe,
}
"""By name of the config."""
