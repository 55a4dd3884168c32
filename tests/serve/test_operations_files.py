"""The dashboard and the alerts ask for what a service shows."""

import json
import re
import shutil
import subprocess

import numpy as np
import promql_parser
import pytest
import yaml
from fastapi.testclient import TestClient
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
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
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing, which Debian's package prometheus brings")
    checked = subprocess.run(
        [program, "check", "rules", FOLDER / "prometheus-alerts.yaml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    assert f"{len(ALERTS['rules'])} rules found" in checked.stdout


@pytest.mark.parametrize(
    ("of_model", "others", "alerts"),
    [
        (("model", "merged"), ("neighbors", "popular"), False),
        (("merged",), ("neighbors",), False),
        (("model",), ("neighbors", "popular"), True),
        ((), ("empty",), True),
    ],
)
def test_half_of_the_answers_without_the_model_is_an_alert(tmp_path, of_model, others, alerts):
    """A source that is named here has one answer a second, and the last of the others half of one."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing, which Debian's package prometheus brings")
    name, shown = "RayRecAnswersWithoutModel", ("model", "merged", "neighbors", "popular", "empty")
    slow = others[-1] if not alerts else ""
    (rule,) = (rule for rule in ALERTS["rules"] if rule["alert"] == name)
    expected = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
    series = [
        {
            "series": f"rayrec_serving_answers_{each}_total",
            "values": f"0+{0 if each not in of_model + others else 30 if each == slow else 60}x60",
        }
        for each in shown
    ]
    case = {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [
            {"eval_time": "50m", "alertname": name, "exp_alerts": [expected] if alerts else []}
        ],
    }
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "prometheus-alerts.yaml")], "tests": [case]}))
    tested = subprocess.run([program, "test", "rules", file], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_grafanas_own_model_reads_the_whole_dashboard():
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))

    assert list(_lost(DASHBOARD, read)) == []


def test_a_setting_that_grafana_does_not_know_would_be_noticed():
    register_default_plugins()
    changed = DASHBOARD | {"titel": "RayRec", "panels": [DASHBOARD["panels"][0] | {"gridPosition": {}}]}
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(changed)))

    assert set(_lost(changed, read)) == {"/titel", "/panels/0/gridPosition"}


def _lost(written, read, path=""):
    """Paths of what was written and not read."""
    if isinstance(written, dict):
        for key, value in written.items():
            yield from _lost(value, read[key], f"{path}/{key}") if key in read else [f"{path}/{key}"]
    elif isinstance(written, list) and len(written) == len(read):
        for place, (value, other) in enumerate(zip(written, read, strict=True)):
            yield from _lost(value, other, f"{path}/{place}")
    elif written != read:
        yield path


def test_panels_have_places_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


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
