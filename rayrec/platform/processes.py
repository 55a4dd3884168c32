"""Naming a process for others, who can tell later whether it has ended.

A number alone says little: machines, containers and later processes have the same ones. So a name is

    the machine since it started / the container's numbers / number / when the process began
"""

from __future__ import annotations

import os
from pathlib import Path


def own_process() -> str:
    """The name of this process; empty where the system does not tell."""
    try:
        return f"{_place()}/{os.getpid()}/{_began(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def has_ended(process: str) -> bool:
    """Whether a process has ended, by its name; False where nothing is known, as of another machine."""
    place, *rest = process.rsplit("/", 2)
    try:
        number, began = (int(part) for part in rest)
        if place != _place() or number < 1:
            return False
    except (OSError, ValueError):
        return False
    try:
        os.kill(number, 0)  # asks only, and knows processes of other users, which /proc may hide
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        return _began(number) != began
    except (OSError, ValueError, IndexError):
        return False


def _place() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def _began(number: int) -> int:
    """In ticks since the machine started, which no clock changes."""
    # The name of the program, in parentheses, may have blanks and parentheses.
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19])
