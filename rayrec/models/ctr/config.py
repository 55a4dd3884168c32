"""Settings of the ranking models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rayrec.platform.config import Config

Width = Annotated[int, Field(gt=0)]


class ImpressionModelConfig(Config):
    """What all models of impressions have, whoever wrote them."""

    dim: int = Field(16, gt=0)
    """Width of every id's embedding."""
    label_weights: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """By column of labels, how often its loss counts; 1 for others, and 0 for one that is not learned."""
    positive_weights: dict[str, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    """By column of labels, how often the loss of an impression with a 1 counts; 1 for others. Probabilities
    are then those of data with so many more of them: for ranking, not for bidding."""

    @property
    def row_dim(self) -> int:
        """Width of the rows of the embedding table."""
        return self.dim


class CtrConfig(ImpressionModelConfig):
    """What those have that come with us."""

    hidden_dims: tuple[Width, ...] = Field((256, 128, 64), min_length=1)
    """Widths of the layers of the MLP that follows what is particular to the model."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """After each of these layers."""


class DlrmConfig(CtrConfig):
    """Inner products of all pairs of features."""

    name: Literal["dlrm"]
    bottom_dims: tuple[Width, ...] = (128, 64)
    """Hidden widths of the MLP that makes one vector of all numbers; its last layer has `dim`."""


class DeepFmConfig(CtrConfig):
    """A factorization machine beside an MLP."""

    name: Literal["deepfm"]

    @property
    def row_dim(self) -> int:
        return self.dim + 1  # the weight of the first order


class DcnV2Config(CtrConfig):
    """Cross layers, below an MLP or beside it."""

    name: Literal["dcn_v2"]
    num_cross_layers: int = Field(3, gt=0)
    rank: int | None = Field(None, gt=0)
    """Of the matrices of cross layers; None is whole ones, of the square of an impression's width."""
    structure: Literal["stacked", "parallel"] = "stacked"


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


class MmoeConfig(CtrConfig):
    """Experts that the tasks share; `hidden_dims` are those of each expert."""

    name: Literal["mmoe"]
    hidden_dims: tuple[Width, ...] = Field((128, 64), min_length=1)
    num_experts: int = Field(4, gt=0)
    tower_dims: tuple[Width, ...] = (32,)
    """Hidden widths of each task's own MLP."""


AnyCtrConfig = DlrmConfig | DeepFmConfig | DcnV2Config | DinConfig | MmoeConfig
CtrModelConfig = Annotated[AnyCtrConfig, Field(discriminator="name")]
