"""The one view of a cluster's nodes: what each has, what of it is free, and whether new actors may go there.

Ray: nodes, free resources, draining ─┐
quarantine of this cluster ───────────┴─► cluster_nodes ─► placement, queues, health, `rayrec nodes`
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ray

from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "RAYREC_CLUSTER_FOLDER"
"""Of what is known of a cluster besides what Ray knows."""
_ASK_S = 10.0
_last_reasons: dict[Path, dict[str, str]] = {}
"""By the file of a quarantine, what this process has read of it last."""


def cluster_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of what is known of a cluster: the one that the environment names, else `~/.rayrec`.

    Drivers, the queue and health checks of one cluster have to see the same one.
    """
    return Path(environment.get(FOLDER_VARIABLE) or Path.home() / ".rayrec").expanduser()


def cluster_nodes(quarantine: Quarantine | None = None) -> list[Node]:
    """The nodes that are alive, in an order of their own; a cluster has to be joined.

    Args:
        quarantine: of this cluster; None: that of its folder.
    """
    # Of Ray's public functions none says what is free on which node, nor which are draining; these are what
    # its libraries use. A draining node is alive, and all that it has seems to be free.
    free = ray._private.state.available_resources_per_node()
    known = ray._private.worker.global_worker.gcs_client  # type: ignore[attr-defined]
    draining = known.get_draining_nodes(timeout=_ASK_S)
    nodes = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Labels"],
            node["Resources"],
            free.get(node["NodeID"], {}),
            node["NodeManagerHostname"],
            node["NodeID"] in draining,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    if quarantine is None:
        quarantine = Quarantine(cluster_folder())
    try:
        reasons = _last_reasons[quarantine.path] = quarantine.reasons(nodes)
    except InputError as error:  # no run ends, nor waits, because a file about nodes is damaged
        reasons = _last_reasons.get(quarantine.path, {})
        logger.warning("%s; meanwhile, nodes are left out as they were before", error)
    nodes = [replace(node, quarantined=reasons.get(node.id)) for node in nodes]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def holders() -> dict[str, dict[str, int]]:
    """By Ray's id of a node, who has actors there, and how many; a cluster has to be joined.

    The actors of a run are called `RUN/stage-member`; others go by their class.
    """
    found: dict[str, Counter[str]] = {}
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE":
            run, _, member = actor["Name"].rpartition("/")
            found.setdefault(actor["Address"]["NodeID"], Counter())[
                run or member or actor["ActorClassName"]
            ] += 1
    return {node: dict(counts) for node, counts in found.items()}
