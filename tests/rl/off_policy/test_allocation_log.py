"""What another allocation of computing power would have earned, told from the request log of a service."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.platform.errors import InputError
from rayrec.rl.off_policy.estimators import diagnostics, inverse_propensity
from rayrec.rl.off_policy.logs import read_log
from rayrec.rl.off_policy.policies import always
from rayrec.serve.config.allocation import AllocateConfig
from rayrec.serve.engine.allocation import Allocator, Facts
from rayrec.serve.events.request_log import SCHEMA
from rayrec.serve.wire.schemas import ModelInfo

SHARES, COSTS = (1.0, 0.7, 0.3), (4e-3, 2e-3, 1e-3)
CLICKS = 0.4
"""Probability of a click on the answer of full effort; of others, their share of it."""
NUM_REQUESTS, PRICE = 5_000, 300.0
CONFIG = AllocateConfig.parse(
    {
        "actions": [{"name": "full"}, {"name": "half", "max_beams": 10}, {"name": "few", "max_beams": 2}],
        "curves": "-",
        "explore": 0.3,
        "floor_every": 0,
    }
)


def allocator_at(price: float, config: AllocateConfig = CONFIG) -> Allocator:
    allocator = Allocator(config, lambda *_: SHARES, lambda: COSTS, lambda: 0.0, lambda: 0.0)
    allocator.price.value = price
    return allocator


def write_log(folder, price: float = PRICE) -> tuple[str, str, np.ndarray]:
    """Request log and clicks of a service that explores, and the values of the requests."""
    random = np.random.default_rng(1)
    allocator, model = allocator_at(price), ModelInfo(run="run", step=1)
    values_N = 1 + random.pareto(2.5, NUM_REQUESTS)
    rows, clicked = [], []
    for number, value in enumerate(values_N.tolist()):
        facts = Facts(f"u{number}", 10, int(random.integers(2**63)) * 2)
        decision = allocator.decide(facts, repr(value), model)
        rows.append({"request_id": f"r{number}", "row": 0, "recommended": ["a", "b"], **decision.columns})
        share = SHARES[["full", "half", "few"].index(decision.action)]
        if random.random() < CLICKS * share:
            clicked.append(f"r{number}")
    rows.append({"request_id": "of no allocator", "row": 0, "recommended": ["a"]})
    day = folder / "requests" / "date=2026-11-25"
    day.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), day / "part-0.parquet")
    pq.write_table(pa.table({"request_id": clicked}), folder / "clicks.parquet")
    return str(folder / "requests"), str(folder / "clicks.parquet"), values_N


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    requests, clicks, values_N = write_log(folder)
    script = runpy.run_path("docs/guides/examples/off_policy/join_rewards.py")
    assert script["join_rewards"](requests, clicks, str(folder / "log.parquet")) == NUM_REQUESTS
    return folder / "log.parquet", values_N


@pytest.mark.slow
def test_what_one_action_for_all_would_have_earned_is_within_the_interval(joined):
    path, values_N = joined
    for action, share in zip(("full", "half", "few"), SHARES, strict=True):
        result = CliRunner().invoke(
            app,
            [
                "off-policy",
                str(path),
                "--policy",
                "always",
                "--action",
                action,
                "--resamples",
                "100",
                "--json",
            ],
        )
        assert result.exit_code == 0, result.stderr
        said = json.loads(result.stdout.splitlines()[-1])
        assert said["num_rows"] == NUM_REQUESTS
        assert not said["diagnostics"]["is_implausible"]
        truth = CLICKS * share * values_N.mean()
        for name in ("inverse propensity", "self-normalized", "doubly robust"):
            estimate = said["estimates"][name]
            assert estimate["low"] <= truth <= estimate["high"], (action, name, truth, estimate)
            assert estimate["value"] == pytest.approx(truth, rel=0.2)


def test_what_another_price_would_have_earned_is_within_the_interval(joined):
    path, values_N = joined
    log, model = read_log(path), ModelInfo(run="run", step=1)
    without_chance = CONFIG.model_copy(update={"explore": 0.0})
    cheaper = allocator_at(PRICE / 4, without_chance)
    chosen = [cheaper.decide(Facts(None, 10, 0), repr(value), model).action for value in values_N.tolist()]
    names = list(log.action_names)
    target_NA = np.zeros((len(log), log.num_actions))
    target_NA[np.arange(len(log)), [names.index(name) for name in chosen]] = 1.0

    found = inverse_propensity(log, target_NA).estimate(200)

    share_of = dict(zip(("full", "half", "few"), SHARES, strict=True))
    truth = float(np.mean([CLICKS * share_of[each] * v for each, v in zip(chosen, values_N, strict=True)]))
    assert found.low <= truth <= found.high
    assert diagnostics(log, target_NA).mean_weight == pytest.approx(1.0, abs=0.08)
    assert truth > log.rewards_N.mean()  # what the log earned by a higher price, and by chance


def test_answers_that_could_have_got_no_other_action_say_nothing(tmp_path):
    requests, clicks, _ = write_log(tmp_path, price=0.0)
    script = runpy.run_path("docs/guides/examples/off_policy/join_rewards.py")
    script["join_rewards"](requests, clicks, str(tmp_path / "log.parquet"))
    with pytest.raises(InputError, match="none could have got another action"):
        read_log(tmp_path / "log.parquet")


def write_requests(path, ids):
    decided = {"row": 0, "action": "full", "propensity": 0.5, "value": 2.0, "price": 0.1}
    rows = [{"request_id": request_id, **decided} for request_id in ids]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


@pytest.mark.parametrize(
    "clicks",
    [{"request_id": [1, 3]}, {"request_id": ["1", "3"], "row": pa.array([None, 0], pa.int64())}],
    ids=["ids as numbers", "no number of the request in its message"],
)
def test_clicks_belong_to_their_answers_however_they_are_written(clicks, tmp_path):
    write_requests(tmp_path / "requests.parquet", ["1", "2", "3"])
    pq.write_table(pa.table(clicks), tmp_path / "clicks.parquet")
    script = runpy.run_path("docs/guides/examples/off_policy/join_rewards.py")

    files = [str(tmp_path / f"{name}.parquet") for name in ("requests", "clicks", "log")]
    assert script["join_rewards"](*files) == 3

    assert pq.read_table(files[2])["reward"].to_pylist() == [2.0, 0.0, 2.0]


def test_an_answer_that_is_there_twice_cannot_be_joined_with_clicks(tmp_path):
    write_requests(tmp_path / "requests.parquet", ["1", "1"])
    pq.write_table(pa.table({"request_id": ["1"]}), tmp_path / "clicks.parquet")
    script = runpy.run_path("docs/guides/examples/off_policy/join_rewards.py")

    files = [str(tmp_path / f"{name}.parquet") for name in ("requests", "clicks", "log")]
    with pytest.raises(SystemExit, match="is there twice"):
        script["join_rewards"](*files)


def test_a_log_of_decisions_without_rewards_says_what_to_add(tmp_path):
    requests, _, _ = write_log(tmp_path)
    with pytest.raises(InputError, match="add `reward` beside `action` and `propensity`"):
        read_log(requests)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": [1.0, None]}, "row 2: reward is None, expected a number from 0"),
        ({"action": ["full", None]}, "row 2: action is missing"),
        ({"propensity": ["a half", "0.5"]}, "column propensity has the type string; expected numbers"),
    ],
)
def test_what_is_wrong_with_decisions_is_said_by_the_names_that_the_log_has(tmp_path, changes, message):
    right = {"request_id": ["a", "b"], "action": ["full", "few"]}
    right |= {"propensity": [0.5, 0.5], "reward": [1, 0]}
    pq.write_table(pa.table(right | changes), tmp_path / "log.parquet")
    with pytest.raises(InputError, match=message):
        read_log(tmp_path / "log.parquet")


def test_an_action_that_nobody_got_cannot_be_evaluated(joined):
    with pytest.raises(
        InputError, match="no action 'most', so nothing can be told of it; there are few, full"
    ):
        always(read_log(joined[0]), "most")
    result = CliRunner().invoke(app, ["off-policy", str(joined[0]), "--policy", "always"])
    assert result.exit_code == 2
    assert "--action says what --policy always does" in " ".join(result.stderr.split())
