"""What a cluster shows to Prometheus, and what the dashboard and the alerts ask for."""

import json
import re
import sqlite3
from types import SimpleNamespace

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rayrec.jobs.cluster_metrics import ClusterMetrics
from rayrec.jobs.job import Job, Size
from rayrec.jobs.ledger import Command, JobState, Ledger
from rayrec.jobs.queues import QueueConfig
from rayrec.pipelines.cluster.placement import ActorGroup, Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.health.node_health import NodeHealth, write_health
from rayrec.pipelines.health.replay import BackgroundReplay, Difference, ReplayReport
from rayrec.pipelines.health.sweep import HealthMetrics
from rayrec.pipelines.metrics.stragglers import WindowScores
from rayrec.pipelines.training.run import Attempt
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.health.findings import Finding
from rayrec.platform.metrics import RayMetrics
from tests.helpers.operations import (
    check_alert,
    check_panels_do_not_overlap,
    not_read_by_grafana,
    num_rules_in_prometheus,
)
from tests.helpers.runs import make_run

FOLDER = CHECKOUT / "docs" / "operations"
ALERT_FILE = FOLDER / "prometheus-cluster-alerts.yaml"
DASHBOARD = json.loads((FOLDER / "grafana-cluster.json").read_text())
(GROUP,) = yaml.safe_load(ALERT_FILE.read_text())["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in GROUP["rules"]),
]
NODES = [Node(f"{number}" * 8, f"10.0.0.{number}", {}, {"GPU": 8.0}, {}, f"n{number}") for number in range(5)]
NOW = 100_000.0


def job(name, queue, submitted_at, not_before=None, **resources):
    group = ActorGroup("trainer", "", 1, resources, {})
    return Job(name, queue, (Size((group,)),), submitted_at, not_before=not_before)


@pytest.fixture
def cluster(tmp_path):
    """Files of a cluster with two queues, a job that waits, one that has failed, and a bad node."""
    ledger = Ledger(tmp_path / "jobs.db")
    with ledger.change():
        ledger.put_queue(QueueConfig.parse({"name": "team-a", "quotas": {"GPU": {"nominal": 8}}}))
        ledger.put_queue(QueueConfig.parse({"name": "team-b", "quotas": {"GPU": {"nominal": 4}}}))
        ledger.add(job("old", "team-a", NOW - 500, GPU=2.0), Command(("x",)))
        ledger.add(job("new", "team-a", NOW - 100, GPU=2.0), Command(("x",)))
        ledger.add(job("over", "team-b", NOW - 900, GPU=1.0), Command(("x",)))
        ledger.cancel("over", NOW - 10)
        ledger.keep_nodes(NODES, NOW - 7)
    ledger.close()
    quarantine = Quarantine(tmp_path, lambda: NOW - 60)
    assert quarantine.add(NODES[0], "xid-79 of card 3", "bad", NODES)
    assert quarantine.add(NODES[0], "disk-full of /", "bad", NODES)
    assert quarantine.add(NODES[1], "xid-79 of card 0", "bad", NODES) is None  # the breaker holds
    finding = Finding.of("xid-79", "card 3", "bad", 79, None, "fell off the bus")
    write_health(tmp_path, [NodeHealth(NODES[0], (finding,)), NodeHealth(NODES[1], ())], NOW - 30)
    return tmp_path


def shown(cluster, now=NOW):
    registry = CollectorRegistry()
    registry.register(ClusterMetrics(cluster / "jobs.db", cluster, lambda: now))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_a_job_that_is_reserved_for_a_time_does_not_wait_before_it(cluster):
    ledger = Ledger(cluster / "jobs.db")
    with ledger.change():
        ledger.add(job("later", "team-b", NOW - 90_000, NOW + 100, GPU=1.0), Command(("x",)))
    ledger.close()

    assert shown(cluster)["rayrec_queue_oldest_wait_seconds", "team-b"] == 0
    assert shown(cluster, NOW + 150)["rayrec_queue_oldest_wait_seconds", "team-b"] == 50


def test_files_of_a_cluster_become_metrics(cluster):
    found = shown(cluster)
    assert found["rayrec_queue_seen_age_seconds",] == 7
    assert found["rayrec_queue_quota", "team-a", "GPU"] == 8
    assert found["rayrec_queue_used", "team-a", "GPU"] == 0
    assert found["rayrec_queue_waiting_jobs", "team-a"] == 2
    assert found["rayrec_queue_waiting_jobs", "team-b"] == 0
    assert found["rayrec_queue_oldest_wait_seconds", "team-a"] == 500
    assert found["rayrec_queue_oldest_wait_seconds", "team-b"] == 0
    assert found["rayrec_jobs", JobState.stopped] == 1
    assert found["rayrec_quarantined_nodes",] == 1  # in two sessions
    assert found["rayrec_quarantine_alarms_last_hour",] == 1
    assert found["rayrec_health_age_seconds",] == 30
    assert found["rayrec_health_nodes", "bad"] == 1
    assert shown(cluster, NOW + 3600)["rayrec_quarantine_alarms_last_hour",] == 0


def test_where_there_are_no_files_there_is_nothing_to_tell(tmp_path):
    assert shown(tmp_path) == {
        ("rayrec_quarantined_nodes",): 0,
        ("rayrec_quarantine_alarms_last_hour",): 0,
        ("rayrec_cluster_file_unreadable", "quarantine"): 0,
    }
    assert not (tmp_path / "jobs.db").exists()


def damage_a_row(cluster):
    """The file is a ledger, and what it says of its queues is none."""
    ledger = sqlite3.connect(cluster / "jobs.db")
    ledger.execute("UPDATE queues SET settings = '{'")
    ledger.commit()
    ledger.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda cluster: (cluster / "jobs.db").write_bytes(b"SQLite format 3 no longer" * 100),
        damage_a_row,
    ],
)
def test_a_damaged_ledger_is_told_and_the_nodes_are_still_shown(cluster, damage, caplog):
    damage(cluster)

    found = shown(cluster)

    assert found["rayrec_cluster_file_unreadable", "ledger"] == 1
    assert not [name for name, *_ in found if "queue" in name or name == "rayrec_jobs"]
    assert found["rayrec_quarantined_nodes",] == 1
    assert found["rayrec_health_age_seconds",] == 30
    (line,) = caplog.messages
    assert line.startswith("the ledger is not shown: ")


def test_a_damaged_quarantine_is_told_and_the_queues_are_still_shown(cluster):
    Quarantine(cluster).path.write_text("{")

    found = shown(cluster)

    assert found["rayrec_cluster_file_unreadable", "quarantine"] == 1
    assert found["rayrec_cluster_file_unreadable", "ledger"] == 0
    assert found["rayrec_queue_waiting_jobs", "team-a"] == 2
    assert found["rayrec_health_nodes", "bad"] == 1


@pytest.fixture(scope="module")
def through_ray(tmp_path_factory):
    """Names that trainings, services and the health check publish."""
    published = set()

    def publish(self, metrics):
        published.update(f"ray_rayrec_{name}" for name in metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayMetrics, "publish", publish)
        finding = Finding.of("xid-79", "card 3", "bad", 79, None, "fell off the bus")
        HealthMetrics().publish([NodeHealth(NODES[0], (finding,))])
        report = ReplayReport("r", 0, 3, "bad", 9, (Difference("weights w", "at 0"),), "a", "b", ("n",), 1.0)
        replay = BackgroundReplay(make_run(tmp_path_factory.mktemp("run")), None, lambda *_, **__: report)
        replay.look()
        replay.wait()
        assert replay.look() == report
        trainer = SimpleNamespace(_trainer_metrics=[RayMetrics({})])
        Attempt._tell_stragglers(trainer, WindowScores((1.0,), (1.0,), (), ()), None)
    from rayrec.serve.on_ray.scaling import REPLICA_METRICS

    return published | {f"ray_rayrec_{name}" for name in REPLICA_METRICS}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_promql_over_what_is_shown(cluster, through_ray, expression):
    promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    names = set(re.findall(r"\w*rayrec_\w+", expression))
    assert names
    assert names <= through_ray | {name for name, *_ in shown(cluster)}


def test_prometheus_and_grafana_load_the_files():
    assert num_rules_in_prometheus(ALERT_FILE) == len(ALERTS)
    assert not_read_by_grafana(DASHBOARD) == []
    check_panels_do_not_overlap(DASHBOARD)


def test_every_alert_says_whom_to_wake_and_has_a_section_in_the_runbook():
    runbook = (FOLDER / "README.md").read_text()
    assert len(ALERTS) == len(GROUP["rules"])
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith((".", "?"))
        assert re.fullmatch(r"\d+m", rule["for"])
        assert f"`{name}`" in runbook


@pytest.mark.parametrize(
    ("name", "series", "at", "fires"),
    [
        ("RayRecQueueSilent", {"rayrec_queue_seen_age_seconds": "5x10 70+60x10"}, "10m", []),
        ("RayRecQueueSilent", {"rayrec_queue_seen_age_seconds": "5x10 70+60x10"}, "14m", [{}]),
        ("RayRecClusterMetricsMissing", {"up": "1x20"}, "8m", [{}]),
        ("RayRecClusterMetricsMissing", {"rayrec_quarantined_nodes": "0x20"}, "8m", []),
        (
            "RayRecClusterFileUnreadable",
            {
                'rayrec_cluster_file_unreadable{file="ledger"}': "1x20",
                'rayrec_cluster_file_unreadable{file="quarantine"}': "0x20",
            },
            "8m",
            [{"file": "ledger"}],
        ),
        (
            "RayRecGuaranteeUnused",
            {
                'rayrec_queue_waiting_jobs{queue="a"}': "1x60",
                'rayrec_queue_waiting_jobs{queue="b"}': "1x60",
                'rayrec_queue_used{queue="a", resource="GPU"}': "4x60",
                'rayrec_queue_used{queue="b", resource="GPU"}': "8x60",
                'rayrec_queue_quota{queue="a", resource="GPU"}': "8x60",
                'rayrec_queue_quota{queue="b", resource="GPU"}': "8x60",
            },
            "40m",
            [{"queue": "a"}],
        ),
        ("RayRecJobsFail", {'rayrec_jobs{state="failed"}': "2x60 7x60"}, "70m", [{"state": "failed"}]),
        ("RayRecJobsFail", {'rayrec_jobs{state="failed"}': "2x60 4x60"}, "70m", []),
        (
            "RayRecNodeBad",
            {
                'ray_rayrec_node_health{node="a", WorkerId="1"}': "2x10",
                'ray_rayrec_node_health{node="b", WorkerId="1"}': "1x10",
            },
            "5m",
            [{"node": "a"}],
        ),
        ("RayRecNodeUnknown", {'ray_rayrec_node_health{node="a"}': "-1x40"}, "35m", [{"node": "a"}]),
        (
            "RayRecReplicasHeld",
            {
                'ray_rayrec_service_replicas_wish{deployment="recommend"}': "4x60",
                'ray_rayrec_service_replicas_maximum{deployment="recommend"}': "2x60",
            },
            "40m",
            [{"deployment": "recommend"}],
        ),
    ],
)
def test_alerts_fire_when_they_should(name, series, at, fires):
    check_alert(ALERT_FILE, ALERTS[name], series, at, fires)
