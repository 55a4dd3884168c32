"""What loading a service does to the process that it is loaded in."""

import gc
import sys

import pytest
from fastapi.testclient import TestClient

from rayrec.serve.api import build_api
from rayrec.serve.batching import BatchCosts, Batcher
from rayrec.serve.config import ServeConfig
from rayrec.serve.loading import SWITCH_S, load_api
from rayrec.serve.metrics import PrometheusMeter
from tests.runs import make_run
from tests.serve.fake_recommender import HeldService


def test_a_process_that_serves_is_set_up_for_it_until_the_end(tmp_path):
    """No looking for garbage in the model, and the interpreter for whoever waits for it."""
    gc.unfreeze()  # other tests leave services as they are
    before, switch_s = gc.get_freeze_count(), 0.005
    sys.setswitchinterval(switch_s)
    with TestClient(load_api(make_run(tmp_path), ServeConfig(page=False), PrometheusMeter())) as client:
        assert gc.get_freeze_count() > before + 10_000
        assert sys.getswitchinterval() == SWITCH_S
        assert client.get("/health/ready").status_code == 200
    assert (gc.get_freeze_count(), sys.getswitchinterval()) == (0, pytest.approx(switch_s))


class _Log:
    def __init__(self, name, closed, fails=False):
        self._name, self._closed, self._fails = name, closed, fails

    def figures(self):
        return {}

    def close(self):
        self._closed.append(self._name)
        if self._fails:
            raise OSError("the disk is gone")


def test_logs_are_closed_first_and_one_that_fails_keeps_nothing_else_open(caplog):
    closed = []
    service = HeldService()
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 1)
    logs = {"intake": _Log("events", closed, fails=True), "request_log": _Log("requests", closed)}
    api = build_api(service, batcher, 1.0, on_close=[lambda: closed.append("versions")], **logs)
    with TestClient(api):
        assert closed == []
    assert closed == ["events", "requests", "versions"]
    assert "the disk is gone" in caplog.text
    batcher.close()
