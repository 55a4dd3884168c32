"""Logs of a policy with the probability of each logged action (its propensity).

Axes: N rows, A actions, F features of a context.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.errors import InputError

LOG_FILE, ITEMS_FILE = "all.csv.gz", "item_context.csv"
_COLUMNS = ("item_id", "position", "click", "propensity_score")


@dataclass(frozen=True)
class BanditLog:
    """One action per row, with its reward and its propensity.

    Raises:
        InputError: a propensity is not in (0, 1], or an action is out of range.
    """

    contexts_NF: Float64Array
    actions_N: Int64Array
    rewards_N: Float64Array
    propensities_N: Float64Array
    """Probability of the logged action, given the context and the position."""
    num_actions: int
    positions_N: Int64Array | None = None
    """Position on the page, from 0; None if there is only one."""
    name: str = "log"

    def __post_init__(self) -> None:
        is_wrong_N = ~((self.propensities_N > 0) & (self.propensities_N <= 1))
        if is_wrong_N.any():
            row = int(is_wrong_N.argmax())
            raise InputError(
                f"{self.name}: row {row + 1} has the propensity {self.propensities_N[row]}; it must be "
                "above 0 and at most 1, since actions that were never logged cannot be evaluated"
            )
        is_none_N = (self.actions_N < 0) | (self.actions_N >= self.num_actions)
        if is_none_N.any():
            row = int(is_none_N.argmax())
            raise InputError(
                f"{self.name}: row {row + 1} has the action {self.actions_N[row]}; there are "
                f"{self.num_actions}, from 0"
            )

    def __len__(self) -> int:
        return len(self.actions_N)

    def some(self, rows_M: NDArray[np.integer]) -> BanditLog:
        """Select rows."""
        return BanditLog(
            self.contexts_NF[rows_M],
            self.actions_N[rows_M],
            self.rewards_N[rows_M],
            self.propensities_N[rows_M],
            self.num_actions,
            None if self.positions_N is None else self.positions_N[rows_M],
            self.name,
        )


def read_open_bandit(folder: str | Path) -> BanditLog:
    """Read a campaign of the Open Bandit Dataset (Saito et al., NeurIPS 2021 Datasets, arXiv:2008.07146).

    Contexts are the four features of the user, one column for each value that they have.

    Args:
        folder: of one policy and campaign, with all.csv.gz and item_context.csv.

    Raises:
        InputError: a file or a column is missing, or a propensity cannot be used.
    """
    path, items = Path(folder) / LOG_FILE, Path(folder) / ITEMS_FILE
    for file in (path, items):
        if not file.is_file():
            raise InputError(f"{file}: missing; expected a folder of the Open Bandit Dataset, as bts/all")
    rows = pd.read_csv(path)
    users = sorted(name for name in rows.columns if name.startswith("user_feature_"))
    if missing := [name for name in _COLUMNS if name not in rows.columns]:
        raise InputError(f"{path}: has no column {missing[0]!r}; a log has {', '.join(_COLUMNS)}")
    contexts = (
        pd.get_dummies(rows[users].astype(str), dtype=float) if users else pd.DataFrame(index=rows.index)
    )
    return BanditLog(
        contexts.to_numpy(dtype=np.float64),
        rows["item_id"].to_numpy(dtype=np.int64),
        rows["click"].to_numpy(dtype=np.float64),
        rows["propensity_score"].to_numpy(dtype=np.float64),
        num_actions=len(pd.read_csv(items)),
        # The data set counts positions from 1.
        positions_N=rows["position"].to_numpy(dtype=np.int64) - 1,
        name=str(path),
    )
