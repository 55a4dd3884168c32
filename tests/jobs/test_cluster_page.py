"""What the page of the cluster shows, and to whom."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from fastapi.testclient import TestClient

from rayrec.jobs.cluster_page import build_page
from rayrec.jobs.view import cluster_view
from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from tests.serve.fake_recommender import listening

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def view(tmp_path):
    quarantine = Quarantine(tmp_path, clock=lambda: 1000.0)
    nodes = [
        Node("aaaa", "10.0.0.1", {"rack": "r1", "role": "server"}, {"CPU": 8.0}, {"CPU": 5.5}, "one"),
        Node("bbbb", "10.0.0.2", {}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}, "two", True),
        Node("cccc", "10.0.0.3", {}, {"CPU": 8.0}, {"CPU": 8.0}, "three", quarantined="<b>xid 79</b>"),
    ]
    quarantine.add(nodes[2], "<b>xid 79</b>", "bad", nodes=nodes)
    quarantine.add(nodes[0], "hot", "bad", nodes=nodes)
    health = {"time": 990.0, "nodes": {"bbbb": {"verdict": "suspect", "findings": ["card 2 is 20 C hotter"]}}}
    queue = {
        "name": "team-a",
        "cohort": "all",
        "use": "GPU 8 of 4",
        "running": ["j1"],
        "waiting": [{"id": "j2", "reason": "4 GPU are missing; starts in about 10 min"}],
    }
    return cluster_view(nodes, {"bbbb": {"runs/x": 3}}, quarantine, health, [queue])


def test_the_view_says_of_each_node_what_it_has_and_who_holds_it(view):
    first, second, third = view.nodes
    assert (first.condition, first.resources, first.topology) == (
        "usable",
        {"CPU": (2.5, 8.0)},
        {"rack": "r1"},
    )
    assert (first.labels, first.health, first.holders) == ({"role": "server"}, None, {})
    assert (second.condition, second.resources["GPU"]) == ("draining", (3.0, 4.0))
    assert (second.holders, second.health) == ({"runs/x": 3}, "suspect")
    assert len(third.sessions) == 1
    assert [alarm.reason for alarm in view.alarms] == ["hot"]


def test_many_who_look_ask_once_and_what_fails_is_a_sentence(view):
    asked, now = [], [0.0]

    def look():
        asked.append(now[0])
        if len(asked) > 1:
            raise RuntimeError("no Ray cluster answers")
        return view

    client = TestClient(build_page(look, ["testserver"], clock=lambda: now[0]))
    for _ in range(5):
        assert client.get("/v1/cluster").json()["nodes"][0]["id"] == "aaaa"
    now[0] = 2.0
    answer = client.get("/v1/cluster")
    assert (answer.status_code, answer.json(), len(asked)) == (503, {"error": "no Ray cluster answers"}, 2)
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium; `make packages` installs it")
def test_a_browser_shows_nodes_cards_health_and_queues(view, tmp_path):
    with listening(build_page(lambda: view, ["127.0.0.1"])) as address:
        shown = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",  # containers forbid it
                "--disable-gpu",
                "--no-proxy-server",
                f"--user-data-dir={tmp_path}",
                "--virtual-time-budget=8000",
                "--dump-dom",
                f"http://{address}/",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.split("<script>")[0]

    for text in (
        "10.0.0.2 (bbbb)",
        "3 of 4 GPU",
        "draining",
        "card 2 is 20 C hotter",
        "runs/x (3)",
        "rack=r1",
        "&lt;b&gt;xid 79&lt;/b&gt;",
        "team-a",
        "GPU 8 of 4",
        "starts in about 10 min",
    ):
        assert text in shown
