"""What goes wrong between us and an event store."""

from __future__ import annotations

from rayrec.platform.errors import InputError, UnavailableError


class StoreUnavailableError(UnavailableError):
    """An event store did not answer; whoever needs its events has to stop, with nothing lost."""


class NoStoreError(InputError):
    """Nobody has built the store that was asked for."""
