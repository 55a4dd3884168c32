"""The dashboard and the alerts of language models ask for what a service shows."""

import json
import re

import pytest
import yaml

promql_parser = pytest.importorskip("promql_parser")
pytest.importorskip("grafana_foundation_sdk")
from fastapi.testclient import TestClient  # noqa: E402

from rayrec.platform.checkout import CHECKOUT  # noqa: E402
from rayrec.serve.language.api import build_language_api  # noqa: E402
from rayrec.serve.language.config import ChatLogConfig, SharedNameConfig  # noqa: E402
from rayrec.serve.language.request_log import ChatLog  # noqa: E402
from tests.helpers.operations import (  # noqa: E402
    check_alert,
    check_panels_do_not_overlap,
    not_read_by_grafana,
    num_rules_in_prometheus,
)
from tests.serve.language.fake_model import FakeModel  # noqa: E402

FOLDER = CHECKOUT / "docs" / "operations"
DASHBOARD = json.loads((FOLDER / "grafana-language.json").read_text())
ALERTS_FILE = FOLDER / "prometheus-language-alerts.yaml"
(ALERTS,) = yaml.safe_load(ALERTS_FILE.read_text())["groups"]
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in ALERTS["rules"]),
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Names at /metrics of a service with a shared name, a shadow and a log, that was asked once."""
    shadow = {"target": "b", "share": 1.0}
    values = {"name": "ab", "routing": {"experiment": "x", "weights": {"a": 1}}, "shadow": shadow}
    log = ChatLog(ChatLogConfig.parse({"folder": str(tmp_path_factory.mktemp("log"))}))
    api = build_language_api([FakeModel("a"), FakeModel("b")], [SharedNameConfig.parse(values)], log)
    with TestClient(api) as client:
        assert client.post("/v1/completions", json={"model": "ab", "prompt": "x"}).status_code == 200
        return set(re.findall(r"^(rayrec_\w+)", client.get("/metrics").text, re.MULTILINE))


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


def test_every_alert_says_whom_to_wake_and_has_a_section_in_the_runbook():
    runbook = (FOLDER / "README.md").read_text()
    for rule in ALERTS["rules"]:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith((".", "?"))
        assert f"`{rule['alert']}`" in runbook


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "series", "at", "fires"),
    [
        (
            "RayRecTokensSlow",
            {
                # Of 60 tokens a minute all take 0.25 to 1 s, and those of another model up to 0.1 s.
                'rayrec_language_next_token_seconds_bucket{model="a", le="0.25"}': "0x30",
                'rayrec_language_next_token_seconds_bucket{model="a", le="1.0"}': "0+60x30",
                'rayrec_language_next_token_seconds_bucket{model="a", le="+Inf"}': "0+60x30",
                'rayrec_language_next_token_seconds_bucket{model="b", le="0.1"}': "0+60x30",
                'rayrec_language_next_token_seconds_bucket{model="b", le="+Inf"}': "0+60x30",
            },
            "30m",
            [{"model": "a"}],
        ),
        (
            "RayRecPagesFull",
            {
                'ray_rayrec_language_pages_used{model="a"}': "1x30",
                'ray_rayrec_language_waiting{model="a"}': "3x30",
                'ray_rayrec_language_pages_used{model="b"}': "1x30",
                'ray_rayrec_language_waiting{model="b"}': "0x30",
            },
            "20m",
            [{"model": "a"}],
        ),
        (
            "RayRecPrefixesLost",
            {
                # Half of the tokens are found; of `a` for the first day only, of `b` for all of the time.
                'rayrec_language_prompt_tokens_total{model="a"}': "0+100x1600",
                'rayrec_language_prefix_tokens_total{model="a"}': "0+50x1440 72000x160",
                'rayrec_language_prompt_tokens_total{model="b"}': "0+100x1600",
                'rayrec_language_prefix_tokens_total{model="b"}': "0+50x1600",
            },
            "1560m",
            [{"model": "a"}],
        ),
        (
            "RayRecModelShadowFails",
            {
                'rayrec_language_shadow_total{name="a", outcome="answered"}': "0+1x60",
                'rayrec_language_shadow_total{name="a", outcome="failed"}': "0+2x60",
                'rayrec_language_shadow_total{name="a", outcome="dropped"}': "0x60",
                'rayrec_language_shadow_total{name="b", outcome="answered"}': "0+2x60",
                'rayrec_language_shadow_total{name="b", outcome="dropped"}': "0+1x60",
            },
            "50m",
            [{"name": "a"}],
        ),
        (
            "RayRecRequestLogLoses",
            {"rayrec_request_log_dropped_total": "0+1x40", "rayrec_request_log_failures_total": "0x40"},
            "30m",
            [{}],
        ),
        (
            "RayRecRequestLogLoses",
            {"rayrec_request_log_dropped_total": "5x40", "rayrec_request_log_failures_total": "1x40"},
            "30m",
            [],
        ),
    ],
)
def test_alerts_fire_of_what_they_are_for(name, series, at, fires):
    (rule,) = (rule for rule in ALERTS["rules"] if rule["alert"] == name)
    check_alert(ALERTS_FILE, rule, series, at, fires)
