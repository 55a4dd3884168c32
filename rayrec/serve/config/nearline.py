"""Settings of near-line products: what was computed of users before they ask."""

from __future__ import annotations

from pydantic import Field

from rayrec.pipelines.nearline.config import KindName
from rayrec.platform.config import Config
from rayrec.samples.stores.retry import RetryConfig


class NearlineReadConfig(Config):
    """Products that `rayrec nearline` keeps, for the versions that answer here."""

    store: str = Field(min_length=1)
    """Folder (LMDB) or URL (redis://, rediss://) of the products."""
    products: tuple[KindName, ...] = ("summaries", "candidates")
    """Kinds that are read; those that nobody makes are missing, and computed instead."""
    max_age_s: float = Field(600.0, gt=0)
    """Older candidates of an earlier beginning of the history, what a ranking model said of any, neighbors
    and instructions are not used. Summaries and candidates of the history as it is have no age: the model
    would compute the same."""
    max_new_chunks: int | None = Field(None, ge=0)
    """Chunks of old events without summaries that are summarized for an answer; of more, the newest, and the
    answer says `no_long_history`. None: all, as without products."""
    min_coverage: float | None = Field(None, gt=0, le=1)
    """A new version answers only when its products are there for such a share of the active users; None: at
    once."""
    wait_s: float = Field(600.0, ge=0)
    """A new version waits for its products no longer than this, as where no worker runs."""
    retry: RetryConfig = RetryConfig(attempts=1, timeout_s=0.2)
    """Of the store; short, since requests wait for it."""
    pause_s: float = Field(1.0, ge=0)
    """In which a store that did not answer is not asked again."""
