"""Settings of the way back: events that come to the service, and what is taken down of its answers."""

from __future__ import annotations

from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.samples.stores.retry import RetryConfig


class LogConfig(Config):
    """A log in Parquet files."""

    folder: str = Field(min_length=1)
    """Path or URL; files are `date=YYYY-MM-DD/part-*.parquet` below it."""
    roll_s: float = Field(10.0, gt=0)
    """Oldest that a row gets before it is in a file."""
    roll_rows: int = Field(100_000, ge=1)
    """Most rows of a file."""
    max_queued: int = Field(200_000, ge=1)
    """Rows that wait to be written, as where a disk is full. Beyond, events are refused with status 503."""


class RequestLogConfig(LogConfig):
    """What of requests and answers is taken down; rows that find no room are dropped and counted."""

    share: float = Field(0.01, ge=0, le=1)
    """Of the requests, by a hash of their ids."""


class EventsConfig(Config):
    """Events that come to `/v1/events`: into the users' state, and into a log that training follows."""

    log: LogConfig | None = None
    """Rows for training; None: events are state alone."""
    store: str | None = None
    """Event store of the users' state: folder (LMDB) or URL (redis://, rediss://), made if there is none.
    None keeps it in the process, until it ends."""
    by_item: bool = False
    """Write the store's other side as well, who met each item, in the same transaction."""
    last: int = Field(200, ge=1)
    """Newest events of a user that are read from the state."""
    max_users: int = Field(100_000, ge=1)
    """Users in the state of a process; the least recently seen is forgotten. A store has no bound."""
    max_events: int = Field(1000, ge=1)
    """Of one message."""
    max_ahead_s: float = Field(60.0, ge=0)
    """Events that are farther in the future, by the clock of the service, are refused."""
    retry: RetryConfig = RetryConfig(attempts=2, first_wait_s=0.05, timeout_s=1.0)
    """Of the event store; short, since requests wait for it."""
    pause_s: float = Field(1.0, ge=0)
    """In which a store that did not answer is not asked for histories again."""

    @model_validator(mode="after")
    def _a_side_is_of_a_store(self) -> EventsConfig:
        if self.by_item and self.store is None:
            raise ValueError("by_item is a side of an event store, and there is none; set store")
        return self
