"""Ids that share buckets, and every optimizer."""

import numpy as np

from rayrec.embeddings.base.routing import bucket_of
from rayrec.embeddings.config import (
    AdagradConfig,
    AdamConfig,
    FtrlConfig,
    PartialRowwiseAdamConfig,
    RowwiseAdagradConfig,
    SgdConfig,
)

OPTIMIZERS = (
    RowwiseAdagradConfig(lr=0.1, weight_decay=0.01),
    AdagradConfig(),
    SgdConfig(),
    AdamConfig(lr=0.05, weight_decay=0.2),
    PartialRowwiseAdamConfig(lr=0.05),
    FtrlConfig(l1=0.001, l2=0.1),
)


def crowded_ids(num: int) -> np.ndarray:
    """Ids that share few virtual buckets, so that capacity per bucket is a matter of several rows."""
    ids = np.arange(3_000_000, dtype=np.int64)
    return ids[bucket_of(ids) < 3][:num]


IDS = crowded_ids(40)
