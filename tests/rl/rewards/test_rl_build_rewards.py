"""From settings to a mix of rewards, and the mistakes that are found on the way."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from rayrec.pipelines.inference.answers import Query
from rayrec.platform.errors import InputError
from rayrec.rl.rewards.base import RewardContext
from rayrec.rl.rewards.config import RewardsConfig, build_rewards
from rayrec.rl.rewards.guard import RewardGuard
from rayrec.rl.rewards.mix import RewardMix
from tests.rl.rewards.rl_lists import CODES_IL, lists_of

CATALOG = RewardContext(
    CODES_IL, np.array([4, 2, 1, 1, 0]), pd.Index(["a", "b", "c", "d", "e"]), ("home", "search")
)


def config_of(*parts: dict[str, Any], **settings: Any) -> RewardsConfig:
    return RewardsConfig.parse({"parts": list(parts), **settings})


def built(*parts: dict[str, Any]) -> RewardMix:
    return build_rewards(config_of(*parts), CATALOG)


def complaint(*parts: dict[str, Any]) -> str:
    with pytest.raises(InputError) as raised:
        built(*parts)
    return str(raised.value)


def test_every_kind_is_built_and_does_what_its_settings_say(tmp_path):
    (tmp_path / "margins.csv").write_text("key,margin\na,2\nb,3\nc,5\nd,7\ne,11\n")
    config = RewardsConfig.load(
        _yaml(
            tmp_path,
            f"""
            parts:
              - {{kind: validity}}
              - {{kind: hit, weight: 2.0}}
              - {{kind: prefix_match}}
              - {{kind: rank_position}}
              - {{kind: rank_position, name: wrong, penalty: true, only_with_hit: true}}
              - {{kind: diversity}}
              - {{kind: novelty}}
              - {{kind: business_value, path: {tmp_path}/margins.csv, key_column: key, column: margin}}
              - {{kind: ranker, name: click, ranking: {{run: runs/click}}}}
              - kind: expected_value
                path: {tmp_path}/margins.csv
                key_column: key
                column: margin
                ranking: {{run: runs/click}}
              - {{kind: function, function: "tests.rl.rewards.test_rl_build_rewards:position"}}
            """,
        )
    )

    def click(queries: Any, items_UG: np.ndarray) -> np.ndarray:
        return np.where(items_UG >= 0, 0.25, np.nan)

    context = dataclasses.replace(CATALOG, load_ranker=lambda ranking: click)
    assert config.needs_queries
    mixed = build_rewards(config, context).mix(
        lists_of([[1, 0, -1]], targets=[0], queries=[Query(np.array([1]))])
    )

    second = 1 / np.log2(3)
    assert {name: part[0].tolist() for name, part in mixed.parts.items()} == {
        "validity": [1, 1, 0],
        "hit": [0, 1, 0],
        "prefix_match": [0.5, 1, 0],
        "rank_position": [0, second, 0],
        "wrong": [pytest.approx(-1 / (1 + second)), 0, 0],
        "diversity": [0.5, 0.5, 0],
        "novelty": [pytest.approx(2 / 3), pytest.approx(1 / 3), 0],
        "business_value": [3, 2, 0],
        "click": [0.25, 0.25, 0],
        "expected_value": [0.75, 0.5, 0],
        "function": [1, 0, -1],
    }
    assert mixed.weighted["hit"].tolist() == [[0, 2, 0]]


def position(lists: Any) -> np.ndarray:
    """What a user might write."""
    return np.asarray(lists.items_UG, dtype=np.float64)


def _yaml(folder: Path, text: str) -> Path:
    path = folder / "rewards.yaml"
    path.write_text(text)
    return path


def test_weights_and_normalization_reach_the_mix():
    mix = built({"kind": "hit", "weight": 1.5, "by_scenario": {"home": 0.5}, "normalize": "standard"})

    (part,) = mix.parts
    assert (part.name, part.weight, dict(part.by_scenario), part.normalize) == (
        "hit",
        1.5,
        {"home": 0.5},
        "standard",
    )


def test_settings_survive_yaml():
    config = config_of(
        {"kind": "rank_position", "penalty": True},
        {"kind": "function", "function": "a.b:c", "folder": "mine"},
        guard={"window": 3},
    )

    assert RewardsConfig.parse(yaml.safe_load(config.to_yaml())) == config


def test_an_unknown_scenario_is_refused_with_those_there_are():
    part = {"kind": "hit", "by_scenario": {"serach": 1.0}}

    assert "the reward 'hit' has a weight by_scenario for 'serach', but the data set has home, search" in (
        complaint(part)
    )
    without = RewardContext(CODES_IL, CATALOG.train_counts_I, CATALOG.item_keys)
    with pytest.raises(InputError, match="the data set has none"):
        build_rewards(config_of(part), without)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"kind": "hit"}, {"kind": "hit"}], "2 rewards of the name 'hit'"),
        ([{"kind": "hit"}, {"kind": "novelty", "name": "hit"}], "2 rewards of the name 'hit'"),
        ([{"kind": "hit", "name": "total"}], "name 'total', which is that of the sum"),
        ([{"kind": "hit", "weight": 0}, {"kind": "novelty", "weight": 0}], "no weight other than 0"),
        ([{"kind": "hit", "weight": 0, "by_scenario": {"home": 0}}], "no weight other than 0"),
        ([{"kind": "rank_position", "only_with_hit": True}], "set penalty to true"),
        ([{"kind": "function", "function": "fresh"}], "must be 'module:function', got 'fresh'"),
        ([{"kind": "hit", "weight": float("nan")}], "weight: input should be a finite number"),
        ([{"kind": "hit", "by_scenario": {"home": float("inf")}}], "home: input should be a finite number"),
        ([{"kind": "hit", "normalize": "rank"}], "normalize: input should be 'none' or 'standard'"),
        ([{"kind": "hits"}], "expected one of 'validity', 'hit',"),
        ([{"kind": "ranker"}], "the setting 'parts.0.ranking' is missing"),
        ([{"kind": "business_value", "path": "x.csv"}], "the setting 'parts.0.column' is missing"),
        ([], "parts: "),
    ],
)
def test_mistakes_are_found_before_anything_starts(parts, message):
    assert message in complaint(*parts)


def test_a_weight_in_one_scenario_is_enough():
    (part,) = built({"kind": "hit", "weight": 0, "by_scenario": {"home": 1.0}}).parts

    assert part.counts


def test_a_file_without_the_column_is_refused_by_name(tmp_path):
    path = tmp_path / "margins.csv"
    path.write_text("item_id,price\na,2\n")

    assert "no column 'margin'" in complaint(
        {"kind": "business_value", "path": str(path), "column": "margin"}
    )


def test_items_without_a_value_are_counted_in_the_log(tmp_path, caplog):
    path = tmp_path / "margins.csv"
    path.write_text("item_id,margin\na,2\nc,1\n")

    with caplog.at_level(logging.WARNING, "rayrec.rl.rewards.item_facts"):
        built({"kind": "business_value", "path": str(path), "column": "margin"})

    assert "'business_value' is 0 for 3 of 5 items" in caplog.text


def test_the_guard_has_its_settings():
    guard = RewardGuard(config_of({"kind": "hit"}, guard={"max_zero_variance": 0.0, "window": 1}).guard)
    equal = built({"kind": "hit"}).mix(lists_of([[0, 1]]))

    assert "more than 0%" in guard.watch(equal).warnings[0]


def test_rewards_need_neither_ray_nor_torch():
    program = "import sys, rayrec.rl.rewards.config; assert not {'ray', 'torch'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
