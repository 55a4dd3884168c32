"""The processes that this one has started, with theirs, and the memory they hold: read in /proc."""

from __future__ import annotations

import os
from pathlib import Path


def descendants(named: str = "") -> list[int]:
    """Process ids, in order, of what this process has started, directly or not.

    Args:
        named: that the command has to begin with.
    """
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # Behind the name, which may have anything in it, come the state and the parent.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
    own, found = os.getpid(), []
    for number in sorted(parents):
        above = number
        while above in parents and above != own:
            above = parents[above]
        if above == own and number != own and command_of(number).startswith(named):
            found.append(number)
    return found


def command_of(process: int) -> str:
    """With its arguments; empty for one that has ended."""
    try:
        content = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return ""
    return content.replace(b"\0", b" ").decode(errors="replace").strip()


def resident_bytes(process: int) -> int:
    """Memory that it holds."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
