"""Memory that two processes of one machine share, and messages that carry it over a Unix-domain socket.

A message is a few hundred bytes: pickled values whose arrays are left out. The arrays lie in a block, at
the spans that the message names. A block has no name in the file system: its descriptor travels with the
first message that uses it, and the memory is gone when neither process has it mapped any more, however
the processes ended.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Bytes = NDArray[np.uint8]
Span = tuple[int, int]
"""First byte and number of bytes of an array within its block."""

_ALIGNMENT = 64
_SMALLEST_BLOCK = 64 * 1024
_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


def why_unavailable() -> str | None:
    """Why processes cannot share memory here; None if they can."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED"):
        return "shared memory between processes needs Linux (memfd_create, SO_PEERCRED)"
    try:
        os.close(os.memfd_create("rayrec"))
    except OSError as error:
        return f"the system gives no shared memory: {error}"
    return None


class SharedBlock:
    """Shared memory, mapped in this process until the last array in it is gone."""

    def __init__(self, number: int, descriptor: int, num_bytes: int) -> None:
        """Map the memory behind a descriptor, which stays the caller's to close."""
        self.number = number
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(descriptor, num_bytes)

    def bytes(self, writeable: bool) -> Bytes:
        """All of the block; every view of it keeps this very array alive."""
        array = np.frombuffer(self._memory, dtype=np.uint8)
        array.flags.writeable = writeable
        return array


def new_block(number: int, num_bytes: int) -> tuple[SharedBlock, int]:
    """A block of at least so many bytes, and its descriptor, to be sent and closed.

    Raises:
        MemoryError: the system has none left.
    """
    # Powers of two: batches differ in length, blocks need not. Pages that nobody touches cost nothing.
    rounded = max(_SMALLEST_BLOCK, 1 << (num_bytes - 1).bit_length())
    try:
        descriptor = os.memfd_create("rayrec")
        try:
            os.ftruncate(descriptor, rounded)
            return SharedBlock(number, descriptor, rounded), descriptor
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise MemoryError(f"no shared memory for a block of {rounded} bytes: {error}") from error


class BlockSpace:
    """What is free of a block behind its first `used` bytes."""

    def __init__(self, block: SharedBlock, used: int) -> None:
        self._block = block
        self._bytes = block.bytes(writeable=True)
        self._address = _address(self._bytes)
        self.used = used
        """Bytes in use; more than the block has, once something did not fit."""

    def take(self, num_bytes: int) -> Bytes | None:
        """The next part of the block; None if there is not so much left."""
        first = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        self.used = first + num_bytes
        return self._bytes[first : self.used] if self.used <= self._block.num_bytes else None

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> NDArray[Any]:
        """As `np.empty`: in the block if it has the room, else elsewhere."""
        before, num_bytes = self.used, math.prod(shape) * np.dtype(dtype).itemsize
        part = self.take(num_bytes)
        if part is None:
            self.used = before  # it is counted when it is placed
            return np.empty(shape, dtype)
        return part.view(dtype).reshape(shape)

    def place(self, array: Bytes) -> Span | None:
        """Where the array is in the block; copied there if it is not, None if there is no room."""
        first = _address(array) - self._address
        if 0 <= first <= self._block.num_bytes - len(array):
            return first, len(array)
        part = self.take(len(array))
        if part is None:
            return None
        part[:] = array
        return self.used - len(array), len(array)


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def packed(value: Any) -> tuple[bytes, list[Bytes]]:
    """A picklable value in two parts: everything but its contiguous arrays, and those."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickled, [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]


def unpacked(pickled: bytes, block: Bytes, spans: Sequence[Span]) -> Any:
    """The value again; its arrays are views of the block."""
    return pickle.loads(pickled, buffers=[block[first : first + size] for first, size in spans])


def send(connection: socket.socket, message: Any, descriptor: int | None = None) -> None:
    """Send one picklable message, with an open descriptor if need be; the caller sees to it that one
    thread sends at a time."""
    body = pickle.dumps(message)
    parts = [_LENGTH.pack(len(body)), body]
    if descriptor is None:
        sent = connection.sendmsg(parts)
    else:
        sent = socket.send_fds(connection, parts, [descriptor])
    if sent < _LENGTH.size + len(body):
        connection.sendall(b"".join(parts)[sent:])


def receive(connection: socket.socket) -> tuple[Any, int | None] | None:
    """The next message and the descriptor that came with it, now the caller's; None at the other's end."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
    head += _exactly(connection, _LENGTH.size - len(head)) if head else b""
    body = _exactly(connection, _LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not body:
        return None
    return pickle.loads(body), descriptors[0] if descriptors else None


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes; none if the connection ends before."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is the same user's.

    Messages are pickled, and who may send a pickle may run code; abstract addresses have no permissions.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
