"""The processes that this one has started, with theirs; their memory and processor time: read in /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


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


class ProcessorTime:
    """Of this process and all that it starts, while the block lasts.

    Looked at again and again, as nobody says what a process took that has ended: its end is missing.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._before: dict[tuple[int, str], float] = {}
        self._latest: dict[tuple[int, str], float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def seconds(self) -> float:
        """Of all processors so far."""
        return sum(spent - self._before.get(process, 0.0) for process, spent in self._latest.items())

    def __enter__(self) -> Self:
        self._before = _processor_seconds()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(self._interval_s)
            # Another one, not the same one changed: `seconds` may be reading it.
            self._latest = self._latest | _processor_seconds()


def _processor_seconds() -> dict[tuple[int, str], float]:
    """In user and system mode, by process and when it began: numbers of processes come again."""
    found = {}
    for process in (os.getpid(), *descendants()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        ticks = int(fields[11]) + int(fields[12])
        found[process, fields[19]] = ticks / os.sysconf("SC_CLK_TCK")
    return found
