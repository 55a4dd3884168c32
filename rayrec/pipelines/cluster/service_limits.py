"""How many replicas a service may have, and has: files by which the queue and the service's controller agree.

    queue ── allow(2) ──► services/APP/DEPLOYMENT.limit.json ──► controller of the service
      ▲                                                             │ scales, every second
      └────────────────── services/APP/DEPLOYMENT.state.json ◄──────┘

Both processes may end and start again at any time, and the cluster's head, too: the last word of each is in
the cluster's folder, written as a whole or not at all. Nobody has to be there when the other one speaks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayrec.platform.errors import InputError
from rayrec.platform.files import is_plain_name, write_json

logger = logging.getLogger(__name__)

FOLDER = "services"
APPLICATION, DEPLOYMENT = "rayrec", "recommend"
"""Of a service whose replicas hold all of it, as Ray Serve knows them."""
FRESH_S = 30.0
"""Age of a state, above which its controller is not there."""


@dataclass(frozen=True)
class Limit:
    """The most replicas that somebody else leaves a service."""

    maximum: int
    why: str
    at: float
    """Unix time."""


@dataclass(frozen=True)
class ReplicaState:
    """What a controller did last."""

    at: float
    """Unix time."""
    num_replicas: int
    """That exist, those that start and those that end included."""
    target: int
    """That Ray Serve was told."""
    wish: int
    """That load, or the value of a device second, asks for."""
    maximum: int
    """In force: that of the service's settings, or a lower one that it was left."""
    nodes: tuple[str, ...] = ()
    """Ray's ids, of every replica's; which of them end is Ray Serve's choice."""


class ServiceLimits:
    """Of all services of one cluster; any process may read and write."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            folder: of the cluster, see `nodes.cluster_folder`.
            clock: Unix time.
        """
        self._folder, self._clock = folder / FOLDER, clock

    def allow(
        self,
        maximum: int | None,
        why: str = "",
        application: str = APPLICATION,
        deployment: str = DEPLOYMENT,
    ) -> bool:
        """Leave a service at most so many replicas from now on; may be called again and again.

        Args:
            maximum: None: as many as its own settings say.

        Returns:
            Whether it has no more by now, as its controller says; False too if that one is not there.

        Raises:
            InputError: a maximum below 1, or a name that is none.
        """
        path = self._path(application, deployment, "limit")
        if maximum is None:
            path.unlink(missing_ok=True)
            return True
        if maximum < 1:
            raise InputError(
                f"maximum: {maximum} replicas of {deployment!r} would answer nobody; leave it at least 1, or "
                "stop the service"
            )
        known = self.limit(application, deployment)
        if known is None or (known.maximum, known.why) != (maximum, why):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(Limit(maximum, why, self._clock())))
        state = self.state(application, deployment)
        return state is not None and max(state.num_replicas, state.target, state.maximum) <= maximum

    def limit(self, application: str = APPLICATION, deployment: str = DEPLOYMENT) -> Limit | None:
        """What a service is left; None: all that its settings say."""
        found = _read(self._path(application, deployment, "limit"))
        try:
            return None if found is None else Limit(**found)
        except TypeError:
            return None

    def report(
        self, state: ReplicaState, application: str = APPLICATION, deployment: str = DEPLOYMENT
    ) -> None:
        """Write down what a controller did."""
        path = self._path(application, deployment, "state")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(state))

    def state(self, application: str = APPLICATION, deployment: str = DEPLOYMENT) -> ReplicaState | None:
        """What its controller said last; None where none has said anything for `FRESH_S`."""
        found = _read(self._path(application, deployment, "state"))
        try:
            state = (
                None if found is None else ReplicaState(**{**found, "nodes": tuple(found.get("nodes", ()))})
            )
        except TypeError:
            return None
        # Also after the clock was put back, or what it said last would count until it is that late again.
        return None if state is None or abs(self._clock() - state.at) > FRESH_S else state

    def forget(self, application: str = APPLICATION, deployment: str = DEPLOYMENT) -> None:
        """The service has ended: the next one is told its own limit."""
        for kind in ("limit", "state"):
            self._path(application, deployment, kind).unlink(missing_ok=True)

    def _path(self, application: str, deployment: str, kind: str) -> Path:
        for name in (application, deployment):
            if not is_plain_name(name):
                raise InputError(f"{name!r} is no name of an application or deployment of Ray Serve")
        return self._folder / application / f"{deployment}.{kind}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or none that can be understood: then nothing is limited."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s: cannot be read (%s), as if it were not there", path, error)
        return None
    return found if isinstance(found, dict) else None
