"""After which steps there is a snapshot."""

from __future__ import annotations

from collections.abc import Callable

from rayrec.pipelines.config.sections import SnapshotConfig

ASK_EVERY_S = 0.2
"""Least time between two looks at whether somebody asks for a snapshot: steps may be much shorter."""


class SnapshotSchedule:
    """After which steps there is a snapshot, besides those of validations."""

    def __init__(
        self,
        config: SnapshotConfig,
        is_asked: Callable[[], bool],
        is_writing: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._is_asked = is_asked
        self._is_writing = is_writing
        self._clock = clock
        self._last_s = self._asked_s = clock()
        self._is_out = False
        """Whether there is one that is not being written yet."""

    def __call__(self, step: int) -> bool:
        """Whether there is one after this step; one that is due while another is written is left out."""
        if self._is_out or self._is_writing():
            return False
        config = self._config
        is_due = config.every_steps is not None and (step + 1) % config.every_steps == 0
        is_due = is_due or (config.every_s is not None and self._clock() - self._last_s >= config.every_s)
        if not (is_due or self._is_wished()):
            return False
        self._last_s = self._clock()
        self._is_out = True
        return True

    def taken(self) -> None:
        """Note that the snapshot is being written now."""
        self._is_out = False

    def _is_wished(self) -> bool:
        """Whether somebody asks, which is looked up now and then: it takes a look at the run's folder."""
        if self._clock() - self._asked_s < ASK_EVERY_S:
            return False
        self._asked_s = self._clock()
        return self._is_asked()
