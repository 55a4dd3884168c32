"""Workers of near-line products as Ray actors: each has its part of the users."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import ray


class Loop(Protocol):
    """What a worker does with its part."""

    def finish(self) -> None: ...

    def run(self, is_stopped: Callable[[float], bool]) -> None: ...

    def report(self) -> tuple[Any, ...]: ...


class NearlineActor:
    """Runs a loop until told to stop; all of the work is in the loop."""

    def __init__(self, make: Callable[[int], Loop], part: int) -> None:
        self._make, self._part = make, part
        self._stopped = threading.Event()

    @cached_property
    def _loop(self) -> Loop:
        # By the first call: of an error in a constructor, Ray prints the stack besides.
        return self._make(self._part)

    def finish(self) -> tuple[Any, ...]:
        """Bring everything up to date that is known by now."""
        self._loop.finish()
        return tuple(self._loop.report())

    def run(self) -> tuple[Any, ...]:
        """Follow events until `stop`."""
        self._loop.run(self._stopped.wait)
        return tuple(self._loop.report())

    def stop(self) -> None:
        """End `run` after the batch that it is at."""
        self._stopped.set()


def spawn_nearline_workers(make: Callable[[int], Loop], num_workers: int, num_cpus: float = 1) -> list[Any]:
    """Start workers, one for each part of the users.

    Args:
        make: the loop of a part, in the actor's process.
    """
    # Restarted, a worker goes on from its position; two threads, so that `stop` reaches one that runs.
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 2,
    }
    actor: Any = ray.remote(**options)(NearlineActor)
    return [actor.remote(make, part) for part in range(num_workers)]
