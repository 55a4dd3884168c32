"""How many processors there are for this process, and what idle threads do with them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from rayrec.platform.control_groups import limits

SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPIN_COUNT = "10000"
"""Some tenths of a millisecond, in which the next parallel loop of a training mostly comes."""


def let_idle_threads_sleep() -> None:
    """Have OpenMP's threads sleep soon when they have nothing to do, unless the environment says otherwise.

    Those of torch's libgomp spin for so long that they hardly ever sleep. That takes nothing from a process
    that has its processors for itself; beside others (the actors of a run, trials, tests), each loop waits
    for a thread on whose processor another one spins. `rayrec bench idle-threads` measures it. For this
    process, if torch was not imported before, and for those that it starts. Other libraries of OpenMP, as
    that of macOS, do not read it.
    """
    if not {SPIN_VARIABLE, "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ[SPIN_VARIABLE] = SPIN_COUNT


def num_processors() -> int:
    """Processors that this process may use at once: the machine's, less by its affinity or its container.

    `os.cpu_count` is the machine's. Threads beyond that wait for each other.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, math.ceil(min(_limits(), default=allowed))))


def _limits() -> Iterator[float]:
    """Microseconds of processors in a period of so many; `max` or -1 where there is no limit."""
    for words in limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        if len(words) == 2 and all(word.isdigit() for word in words):
            yield int(words[0]) / int(words[1])
