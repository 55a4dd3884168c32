"""Processes of reinforcement learning: what each has besides its part of the algorithm, and how they start.

    RayProcesses.spawn(RlWorker, ...) ─► handles
    handle.sample.remote(...) ─► promise;  get([promise]) ─► answer

`RlWorker` itself is in `rayrec.rl.worker`, since actors know nothing of the algorithm.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from rayrec.actors.collective import TrainerGroup
from rayrec.actors.spawning import ActorRole, spawn, spawn_stateless
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

    def address(self) -> str:
        """Return where the processes of the group can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str, backend: str) -> None:
        """Meet the others."""
        assert self._group is not None, "it is alone"
        self._group.join(address, backend)

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


class RayProcesses:
    """The processes of one run as Ray actors; the only place of reinforcement learning that calls Ray."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._actors: list[ActorHandle] = []

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
        workers = []
        for member in range(num_workers):
            role = ActorRole(self._run, stage, member)
            if restarts is None:
                workers.append(spawn(cls, role, options, *given))
            else:
                workers.append(spawn_stateless(cls, role, options, restarts, *given))
            self._actors.append(workers[-1])
        if meets and num_workers > 1:
            address = str(ray.get([workers[0].address.remote()])[0])
            backend = get_device(device).collective_backend
            ray.get([worker.join.remote(address, backend) for worker in workers])
        return workers

    def get(self, promises: Sequence[Any]) -> list[Any]:
        """Wait for all promises and return what was promised; the first error is raised."""
        return list(ray.get(list(promises)))

    def put(self, value: Any) -> Any:
        """Store a value once that several calls take as an argument."""
        return ray.put(value)

    def close(self) -> None:
        """End every process."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._actors = []
