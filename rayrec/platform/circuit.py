"""Circuit breaker: what did not answer is not asked for a moment, so that requests need not wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rayrec.platform.errors import UnavailableError

Answer = TypeVar("Answer")


class Circuit:
    """Not thread-safe: two threads may both ask what is down, which does no harm."""

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._down: tuple[float, UnavailableError] | None = None
        """Until when nobody asks, and what was said last."""

    def __call__(self, ask: Callable[[], Answer]) -> Answer:
        """Ask, unless the store failed a moment ago.

        Raises:
            UnavailableError: there was no answer, or none a moment ago.
        """
        if self._down is not None and self._clock() < self._down[0]:
            raise self._down[1].with_traceback(None)  # it would grow with every request that is refused
        try:
            answer = ask()
        except UnavailableError as error:
            self._down = self._clock() + self._pause_s, error
            raise
        self._down = None
        return answer
