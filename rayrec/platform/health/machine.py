"""What the readers of counters may ask of a machine, so that recorded answers can stand in for one.

A driver may hang, refuse, or answer with an error and the word OK. So every answer says how it came about.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rayrec.platform.device_diagnosis import Surroundings

COMMAND_S = 10.0
"""Limit for one command: drivers answer within a second or not at all."""
DISK_S = 3.0
"""Limit for one look at a disk: a network file system whose server is gone never answers."""
KILLED_S = 1.0
"""A process that waits in the kernel does not even die; it is left behind after so long."""


@dataclass(frozen=True)
class Missing:
    """Something that could not be read."""

    why: str


class Ran(NamedTuple):
    """How a command ended."""

    output: str
    """Both streams, undecodable bytes replaced."""
    failure: str | None = None
    """None where it ended with exit code 0; otherwise what happened, after the command's name."""


class DiskFacts(NamedTuple):
    """One file system."""

    total_bytes: int
    free_bytes: int
    """For those without privileges."""
    total_inodes: int
    """0 where the file system counts none."""
    free_inodes: int
    is_read_only: bool


def run_command(command: Sequence[str], limit_s: float = COMMAND_S) -> Ran:
    """Run a command in the locale C; it never takes much longer than the limit, whatever the driver does."""
    if shutil.which(command[0]) is None:
        return Ran("", "is not installed")
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C"}
    # To a file: a pipe that nobody drains any more would hold a reader, too.
    with tempfile.TemporaryFile() as written:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return Ran("", f"cannot be started ({error.strerror})")
        failure = None
        try:
            if (code := process.wait(limit_s)) != 0:
                failure = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"did not answer in {limit_s:g} s"
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
        written.seek(0)
        return Ran(written.read().decode(errors="replace"), failure)


def look_at_disk(folder: str, limit_s: float = DISK_S) -> DiskFacts | Missing:
    """Free room of the file system that a folder is on."""
    answers: list[DiskFacts | Missing] = []

    def look() -> None:
        try:
            found = os.statvfs(folder)
        except OSError as error:
            answers.append(Missing(f"{folder}: {error.strerror}"))
            return
        answers.append(
            DiskFacts(
                found.f_blocks * found.f_frsize,
                found.f_bavail * found.f_frsize,
                found.f_files,
                found.f_favail,
                bool(found.f_flag & os.ST_RDONLY),
            )
        )

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(limit_s)
    return answers[0] if answers else Missing(f"{folder}: the file system did not answer in {limit_s:g} s")


def working_folders() -> tuple[str, ...]:
    """Where Ray and its workers write."""
    return tuple(dict.fromkeys(("/tmp", tempfile.gettempdir(), "/dev/shm")))


@dataclass(frozen=True)
class Machine(Surroundings):
    """The drivers, kernel and disks of a machine."""

    run: Callable[[Sequence[str]], Ran] = run_command
    disk: Callable[[str], DiskFacts | Missing] = look_at_disk
    folders: Sequence[str] = field(default_factory=working_folders)
    """Whose disks are looked at."""
    clock: Callable[[], float] = time.time
    """UNIX seconds."""


THIS_MACHINE = Machine()
