"""Batches of a run: prompts are read, candidates sampled and scored.

    begin     prompts ─► chunks ─► candidates ─► rewards, reference      makes the calls, waits for nothing
    complete  waits for the rewards; with `rollout.dynamic`, reads on until enough groups have signal

A group has signal if the rewards of its candidates differ: where they are equal, all advantages are 0. With
dynamic sampling, groups without signal are left out of the batch, and further prompts take their place,
sampled by the same version of the policy.

    zero-variance groups ── dropped by the reward process (`RolloutScorer`)
    groups with signal ──── kept; too few, and reads are left: another read of prompts

Prompts are read in one order; `num_reads` is the cursor, and a resumed run continues from it. Which batch
gets which prompts depends on rewards, which depend on seed, files and weights: two runs agree.

Source: dynamic sampling is DAPO's, arXiv:2503.14476, eq. 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rayrec.rl.config import RlConfig
from rayrec.rl.controller import Promise, SingleController
from rayrec.rl.policy import Weights
from rayrec.rl.prompts import PromptStream
from rayrec.rl.rollouts import ChunkSummary, ReferenceLogProbs, ScoredRollouts


class _ChunkInFlight(NamedTuple):
    summary: Promise[ChunkSummary]
    scored: Promise[ScoredRollouts]
    reference: Promise[ReferenceLogProbs] | None
    """None with dynamic sampling: asked for the groups that are kept, once these are known."""


@dataclass
class Batch:
    """A batch in flight, chunk by chunk."""

    step: int
    version: int
    weights: Promise[Weights] | None
    """None where rollouts use the learner's own."""
    chunks: list[_ChunkInFlight] = field(default_factory=list)


class LearnedChunk(NamedTuple):
    """A chunk that the learner gets."""

    summary: ChunkSummary
    scored: Promise[ScoredRollouts]
    reference: Promise[ReferenceLogProbs]


@dataclass(frozen=True)
class CompleteBatch:
    """A batch whose rewards are known."""

    sampled: Sequence[ChunkSummary]
    """Of all chunks that were sampled."""
    learned: Sequence[LearnedChunk]

    @property
    def num_groups(self) -> int:
        """Groups that are learned from."""
        return sum(chunk.summary.num_groups for chunk in self.learned)

    def metrics(self) -> dict[str, float]:
        """Means over all groups that were sampled, and how many of them are learned from."""
        num_users = sum(chunk.num_users for chunk in self.sampled)
        metrics = {
            f"reward/{name}": sum(chunk.reward_metrics[name] * chunk.num_users for chunk in self.sampled)
            / num_users
            for name in self.sampled[0].reward_metrics
        }
        metrics["zero_variance_share"] = sum(chunk.num_zero_variance for chunk in self.sampled) / num_users
        metrics["entropy"] = sum(chunk.entropy_sum for chunk in self.sampled) / num_users
        metrics["groups"] = float(self.num_groups)
        metrics["oversampling"] = num_users / self.num_groups
        return metrics


class BatchSource:
    """Makes the batches of one run."""

    def __init__(
        self, config: RlConfig, controller: SingleController, prompts: PromptStream, num_reads: int = 0
    ) -> None:
        """
        Args:
            num_reads: reads of prompts that batches before have consumed.
        """
        self._config, self._controller, self._prompts = config, controller, prompts
        self.num_reads = num_reads

    def begin(self, step: int, version: int, weights: Promise[Weights] | None) -> Batch:
        """Ask for a batch that this version of the policy samples."""
        batch = Batch(step, version, weights)
        self._read_into(batch)
        return batch

    def complete(self, batch: Batch) -> CompleteBatch:
        """Wait for the rewards of a batch; with dynamic sampling, fill it up.

        Raises:
            RewardError: a reward failed.
        """
        sampled = self._summaries(batch)
        if (dynamic := self._config.rollout.dynamic) is None:
            return CompleteBatch(sampled, self._learned(batch, sampled))
        reads = 1
        while _num_with_signal(sampled) < dynamic.groups and reads < dynamic.max_reads:
            self._read_into(batch)
            sampled = self._summaries(batch)
            reads += 1
        return CompleteBatch(sampled, self._learned(batch, sampled))

    def _read_into(self, batch: Batch) -> None:
        """Sample and score candidates for one more read of prompts."""
        prompts, self.num_reads = self._prompts.read_on(batch.step, self.num_reads)
        config, controller = self._config, self._controller
        chunks = [
            # The noise of a chunk is keyed by step and number.
            replace(chunk, chunk=len(batch.chunks) + chunk.chunk)
            for chunk in prompts.chunks(config.rollout.chunk_users, config.learner.updates_per_batch)
        ]
        rollouts = controller.sample(chunks, batch.weights)
        scored = [controller.score(each) for each in rollouts]
        reference: Sequence[Promise[ReferenceLogProbs] | None] = [None] * len(chunks)
        if config.rollout.dynamic is None:
            reference = controller.reference_log_probs(rollouts)
        batch.chunks += [_ChunkInFlight(*of, each) for of, each in zip(scored, reference, strict=True)]

    def _summaries(self, batch: Batch) -> list[ChunkSummary]:
        summaries = self._controller.get([chunk.summary for chunk in batch.chunks])
        for chunk in summaries:
            if chunk.policy_version != batch.version:
                raise AssertionError(
                    f"sampled by version {chunk.policy_version}, asked for was {batch.version}"
                )
        return summaries

    def _learned(self, batch: Batch, sampled: Sequence[ChunkSummary]) -> list[LearnedChunk]:
        found = list(zip(sampled, batch.chunks, strict=True))
        if self._config.rollout.dynamic is not None:
            # Without any signal, the step still has its KL and NLL terms, on all groups.
            found = [(each, chunk) for each, chunk in found if each.num_with_signal] or found
        missing = [chunk.scored for _, chunk in found if chunk.reference is None]
        asked = iter(self._controller.reference_log_probs(missing))
        return [
            LearnedChunk(each, chunk.scored, next(asked) if chunk.reference is None else chunk.reference)
            for each, chunk in found
        ]


def _num_with_signal(sampled: Sequence[ChunkSummary]) -> int:
    return sum(chunk.num_with_signal for chunk in sampled)
