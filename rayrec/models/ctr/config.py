"""Settings of models that predict the labels of impressions, and of those that come with us.

Imports no torch: feature workers read these settings, and start within a second. `build` imports the network.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from rayrec.models.base.config import ModelConfig
from rayrec.platform.devices import Device
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema

if TYPE_CHECKING:
    from torch import nn

    from rayrec.models.base.compute import ComputeSettings
    from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
    from rayrec.models.ctr.losses import LabelLoss
    from rayrec.models.ctr.model import CtrModel
    from rayrec.models.program.program import ProgramSpec

Width = Annotated[int, Field(gt=0)]


class ImpressionModelConfig(ModelConfig):
    """Settings of a model that predicts the labels of impressions. The smallest has a `name` and `build`."""

    kind: ClassVar[Literal["impressions"]] = "impressions"

    dim: int = Field(16, gt=0)
    """Width of every id's embedding."""
    label_weights: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """By column of labels, how often its loss counts; 1 for others, and 0 for one that is not learned."""
    positive_weights: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """By column of labels, how often the loss of an impression with a 1 counts; 1 for others. Probabilities
    are then those of data with so many more of them: for ranking, not for bidding."""

    @abstractmethod
    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> CtrModel:
        """The network with its initial weights, from torch's default generator, which is seeded.

        Raises:
            InputError: settings name a column that the data does not have.
        """

    @property
    def row_dim(self) -> int:
        """Width of the rows of the embedding table."""
        return self.dim

    @property
    def tables(self) -> dict[str, int]:
        return {FEATURE_TABLE: self.row_dim}

    def network(
        self, schema: ImpressionSchema, seed: int, device: Device, compute: ComputeSettings
    ) -> nn.Module:
        """The network as trainers will build it, without memory for its weights where that is possible.

        Raises:
            InputError: as `build`, or the model cannot compute in this way.
        """
        import torch

        from rayrec.models.ctr.program import build_ctr_model

        with torch.device("meta"):
            return build_ctr_model(self, schema, seed)

    def program(self, schema: ImpressionSchema, optimizer: DenseOptimizerSettings) -> ProgramSpec:
        """What trainers build."""
        from rayrec.models.ctr.program import CtrProgramSpec

        return CtrProgramSpec(self, schema, optimizer)


class CtrConfig(ImpressionModelConfig):
    """What the models that come with us have in common."""

    hidden_dims: tuple[Width, ...] = Field((256, 128, 64), min_length=1)
    """Widths of the layers of the MLP that follows what is particular to the model."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """After each of these layers."""


class DlrmConfig(CtrConfig):
    """Inner products of all pairs of features."""

    name: Literal["dlrm"]
    bottom_dims: tuple[Width, ...] = (128, 64)
    """Hidden widths of the MLP that makes one vector of all numbers; its last layer has `dim`."""

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> CtrModel:
        from rayrec.models.ctr.dlrm import Dlrm

        return Dlrm(schema, loss, self.dim, self.bottom_dims, self.hidden_dims, self.dropout)


class DeepFmConfig(CtrConfig):
    """A factorization machine beside an MLP."""

    name: Literal["deepfm"]

    @property
    def row_dim(self) -> int:
        return self.dim + 1  # the weight of the first order

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> CtrModel:
        from rayrec.models.ctr.deepfm import DeepFm

        return DeepFm(schema, loss, self.dim, self.hidden_dims, self.dropout)


class DcnV2Config(CtrConfig):
    """Cross layers, below an MLP or beside it."""

    name: Literal["dcn_v2"]
    num_cross_layers: int = Field(3, gt=0)
    rank: int | None = Field(None, gt=0)
    """Of the matrices of cross layers; None is whole ones, of the square of an impression's width."""
    structure: Literal["stacked", "parallel"] = "stacked"

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> CtrModel:
        from rayrec.models.ctr.dcn_v2 import DcnV2

        return DcnV2(
            schema,
            loss,
            self.dim,
            self.num_cross_layers,
            self.rank,
            self.structure,
            self.hidden_dims,
            self.dropout,
        )


class DinConfig(CtrConfig):
    """Lists of a history, each element weighed by what is shown."""

    name: Literal["din"]
    attention: dict[str, str]
    """Column of lists to the column of ids by which its elements are weighed, for example of clicked items to
    the item that is shown. Lists that are not named are averaged."""
    attention_dims: tuple[Width, ...] = Field((36,), min_length=1)
    """Hidden widths of the networks that weigh."""
    activation: Literal["dice", "prelu"] = "dice"

    @field_validator("attention")
    @classmethod
    def _something_is_weighed(cls, value: dict[str, str]) -> dict[str, str]:
        if not value:
            raise ValueError(
                "model.attention is empty, and din without it averages every list; name a column of lists "
                "and the column of ids that it is weighed by, or take another model"
            )
        return value

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> CtrModel:
        from rayrec.models.ctr.din import Din

        self._check_attention(schema)
        return Din(
            schema,
            loss,
            self.dim,
            self.attention,
            self.attention_dims,
            self.activation,
            self.hidden_dims,
            self.dropout,
        )

    def _check_attention(self, schema: ImpressionSchema) -> None:
        from rayrec.models.ctr.losses import check_names

        check_names("model.attention", self.attention, schema.lists, "column of lists")
        check_names("model.attention", self.attention.values(), schema.ids, "column of ids")
        for column, target in self.attention.items():
            if schema.lists[column] != schema.ids[target]:
                raise InputError(
                    f"model.attention weighs {column!r} by {target!r}, whose ids are of other spaces "
                    f"({schema.lists[column]!r} and {schema.ids[target]!r}), so that no id of one can be "
                    "told from those of the other; pair columns of one space, or give both the same"
                )


class MmoeConfig(CtrConfig):
    """Experts that the tasks share; `hidden_dims` are those of each expert."""

    name: Literal["mmoe"]
    hidden_dims: tuple[Width, ...] = Field((128, 64), min_length=1)
    num_experts: int = Field(4, gt=0)
    tower_dims: tuple[Width, ...] = (32,)
    """Hidden widths of each task's own MLP."""

    def build(self, schema: ImpressionSchema, loss: LabelLoss) -> CtrModel:
        from rayrec.models.ctr.mmoe import Mmoe

        return Mmoe(
            schema,
            loss,
            self.dim,
            self.num_experts,
            self.hidden_dims,
            self.tower_dims,
            self.dropout,
        )
