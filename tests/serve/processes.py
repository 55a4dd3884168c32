"""Processes that were started with a mark in their environment, and where they listen: read in /proc."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

_LISTENS = "0A"


def marked_processes(mark: str) -> dict[int, str]:
    """Commands by process id; threads of the caller's own process are none of them."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # One that has ended, and that nobody has asked for its status, has none.
                found[int(folder.name)] = command
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
    return {number: command for number, command in found.items() if command.strip()}


def listening(process: int) -> set[tuple[str, int]]:
    """IP addresses and ports; none of a process that has ended, as HAProxy does when Serve reloads it."""
    try:
        files = list(Path(f"/proc/{process}/fd").iterdir())
        tables = {
            family: Path(f"/proc/{process}/net/{table}").read_text()
            for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
        }
    except OSError:
        return set()
    sockets = set()
    for file in files:
        try:
            sockets.add(os.readlink(file))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for family, table in tables.items():
        for line in table.splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.add((_readable(address, family), int(port, 16)))
    return found


def environment_of(process: int) -> bytes:
    """What it was started with; nothing of a process that has ended."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def speaks_http(port: int) -> bool:
    """Whether somebody on this machine answers HTTP/1.1 there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:  # it speaks something else, or has ended meanwhile
        return False


def _readable(address: str, family: socket.AddressFamily) -> str:
    # Words of 32 bits in the order of this machine's bytes.
    raw = bytes.fromhex(address)
    return socket.inet_ntop(family, b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4)))
