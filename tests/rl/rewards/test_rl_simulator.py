"""Feedback of a simulated world, by worked numbers."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy.special import expit

from rayrec.pipelines.inference.answers import Query
from rayrec.platform.errors import InputError
from rayrec.rl.rewards.base import RewardContext
from rayrec.rl.rewards.config import RewardsConfig, build_rewards
from rayrec.rl.rewards.simulator import World
from tests.rl.rewards.rl_lists import CODES_IL, lists_of

KEYS = pd.Index(["a", "b", "c", "d", "e"])
WORLD = World(
    pd.Index(["u1", "u0"]),
    affinity_UF=np.array([[0.0, 1.0], [2.0, 0.0]]),
    factors_IF=np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.0], [-1.0, 0.0]]),
    quality_I=np.array([0.0, 0.0, 1.0, -1.0, 0.0]),
    category_I=np.array([0, 1, 0, 1, 2]),
)


@pytest.fixture
def folder(tmp_path) -> Path:
    # Items in another order than the catalog's.
    order_I = np.array([4, 2, 0, 1, 3])
    World(
        WORLD.user_keys,
        WORLD.affinity_UF,
        WORLD.factors_IF[order_I],
        WORLD.quality_I[order_I],
        WORLD.category_I[order_I],
    ).write(tmp_path / "world", KEYS[order_I])
    return tmp_path / "world"


def answers(folder: Path, items, histories, **settings) -> np.ndarray:
    """Of the users u0, u1, ...; ids of items are their positions plus 100."""
    config = RewardsConfig.parse({"parts": [{"kind": "simulator", "path": str(folder), **settings}]})

    def positions(item_ids: np.ndarray) -> np.ndarray:
        return np.where(item_ids >= 100, item_ids - 100, -1)

    context = RewardContext(CODES_IL, np.ones(5, dtype=np.int64), KEYS, item_positions=positions)
    queries = [Query(np.array(history, dtype=np.int64) + 100) for history in histories]
    mix = build_rewards(config, context)
    return mix.mix(lists_of(items, queries=queries)).parts["simulator"]


def test_expected_feedback_is_the_probability_of_the_truth(folder):
    found_UG = answers(folder, [[0, 2, -1], [0, 2, 3]], [[1], [1]], feedback="expected")
    expected_UG = [[expit(2.0), expit(2.0), 0.0], [0.5, expit(1.5), expit(-1.0)]]
    np.testing.assert_allclose(found_UG, expected_UG)


def test_a_category_that_fills_the_newest_events_satiates(folder):
    """Items 0 and 2 are of one category; of the newest two events, both, one or none are."""
    items, settings = [[2], [2]], {"feedback": "expected", "satiation": 2.0, "memory": 2}
    found_UG = answers(folder, items, [[1, 0, 2], [0, 2, 1]], **settings)
    np.testing.assert_allclose(found_UG, [[expit(2.0 - 2.0)], [expit(1.5 - 1.0)]])
    # One event is half of the memory, and item ids that the catalog lacks are of no category.
    found_UG = answers(folder, items, [[0], [-50, -50]], **settings)
    np.testing.assert_allclose(found_UG, [[expit(2.0 - 1.0)], [expit(1.5)]])


@pytest.mark.slow
def test_sampled_feedback_is_0_or_1_at_the_rate_of_the_truth_and_repeats_itself(folder):
    histories = [list(range(length)) for length in range(1, 401)]
    items = [[2, 2, 3]] * 400

    def asked(seed: int) -> np.ndarray:
        parts = [
            answers(folder, items[at : at + 2], histories[at : at + 2], seed=seed) for at in range(0, 400, 2)
        ]
        return np.concatenate(parts)

    found_UG = asked(0)
    assert set(np.unique(found_UG)) == {0.0, 1.0}
    # The same user in the same situation gives the same answer.
    assert (found_UG[:, 0] == found_UG[:, 1]).all()
    assert (asked(0) == found_UG).all()
    assert (asked(1) != found_UG).any()
    rate, expected = found_UG[:, 0].mean(), (expit(2.0) + expit(1.5)) / 2
    assert rate == pytest.approx(expected, abs=0.06)


def test_rows_with_fewer_factors_are_not_filled_up_with_those_of_the_next(folder):
    items = pq.read_table(folder / "items.parquet")
    factors = [[1.0, 0.0, 5.0], [0.0], [0.5, 0.5], [0.0, 0.0], [-1.0, 0.0]]
    place = items.schema.get_field_index("factors")
    pq.write_table(items.set_column(place, "factors", [factors]), folder / "items.parquet")
    with pytest.raises(InputError, match=r"items\.parquet: rows have \[3, 1, 2\] factors"):
        World.read(folder, KEYS)


def test_users_and_items_of_another_world_are_refused(folder):
    with pytest.raises(Exception, match=r"the simulated world has no user 'u2'"):
        answers(folder, [[0]] * 3, [[1]] * 3)
    with pytest.raises(InputError, match=r"has no item 'z', which is in the catalog"):
        World.read(folder, pd.Index(["a", "z"]))
    with pytest.raises(InputError, match=r"no such file; a simulated world is a folder with"):
        World.read(folder / "elsewhere", KEYS)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("quality", [0.0, None, 0.0, 0.0, 0.0], r"row 2 has the quality nan; expected finite numbers"),
        ("quality", [0.0, 0.0, np.inf, 0.0, 0.0], r"row 3 has the quality inf"),
        ("category", [0, 0, 0, None, 0], r"row 4 has the category nan"),
        (
            "factors",
            [[0.0, 1.0], [0.0, np.nan], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
            r"row 2 has the factors \[ ?0. nan\]",
        ),
        ("item_key", ["a", "b", "c", "d", "a"], r"'a' is there a second time"),
    ],
)
def test_a_world_with_items_that_are_not_known_or_known_twice_is_refused(folder, column, values, said):
    items = pq.read_table(folder / "items.parquet")
    pq.write_table(
        items.set_column(items.schema.get_field_index(column), column, [values]), folder / "items.parquet"
    )
    with pytest.raises(InputError, match=rf"items\.parquet: .*{said}"):
        World.read(folder, KEYS)
