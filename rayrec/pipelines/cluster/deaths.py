"""Which actor's death is behind an error, whichever call hears of it first.

A trainer hears of another one's death from the collective, which names nobody, at once. Ray knows that a
process has died after a moment; that a whole node has, after so many missed heartbeats of it, and until then
calls to its actors get no answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError

from rayrec.platform.ray_errors import ActorDeathError, root_cause

DEATH_KNOWN_S = 2.0
"""Time in which Ray notices that a process has died."""
NODE_DEATH_KNOWN_S = 90.0
"""The same of a node: by default five checks of its health, each with a timeout of ten seconds."""
NODE_ANSWERS_S = 1.0
"""Time in which a node that is there takes a connection."""
ASK_AGAIN_S = 0.5


def death_behind(error: Exception, actors: Sequence[ActorHandle]) -> ActorDeathError | None:
    """The death of an actor that the error tells of, or may be a consequence of.

    Args:
        actors: all of the run.
    """
    cause = root_cause(error)
    if isinstance(cause, ActorDeathError):
        return cause
    if isinstance(cause, ObjectLostError):
        return ActorDeathError("a batch was lost with the node that held it")
    if not isinstance(cause, RayError | RuntimeError):
        return None
    # The dead answer with an error; of the others, those that are at work may not answer in time.
    waiting: dict[Any, ActorHandle] = {actor.stats.remote(): actor for actor in actors}
    began = time.monotonic()
    patience_s, unavailable = DEATH_KNOWN_S, isinstance(cause, ActorUnavailableError)
    while waiting:
        left_s = began + patience_s - time.monotonic()
        if left_s <= 0:
            if patience_s == NODE_DEATH_KNOWN_S or not (unavailable or _a_node_is_gone()):
                break
            patience_s = NODE_DEATH_KNOWN_S
            continue
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left_s)
        if not ready:
            continue
        actor = waiting.pop(ready[0])
        try:
            ray.get(ready[0])
        except Exception as found:
            if isinstance(death := root_cause(found), ActorDeathError):
                return death
            if isinstance(death, ActorUnavailableError):
                unavailable = True
                time.sleep(ASK_AGAIN_S)
                waiting[actor.stats.remote()] = actor
    if isinstance(cause, ActorUnavailableError):
        return ActorDeathError(f"an actor cannot be reached, and Ray does not say that it died: {cause}")
    return None


def deaths_among(
    actors: Sequence[ActorHandle], patience_s: float = DEATH_KNOWN_S
) -> dict[int, ActorDeathError]:
    """Those that are known to be dead, by position; empty if no death shows in time, or one is in doubt.

    Returns as soon as there is a death: of the others, those that die a moment later may be missing.
    """
    waiting: dict[Any, int] = {actor.stats.remote(): position for position, actor in enumerate(actors)}
    ends, deaths = time.monotonic() + patience_s, dict[int, ActorDeathError]()
    while waiting and not deaths and (left_s := ends - time.monotonic()) > 0:
        some, _ = ray.wait(list(waiting), num_returns=1, timeout=left_s)
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0) if some else ([], [])
        for ref in ready:
            position = waiting.pop(ref)
            try:
                ray.get(ref)
            except Exception as found:
                if not isinstance(death := root_cause(found), ActorDeathError):
                    return {}
                deaths[position] = death
    return deaths


def _a_node_is_gone() -> bool:
    """Whether Ray counts a node as alive that takes no connection."""
    for node in ray.nodes():
        if node["Alive"]:
            try:
                address = node["NodeManagerAddress"], node["NodeManagerPort"]
                socket.create_connection(address, NODE_ANSWERS_S).close()
            except OSError:
                return True
    return False
