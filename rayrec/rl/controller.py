"""One process that says who does what: groups of workers, and calls that are dispatched to them.

    SingleController ── rollouts.spread("draw", chunks) ───────► worker 0: chunks 0, 2, ...
                     ── learner.one_to_all("update", totals) ──► every worker
                     ── rewards.rank_zero("score", drawn) ─────► worker 0

Answers are promises, and may be arguments of other calls: candidates go from the process that drew them to
those that reward them and learn of them, and never through the controller.

With `colocated`, the groups are different names for parts of the same processes, which take turns; else each
has processes of its own. An algorithm does not know which.

Source: a single controller over worker groups is HybridFlow's, Sheng et al., EuroSys 2025, arXiv:2409.19256.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrec.actors.rl_worker import WorkerPlace, spawn_rl_workers
from rayrec.actors.spawning import RayHost
from rayrec.platform.devices import HOST
from rayrec.rl.config import RlConfig
from rayrec.rl.workers import PARTS, make_parts

RESTARTS = 3
"""Of a worker whose answers hang on the arguments alone."""


class WorkerGroup:
    """The processes that have one part of an algorithm."""

    def __init__(self, part: str, workers: Sequence[ActorHandle]) -> None:
        self.part = part
        self.workers = tuple(workers)

    def __len__(self) -> int:
        return len(self.workers)

    def rank_zero(self, method: str, *arguments: Any, num_returns: int = 1) -> Any:
        """The promise of the first worker's answer; several where it returns a tuple of so many."""
        return self._call(self.workers[0], method, arguments, num_returns)

    def one_to_all(self, method: str, *arguments: Any) -> list[Any]:
        """Promises of every worker's answer to the same question."""
        return [self._call(worker, method, arguments, 1) for worker in self.workers]

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Promises of every worker's answer to a question of its own, by rank."""
        assert len(arguments) == len(self.workers), "there is a question for every worker"
        return [
            self._call(worker, method, given, 1)
            for worker, given in zip(self.workers, arguments, strict=True)
        ]

    def spread(self, method: str, pieces: Sequence[tuple[Any, ...]], num_returns: int = 1) -> list[Any]:
        """Promises of an answer for every piece, in order; worker r does every N-th from the r-th on."""
        return [
            self._call(self.workers[number % len(self.workers)], method, piece, num_returns)
            for number, piece in enumerate(pieces)
        ]

    def _call(self, worker: ActorHandle, method: str, arguments: tuple[Any, ...], num_returns: int) -> Any:
        return worker.call.options(num_returns=num_returns).remote(self.part, method, *arguments)


class SingleController:
    """Starts the processes of a run's placement, and ends them."""

    def __init__(self, run: str, config: RlConfig, device: str) -> None:
        self._actors: list[ActorHandle] = []
        try:
            self.groups: Mapping[str, WorkerGroup] = self._spawned(run, config, device)
        except BaseException:
            self.close()
            raise

    @property
    def learner(self) -> WorkerGroup:
        return self.groups["learner"]

    @property
    def rollouts(self) -> WorkerGroup:
        return self.groups["rollouts"]

    @property
    def reference(self) -> WorkerGroup:
        return self.groups["reference"]

    @property
    def rewards(self) -> WorkerGroup:
        return self.groups["rewards"]

    @property
    def is_colocated(self) -> bool:
        """Whether those who draw have the learner's weights without being sent them."""
        return self.learner.workers[0] is self.rollouts.workers[0]

    def seconds(self) -> dict[str, float]:
        """Spent in each method, in sum over the processes."""
        found: dict[str, float] = {}
        spent: list[dict[str, float]] = ray.get([actor.seconds.remote() for actor in self._actors])
        for of_worker in spent:
            for name, seconds in of_worker.items():
                found[name] = found.get(name, 0.0) + seconds
        return found

    def close(self) -> None:
        """End every process."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._actors = []

    def __enter__(self) -> SingleController:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawned(self, run: str, config: RlConfig, device: str) -> dict[str, WorkerGroup]:
        placement = config.placement

        def processes(
            stage: str, parts: Sequence[str], count: int, restarts: int | None
        ) -> list[ActorHandle]:
            made = partial(_make, config, tuple(parts))
            actors = spawn_rl_workers(
                RayHost(run),
                stage,
                made,
                count,
                cpus=placement.cpus,
                threads=placement.threads,
                # Rewards are arithmetic on the host, and rankers have a device of their own.
                device=HOST.kind if parts == ["rewards"] else device,
                restarts=restarts,
            )
            self._actors += actors
            return actors

        if placement.kind == "colocated":
            actors = processes("rl_worker", PARTS, placement.learners, None)
            return {part: WorkerGroup(part, actors) for part in PARTS}
        drawing = processes("rl_rollouts", ["rollouts", "reference"], placement.rollouts, RESTARTS)
        return {
            "learner": WorkerGroup("learner", processes("rl_learner", ["learner"], placement.learners, None)),
            "rollouts": WorkerGroup("rollouts", drawing),
            # Where candidates were drawn: what the reference says of them is one more answer without a state.
            "reference": WorkerGroup("reference", drawing),
            # What rewards are divided by follows all rewards before; so it is one process, and has state.
            "rewards": WorkerGroup("rewards", processes("rl_rewards", ["rewards"], 1, None)),
        }


def _make(config: RlConfig, parts: tuple[str, ...], place: WorkerPlace) -> Mapping[str, Any]:
    return make_parts(config, parts, place.sum_over_workers)
