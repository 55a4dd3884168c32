"""A simulator with known truth: latent factors of users and items say how likely each item is to satisfy.

    logit P(user u is satisfied by item i after history h)
        = affinity_u · factors_i + quality_i - satiation · (share of h's newest events in i's category)

What a log shows and what satisfies are two things: exposure decides much of the first. So a policy that
imitates the log has a known distance from the best one, and feedback on items that the policy itself chooses
can close it.

    WORLD/users.parquet    user_key, affinity (list of F numbers)
    WORLD/items.parquet    item_key, factors (list of F numbers), quality, category

Axes: U users, G candidates of a user, I items of the catalog, F factors, M newest events of a history.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field
from scipy.special import expit

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.platform.remote_files import absolute
from rayrec.rl.rewards.base import CandidateLists, RewardArray, RewardContext, RewardSettings

USERS, ITEMS = "users.parquet", "items.parquet"


class SimulatorConfig(RewardSettings):
    """Feedback of simulated users."""

    needs_queries: ClassVar[bool] = True

    kind: Literal["simulator"] = "simulator"
    path: str = Field(min_length=1)
    """Folder of the world."""
    feedback: Literal["sampled", "expected"] = "sampled"
    """`sampled`: 1 if the user is satisfied, else 0; the same item after as many events has the same answer.
    `expected`: its probability."""
    satiation: Annotated[float, Field(ge=0)] = 0.0
    """How much the logit falls if all newest events are of the item's category."""
    memory: Annotated[int, Field(ge=1)] = 5
    """Newest events that satiate."""
    seed: int = 0
    """Of the answers."""

    def build(self, context: RewardContext) -> Simulator:
        assert context.item_positions is not None, "the context knows the data set"
        world = World.read(self.path, context.item_keys, self.satiation)
        return Simulator(world, context.item_positions, self.feedback, self.memory, self.seed)

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"path": absolute(self.path)})


class World:
    """The truth; items are in catalog order."""

    def __init__(
        self,
        user_keys: pd.Index,
        affinity_UF: Float64Array,
        factors_IF: Float64Array,
        quality_I: Float64Array,
        category_I: Int64Array,
        satiation: float = 0.0,
    ) -> None:
        self.user_keys, self.affinity_UF = user_keys, affinity_UF
        self.factors_IF, self.quality_I, self.category_I = factors_IF, quality_I, category_I
        self.satiation = satiation

    @classmethod
    def read(cls, path: str | Path, item_keys: pd.Index, satiation: float = 0.0) -> World:
        """Read a world.

        Args:
            item_keys: [I] keys of the catalog, strings.

        Raises:
            InputError: a file or column is missing, an item of the catalog is not in the world, a user or
                item is there twice, a number is missing or not finite, or users and items have different
                numbers of factors, or some of them have.
        """
        folder = Path(path)
        users = _table(folder / USERS, ("user_key", "affinity"))
        items = _table(folder / ITEMS, ("item_key", "factors", "quality", "category"))
        row_I = _keys(items["item_key"], folder / ITEMS).get_indexer(item_keys)
        if (row_I < 0).any():
            missing = item_keys[int(np.argmax(row_I < 0))]
            raise InputError(
                f"{folder / ITEMS}: has no item {missing!r}, which is in the catalog: nothing is known of "
                "its utility; name the world that the data set was made by"
            )
        affinity_UF = _matrix(users["affinity"], folder / USERS)
        factors_IF = _matrix(items["factors"], folder / ITEMS)[row_I]
        if affinity_UF.shape[1] != factors_IF.shape[1]:
            raise InputError(
                f"{folder}: users have {affinity_UF.shape[1]} factors and items {factors_IF.shape[1]}; their "
                "product needs as many"
            )
        return cls(
            _keys(users["user_key"], folder / USERS),
            affinity_UF,
            factors_IF,
            _numbers(items["quality"], folder / ITEMS, "quality")[row_I],
            _numbers(items["category"], folder / ITEMS, "category").astype(np.int64)[row_I],
            satiation,
        )

    def write(self, path: Path, item_keys: pd.Index) -> None:
        """Write the files that `read` reads."""
        path.mkdir(parents=True, exist_ok=True)
        users = {"user_key": self.user_keys.to_numpy(), "affinity": list(self.affinity_UF)}
        items = {
            "item_key": item_keys.to_numpy(),
            "factors": list(self.factors_IF),
            "quality": self.quality_I,
            "category": self.category_I,
        }
        pq.write_table(pa.table(users), path / USERS)
        pq.write_table(pa.table(items), path / ITEMS)

    def rows_of(self, user_keys: list[str]) -> Int64Array:
        """[U] rows of users.

        Raises:
            ValueError: a user is not in the world.
        """
        rows_U: Int64Array = self.user_keys.get_indexer(pd.Index(user_keys)).astype(np.int64)
        if (rows_U < 0).any():
            unknown = user_keys[int(np.argmax(rows_U < 0))]
            raise ValueError(f"the simulated world has no user {unknown!r}")
        return rows_U

    def satisfaction(self, rows_U: Int64Array, items_UG: Int64Array, newest_UM: Int64Array) -> Float64Array:
        """[U, G] the probability that an item satisfies.

        Args:
            rows_U: of the users, as `rows_of` has them.
            items_UG: catalog positions, not negative.
            newest_UM: catalog positions of the newest events; -1 where there is none.
        """
        logit_UG = np.einsum("uf,ugf->ug", self.affinity_UF[rows_U], self.factors_IF[items_UG])
        logit_UG += self.quality_I[items_UG]
        if self.satiation:
            newest_UM = np.where(newest_UM >= 0, self.category_I[newest_UM], -1)
            is_same_UGM = self.category_I[items_UG][:, :, None] == newest_UM[:, None, :]
            logit_UG -= self.satiation * is_same_UGM.mean(axis=2)
        probability_UG: Float64Array = expit(logit_UG)
        return probability_UG


class Simulator:
    """Feedback of a world's users to candidates."""

    def __init__(
        self,
        world: World,
        item_positions: Callable[[Int64Array], Int64Array],
        feedback: Literal["sampled", "expected"],
        memory: int,
        seed: int,
    ) -> None:
        """
        Args:
            item_positions: item ids to catalog positions.
        """
        self._world, self._positions, self._feedback = world, item_positions, feedback
        self._memory, self._seed = memory, seed

    def __call__(self, lists: CandidateLists) -> RewardArray:
        """Ask the users, whose queries are given.

        Raises:
            ValueError: the lists have no queries, or a user is not in the world.
        """
        if lists.queries is None:
            raise ValueError("a simulator needs the queries of the users, and the lists have none")
        rows_U = self._world.rows_of(list(lists.user_keys))
        newest_UM = np.full((lists.num_users, self._memory), -1)
        for user, query in enumerate(lists.queries):
            newest = query.history_ids[-self._memory :]
            newest_UM[user, : len(newest)] = self._positions(newest)
        items_UG = np.maximum(lists.items_UG, 0)
        reward_UG = self._world.satisfaction(rows_U, items_UG, newest_UM)
        if self._feedback == "sampled":
            num_events_U = np.array([len(query.history_ids) for query in lists.queries])
            user_U = combine64(self._seed, rows_U, num_events_U)
            uniform_UG = (combine64(user_U[:, None], items_UG) >> np.uint64(11)) * 2.0**-53
            reward_UG = (uniform_UG < reward_UG).astype(np.float64)
        return np.where(lists.is_item_UG, reward_UG, 0.0)


def _table(path: Path, columns: tuple[str, ...]) -> pa.Table:
    if not path.is_file():
        raise InputError(f"{path}: no such file; a simulated world is a folder with {USERS} and {ITEMS}")
    names = pq.read_schema(path).names
    for column in columns:
        if column not in names:
            raise InputError(f"{path}: no column {column!r} of a simulated world; found {', '.join(names)}")
    return pq.read_table(path, columns=list(columns))


def _keys(column: pa.ChunkedArray, file: Path) -> pd.Index:
    """Keys of users or items, each once."""
    keys = pd.Index(column.cast(pa.string()).to_pandas())
    if keys.has_duplicates:
        twice = keys[int(np.argmax(keys.duplicated()))]
        raise InputError(f"{file}: {twice!r} is there a second time; keep one of its rows")
    return keys


def _numbers(column: pa.ChunkedArray, file: Path, name: str) -> Float64Array:
    """A finite number of each row."""
    return _finite(column.to_numpy().astype(np.float64), file, name)


def _finite(values_R: Float64Array, file: Path, name: str) -> Float64Array:
    """Rows of numbers; one that is not finite would satisfy nobody, without a word."""
    is_finite_R = np.isfinite(values_R).all(axis=tuple(range(1, values_R.ndim)))
    if not is_finite_R.all():
        row = int(np.argmin(is_finite_R))
        raise InputError(f"{file}: row {row + 1} has the {name} {values_R[row]}; expected finite numbers")
    return values_R


def _matrix(lists: pa.ChunkedArray, file: Path) -> Float64Array:
    """Rows of equal length."""
    rows = lists.combine_chunks()
    lengths = pc.unique(pc.list_value_length(rows)).to_pylist()
    if len(lengths) != 1 or lengths == [None]:  # in all, they may still divide into equal rows
        raise InputError(f"{file}: rows have {lengths} factors; each needs as many as the others")
    values = rows.flatten()
    if values.null_count:
        raise InputError(f"{file}: {values.null_count} factors are missing; each row needs all of its own")
    return _finite(values.to_numpy().astype(np.float64).reshape(len(rows), -1), file, "factors")
