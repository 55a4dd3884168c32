"""How much memory there is, and how amounts of it are written."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rayrec.platform.control_groups import limits


def machine_bytes() -> int:
    """Memory that the processes of this machine, or of this container, may use in all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_limits()])


def human_size(num_bytes: float) -> str:
    """The amount in the largest binary unit that leaves at least one of it: `8.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _limits() -> Iterator[int]:
    """`max` where there is no limit."""
    for words in limits("memory", ("memory.max",), ("memory.limit_in_bytes",)):
        yield from (int(word) for word in words if word.isdigit())
