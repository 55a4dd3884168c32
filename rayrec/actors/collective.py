"""What trainers say to each other without a driver in between: sums of dense gradients, rows to owners.

Trainers in processes of their own meet in two process groups of torch; those in one process at a `Meeting`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.devices import HOST_COLLECTIVE_BACKEND

if TYPE_CHECKING:  # servers and readers import this module's users, and start without torch
    import torch


Address = tuple[str, int]
"""Host and port of the store where processes meet."""


class _Link(Protocol):
    def begin_all_reduce(self, flat: torch.Tensor) -> Callable[[], object]: ...

    def all_to_all(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]: ...

    def close(self) -> None: ...


class TrainerGroup:
    """One trainer's end of the group; an `Exchange` of `rayrec.embeddings.base.exchange`."""

    def __init__(self, num_trainers: int, rank: int) -> None:
        self.num_trainers = num_trainers
        self._rank = rank
        self._link: _Link | None = None
        self._store: Any = None
        self.waited_s = 0.0
        """In sums of dense gradients: who is fast waits there for who is slow."""

    def open(self) -> Address:
        """Open the store at which the processes of the group meet; asked of the first one.

        It keeps the port from here on: one that was only looked up might be taken before it is used.
        """
        import ray

        return self.open_at(ray.util.get_node_ip_address())

    def open_at(self, host: str, port: int = 0) -> Address:
        """As `open`, at an address of this machine that is known.

        Args:
            port: 0: one that is free.
        """
        from torch.distributed import TCPStore

        self._store = TCPStore(host, port, self.num_trainers, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, where: Address | Meeting, backend: str) -> None:
        """Meet the others.

        Args:
            where: what the first one's `open` returned, or where threads of one process meet.
            backend: carries the sums of dense gradients between processes.
        """
        if isinstance(where, Meeting):
            self._link = _Seat(where, self._rank)
            return
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore(*where, self.num_trainers, is_master=False)
        self._link = _ProcessGroups(self._store, backend, self.num_trainers, self._rank)

    def leave(self) -> None:
        """Meet nobody any more, until the next `join`; those that wait for this one get an error at once."""
        self._store = None
        if (link := self._link) is not None:
            self._link = None
            link.close()

    def begin_all_reduce(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin to replace a tensor by its sum over the trainers; returns what waits for it."""
        assert self._link is not None, "trainers meet before they train"
        pending = self._link.begin_all_reduce(flat)

        def wait() -> None:
            began = time.perf_counter()
            pending()
            flat.reshape(-1)[-1:].tolist()  # waits for the device, whose result is needed next anyway
            self.waited_s += time.perf_counter() - began

        return wait

    def all_to_all(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Send each trainer its part; returns the parts that all trainers have for this one, by rank."""
        assert self._link is not None, "trainers meet before they train"
        return self._link.all_to_all(parts)


class _ProcessGroups:
    """Trainers are processes."""

    def __init__(self, store: Any, backend: str, num_trainers: int, rank: int) -> None:
        import torch

        torch.distributed.init_process_group(backend, store=store, world_size=num_trainers, rank=rank)
        # A group of its own: rows lie in host memory, and are exchanged while gradients are summed.
        self._host_group: Any = torch.distributed.new_group(backend=HOST_COLLECTIVE_BACKEND)
        self._works: dict[int, Any] = {}
        self._num_begun = 0

    def begin_all_reduce(self, flat: torch.Tensor) -> Callable[[], object]:
        import torch

        # Held here alone: a work keeps the connections of a group that was left, and those that wait for this
        # process would hear nothing.
        self._num_begun += 1
        number = self._num_begun
        self._works[number] = torch.distributed.all_reduce(flat, async_op=True)

        def wait() -> None:
            self._works[number].wait()
            del self._works[number]

        return wait

    def all_to_all(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        import torch

        sent = np.concatenate(parts)
        num_sent = torch.tensor([len(part) for part in parts])
        num_received = torch.empty_like(num_sent)
        torch.distributed.all_to_all_single(num_received, num_sent, group=self._host_group)
        splits = num_received.tolist()
        received = np.empty((sum(splits), *sent.shape[1:]), dtype=sent.dtype)
        torch.distributed.all_to_all_single(
            torch.from_numpy(received),
            torch.from_numpy(sent),
            splits,
            num_sent.tolist(),
            group=self._host_group,
        )
        return np.split(received, np.cumsum(splits)[:-1])

    def close(self) -> None:
        import torch

        self._host_group = None
        self._works.clear()
        # The connection ends, so processes that wait for this one in a sum get an error.
        torch.distributed.destroy_process_group()


class Meeting:
    """Where trainers meet that are threads of one process."""

    def __init__(self, num_trainers: int) -> None:
        self.gradients = _Table(num_trainers)
        # Rows are exchanged by another thread of each trainer, while gradients are summed.
        self.rows = _Table(num_trainers)

    def abort(self) -> None:
        """Let those go that wait for one that has failed: they get a `BrokenBarrierError`."""
        self.gradients.abort()
        self.rows.abort()


class _Table:
    """Each lays down what it has; when all have, each takes what it needs."""

    def __init__(self, num_trainers: int) -> None:
        self._barrier = threading.Barrier(num_trainers)
        self._brought: list[Any] = [None] * num_trainers

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()  # nobody lays down the next value before all have taken these
        return found

    def abort(self) -> None:
        self._barrier.abort()


class _Seat:
    """One trainer's place at a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def begin_all_reduce(self, flat: torch.Tensor) -> Callable[[], None]:
        """All of it is done where it is waited for: trainers of one process have no wire to hide."""

        def meet() -> None:
            # In the order of ranks, so that all have the same bits.
            first, *others = self._meeting.gradients.exchange(self._rank, flat.clone())
            total = first.clone()
            for other in others:
                total += other
            flat.copy_(total)

        return meet

    def all_to_all(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return [brought[self._rank] for brought in self._meeting.rows.exchange(self._rank, list(parts))]

    def close(self) -> None:
        self._meeting.abort()
