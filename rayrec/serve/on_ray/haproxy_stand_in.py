"""What answers when HAProxy died, until Ray Serve has started another one.

    HAProxy ─ dies ─► this program, which waited for it ─► HAProxy with the same configuration
                                                            └ until a newer one listens, or the service stops

Serve finds out by its health checks, and starts an actor that starts HAProxy: that takes from 7 to 21 s, in
which nobody would listen. The stand-in listens within a fraction of a second. It has no socket of
administration, so Serve misses the one that died, and does what it always does.

`haproxy_config.py` starts it, beside each HAProxy, by its path: it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CONFIG, CURRENT, STOPPING, LOCK = "stand-in.cfg", "current", "stopping", "stand-in.lock"
"""Files in the folder of the plan: what a stand-in is configured by; the process id of the newest HAProxy
that knows an application; whether the service is being stopped; held by the stand-in that answers."""
LONGEST_S = 120.0
"""Serve has given up by then."""
SETTLE_S = 1.0
"""After which a newer HAProxy listens."""
LOOK_EVERY_S = 0.05
_DIE_WITH_PARENT = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""
_OF_SERVE = ("frontend prometheus", "listen stats")
"""Sections of the configuration that stay those of Serve's own HAProxy."""


def note_current(folder: Path, config: str) -> None:
    """Note that this process becomes the newest HAProxy, and what its stand-in is configured by.

    Args:
        config: as `haproxy_config.rewritten` makes it, with an application.
    """
    lines: list[str] = []
    is_left_out = False
    for line in config.splitlines():
        if not line.startswith(" "):
            is_left_out = line.startswith(_OF_SERVE)
        if not is_left_out and not re.match(r"\s+stats socket", line):
            lines.append(line)
    for name, text in ((CONFIG, "\n".join(lines) + "\n"), (CURRENT, str(os.getpid()))):
        new = folder / f"{name}.new"
        new.write_text(text)
        new.replace(folder / name)


def start(folder: Path, haproxy: str, launcher: int) -> None:
    """Start this program for the HAProxy that this process becomes.

    Args:
        launcher: the process that stops the service.
    """
    arguments = [str(folder), haproxy, str(os.getpid()), str(launcher)]
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).resolve()), *arguments],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def answers(folder: Path) -> bool:
    """Whether a stand-in answers now."""
    with (folder / LOCK).open("a") as lock:
        return not _takes(lock.fileno())


def _takes(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(arguments: list[str]) -> None:
    """Called as `FOLDER HAPROXY PID LAUNCHER`."""
    folder, haproxy, pid, launcher = Path(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3])
    _wait_for_end(pid)

    def newer() -> bool:
        current = int((folder / CURRENT).read_text())
        return current != pid and _is_alive(current)

    def is_stopping() -> bool:
        return not (folder / CURRENT).exists() or (folder / STOPPING).exists() or not _is_alive(launcher)

    if is_stopping() or newer():
        return
    with (folder / LOCK).open("a") as lock:
        # Else one of an older HAProxy answers.
        if _takes(lock.fileno()):
            stand_in([haproxy, "-db", "-f", str(folder / CONFIG)], newer, is_stopping)


def stand_in(command: list[str], newer: Callable[[], bool], is_stopping: Callable[[], bool]) -> None:
    """Run HAProxy until a newer one has been there for a moment, or the service stops."""
    process = subprocess.Popen(command, preexec_fn=_die_with_parent)
    ends_at, newer_since = time.monotonic() + LONGEST_S, None
    while process.poll() is None and not is_stopping() and (now := time.monotonic()) < ends_at:
        if not newer():
            newer_since = None
        elif newer_since is None:
            newer_since = now
        elif now - newer_since > SETTLE_S:
            process.send_signal(signal.SIGUSR1)  # what has begun is answered
            process.wait()
        time.sleep(LOOK_EVERY_S)
    process.kill()
    process.wait()


def _wait_for_end(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([process], [], [])
    os.close(process)


def _is_alive(pid: int) -> bool:
    try:
        # A process that ended and that nobody has asked about is none.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
