"""A run leaves a node that is found to be bad: snapshot, and the next attempt elsewhere, with the same bits.

    quarantine, verdict bad ─► LeaveWatch ─► a snapshot is asked for ─► written ─► NodeLeftError
                                                                                      └► next attempt

A node that is only suspect keeps what runs on it; new attempts avoid it either way (`assign`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
STAYS_SAID_EVERY_S = 300.0


class NodeLeftError(Exception):
    """The run goes on elsewhere; says which node it leaves and why."""


class LeaveWatch:
    """Looks now and then at whether a node of a run is to be left."""

    def __init__(
        self,
        quarantine: Quarantine,
        node_ids: Callable[[], Collection[str]],
        has_room_elsewhere: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            node_ids: gives Ray's, of the nodes that the run's actors are on.
            has_room_elsewhere: whether the run could start on nodes that may be used, if it gave its own room
                back; without, it stays: a bad node is better than none.
        """
        self._quarantine, self._node_ids, self._clock = quarantine, node_ids, clock
        self._has_room_elsewhere = has_room_elsewhere
        self._stays_since: float | None = None
        self._looked_at = float("-inf")
        self._found: str | None = None

    def __call__(self) -> str | None:
        """Which node is to be left and why, in words; None: none."""
        now = self._clock()
        if self._found is None and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._found = self._look()
        return self._found

    def _look(self) -> str | None:
        try:
            sessions = self._quarantine.sessions()
        except (InputError, OSError) as error:  # a run does not end because a file about nodes is damaged
            logger.warning("quarantined nodes cannot be read: %s", error)
            return None
        bad = [each for each in sessions if each.verdict == "bad"]
        node_ids = self._node_ids() if bad else ()
        for each in bad:
            if each.node_id in node_ids:
                why = f"{each.node_name} is bad ({each.reason})"
                if self._has_room_elsewhere():
                    return why
                self._say_that_it_stays(why)
        return None

    def _say_that_it_stays(self, why: str) -> None:
        now = self._clock()
        if self._stays_since is None or now - self._stays_since >= STAYS_SAID_EVERY_S:
            self._stays_since = now
            logger.error("%s, and no other node has room: the run stays there until one has", why)
