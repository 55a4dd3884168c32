"""Settings of neighbors: items of a graph of users and items, beside those of the model."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rayrec.platform.config import Config
from rayrec.samples.stores.retry import RetryConfig


class NeighborsConfig(Config):
    """A graph in every process that answers, which learns of events while it runs."""

    graph: str = Field(min_length=1)
    """Folder that `rayrec data graph` wrote."""
    store: str | None = None
    """Event store whose new events the graph takes in, one with both sides; None: that of `events`, where
    that has one, else the graph stays as it is."""
    share: float = Field(0.5, ge=0, le=1)
    """Of the candidates of a ranking stage, those that neighbors give."""
    poll_s: float = Field(0.2, gt=0)
    """How often the store is asked for new events."""
    max_ahead_s: float = Field(60.0, ge=0)
    """Events that are farther in the future, by the clock of the service, do not count until they are not."""
    retry: RetryConfig = RetryConfig(attempts=2, first_wait_s=0.05, timeout_s=1.0)
    """Of the event store."""


def neighbors_of(path: Path) -> NeighborsConfig:
    """Settings of a graph's folder, or those in a YAML file.

    Raises:
        InputError: the file cannot be read, or says something unknown.
    """
    return NeighborsConfig.load(path) if path.is_file() else NeighborsConfig(graph=str(path.resolve()))
