"""One call's work on several threads; compiled kernels run at once, since they let go of Python's lock.

Every part of the work is done by one thread, in order, so results do not depend on how many there are.
One thread is the default everywhere: servers share their machine with each other.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from rayrec.platform.processors import num_processors

ResultT = TypeVar("ResultT")

ROWS_PER_THREAD = 4096
"""Fewest rows worth a thread: handing them over costs about as much as copying a thousand."""

_NICE = 10
"""A tenth of the time of a core that another thread wants, too; with less it could sit on Python's lock."""


def give_way() -> None:
    """Lower the calling thread's priority, where a thread has one of its own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a container may forbid it; only speed is lost
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICE)


def in_parts(
    num_threads: int, length: int, work: Callable[[int, int], ResultT], least: int = ROWS_PER_THREAD
) -> list[ResultT]:
    """Call `work(first, last)` on contiguous parts of range(length), one per thread; results in order.

    Args:
        least: length of a part that is worth a thread. There is always one part, which may be shorter.
    """
    num_parts = max(1, min(num_threads, length // least))
    bounds = [part * length // num_parts for part in range(num_parts + 1)]
    others = [_pool().submit(work, first, last) for first, last in itertools.pairwise(bounds[1:])]
    try:
        mine = work(bounds[0], bounds[1])
    finally:
        rest = [other.result() for other in others]  # afterwards nobody writes to the caller's arrays
    return [mine, *rest]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_processors(), thread_name_prefix="rows")
