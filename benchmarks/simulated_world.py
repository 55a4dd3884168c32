"""A simulated world whose log says what was shown more than what satisfies; its truth is known.

    logged choice of user u   ∝ exp(affinity_u · factors_i + exposure_i), without replacement
    satisfaction              = σ(affinity_u · factors_i + quality_i - satiation · share of newest events)

Exposure is what promotion decides, and quality is what it does not ask for: the two are negatively
correlated. A model of the log learns affinity and exposure, so it recommends what is shown; the log has no
trace of quality. Feedback on what a policy recommends has.

Axes: U users, I items, F factors, C categories, K positions of a list, M newest events.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.rl.rewards.simulator import World

SATIATION, MEMORY = 1.0, 5
MEAN_QUALITY = -5.5
AGAINST = 0.6
"""Correlation of exposure with quality, negative."""


@dataclass(frozen=True)
class LoggedWorld:
    """A world, and how it was logged."""

    world: World
    item_keys: pd.Index
    exposure_I: Float64Array

    @classmethod
    def random(
        cls, num_users: int = 1_000, num_items: int = 200, num_categories: int = 10, seed: int = 0
    ) -> LoggedWorld:
        random = np.random.default_rng([seed, 0x57])
        num_factors = 8
        center_CF = random.normal(size=(num_categories, num_factors))
        category_I = np.arange(num_items) % num_categories
        factors_IF = 0.8 * center_CF[category_I] + 0.6 * random.normal(size=(num_items, num_factors))
        affinity_UF = 0.6 * random.normal(size=(num_users, num_factors))
        quality_I = random.normal(size=num_items)
        other_I = random.normal(size=num_items)
        exposure_I = -AGAINST * quality_I + np.sqrt(1 - AGAINST**2) * other_I
        world = World(
            pd.Index([f"u{user}" for user in range(num_users)]),
            affinity_UF,
            factors_IF,
            quality_I + MEAN_QUALITY,
            category_I,
            SATIATION,
        )
        return cls(world, pd.Index([f"i{item}" for item in range(num_items)]), exposure_I)

    def write(self, folder: Path, shortest: int = 6, longest: int = 16, seed: int = 0) -> None:
        """Write the truth to `folder/world`, and a log of interactions to `folder/source`."""
        self.world.write(folder / "world", self.item_keys)
        random = np.random.default_rng([seed, 0x10])
        logit_UI = self.world.affinity_UF @ self.world.factors_IF.T + self.exposure_I
        # The order of perturbed logits is a sample without replacement: the Gumbel-max trick.
        order_UI = np.argsort(-(logit_UI + random.gumbel(size=logit_UI.shape)), axis=1)
        lengths_U = random.integers(shortest, longest + 1, size=len(logit_UI))
        users_N = np.repeat(np.arange(len(logit_UI)), lengths_U)
        items_N = np.concatenate([order_UI[user, :length] for user, length in enumerate(lengths_U)])
        rows = {
            "user_id": self.world.user_keys.to_numpy()[users_N],
            "item_id": self.item_keys.to_numpy()[items_N],
            "timestamp": np.arange(len(users_N)),
        }
        (folder / "source").mkdir(parents=True)
        pq.write_table(pa.table(rows), folder / "source" / "interactions.parquet")


def best_lists(world: World, rows_U: Int64Array, newest_UM: Int64Array, seen_UE: Int64Array) -> Float64Array:
    """[U] mean satisfaction of the best ten items that a user has not seen: the optimum of any policy.

    Args:
        rows_U: of the users in the world.
        newest_UM: catalog positions of their newest events; -1 where there is none.
        seen_UE: catalog positions of all their events; -1 where there is none.
    """
    all_UI = np.broadcast_to(np.arange(len(world.quality_I)), (len(rows_U), len(world.quality_I)))
    value_UI = world.satisfaction(rows_U, all_UI, newest_UM)
    users_U1 = np.arange(len(rows_U))[:, None]
    # A column more takes what pads the histories.
    value_UI = np.concatenate([value_UI, np.zeros((len(rows_U), 1))], axis=1)
    value_UI[users_U1, seen_UE] = 0.0
    best_U: Float64Array = np.sort(value_UI, axis=1)[:, -10:].mean(axis=1)
    return best_U
