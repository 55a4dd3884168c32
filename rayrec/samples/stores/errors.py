"""Errors of event stores."""

from __future__ import annotations

from rayrec.platform.errors import InputError, UnavailableError


class StoreUnavailableError(UnavailableError):
    """An event store did not answer; a run that needs its events stops, with nothing lost."""


class NoStoreError(InputError):
    """There is no store at this address."""
