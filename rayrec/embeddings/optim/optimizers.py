"""The optimizers of embedding rows, by their settings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rayrec.embeddings.optim.adagrad import Adagrad, AdagradConfig
from rayrec.embeddings.optim.adam import Adam, AdamConfig
from rayrec.embeddings.optim.ftrl import Ftrl, FtrlConfig
from rayrec.embeddings.optim.partial_rowwise_adam import PartialRowwiseAdam, PartialRowwiseAdamConfig
from rayrec.embeddings.optim.row_optimizer import RowOptimizer
from rayrec.embeddings.optim.rowwise_adagrad import RowwiseAdagrad, RowwiseAdagradConfig
from rayrec.embeddings.optim.sgd import Sgd, SgdConfig
from rayrec.platform.schedule import RateSchedule

OPTIMIZERS: dict[type, type[RowOptimizer[Any]]] = {
    RowwiseAdagradConfig: RowwiseAdagrad,
    AdagradConfig: Adagrad,
    SgdConfig: Sgd,
    AdamConfig: Adam,
    PartialRowwiseAdamConfig: PartialRowwiseAdam,
    FtrlConfig: Ftrl,
}

OptimizerConfig = Annotated[
    RowwiseAdagradConfig | AdagradConfig | SgdConfig | AdamConfig | PartialRowwiseAdamConfig | FtrlConfig,
    Field(discriminator="kind"),
]


def make_optimizer(config: OptimizerConfig, schedule: RateSchedule) -> RowOptimizer[Any]:
    """Make the optimizer that the settings are of."""
    return OPTIMIZERS[type(config)](config, schedule)
