"""How much memory there is, and how amounts of it are written."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
"""Of cgroups 2 and 1: the limit of a container."""


def machine_bytes() -> int:
    """Memory that the processes of this machine, or of this container, may use in all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_cgroup_limits()])


def human_size(num_bytes: float) -> str:
    """The amount in the largest binary unit that leaves at least one of it: `8.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _cgroup_limits() -> list[int]:
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" where there is none
            limits.append(int(text))
    return limits
