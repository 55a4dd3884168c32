"""Names of the lists that are evaluated, and of the files that have the positions in them."""

from __future__ import annotations

from pathlib import Path

from rayrec.pipelines.metrics.positions import SUFFIX
from rayrec.samples.dataset.manifest import Split

HYBRID = "model + ranker"
"""What the model gives, ranked again; see `RankingStage`."""
MODEL, MODEL_UNMASKED = "model", "model, seen items kept"
POPULARITY, POPULARITY_UNMASKED = "popularity", "popularity, seen items kept"
CO_VISITATION, SWING = "neighbors, co-visitation", "neighbors, Swing"
CO_VISITATION_UNMASKED, SWING_UNMASKED = f"{CO_VISITATION}, seen items kept", f"{SWING}, seen items kept"
REPEATS = "history, newest first"
"""Items that the user met before, where these are kept: what logs of sessions have to be compared with."""
CO_VISITATION_IN_TIME = "neighbors, co-visitation at the time"
"""All events of all users before the one that is to be predicted, held-out ones of other users too: what a
service would know. The others know training events alone, as models do."""


def positions_path(
    run: str | Path,
    split: Split,
    snapshot: str,
    max_users: int | None = None,
    on: str | None = None,
    grown: str | None = None,
) -> Path:
    """Where the positions of a run's evaluation are: a file for each split and snapshot.

    Args:
        snapshot: its name.
        max_users, on, grown: as of `evaluation_name`.
    """
    return Path(run) / f"{evaluation_name(split, max_users, on, grown)}-{snapshot}{SUFFIX}"


def neighbor_positions_path(data: Path, split: Split, max_users: int | None = None) -> Path:
    """Where the positions of a data set's neighbors are, unless another file was named."""
    return data / f"neighbors-{split}{_of_sample(max_users)}{SUFFIX}"


def evaluation_name(
    split: Split, max_users: int | None = None, on: str | None = None, grown: str | None = None
) -> str:
    """How names of files of an evaluation begin: one of a sample, or of another data set, does not take the
    place of the whole.

    Args:
        on: fingerprint of the data set on whose events the run is judged, where it is not its own.
        grown: that of the data set whose catalog is ranked, likewise.
    """
    others = (("on", on), ("grown", grown))
    names = (f"-{name}-{fingerprint[:8]}" for name, fingerprint in others if fingerprint is not None)
    return f"evaluation-{split}{_of_sample(max_users)}{''.join(names)}"


def _of_sample(max_users: int | None) -> str:
    return "" if max_users is None else f"-first-{max_users}"
