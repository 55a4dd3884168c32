"""Arrays from every trainer to every trainer, which a cache that is divided among them needs.

Axes: T trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray


class Exchange(Protocol):
    """All trainers call it, in the same order, for the same thing."""

    @property
    def num_trainers(self) -> int: ...

    def all_to_all(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Send one array to every trainer, and receive one from each.

        Args:
            parts: [T] what each trainer gets from this one; equal dtypes and equal shapes but for the
                first axis.

        Returns:
            [T] what this one gets from each trainer, in the order of their ranks.
        """
        ...
