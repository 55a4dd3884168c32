"""Two variants, compared by the logs of a service."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.pipelines.metrics.ab_test import VariantRows, compared, sample_ratio
from rayrec.platform.errors import InputError
from rayrec.samples.prepare.ids import hash_strings
from rayrec.serve.config.events import RequestLogConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.ab_log import read_ab_log
from rayrec.serve.events.intake import LOG_SCHEMA
from rayrec.serve.events.request_log import SCHEMA, RequestLog
from rayrec.serve.web.api import build_api
from tests.serve.fake_recommender import FakeRecommender

MINUTE = 60_000_000


def request(number, user, minute, items=(), version=1, target=None, latency_ms=10.0, error=None):
    known = {
        "request_id": f"r{number}",
        "row": 0,
        "time": minute * MINUTE,
        "user_key": None if user is None else f"u{user}",
        "user_id": user,
        "recommended": list(items),
        "target": target,
        "version": version,
        "latency_ms": latency_ms,
        "error": error,
    }
    return {name: known.get(name) for name in SCHEMA.names}


def write_requests(folder, rows, schema=SCHEMA):
    day = folder / "date=2026-05-01"
    day.mkdir(parents=True, exist_ok=True)
    names = schema.names
    table = pa.Table.from_pylist([{name: row[name] for name in names} for row in rows], schema=schema)
    pq.write_table(table, day / f"part-{len(list(day.iterdir()))}.parquet")
    return str(folder)


def write_events(folder, rows, hashed=False):
    """(User, item, minute, behavior) of each."""
    day = folder / "date=2026-05-01"
    day.mkdir(parents=True, exist_ok=True)
    users, items, minutes, behaviors = zip(*rows, strict=True)
    ids = hash_strings(pa.array([str(item) for item in items])) if hashed else np.array(items)
    columns = {
        "user_id": pa.array(users, pa.int64()),
        "item_id": pa.array(ids, pa.int64()),
        "timestamp": pa.array([int(minute * MINUTE) for minute in minutes], pa.timestamp("us")),
        "behavior": pa.array(behaviors, pa.string()),
        "event_key": pa.array(range(len(rows)), pa.int64()),
    }
    pq.write_table(pa.table(columns, schema=LOG_SCHEMA), day / "part-0.parquet")
    return str(folder)


def metrics_of(log):
    return compared(*log.rows, log.num_users, num_resamples=200)


def test_worked_numbers_of_errors_latency_and_outcomes(tmp_path):
    log = write_requests(
        tmp_path / "requests",
        [
            request(1, 1, 0, ["7", "8"], version=1, latency_ms=10),
            request(2, 1, 5, ["7", "9"], version=1, latency_ms=30),
            request(3, 2, 1, ["7"], version=2, latency_ms=20),
            request(4, 3, 2, version=2, latency_ms=99, error="RuntimeError: failed"),
            request(5, 4, 6, ["9"], version=1, latency_ms=20),
            request(6, 2, 7, ["5"], version=2, latency_ms=40),
        ],
    )
    events = write_events(
        tmp_path / "events",
        [
            (1, 7, 6, "view"),  # of the request at 5, which showed it last
            (1, 9, 6, "buy"),
            (1, 8, 61, "view"),  # more than an hour after it was shown
            (2, 7, 0.5, "view"),  # before it was shown
            (2, 7, 3, "view"),
            (2, 8, 3, "view"),  # was not shown
            (9, 7, 3, "view"),  # to somebody else
        ],
    )
    found = read_ab_log(log, events=events, baseline="2")
    assert (found.by, found.num_users, found.num_shared_users) == ("version", 4, 0)
    assert found.num_left_out == 2  # at minutes 0 and 7 only one of the two answers
    metrics = metrics_of(found)
    assert (found.baseline, found.variant) == ("2", "1")
    assert metrics["errors"].baseline.value == 0.5
    assert metrics["errors"].variant.value == 0.0
    assert metrics["latency p50"].baseline.value == 20  # of answers alone
    assert metrics["events per answer"].baseline.value == 1.0
    assert metrics["events per answer"].variant.value == 1.0  # two of two answers
    assert metrics["answers with an event"].variant.value == 0.5
    assert metrics["buy per answer"].variant.value == 0.5
    assert metrics["buy per answer"].difference.value == 0.5


def test_items_are_joined_by_their_ids_whichever_kind_these_have(tmp_path):
    rows = [request(1, 1, 0, ["7"], version=1), request(2, 2, 0, ["x"], version=2)]
    log = write_requests(tmp_path / "requests", rows)
    events = write_events(tmp_path / "events", [(1, "7", 1, None), (2, "x", 1, None)], hashed=True)
    found = metrics_of(read_ab_log(log, events=events))["answers with an event"]
    assert (found.baseline.value, found.variant.value) == (1.0, 1.0)
    digits = write_requests(
        tmp_path / "digits", [request(1, 1, 0, ["7"], version=1), request(2, 2, 0, ["8"], version=2)]
    )
    hashed = write_events(tmp_path / "hashed", [(1, "7", 1, None)], hashed=True)
    assert metrics_of(read_ab_log(digits, events=hashed))["events per answer"].baseline.value == 1.0


def test_ids_of_64_bits_are_joined_beside_rows_without_a_user_or_a_version(tmp_path):
    users = hash_strings(pa.array([f"user {number}" for number in range(4)])).tolist()
    items = hash_strings(pa.array([f"item {number}" for number in range(4)])).tolist()
    rows = [
        request(number, user, number // 2, [f"item {number}"], version=3 + number % 2)
        for number, user in enumerate(users)
    ]
    rows.append(request(8, None, 0.5, version=3, error="RuntimeError: failed"))
    rows.append(request(9, users[0], 0.5, ["item 0"], version=None))
    log = write_requests(tmp_path / "requests", rows)
    events = [(user, item, 2, None) for user, item in zip(users, items, strict=True)]
    found = read_ab_log(log, events=write_events(tmp_path / "events", events), baseline="3")
    assert (found.baseline, found.variant) == ("3", "4")
    found = metrics_of(found)
    assert found["events per answer"].baseline.value == 1.0
    assert found["events per answer"].variant.value == 1.0
    assert found["errors"].baseline.value == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (
            [request(1, 1, 0), request(2, 2, 0)],
            {},
            "2 requests of neither several targets nor several versions",
        ),
        ([request(1, 1, 0), request(2, 2, 0, version=2)], {"by": "target"}, "no two targets"),
        ([request(1, 1, 0), request(2, 2, 0, version=2)], {"variant": "7"}, "no version '7'; it has"),
        ([request(1, 1, 0), request(2, 2, 0, version=2)], {"baseline": "1", "variant": "1"}, "with itself"),
        (
            [request(1, 1, 0), request(2, 1, 5), request(3, 1, 9, version=2)],
            {},
            "never answered at the same time",
        ),
        ([], {}, "no request was logged"),
    ],
)
def test_logs_without_variants_are_refused(tmp_path, rows, options, sentence):
    log = write_requests(tmp_path / "requests", rows)
    with pytest.raises(InputError, match=sentence):
        read_ab_log(log, **options)


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(InputError, match="no log can be read there"):
        read_ab_log(str(tmp_path / "nothing"))
    log = write_requests(tmp_path / "requests", [request(1, 1, 0)], pa.schema([("request_id", pa.string())]))
    with pytest.raises(InputError, match="no column row, time"):
        read_ab_log(log)


def test_targets_come_before_versions_and_old_logs_have_no_errors(tmp_path):
    rows = [request(number, number % 5, number % 3, target="ab"[number % 2]) for number in range(30)]
    old = pa.schema([field for field in SCHEMA if field.name != "error"])
    log = write_requests(tmp_path / "requests", rows, old)
    rows = [request(number, None, number % 3, target="ab"[number % 2]) for number in range(30, 40)]
    write_requests(tmp_path / "requests", rows)
    found = read_ab_log(log)
    assert (found.by, {found.baseline, found.variant}) == ("target", {"a", "b"})
    assert found.num_users == 15  # those without a name are one each
    assert found.num_shared_users == 5
    assert metrics_of(found)["errors"].variant.value == 0


@pytest.mark.slow
def test_a_bootstrap_over_users_covers_no_difference_as_often_as_it_says():
    """Users whose own rates differ much: by requests, intervals would be half as wide as they have to be."""
    random = np.random.default_rng(5)
    covered, widths = 0, []
    for _ in range(300):
        rates_U = random.beta(0.5, 1.5, 200)
        rows = []
        for users in (np.arange(100), np.arange(100, 200)):
            users_R = np.repeat(users, 5)
            clicked_R = (random.random(len(users_R)) < rates_U[users_R]).astype(np.float64)
            nothing_R = np.zeros(len(users_R))
            rows.append(VariantRows(users_R, nothing_R > 0, nothing_R, {"clicks": clicked_R}))
        found = compared(*rows, 200, num_resamples=200)["clicks"].difference
        covered += found.low <= 0 <= found.high
        widths.append(found.high - found.low)
    assert 275 <= covered <= 294  # 285, give or take less than three standard deviations
    assert np.mean(widths) > 0.14  # as if requests were independent: 0.107


def test_a_failure_counts_though_another_variant_answered_the_same_message(tmp_path):
    rows = [
        request(1, 1, 0, version=1, error="RuntimeError: failed"),
        request(1, 1, 1, ["7"], version=2),
        request(1, 1, 2, ["7"], version=2),  # from a replica that was not heard
        request(2, 2, 3, ["7"], version=1),
        request(3, 3, 0, ["7"], version=2),
        request(4, 4, 3, ["7"], version=2),
    ]
    found = read_ab_log(write_requests(tmp_path / "requests", rows), baseline="1")
    assert [len(each.users_R) for each in found.rows] == [2, 3]
    assert metrics_of(found)["errors"].baseline.value == 0.5


def rows_of(num_users, num_errors, first_user=0):
    has_error_R = np.arange(num_users) < num_errors
    latency_ms_R = np.linspace(10, 20, num_users)
    return VariantRows(np.arange(first_user, first_user + num_users), has_error_R, latency_ms_R, {})


def test_few_users_and_users_who_are_alike_have_no_interval():
    few = compared(rows_of(1, 0), rows_of(19, 9, 1), 20, num_resamples=100)["errors"]
    alike = compared(rows_of(30, 0), rows_of(30, 10, 30), 60, num_resamples=100)["errors"]
    for estimate in (few.baseline, few.variant, few.difference, alike.baseline):
        assert np.isnan([estimate.low, estimate.high]).all()
        assert not np.isnan(estimate.value)
    assert 0 < alike.variant.low < 1 / 3 < alike.variant.high


def test_worked_numbers_of_the_sample_ratio():
    assert sample_ratio(8, 2, 0.5).p_value == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sample_ratio(900, 100, 0.1).p_value == pytest.approx(1)
    assert not sample_ratio(900, 100, 0.1).is_off
    assert sample_ratio(900, 100, 0.5).is_off


@pytest.mark.parametrize(("options", "is_off"), [([], True), (["--share", "0.1"], False)])
def test_a_share_of_the_users_that_was_not_expected_is_told(tmp_path, options, is_off):
    rows = [request(number, number, number % 7, version=1 + (number % 10 == 1)) for number in range(200)]
    log = write_requests(tmp_path / "requests", rows)
    found = CliRunner().invoke(app, ["ab", log, "--resamples", "100", "--json", *options])
    assert found.exit_code == 0, found.output
    ratio = json.loads(found.stdout.splitlines()[-1])["sample_ratio"]
    assert (ratio["is_off"], ratio["found"]) == (is_off, 0.1)
    assert ("10.0% of the users" in " ".join(found.output.split())) == is_off


def test_the_command_says_it_in_a_table_and_in_json(tmp_path):
    random = np.random.default_rng(1)
    rows = []
    for number in range(400):
        is_slow = number % 2 == 1
        latency_ms = float(10 * (2 if is_slow else 1) * np.exp(0.2 * random.standard_normal()))
        failed = "RuntimeError: x" if is_slow and number % 10 == 1 else None
        rows.append(
            request(
                number,
                number % 80,
                number % 7,
                version=2 if is_slow else 1,
                latency_ms=latency_ms,
                error=failed,
            )
        )
    log = write_requests(tmp_path / "requests", rows)
    found = CliRunner().invoke(app, ["ab", log, "--resamples", "100", "--json"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout.splitlines()[-1])
    assert said["requests"] == {"1": 200, "2": 200}
    latency, errors = said["metrics"]["latency p50"]["difference"], said["metrics"]["errors"]["difference"]
    assert 5 < latency["low"] < latency["value"] < latency["high"] < 15
    assert errors["value"] == pytest.approx(0.2)
    assert errors["low"] > 0
    assert said["metrics"]["errors"]["baseline"] == {"value": 0, "low": None, "high": None}
    assert not said["sample_ratio"]["is_off"]
    shown = CliRunner().invoke(app, ["ab", log, "--resamples", "100"])
    assert "latency p95" in shown.output
    assert "0 (-)" in shown.output


def test_a_request_that_fails_is_logged_with_the_version_that_was_asked(tmp_path):
    class Broken(RecommendationService):
        def recommend_all(self, requests):
            raise RuntimeError("no memory is left")

    service = Broken(FakeRecommender(), max_k=10)
    log = RequestLog(RequestLogConfig(folder=str(tmp_path / "requests"), share=1), "new", clock=lambda: 60.0)
    batcher = Batcher(service.recommend_all, BatchCosts({1: 0.001}), max_waiting=4)
    api = build_api(service, batcher, timeout_s=5.0, request_log=log, on_close=[batcher.close])
    with TestClient(api) as client:
        assert client.post("/v1/recommend", json={"user_id": "u1", "k": 3}).status_code == 500
        assert client.post("/v1/recommend", json={"user_id": "u1", "k": 99}).status_code == 500
    rows = pads.dataset(str(tmp_path / "requests"), format="parquet").to_table().to_pylist()
    assert len(rows) == 2
    assert rows[0]["error"] == "RuntimeError: no memory is left"
    assert (rows[0]["target"], rows[0]["user_key"], rows[0]["recommended"]) == ("new", "u1", [])
