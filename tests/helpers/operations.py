"""Dashboards and alerts, as Grafana's own model and Prometheus' own program read them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def not_read_by_grafana(dashboard: dict[str, Any]) -> list[str]:
    """Paths of what is written in a dashboard, and not known to Grafana's model."""
    register_default_plugins()
    return list(_lost(dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))))


def _lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    if isinstance(written, dict):
        for key, value in written.items():
            yield from _lost(value, read[key], f"{path}/{key}") if key in read else [f"{path}/{key}"]
    elif isinstance(written, list) and len(written) == len(read):
        for place, (value, other) in enumerate(zip(written, read, strict=True)):
            yield from _lost(value, other, f"{path}/{place}")
    elif written != read:
        yield path


def check_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def num_rules_in_prometheus(path: Path) -> int:
    """Alerts that Prometheus finds in a file; the test is skipped where there is no Prometheus."""
    checked = subprocess.run([_promtool(), "check", "rules", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    (line,) = (line for line in checked.stdout.splitlines() if "rules found" in line)
    return int(line.split()[-3])


def check_alert(
    path: Path,
    rule: Mapping[str, Any],
    series: Mapping[str, str],
    at: str,
    fires: Sequence[Mapping[str, str]],
) -> None:
    """Let Prometheus compute one alert.

    Args:
        path: file with the rule.
        series: values by series, one a minute, in Prometheus' notation.
        at: when it is looked at, such as `50m`.
        fires: labels of the alerts that are expected then, besides those of the rule.
    """
    expected = [
        {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": rule["annotations"]}
        for labels in fires
    ]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": rule["alert"], "exp_alerts": expected}],
    }
    text = yaml.safe_dump({"rule_files": [str(path)], "tests": [case]})
    command = [_promtool(), "test", "rules", "/dev/stdin"]
    tested = subprocess.run(command, input=text, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing, which Debian's package prometheus brings")
    return program
