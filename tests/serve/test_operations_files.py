"""The dashboard and the alerts ask for what a service shows."""

import json
import re

import numpy as np
import promql_parser
import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.checkout import CHECKOUT
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import TemporalGraph
from rayrec.samples.graph.sources import config_of_store
from rayrec.samples.stores import StoreManifest, open_store
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.events import EventsConfig, LogConfig, RequestLogConfig
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.neighbors import NeighborsConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.value_curves import ActionKey, ValueCurves, version_of
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.operations import (
    check_alert,
    check_panels_do_not_overlap,
    not_read_by_grafana,
    num_rules_in_prometheus,
)
from tests.helpers.runs import make_run

FOLDER = CHECKOUT / "docs" / "operations"
DASHBOARD = json.loads((FOLDER / "grafana-serving.json").read_text())
(ALERTS,) = yaml.safe_load((FOLDER / "prometheus-alerts.yaml").read_text())["groups"]
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in ALERTS["rules"]),
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> set[str]:
    """Names at /metrics of a service that follows versions, takes events, keeps a log, has neighbors and
    computes by value."""
    folder = tmp_path_factory.mktemp("service")
    run = RunFolder.open(make_run(folder))
    store = VersionStore(folder / "store")
    Publisher(run, store).publish(read_snapshot(run.chosen_snapshot("best")))
    manifest = Dataset.open(folder / "data").manifest
    graph, events = str(folder / "graph"), str(folder / "both-sides")
    made = StoreManifest(name=manifest.name, id_kinds=manifest.id_kinds)
    open_store(events, create=made).close()
    open_store(events, create=made.model_copy(update={"by": "item"}), by="item").close()
    TemporalGraph(config_of_store(made)).save(graph)
    curves = ValueCurves(version_of(str(run.path), 1), (ActionKey(max_events=2),), (), np.array([[0.9]]))
    (folder / "curves.json").write_text(curves.to_json())
    actions = [{"name": "full"}, {"name": "newest", "max_events": 2}]
    allocate = {"actions": actions, "curves": str(folder / "curves.json")}
    config = ServeConfig(
        page=False,
        admission=AdmissionConfig.parse({"allocate": allocate}),
        events=EventsConfig(store=events, by_item=True, log=LogConfig(folder=str(folder / "events"))),
        neighbors=NeighborsConfig(graph=graph),
        nearline=NearlineReadConfig(store=str(folder / "products")),
        request_log=RequestLogConfig(folder=str(folder / "requests")),
    )
    with TestClient(load_api(store.url, config, PrometheusMeter())) as client:
        assert client.post("/v1/recommend", json={"user_id": "u1"}).status_code == 200
        families = text_string_to_metric_families(client.get("/metrics").text)
        return {sample.name for family in families for sample in family.samples}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_promql_over_what_is_shown(shown, expression):
    for prefix in ("", "ray_"):
        plain = expression.replace("${prefix}", prefix).replace("$__rate_interval", "1m")
        promql_parser.parse(plain)
    names = set(re.findall(r"rayrec_\w+", expression))
    assert names
    assert names <= shown


def test_prometheus_loads_the_alerts():
    assert num_rules_in_prometheus(FOLDER / "prometheus-alerts.yaml") == len(ALERTS["rules"])


@pytest.mark.parametrize(
    ("of_model", "others", "alerts"),
    [
        (("model", "merged"), ("neighbors", "popular"), False),
        (("merged",), ("neighbors",), False),
        (("model",), ("neighbors", "popular"), True),
        ((), ("empty",), True),
    ],
)
def test_half_of_the_answers_without_the_model_is_an_alert(of_model, others, alerts):
    """A source that is named here has one answer a second, and the last of the others half of one."""
    shown = ("model", "merged", "neighbors", "popular", "empty")
    slow = others[-1] if not alerts else ""
    (rule,) = (rule for rule in ALERTS["rules"] if rule["alert"] == "RayRecAnswersWithoutModel")
    series = {
        f"rayrec_serving_answers_{each}_total": (
            f"0+{0 if each not in of_model + others else 30 if each == slow else 60}x60"
        )
        for each in shown
    }
    check_alert(FOLDER / "prometheus-alerts.yaml", rule, series, "50m", [{}] if alerts else [])


def test_grafanas_own_model_reads_the_whole_dashboard():
    assert not_read_by_grafana(DASHBOARD) == []


def test_a_setting_that_grafana_does_not_know_would_be_noticed():
    changed = DASHBOARD | {"titel": "RayRec", "panels": [DASHBOARD["panels"][0] | {"gridPosition": {}}]}

    assert set(not_read_by_grafana(changed)) == {"/titel", "/panels/0/gridPosition"}


def test_panels_have_places_of_their_own():
    check_panels_do_not_overlap(DASHBOARD)


def test_alerts_say_whom_to_wake_and_why():
    names = [rule["alert"] for rule in ALERTS["rules"]]
    assert len(set(names)) == len(names)
    for rule in ALERTS["rules"]:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith((".", "?"))
        assert re.fullmatch(r"\d+m", rule["for"])


def test_the_example_of_who_is_admitted_is_one_and_lowers_before_it_refuses():
    admission = AdmissionConfig.load(FOLDER / "admission.yaml")
    assert admission.service.concurrency is not None
    assert [step.do for step in admission.degrade.steps] == ["shorter_history", "fewer_beams"]
    assert all(step.enter < 1 for step in admission.degrade.steps)
