"""What loading a service does to the process that it is loaded in."""

import gc

from fastapi.testclient import TestClient

from rayrec.serve.config import ServeConfig
from rayrec.serve.loading import load_api
from rayrec.serve.metrics import PrometheusMeter
from tests.runs import make_run


def test_the_garbage_collector_passes_over_a_model_while_it_serves(tmp_path):
    before = gc.get_freeze_count()
    with TestClient(load_api(make_run(tmp_path), ServeConfig(page=False), PrometheusMeter())) as client:
        assert gc.get_freeze_count() > before + 10_000
        assert client.get("/health/ready").status_code == 200
    assert gc.get_freeze_count() == 0
