"""A service that computes by value, over HTTP: what requests get, and what the log says of it."""

import json
import time

import numpy as np
import pyarrow.dataset as pads
import pytest
from fastapi.testclient import TestClient

from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.events import RequestLogConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine import allocation
from rayrec.serve.engine.allocation import Price
from rayrec.serve.engine.value_curves import ActionKey, ValueCurves, version_of
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.runs import make_run

ACTIONS = [{"name": "full"}, {"name": "few", "max_beams": 4}, {"name": "popular", "popular": True}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "lazy")


@pytest.fixture
def curves(tmp_path, run):
    found = ValueCurves(version_of(str(run), 1), (ActionKey(max_beams=4),), (), np.array([[0.8]]))
    (tmp_path / "curves.json").write_text(found.to_json())
    return tmp_path / "curves.json"


def config_of(curves, folder, **allocate):
    values = {"actions": ACTIONS, "curves": str(curves), "explore": 0.0, "floor_every": 0, **allocate}
    return ServeConfig(
        page=False,
        admission=AdmissionConfig.parse({"allocate": values}),
        request_log=RequestLogConfig(folder=str(folder / "log"), share=1.0),
    )


def test_requests_get_what_they_are_worth_and_the_log_says_so(run, curves, tmp_path, monkeypatch):
    # Short of power, whatever the machine does meanwhile, be it that it stands still for a minute.
    monkeypatch.setattr(Price, "update", lambda self, *_: setattr(self, "value", 1000.0))
    monkeypatch.setattr(allocation, "LONGEST_GAP_S", 1e9)
    config = config_of(curves, tmp_path)
    with TestClient(load_api(run, config, PrometheusMeter())) as client:

        def ask(value):
            headers = {} if value is None else {"X-Request-Value": value}
            answer = client.post("/v1/recommend", json={"user_id": "u1", "k": 3}, headers=headers)
            assert answer.status_code == 200
            return answer.json()

        deadline = time.monotonic() + 60.0
        while "rayrec_allocation_price 1000" not in client.get("/metrics").text:  # until a tick has passed
            assert time.monotonic() < deadline, "there was no tick"
            ask("1e9")
        assert ask("1e9")["degraded"] == []
        assert ask("0")["degraded"] == ["popular_items"]
        assert ask("nonsense")["degraded"] == []

    rows = pads.dataset(tmp_path / "log", format="parquet", partitioning="hive").to_table().to_pylist()
    last = sorted(rows, key=lambda row: row["time"])[-3:]
    assert [row["action"] for row in last] == ["full", "popular", "full"]
    assert [row["value"] for row in last] == [1e9, 0.0, None]
    assert [row["price"] for row in last] == [1000.0] * 3
    assert all(row["propensity"] == 1.0 for row in last)


def test_with_time_to_spare_answers_are_those_of_a_service_without_allocation(run, curves, tmp_path):
    bodies = [{"user_id": f"u{number}", "k": 4} for number in range(6)]

    def answers(config):
        with TestClient(load_api(run, config, PrometheusMeter())) as client:
            headers = {"X-Request-Value": "1e-9"}
            found = [client.post("/v1/recommend", json=body, headers=headers).json() for body in bodies]
        return json.dumps([each["items"] for each in found])

    assert answers(config_of(curves, tmp_path)) == answers(ServeConfig(page=False))


def test_curves_that_cannot_be_read_are_told_at_the_start(run, curves, tmp_path):
    curves.write_text(curves.read_text()[:40])
    with pytest.raises(InputError, match=r"curves.json: not valid JSON.*rayrec value-curves"):
        load_api(run, config_of(curves, tmp_path), PrometheusMeter())


def test_answers_from_before_need_something_that_keeps_them(curves, tmp_path):
    actions = [{"name": "full"}, {"name": "near", "near_line": True}]
    with pytest.raises(ValueError, match="'near' has near_line, and nothing is computed before"):
        config_of(curves, tmp_path, actions=actions)
