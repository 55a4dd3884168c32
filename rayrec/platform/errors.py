"""Exceptions whose messages are written for users."""

from __future__ import annotations

from pathlib import Path


class NoRoomError(RuntimeError):
    """A disk is full or read-only; the message is for users, as an `InputError`'s is."""


class InputError(ValueError):
    """Something the caller gave cannot be used.

    The message is one sentence or two: which file, row or key; what was
    expected; what was found; what to do about it. The command prints it as its
    last line and exits with a code other than zero.
    """


def looked_in(path: Path) -> str:
    """What a message adds behind "no such file" for a relative path: the directory that it begins in."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


class MachineError(InputError):
    """A machine or a cluster does not have what was asked of it, another process holds it, or a service does
    not answer: it may be there later or elsewhere."""


class UnavailableError(RuntimeError):
    """A service that something needs did not answer, however often it was asked.

    Nothing was done in part. It travels between processes as it is.
    """

    def __init__(self, service: str, attempts: int, reason: str) -> None:
        """
        Args:
            service: what was asked, without any password.
            reason: what went wrong the last time.
        """
        super().__init__(service, attempts, reason)
        self.service = service
        self.attempts = attempts
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.service}: no answer in {self.attempts} attempts, the last one failed with: {self.reason}"
        )
