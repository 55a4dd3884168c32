"""One process that says who does what: groups of workers, and typed calls to them.

    SingleController ── sample(chunks, weights) ────────► rollout worker 0: chunks 0, N, ...; worker 1: ...
                     ── score(rollouts) ────────────────► the rewards' process
                     ── update(totals, scored, ...) ────► every learner, with chunks of its own

Calls return promises, which may be arguments of other calls: candidates go from the worker that sampled them
to those that score them and learn from them, and never through the controller.

With `colocated`, the groups are roles of the same processes, which take turns; otherwise each has processes
of its own. The algorithm (`training.py`) does not know which.

Source: a single controller over worker groups is HybridFlow's, Sheng et al., EuroSys 2025, arXiv:2409.19256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from rayrec.actors.spawning import Calls, Host
from rayrec.platform.devices import HOST, get_device, ray_claim
from rayrec.rl.config import RlConfig
from rayrec.rl.learner import BatchTotals
from rayrec.rl.list_metrics import EvaluatedLists, ListSettings
from rayrec.rl.policy import Weights
from rayrec.rl.prompts import Prompts
from rayrec.rl.rollouts import ChunkSummary, ReferenceLogProbs, Rollouts, ScoredRollouts
from rayrec.rl.worker import ROLES, RlWorker, Role

COLOCATED_STAGE, LEARNER_STAGE = "rl_worker", "rl_learner"
RESTARTS = 3
"""Of a worker without state."""

T = TypeVar("T")


class Promise(Generic[T]):
    """Type of what a worker will return: Ray's `ObjectRef`, which calls take in place of a value."""


class SingleController:
    """Starts the workers of a run's placement, calls them, and ends them."""

    def __init__(self, config: RlConfig, device: str, host: Host, calls: Calls) -> None:
        """
        Args:
            host: starts the workers.
            calls: waits for their answers.
        """
        self._host, self._calls = host, calls
        try:
            self._spawn(config, device)
        except BaseException:
            self.close()
            raise

    def _spawn(self, config: RlConfig, device: str) -> None:
        placement = config.placement

        def group(stage: str, roles: tuple[Role, ...], count: int, restarts: int | None = None) -> list[Any]:
            # Rewards are arithmetic on the host, and ranking models choose a device of their own.
            options = {
                "num_cpus": placement.cpus,
                **ray_claim(HOST.kind if roles == ("rewards",) else device),
            }
            num_learners = count if "learner" in roles else 1
            workers = [
                self._host.spawn(RlWorker, stage, member, (config, roles, num_learners), options, restarts)
                for member in range(count)
            ]
            if num_learners > 1:
                where: Any = self._host.meeting(stage) or workers[0].open_group.remote()
                backend = get_device(device).collective_backend
                self.get([worker.join.remote(where, backend) for worker in workers])
            return workers

        self.is_colocated = placement.kind == "colocated"
        """Whether rollouts use the learner's own weights, so that none have to be sent."""
        if self.is_colocated:
            workers = group(COLOCATED_STAGE, ROLES, placement.learners)
            self._learners = self._rollouts = self._references = self._rewards = workers
            self._all = workers
            return
        # The reference is where candidates are sampled: its answers do not depend on state either.
        self._rollouts = self._references = group(
            "rl_rollouts", ("rollouts", "reference"), placement.rollouts, RESTARTS
        )
        self._learners = group(LEARNER_STAGE, ("learner",), placement.learners)
        # One process, since the moments that rewards are normalized by depend on all rewards before.
        self._rewards = group("rl_rewards", ("rewards",), 1)
        self._all = [*self._rollouts, *self._learners, *self._rewards]

    def sample(self, chunks: Sequence[Prompts], weights: Promise[Weights] | None) -> list[Promise[Rollouts]]:
        """Sample candidates for every chunk, on the rollout workers in turn."""
        return [
            self._nth(self._rollouts, number).sample.remote(chunk, weights)
            for number, chunk in enumerate(chunks)
        ]

    def score(self, rollouts: Promise[Rollouts]) -> tuple[Promise[ChunkSummary], Promise[ScoredRollouts]]:
        """Compute the rewards of a chunk."""
        summary, scored = self._rewards[0].score.options(num_returns=2).remote(rollouts)
        return summary, scored

    def reference_log_probs(
        self, chunks: Sequence[Promise[Rollouts]] | Sequence[Promise[ScoredRollouts]]
    ) -> list[Promise[ReferenceLogProbs]]:
        """Compute the supervised policy's log-probabilities of every chunk."""
        return [
            self._nth(self._references, number).reference_log_probs.remote(chunk)
            for number, chunk in enumerate(chunks)
        ]

    def update(
        self,
        totals: BatchTotals,
        scored: Sequence[Promise[ScoredRollouts]],
        reference: Sequence[Promise[ReferenceLogProbs]],
    ) -> list[Promise[dict[str, float]]]:
        """Take one optimizer step on all learners, each with an equal number of chunks, give or take one."""
        num = len(self._learners)
        return [
            learner.update.remote(totals, *scored[rank::num], *reference[rank::num])
            for rank, learner in enumerate(self._learners)
        ]

    def weights(self) -> Promise[Weights]:
        """The learner's weights, after all updates asked for so far."""
        promise: Promise[Weights] = self._learners[0].weights.remote()
        return promise

    def evaluate(
        self, prompts: Sequence[Prompts], weights: Promise[Weights] | None, lists: ListSettings
    ) -> list[EvaluatedLists]:
        """Evaluate the policy of some weights; None: the learner's own, of the same process."""
        sampled = [
            self._nth(self._rollouts, number).sample_lists.remote(each, weights, lists)
            for number, each in enumerate(prompts)
        ]
        return self.get([self._rewards[0].score_lists.remote(each) for each in sampled])

    def evaluate_reference(self, prompts: Sequence[Prompts], lists: ListSettings) -> list[EvaluatedLists]:
        """Evaluate the supervised policy."""
        sampled = [
            self._nth(self._references, number).reference_lists.remote(each, lists)
            for number, each in enumerate(prompts)
        ]
        return self.get([self._rewards[0].score_lists.remote(each) for each in sampled])

    def state(self) -> tuple[Weights, dict[str, np.ndarray], dict[str, Any]]:
        """Return what a run continues from: weights, state of the optimizer, state of the rewards."""
        learner = self._learners[0]
        weights, optimizer_state, rewards = self.get(
            [
                learner.weights.remote(),
                learner.optimizer_state.remote(),
                self._rewards[0].reward_state.remote(),
            ]
        )
        return weights, optimizer_state, rewards

    def load(
        self,
        weights: Mapping[str, np.ndarray],
        optimizer_state: Mapping[str, np.ndarray],
        rewards: Mapping[str, Any],
    ) -> None:
        """Continue from what `state` returned, on every learner."""
        sent = self.put(weights), self.put(optimizer_state)
        self.get(
            [
                *(learner.load.remote(*sent) for learner in self._learners),
                self._rewards[0].load_reward_state.remote(rewards),
            ]
        )

    def seconds(self) -> dict[str, float]:
        """Return the time spent in each kind of call, and on loading weights (`sync`), over all processes."""
        found = {"sync": 0.0}
        spent: list[dict[str, float]] = self.get([worker.seconds.remote() for worker in self._all])
        for of_worker in spent:
            for name, seconds in of_worker.items():
                found[name] = found.get(name, 0.0) + seconds
        return found

    def get(self, promises: Sequence[Promise[T]]) -> list[T]:
        """Wait for promises and return what was promised; the first error is raised."""
        return self._calls.get(promises)

    def put(self, value: T) -> Promise[T]:
        """Store a value once that several calls take as an argument."""
        stored: Promise[T] = self._host.put(value)
        return stored

    def close(self) -> None:
        """End every process."""
        self._host.close()

    def __enter__(self) -> SingleController:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _nth(workers: Sequence[Any], number: int) -> Any:
        return workers[number % len(workers)]
