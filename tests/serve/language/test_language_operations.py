"""The dashboard and the alerts of language models ask for what a service shows."""

import json
import re

import pytest
import yaml

promql_parser = pytest.importorskip("promql_parser")
pytest.importorskip("grafana_foundation_sdk")
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from rayrec.platform.checkout import CHECKOUT  # noqa: E402
from rayrec.serve.language.measures import EngineMeasures, LanguageCollector  # noqa: E402
from tests.helpers.operations import (  # noqa: E402
    check_panels_do_not_overlap,
    not_read_by_grafana,
    num_rules_in_prometheus,
)

FOLDER = CHECKOUT / "docs" / "operations"
DASHBOARD = json.loads((FOLDER / "grafana-language.json").read_text())
ALERTS_FILE = FOLDER / "prometheus-language-alerts.yaml"
(ALERTS,) = yaml.safe_load(ALERTS_FILE.read_text())["groups"]
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in ALERTS["rules"]),
]


@pytest.fixture(scope="module")
def shown():
    registry = CollectorRegistry()
    registry.register(LanguageCollector({"tiny": EngineMeasures()}))
    page = generate_latest(registry).decode()
    return set(re.findall(r"^(rayrec_\w+)", page, re.MULTILINE))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_promql_over_what_is_shown(shown, expression):
    plain = expression.replace("${prefix}", "").replace("$__rate_interval", "1m")
    promql_parser.parse(plain)
    names = set(re.findall(r"rayrec_\w+", expression))

    assert names
    assert names <= shown


def test_grafana_reads_the_whole_dashboard_whose_panels_have_places_of_their_own():
    assert not_read_by_grafana(DASHBOARD) == []
    check_panels_do_not_overlap(DASHBOARD)


def test_prometheus_loads_the_alerts():
    assert num_rules_in_prometheus(ALERTS_FILE) == len(ALERTS["rules"])
