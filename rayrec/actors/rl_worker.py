"""Processes of reinforcement learning: shells around the parts of an algorithm, which know nothing of Ray.

make(place) ─► {"learner": PolicyLearner, "rollouts": RolloutWorker, ...}      what this process is for
call("rollouts", "draw", ...)                                                  of one part at a time
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from rayrec.actors.collective import TrainerGroup
from rayrec.actors.spawning import ActorRole, Host
from rayrec.models.program.program import SumOverTrainers
from rayrec.platform.devices import get_device, ray_claim


@dataclass(frozen=True)
class WorkerPlace:
    """Which process of its group it is."""

    rank: int
    num_workers: int
    sum_over_workers: SumOverTrainers | None = None
    """None: it is alone."""


MakeParts = Callable[[WorkerPlace], Mapping[str, Any]]
"""Parts by name; called in the process."""


class RlWorker:
    """One process."""

    def __init__(self, role: ActorRole, make: MakeParts, num_workers: int, threads: int, meets: bool) -> None:
        """
        Args:
            meets: whether the processes of the group add up gradients.
        """
        torch.set_num_threads(threads)
        self._role = role
        self._heartbeats = role.heartbeats()
        self._group = TrainerGroup(num_workers, role.member) if meets and num_workers > 1 else None
        sums = None if self._group is None else self._group.all_reduce
        self._parts = make(WorkerPlace(role.member, num_workers, sums))
        self._seconds: dict[str, float] = defaultdict(float)

    def __repr__(self) -> str:
        return self._role.actor_name

    def address(self) -> str:
        """Where the processes of the group can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str, backend: str) -> None:
        """Meet the others."""
        assert self._group is not None, "it is alone"
        self._group.join(address, backend)

    def call(self, part: str, method: str, *arguments: Any) -> Any:
        """What the method of a part returns."""
        name = f"{part}.{method}"
        with self._heartbeats.during(name):
            begun = time.perf_counter()
            try:
                return getattr(self._parts[part], method)(*arguments)
            finally:
                self._seconds[name] += time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """Spent in each method so far."""
        return dict(self._seconds)


def spawn_rl_workers(
    host: Host,
    stage: str,
    make: MakeParts,
    num_workers: int,
    *,
    cpus: float,
    threads: int,
    device: str,
    restarts: int | None = None,
) -> list[Any]:
    """Start the processes of a group.

    Args:
        restarts: of a process whose answers depend on the arguments alone, so that Ray may start it again and
            repeat its calls; None: it has state, and never comes back.
    """
    options, meets = {"num_cpus": cpus, **ray_claim(device)}, restarts is None
    workers = [
        host.spawn(RlWorker, stage, member, (make, num_workers, threads, meets), options, restarts)
        for member in range(num_workers)
    ]
    if meets:
        _meet(workers, device)
    return workers


def _meet(workers: Sequence[Any], device: str) -> None:
    if len(workers) > 1:
        address = str(ray.get([workers[0].address.remote()])[0])
        backend = get_device(device).collective_backend
        ray.get([worker.join.remote(address, backend) for worker in workers])
