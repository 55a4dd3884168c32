"""A peer of a benchmark in a process of its own, idle between the windows that are measured."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

SETTLE_S = 0.3
"""OpenMP's threads spin for 0.2 s after their last work; the other side starts later."""

MEMORY: dict[str, dict[str, str]] = {
    "as installed": {},
    "memory kept": {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)},
    "memory kept, huge pages": {
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**31),
        "THP_MEM_ALLOC_ENABLE": "1",
    },
}
"""What the environment says of memory; the C library and torch read it when a process starts."""


class PeerProcess:
    """Starts at once, with an environment of its own: settings of memory are read when a process starts."""

    def __init__(
        self,
        make_windows: Callable[..., Callable[[Any], Any]],
        args: tuple[Any, ...],
        environment: Mapping[str, str] | None = None,
        settle_s: float = 0.0,
    ) -> None:
        """
        Args:
            make_windows: called in the process with `args`; what it gives measures a rate over a window of as
                many steps as it is told.
            settle_s: waited before each window.
        """
        context = multiprocessing.get_context("spawn")  # a forked process would share our thread pools
        self._connection, theirs = context.Pipe()
        self._settle_s = settle_s
        self._process = context.Process(target=_serve, args=(theirs, make_windows, args), daemon=True)
        with _environment(environment or {}):
            self._process.start()
        theirs.close()  # so that the peer's end is the only one, and its death an EOFError here

    def rate(self, num_steps: int | None = None) -> float:
        """Over the next window."""
        rate: float = self.measure(num_steps)
        return rate

    def measure(self, window: Any) -> Any:
        """What the process's function gives for the next window, where that is more than a rate."""
        time.sleep(self._settle_s)
        self._connection.send(window)
        return self._connection.recv()

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def steps_per_second(losses: Iterator[Any]) -> Callable[[int], float]:
    """Measures a loop that trains a step for each loss."""

    def measure(num_steps: int) -> float:
        started = time.perf_counter()
        for _ in range(num_steps):
            next(losses)
        return num_steps / (time.perf_counter() - started)

    return measure


def _serve(
    connection: Connection, make_windows: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...]
) -> None:
    measure = make_windows(*args)
    with suppress(EOFError, BrokenPipeError):  # whoever asked is gone
        while True:
            connection.send(measure(connection.recv()))


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
