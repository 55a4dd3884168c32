"""Which events make up histories: stored with a data set of impressions, since serving must do the same."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayrec.platform.config import Config


class HistoryRule(Config):
    """Which of a user's earlier events the list `history` has."""

    events: Literal["all", "liked", "first"]
    """`all`; `liked`: those that the user rated highly; `first`: the first one of each item."""
    length: int = Field(ge=1)
    """The newest ones, at most so many."""
