"""How many processors there are for this process, and what idle threads do with them."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_2 = "/sys/fs/cgroup/cpu.max"
_CGROUP_1 = ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
"""The limit of a container: microseconds of processors, in a period of so many."""


SPIN_VARIABLE = "GOMP_SPINCOUNT"
SPIN_COUNT = "10000"
"""Some microseconds, in which the next parallel loop of a training mostly comes."""


def let_idle_threads_sleep() -> None:
    """Have OpenMP's threads sleep soon when they have nothing to do, unless the environment says otherwise.

    Those of torch's libgomp spin for so long that they hardly ever sleep. That takes nothing from a process
    that has its processors for itself; beside others (the actors of a run, trials, tests), each loop waits
    for a thread on whose processor another one spins. `rayrec bench idle-threads` measures it. For this
    process, if torch was not imported before, and for those that it starts.
    """
    if not {SPIN_VARIABLE, "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ[SPIN_VARIABLE] = SPIN_COUNT


def num_processors() -> int:
    """Processors that this process may use at once: the machine's, less by its affinity or its container.

    `os.cpu_count` is the machine's. Threads beyond that wait for each other.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _container_processors()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _container_processors() -> float | None:
    for numbers in (_numbers(_CGROUP_2), [number for path in _CGROUP_1 for number in _numbers(path)]):
        if len(numbers) == 2 and min(numbers) > 0:  # version 1 has -1 where there is no limit
            return numbers[0] / numbers[1]
    return None


def _numbers(path: str) -> list[int]:
    """Of a file; none where it is missing, or says that there is no limit."""
    try:
        return [int(word) for word in Path(path).read_text().split()]
    except (OSError, ValueError):
        return []
