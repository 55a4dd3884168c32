"""Which of two versions answers a message, and what to call when it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Note = Callable[[float, BaseException | None], None]
"""`note(seconds, error)`: counts what became of a message; what a caller did wrong, or did not wait for, is
no error."""


class Draw(NamedTuple):
    """For one message."""

    is_canarys: bool
    note: Note
