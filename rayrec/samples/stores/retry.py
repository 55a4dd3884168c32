"""Bounded attempts with growing pauses, for stores that are a network away."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from pydantic import Field

from rayrec.platform.config import Config
from rayrec.samples.stores.errors import StoreUnavailableError

_T = TypeVar("_T")


class RetryConfig(Config):
    """How long a store that does not answer is waited for."""

    attempts: int = Field(6, ge=1)
    """How often a request is made before the run stops."""
    first_wait_s: float = Field(0.1, gt=0)
    """Longest pause after the first failure; it doubles with every further one."""
    longest_wait_s: float = Field(10.0, gt=0)
    """No pause is longer than this."""
    timeout_s: float = Field(5.0, gt=0)
    """How long one request may take."""


class Retry:
    """Repeats what fails for a reason that may pass."""

    def __init__(
        self,
        config: RetryConfig,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._config = config
        self._sleep = sleep
        self._uniform = uniform

    def __call__(self, service: str, request: Callable[[], _T], transient: tuple[type[Exception], ...]) -> _T:
        """What `request` returns, the first time that it does.

        Raises:
            StoreUnavailableError: every attempt raised one of `transient`.
        """
        longest = self._config.first_wait_s
        for attempt in range(1, self._config.attempts + 1):
            try:
                return request()
            except transient as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt < self._config.attempts:
                # Between half and all of it: workers that failed together do not come back together.
                self._sleep(self._uniform(longest / 2, longest))
                longest = min(2 * longest, self._config.longest_wait_s)
        raise StoreUnavailableError(service, self._config.attempts, reason)
