"""Two network namespaces of this machine with a link of a given rate between them, as between two nodes.

Needs root and iproute2's `ip` and `tc`. Each end is shaped by a token bucket, so a process that sends faster
waits, and what has been sent is counted by the kernel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class End:
    """One of the two."""

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command that runs another one in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]

    @property
    def environment(self) -> dict[str, str]:
        """Makes gloo take the link, not a name that the namespace cannot look up."""
        return {"GLOO_SOCKET_IFNAME": self.interface}


def why_not() -> str | None:
    """Why no link can be made here; None: it can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} missing (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with shaped_link(1_000):
            return None
    except subprocess.CalledProcessError as error:
        return f"no shaped link: {error.stderr.decode().strip()}"


@contextmanager
def shaped_link(megabits: int) -> Iterator[tuple[End, End]]:
    """Make the link, and remove it at the end.

    Args:
        megabits: per second, each way.

    Raises:
        subprocess.CalledProcessError: the kernel has no namespaces or no token buckets.
    """
    tag = f"rr{os.getpid() % 100_000}"
    ends = (
        End(f"{tag}a", f"{tag}a", "10.213.0.1"),
        End(f"{tag}b", f"{tag}b", "10.213.0.2"),
    )
    with ExitStack() as undo:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
            undo.callback(_run, "ip", "netns", "delete", end.namespace)
        first, second = ends
        # In the first namespace from the start: a name here might be taken.
        _run(
            *first.command(
                "ip",
                "link",
                "add",
                first.interface,
                "type",
                "veth",
                "peer",
                "name",
                second.interface,
                "netns",
                second.namespace,
            )
        )
        for end in ends:
            _run(*end.command("ip", "link", "set", "lo", "up"))
            _run(*end.command("ip", "address", "add", f"{end.address}/24", "dev", end.interface))
            _run(*end.command("ip", "link", "set", end.interface, "up"))
            _run(
                *end.command(
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    end.interface,
                    "root",
                    "tbf",
                    "rate",
                    f"{megabits}mbit",
                    "burst",
                    "256kb",
                    "latency",
                    "50ms",
                )
            )
        yield ends


def sent_bytes(interface: str) -> int:
    """That the kernel has sent over an interface of the caller's namespace."""
    return _counters(interface)[8]


def moved_bytes(interface: str) -> int:
    """As `sent_bytes`, with those that came."""
    return _counters(interface)[0] + _counters(interface)[8]


def _counters(interface: str) -> list[int]:
    # Not /sys, which shows the namespace that it was mounted in.
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return [int(number) for number in numbers.split()]
    raise LookupError(f"no interface {interface}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
