"""How often a run may go back to its last snapshot by itself."""

from __future__ import annotations

import logging
import time

from rayrec.pipelines.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Rollbacks:
    """Counts returns to one snapshot: a run that gets further may return as often again."""

    def __init__(self, most: int, folder: RunFolder) -> None:
        """
        Args:
            most: returns to one snapshot, after which the run is given up.
        """
        self._most = most
        self._folder = folder
        self._count = 0
        self._snapshot = folder.state["last"]

    def allow(self, error: Exception) -> None:
        """Note a return, for this reason, to what is the last snapshot now; or raise the error again."""
        last = self._folder.state["last"]
        if last != self._snapshot:
            self._snapshot, self._count = last, 0
        self._count += 1
        if self._count > self._most:
            error.add_note(
                f"The run has gone back to its last snapshot {self._most} times (recovery.max_rollbacks); "
                "continue it with --resume"
            )
            raise error
        self._folder.log_recovery({"time": time.time(), "reason": str(error), "snapshot": last})
        self._folder.update(rollbacks=self._folder.state.get("rollbacks", 0) + 1)
        where = "the beginning" if last is None else last
        logger.warning("%s; the run goes back to %s", error, where)
