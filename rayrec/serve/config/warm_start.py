"""Settings of what a replica leaves to the one that takes its place."""

from __future__ import annotations

from pydantic import Field

from rayrec.platform.config import Config


class WarmStartConfig(Config):
    """A replica that starts answers what the one before was asked, before it says that it is ready."""

    folder: str = Field(min_length=1)
    """Of this machine, or one that all have. Files name users, and only their owner can read them."""
    users: int = Field(1000, ge=1)
    """Newest users that are remembered, and asked for."""
    every_s: float = Field(30.0, gt=0)
    """Between two files; a process that is killed has left the last one."""
    most_s: float = Field(30.0, ge=0)
    """Readiness waits no longer for users, whatever hangs; programs have `CompileConfig.wait_s`."""
    read_s: float = Field(5.0, gt=0)
    """What replicas before have left is read in so many seconds, and the last file is written in as many; a
    store that takes longer is left alone."""
    read_mib: float = Field(16.0, gt=0)
    """Of all files together, the newest first; what has no room is passed over."""
    max_age_s: float = Field(86_400.0, gt=0)
    """Users and shapes that nobody has asked for since are forgotten, and older files deleted."""
