"""What loading a service does to the process that it is loaded in."""

import gc
import re
import sys

import pytest
import safetensors.numpy
from fastapi.testclient import TestClient

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import check_service, load_api
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import SWITCH_S, Batcher
from rayrec.serve.web.api import build_api
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.runs import make_run
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


def test_what_was_read_of_a_user_who_returns_is_kept_and_counted(tmp_path):
    run, config = make_run(tmp_path, "prefix"), ServeConfig(page=False, max_batch=1)
    asked = [{"history": history, "k": 5} for history in (["i3", "i4"], ["i3", "i4", "i7"], ["i7"])]

    def answers(config):
        with TestClient(load_api(run, config, PrometheusMeter())) as client:
            found = [client.post("/v1/recommend", json=each).json()["items"] for each in asked]
            return found, client.get("/metrics").text

    keeping = config.model_copy(update={"prefix_cache_mib": 1.0})
    (found, metrics), (expected, plain_metrics) = answers(keeping), answers(config)
    for items, others in zip(found, expected, strict=True):
        assert [item["item_id"] for item in items] == [item["item_id"] for item in others]
        assert [item["score"] for item in items] == pytest.approx(
            [item["score"] for item in others], abs=1e-4
        )
    assert float(re.search(r"^rayrec_prefix_cache_events_reused_total (\S+)$", metrics, re.MULTILINE)[1]) >= 2
    assert "prefix_cache_histories" not in plain_metrics


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [("lazy", {}, "reads each history as a whole"), ("prefix", {"user_embedding": True}, "rows of tables")],
)
def test_where_nothing_can_be_kept_it_is_said_before_anybody_is_answered(tmp_path, model, settings, why):
    run = make_run(tmp_path, model, **settings)
    config = ServeConfig(page=False, prefix_cache_mib=1.0)
    with pytest.raises(InputError, match=f"{why}.*leave out --prefix-cache-mib"):
        load_api(run, config, PrometheusMeter())
    with pytest.raises(InputError, match=f"{why}.*leave out --prefix-cache-mib"):
        check_service(run, config)


@pytest.mark.parametrize("model", ["sasrec", "hstu", "generative", "prefix", "lazy", "encoder"])
def test_a_launcher_checks_what_replicas_load_and_reads_no_weights(tmp_path, monkeypatch, model):
    run = make_run(tmp_path, model)

    def load_file(path):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(safetensors.numpy, "load_file", load_file)
    check_service(run, ServeConfig(page=False))
    changed = (run / "config.yaml").read_text().replace("feedforward_dim: 16", "feedforward_dim: 32")
    (run / "config.yaml").write_text(changed.replace("num_layers: 1", "num_layers: 2"))
    with pytest.raises(InputError, match=r"dense weight.* its config was changed after training"):
        check_service(run, ServeConfig(page=False))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"compile": {}}, "leave out --compile, or --prefix-cache-mib"),
        ({"services": {"dense": {"streams": 2}}}, r"dense\.streams: 2 threads"),
    ],
)
def test_contexts_are_kept_by_who_reads_whole_histories_one_after_the_other(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        ServeConfig.parse({"prefix_cache_mib": 8, **settings})


def test_tiers_below_the_prefix_cache_need_one():
    sizes = ServeConfig.parse(
        {"prefix_cache_mib": 1, "prefix_cache_host_mib": 2, "prefix_cache_disk_mib": 3}
    ).context_sizes
    assert sizes is not None
    assert (sizes.device, sizes.host, sizes.disk) == (2**20, 2 * 2**20, 3 * 2**20)
    with pytest.raises(InputError, match="give its size, too"):
        ServeConfig.parse({"prefix_cache_host_mib": 2})


def test_a_folder_that_takes_no_contexts_is_refused_by_name(tmp_path):
    recommender = Recommender.load(make_run(tmp_path, "prefix", beam_width=4))
    with pytest.raises(InputError, match="prefix_cache_folder: contexts cannot be kept on disk"):
        recommender.use_prefix_cache(CacheSizes(100, disk=100, folder=tmp_path / "missing"))


class _Log:
    def __init__(self, name, closed, fails=False):
        self._name, self._closed, self._fails = name, closed, fails

    def metrics(self):
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
