"""Binds an actor's process to one socket, before it allocates tables or weights.

    /sys/devices/system/node ─► sockets ─► its card's, else the one with the fewest actors ─► CPUs, memory

Memory is where it was touched first, and a server that reads its tables across sockets reads them slower, for
as long as it runs. So the order matters: bind, then allocate (sglang's issue 22989 is about the reverse).
Memory is preferred, not bound: where a socket has no more, it comes from another one, and nothing fails.

Source of the calls: man 2 sched_setaffinity, man 2 set_mempolicy.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayrec.platform.devices import socket_of_card

logger = logging.getLogger(__name__)

SYS = Path("/sys")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, which no library that Python has calls."""
MPOL_PREFERRED = 1
BITS = 64
"""Of a word of the mask of nodes."""


@dataclass(frozen=True)
class Socket:
    """One NUMA node with CPUs; some have memory alone."""

    id: int
    cpus: frozenset[int]


@dataclass(frozen=True)
class Bound:
    """What a process was bound to."""

    socket: Socket
    has_memory: bool
    """Memory is preferred there; else the kernel did not let us, and it is where it is touched first."""
    seat: int | None = None
    """Descriptor of a lock that is held as long as the process lives; None: its card has said where."""


def read_sockets(allowed: Collection[int], sys: Path = SYS) -> list[Socket]:
    """The sockets of this machine, each with those of its CPUs that this process may use, by their numbers.

    Args:
        allowed: CPUs; containers and batch systems may have left fewer than there are.
    """
    found = []
    for folder in (sys / "devices" / "system" / "node").glob("node[0-9]*"):
        try:
            cpus = _numbers((folder / "cpulist").read_text()) & frozenset(allowed)
        except (OSError, ValueError):
            continue
        if cpus:
            found.append(Socket(int(folder.name.removeprefix("node")), cpus))
    return sorted(found, key=lambda socket: socket.id)


def _numbers(text: str) -> frozenset[int]:
    """Of the kernel's lists: `0-3,8,10-11`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def take_seat(sockets: Sequence[Socket], folder: Path) -> tuple[Socket, int]:
    """The socket with the fewest processes that are bound, and a lock that counts this one until it ends.

    Args:
        folder: that all processes of this machine and user share.

    Returns:
        The socket, and the descriptor of the lock, which the kernel lets go with the process.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for round_ in itertools.count():
        for socket in sockets:
            # Not inherited: a child that outlives the actor would keep its seat.
            seat = os.open(folder / f"{socket.id}-{round_}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(seat)
                continue
            return socket, seat
    raise AssertionError("there are always more seats")


def prefer_memory(node: int) -> None:
    """Let what this thread allocates from now on, and threads that it starts, come from one node's memory.

    Raises:
        OSError: the kernel refuses, as it does in containers without CAP_SYS_NICE, or has no such call here.
    """
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"set_mempolicy has no number for {platform.machine()}")
    words = node // BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // BITS] = 1 << (node % BITS)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    size = ctypes.c_ulong(words * BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(MPOL_PREFERRED), mask, size) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def use_cpus(cpus: Collection[int]) -> None:
    """Let every thread of this process, and those that they start, run on these CPUs alone."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # it has ended meanwhile


def bind(
    sys: Path = SYS,
    seats: Path | None = None,
    card_socket: Callable[[], int | None] = socket_of_card,
    allowed: Collection[int] | None = None,
    set_cpus: Callable[[Collection[int]], None] = use_cpus,
    set_memory: Callable[[int], None] = prefer_memory,
) -> Bound | None:
    """Bind this process to the socket of its card, or to the one with the fewest processes that are bound.

    To be called before anything large is allocated, on the thread that allocates it.

    Args:
        seats: folder that the processes of this machine share; None: a user's own in that of temporary files.
        allowed: CPUs that this process may use; None: asked of the kernel.

    Returns:
        None on a machine with one socket, and where there is no /sys: nothing was done.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    sockets = read_sockets(os.sched_getaffinity(0) if allowed is None else allowed, sys)
    if len(sockets) < 2:
        return None
    by_number = {socket.id: socket for socket in sockets}
    chosen, seat = by_number.get(-1 if (number := card_socket()) is None else number), None
    if chosen is None:
        shared = Path(tempfile.gettempdir()) / f"rayrec-numa-{os.getuid()}" if seats is None else seats
        chosen, seat = take_seat(sockets, shared)
    set_cpus(chosen.cpus)
    try:
        set_memory(chosen.id)
    except OSError as error:
        logger.warning(
            "memory is not preferred on socket %d (%s): it is where it was touched first, which is there too "
            "as long as there is room",
            chosen.id,
            error,
        )
        return Bound(chosen, False, seat)
    return Bound(chosen, True, seat)
