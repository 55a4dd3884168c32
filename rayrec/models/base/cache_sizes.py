"""How much of returning users' contexts is kept where, see `rayrec.models.generative.context_tiers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of a prefix cache, by where it keeps contexts; 0: nowhere there."""

    device: int
    host: int = 0
    disk: int = 0
    folder: Path | None = None
    """Where files go; None: the folder of temporary files."""
