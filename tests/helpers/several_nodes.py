"""Runs on a Ray cluster of several nodes, all simulated on this machine.

A program of its own, since the tests share a cluster of one node:

    RAY_TMPDIR=SHORT python -m tests.helpers.several_nodes FOLDER     what happened is in FOLDER/report.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrec.actors.heartbeats import Account, monitor_name
from rayrec.pipelines.cluster import leaving
from rayrec.pipelines.cluster.nodes import FOLDER_VARIABLE, cluster_folder, cluster_nodes
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from tests.helpers.data import small_dataset
from tests.helpers.forked_workers import forked_workers
from tests.helpers.runs import SPARSE_SASREC

NUM_STEPS = 60
SERVER_LOST_AT, TRAINER_LOST_AT, NODE_BAD_AT = 25, 45, 15
SNAPSHOT_EVERY = 10
NUM_ACTORS = 6  # two servers, a reader, a feature worker, two trainers
# The head finds soon that a node is dead; Ray's own patience is 15 s.
QUICK_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


@dataclass
class Story:
    """What became of one run."""

    losses: dict[int, float] = field(default_factory=dict)
    """By step; of one that was trained again, the last."""
    places: list[dict[str, str]] = field(default_factory=list)
    """Of every attempt, Ray's id of the node of each actor."""
    lost_nodes: list[str] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    broke_at_s: float = 0.0
    left_s: list[float] = field(default_factory=list)
    """From what broke to the first step after it, of every later attempt."""
    final_loss: float = 0.0
    seconds: float = 0.0


class Nodes:
    """The cluster: a head on which nothing runs, and nodes with a role each."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_DEATH}
        self._cluster = Cluster(initialize_head=True, head_node_args=self._small(head))
        self.roles: dict[str, str] = {}
        """By Ray's id, also of nodes that are gone."""

    def add(self, role: str, num_cpus: int = 2) -> str:
        """Returns its id."""
        node = self._cluster.add_node(**self._small({"num_cpus": num_cpus, "labels": {"role": role}}))
        self.roles[node.node_id] = role
        return str(node.node_id)

    def drain(self, node_id: str) -> Any:
        """Let a node that has the most room leave as soon as nobody is there, and somebody be there.

        Returns:
            The actor that holds it; to be kept.
        """
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        guest = ray.remote(num_cpus=1)(Guest).options(scheduling_strategy=on_node).remote()
        ray.get(guest.here.remote())
        known = ray._private.worker.global_worker.gcs_client
        is_accepted, why = known.drain_node(
            node_id, DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "", 0
        )
        assert is_accepted, why
        return guest

    def remove(self, node_id: str) -> None:
        """As if its power was cut."""
        (node,) = (node for node in self._cluster.worker_nodes if node.node_id == node_id)
        self._cluster.remove_node(node, allow_graceful=False)

    @contextmanager
    def connected(self) -> Iterator[None]:
        self._cluster.wait_for_nodes()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()

    def shutdown(self) -> None:
        self._cluster.shutdown()

    def _small(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {"object_store_memory": 80 * 2**20, **settings}


class Guest:
    """An actor that only is there."""

    def here(self) -> None:
        return None


def settings(data: Path, **changes: Any) -> RunConfig:
    """Two trainers and two servers on the nodes whose labels say so; `changes` by section."""
    on_servers, on_trainers = {"labels": {"role": "server"}}, {"labels": {"role": "trainer"}}
    values: dict[str, Any] = {
        "data": {"path": str(data)},
        "model": SPARSE_SASREC,
        "sparse": {"num_servers": 2, "optimizer": {"kind": "adam", "lr": 0.03}},
        "pipeline": {
            "num_trainers": 2,
            "trainer_threads": 1,
            "cpus_per_actor": 0.5,
            "cpus_per_trainer": 1.0,
        },
        "training": {"batch_size": 8, "epochs": NUM_STEPS // 5},
        "evaluation": {"every_steps": NUM_STEPS},
        "snapshots": {"every_steps": SNAPSHOT_EVERY},
        "placement": {
            "servers": on_servers,
            "readers": {"labels": {"role": "!trainer"}},
            "feature_workers": on_servers,
            "trainers": {**on_trainers, "strategy": "SPREAD"},
        },
    }
    return RunConfig.parse({name: values.get(name, {}) | changes.get(name, {}) for name in values | changes})


def places_of(run: str, num_actors: int = NUM_ACTORS) -> dict[str, str]:
    """Waits for the first beat of every actor.

    Returns:
        Ray's id of the node of each actor.
    """
    monitor = ray.get_actor(monitor_name(run))
    while True:
        accounts: dict[str, Account] = ray.get(monitor.accounts.remote())
        places = {
            name.partition("/")[2]: account.heartbeat.process.node for name, account in accounts.items()
        }
        if len(places) >= num_actors:
            return places
        time.sleep(0.1)


def run(folder: Path, config: RunConfig, breaks: dict[int, Callable[[Story], str]] | None = None) -> Story:
    """Train to the end.

    Args:
        breaks: by step, what is done behind it once, when there is a snapshot; says which node it cut off.
    """
    story, began, to_do = Story(), time.monotonic(), dict(breaks or {})

    def on_step(done: int, total: int, loss: float) -> None:
        if story.broke_at_s and len(recoveries_of(folder)) > len(story.left_s):
            story.left_s.append(time.monotonic() - story.broke_at_s)
        if len(story.places) <= len(recoveries_of(folder)):
            story.places.append(places_of(folder.name) if config.pipeline.num_trainers == 2 else {})
        story.losses[done] = loss
        if done in to_do:
            while RunFolder.open(folder).state["last"] is None:
                time.sleep(0.05)
            story.broke_at_s = time.monotonic()
            story.lost_nodes.append(to_do.pop(done)(story))

    story.final_loss = train(config, folder, on_step=on_step).final_loss
    story.seconds = time.monotonic() - began
    story.recoveries = recoveries_of(folder)
    return story


def recoveries_of(folder: Path) -> list[dict[str, Any]]:
    recoveries = folder / "recoveries.jsonl"
    if not recoveries.exists():
        return []
    return [json.loads(line) for line in recoveries.read_text().splitlines()]


def refusal(folder: Path, config: RunConfig) -> str:
    try:
        train(config, folder)
    except InputError as error:
        return str(error)
    return "none"


def tell(folder: Path, nodes: Nodes) -> dict[str, Any]:
    data = small_dataset(folder / "source").root

    def lose(actor: str, replacement: str | None) -> Callable[[Story], str]:
        def breaks(story: Story) -> str:
            node = story.places[-1][actor]
            if replacement is not None:
                nodes.add(replacement)
            nodes.remove(node)
            return node

        return breaks

    def find_bad(actor: str) -> Callable[[Story], str]:
        """Quarantines the actor's node."""

        def breaks(story: Story) -> str:
            all_nodes = cluster_nodes()
            (node,) = (node for node in all_nodes if node.id == story.places[-1][actor])
            assert quarantine.add(node, "xid 79", "bad", all_nodes) is not None
            return node.id

        return breaks

    quarantine, runs = Quarantine(cluster_folder()), folder / "runs"
    config = settings(data)
    with nodes.connected():
        typo = {"servers": {"labels": {"role": "servr"}}}
        large = {"cpus_per_trainer": 3.0}
        refused = [
            refusal(runs / "typo", settings(data, placement=typo)),
            refusal(runs / "large", settings(data, pipeline=large)),
        ]
        stories = {
            "one trainer": run(runs / "one", settings(data, pipeline={"num_trainers": 1})),
            "replicated": run(runs / "replicated", config),
            "fsdp2": run(runs / "fsdp2", settings(data, training={"parallel": "fsdp2"})),
        }
        with mock.patch.object(leaving, "LOOK_EVERY_S", 0.0):
            stories["bad node"] = run(runs / "bad", config, {NODE_BAD_AT: find_bad("trainer-1")})
        for session in quarantine.sessions():
            quarantine.lift(session.id)
        stories["nodes lost"] = run(
            runs / "lost",
            config,
            {
                SERVER_LOST_AT: lose("parameter_server-0", replacement="server"),
                TRAINER_LOST_AT: lose("trainer-1", replacement=None),
            },
        )
        draining = nodes.add("server", num_cpus=9)
        guest = nodes.drain(draining)
        stories["draining"] = run(runs / "draining", config)
        del guest
        groups = ray.util.placement_group_table().values()
        left = [group["state"] for group in groups if group["state"] != "REMOVED"]
    return {
        "roles": nodes.roles,
        "refused": refused,
        "stories": {name: asdict(story) for name, story in stories.items()},
        "groups_left": left,
        "draining": draining,
    }


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.environ[FOLDER_VARIABLE] = str(folder / "cluster")
    with forked_workers() as interpreter, mock.patch.object(sys, "executable", interpreter):
        nodes = Nodes()
        try:
            for role in ("server", "server", "trainer", "trainer"):
                nodes.add(role)
            report = tell(folder, nodes)
            (folder / "report.json").write_text(json.dumps(report))
        finally:
            nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
