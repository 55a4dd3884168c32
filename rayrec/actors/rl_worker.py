"""Processes of reinforcement learning: what each has besides its part of the algorithm, and how they start.

    RlProcesses.spawn(RlWorker, ...) ─► handles
    handle.sample.remote(...) ─► promise;  get([promise]) ─► answer

`RlWorker` itself is in `rayrec.rl.worker`, since actors know nothing of the algorithm.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rayrec.actors.collective import Address, Meeting, TrainerGroup
from rayrec.actors.spawning import ActorRole, Calls, Host
from rayrec.models.program.program import SumOverTrainers
from rayrec.platform.devices import get_device, ray_claim


class RlProcess:
    """Base of the actor: its name, its group, and how long each call took."""

    def __init__(self, role: ActorRole, num_workers: int, threads: int, meets: bool) -> None:
        """
        Args:
            num_workers: processes of its group.
            meets: whether the processes of the group sum gradients.
        """
        torch.set_num_threads(threads)
        self._role = role
        self._group = TrainerGroup(num_workers, role.member) if meets and num_workers > 1 else None
        self._seconds: dict[str, float] = defaultdict(float)

    def __repr__(self) -> str:
        return self._role.actor_name

    @property
    def sum_over_workers(self) -> SumOverTrainers | None:
        """Sums tensors over the group; None for a process that is alone."""
        return None if self._group is None else self._group.all_reduce

    def open_group(self) -> Address:
        """Return where the processes of the group can meet; asked of the first one."""
        assert self._group is not None, "it is alone"
        return self._group.open()

    def join(self, where: Address | Meeting, backend: str) -> None:
        """Meet the others."""
        assert self._group is not None, "it is alone"
        self._group.join(where, backend)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to `seconds`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begun

    def seconds(self) -> Mapping[str, float]:
        """Return the time spent in each kind of call so far."""
        return dict(self._seconds)


class RlProcesses:
    """The processes of one run; knows neither the algorithm nor whether they are Ray's."""

    def __init__(self, host: Host, calls: Calls) -> None:
        self._host = host
        self._calls = calls

    def spawn(
        self,
        cls: type[RlProcess],
        stage: str,
        num_workers: int,
        arguments: Sequence[Any],
        *,
        cpus: float,
        threads: int,
        device: str,
        restarts: int | None = None,
    ) -> list[Any]:
        """Start a group of processes.

        Args:
            arguments: of the class, before those of `RlProcess`.
            restarts: of a process whose answers depend on the arguments of calls alone, so that Ray may start
                it again and repeat its calls; None: it has state, and never comes back.
        """
        options, meets = {"num_cpus": cpus, **ray_claim(device)}, restarts is None
        given = (*arguments, num_workers, threads, meets)
        workers = [
            self._host.spawn(cls, stage, member, given, options, restarts) for member in range(num_workers)
        ]
        if meets and num_workers > 1:
            where: Any = self._host.meeting(stage) or workers[0].open_group.remote()
            backend = get_device(device).collective_backend
            self.get([worker.join.remote(where, backend) for worker in workers])
        return workers

    def get(self, promises: Sequence[Any]) -> list[Any]:
        """Wait for all promises and return what was promised; the first error is raised."""
        return self._calls.get(promises)

    def put(self, value: Any) -> Any:
        """Store a value once that several calls take as an argument."""
        return self._host.put(value)

    def close(self) -> None:
        """End every process."""
        self._host.close()
