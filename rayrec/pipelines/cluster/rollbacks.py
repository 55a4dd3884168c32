"""How often a run may go back to its last snapshot by itself."""

from __future__ import annotations

import logging
import time

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.ray_errors import StageHungError

logger = logging.getLogger(__name__)


MOST_PATIENCE = 4


class Rollbacks:
    """Counts returns to one snapshot: a run that gets further may return as often again.

    What counts as hanging may only be slow, on a machine that has others to serve, and is as slow when it
    starts again. So the patience with one snapshot doubles each time that it was at an end.
    """

    def __init__(self, most: int, folder: RunFolder) -> None:
        """
        Args:
            most: returns to one snapshot, after which the run is given up.
        """
        self._most = most
        self._folder = folder
        self._count = 0
        self._patience = 1
        self._snapshot = folder.state["last"]
        self._refused: Exception | None = None

    @property
    def patience(self) -> int:
        """Times `recovery.hang_timeout_s`, that an attempt is to have."""
        return self._patience

    def allow(self, error: Exception, is_alone: bool = False) -> None:
        """Note a return, for this reason, to what is the last snapshot now; or raise the error again.

        Args:
            is_alone: whether what was lost has been replaced, and all else stays.
        """
        if error is self._refused:
            raise error
        last = self._folder.state["last"]
        if last != self._snapshot:
            self._snapshot, self._count, self._patience = last, 0, 1
        self._count += 1
        if isinstance(error, StageHungError):
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        if self._count > self._most:
            error.add_note(
                f"The run has gone back to its last snapshot {self._most} times (recovery.max_rollbacks); "
                "continue it with --resume"
            )
            self._refused = error
            raise error
        record = {"time": time.time(), "reason": str(error), "snapshot": last}
        self._folder.log_recovery(record | ({"replaced_alone": True} if is_alone else {}))
        self._folder.update(rollbacks=self._folder.state.get("rollbacks", 0) + 1)
        where = "the beginning" if last is None else last
        how = ", with what is left of it" if is_alone else ""
        logger.warning("%s; the run goes back to %s%s", error, where, how)
