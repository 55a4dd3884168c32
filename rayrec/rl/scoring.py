"""Scores rollouts: prompts and candidates become lists for the rewards, whose moments and guard are kept
here.

    Rollouts ─► CandidateLists ─► RewardMix ─► ScoredRollouts
                                      └─► RewardGuard: warnings

Axes: U users, G candidates of a user, K positions of a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.arrays import Int64Array
from rayrec.rl.list_metrics import EvaluatedLists, SampledLists
from rayrec.rl.losses.terms import has_spread
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import Prompts
from rayrec.rl.rewards.base import CandidateLists, Ranker, RewardContext, RewardError
from rayrec.rl.rewards.config import RewardsConfig, build_rewards
from rayrec.rl.rewards.guard import RewardGuard
from rayrec.rl.rewards.mix import TOTAL, RewardMix
from rayrec.rl.rollouts import ChunkSummary, Rollouts, ScoredRollouts


class RewardInputs:
    """Makes the lists that rewards score, from the data set of the supervised run."""

    def __init__(self, policy: Policy, needs_queries: bool) -> None:
        self._policy, self._needs_queries = policy, needs_queries
        self._dataset = policy.task.dataset

    def context(self) -> RewardContext:
        """Return what rewards know about the data set."""
        codes_IL = self._policy.task.catalog.codes_IL
        assert codes_IL is not None, "the policy generates them"
        items = self._dataset.items
        return RewardContext(
            codes_IL=np.asarray(codes_IL),
            train_counts_I=items.train_counts_I,
            item_keys=pd.Index(items.keys.to_pandas()),
            scenarios=tuple(self._dataset.manifest.labels["scenario"]),
            load_ranker=self._ranker,
            item_positions=self._dataset.item_positions,
        )

    def lists(self, prompts: Prompts, items_UG: Int64Array, log_probs_UG: np.ndarray) -> CandidateLists:
        """Put candidates of some prompts together with what rewards read about their users."""
        codes_U = prompts.target_labels.get("scenario")
        names = self._dataset.manifest.labels["scenario"]
        return CandidateLists(
            items_UG,
            log_probs_UG,
            prompts.targets_U,
            self._keys_of(prompts.samples.user_ids_B),
            None if codes_U is None else [names[code] if code >= 0 else "" for code in codes_U.tolist()],
            self._queries(prompts) if self._needs_queries else None,
        )

    def _ranker(self, ranking: RankingConfig) -> Ranker:
        """Load the ranking model that scores rollouts.

        Raises:
            InputError: the ranking model is of other items or impressions.
        """
        stage = RankingStage.load(Recommender(self._policy.trained), ranking)
        # It must not have been trained on events that the policy is rewarded for or evaluated on.
        stage.check_evaluation()
        self._dataset.check_times()

        def rewards(queries: Sequence[Query], items_UG: Int64Array) -> np.ndarray:
            # As of the newest event of each history: with the clock, two runs would differ.
            times = [query.times[-1] if query.times is not None else 0 for query in queries]
            return stage.rewards(queries, items_UG, np.array(times, dtype=np.int64))

        return rewards

    def _queries(self, prompts: Prompts) -> list[Query]:
        samples = prompts.samples
        bounds = zip(samples.offsets_B1[:-1].tolist(), samples.offsets_B1[1:].tolist(), strict=True)
        return [
            Query(
                samples.item_ids_N[start:stop],
                int(user_id),
                None if samples.times_N is None else samples.times_N[start:stop],
            )
            for (start, stop), user_id in zip(bounds, samples.user_ids_B.tolist(), strict=True)
        ]

    def _keys_of(self, user_ids_U: Int64Array) -> list[str]:
        rows_U = self._users.get_indexer(pd.Index(user_ids_U))
        keys = self._dataset.users["user_key"].to_pandas()
        return [
            str(user_id) if row < 0 else str(keys.iloc[row])
            for user_id, row in zip(user_ids_U.tolist(), rows_U.tolist(), strict=True)
        ]

    @cached_property
    def _users(self) -> pd.Index:
        return pd.Index(self._dataset.users["user_id"].to_numpy())


class RolloutScorer:
    """Computes rewards of rollouts; keeps the moments that rewards are normalized by, and the guard."""

    def __init__(
        self, mix: RewardMix, guard: RewardGuard, inputs: RewardInputs, keeps_only_signal: bool = False
    ) -> None:
        self._mix, self._guard, self._inputs = mix, guard, inputs
        self._keeps_only_signal = keeps_only_signal

    @classmethod
    def of(cls, config: RewardsConfig, policy: Policy, keeps_only_signal: bool = False) -> RolloutScorer:
        """Make the scorer of a policy's data set.

        Args:
            keeps_only_signal: drop zero-variance groups of chunks that have others, for dynamic sampling.

        Raises:
            InputError: a reward does not fit the data set, or its ranker was trained on another catalog.
        """
        inputs = RewardInputs(policy, config.needs_queries)
        mix = build_rewards(config, inputs.context())
        return cls(mix, RewardGuard(config.guard), inputs, keeps_only_signal)

    def score(self, rollouts: Rollouts) -> tuple[ChunkSummary, ScoredRollouts]:
        """Compute the rewards of a chunk.

        Raises:
            RewardError: a reward failed, or returned something that cannot be learned from; no state was
                updated.
        """
        lists = self._inputs.lists(rollouts.prompts, rollouts.items_UG, rollouts.log_probs_UG)
        before = self._mix.state()
        mixed = self._mix.mix(lists)
        # The target is scored as one more candidate, since its reward may depend on its position.
        with_targets = lists.with_targets(rollouts.target_log_probs_U)
        try:
            of_targets = self._mix.mix(with_targets, learns=False)
        except RewardError:
            self._mix.load(before)
            raise
        has_target_U = with_targets.is_item_UG[:, -1]
        has_spread_U = has_spread(torch.from_numpy(mixed.total_UG), torch.from_numpy(rollouts.weights_UG))
        report = self._guard.watch(mixed)
        scored = ScoredRollouts(
            rollouts,
            np.where(rollouts.items_UG >= 0, mixed.total_UG, 0.0),
            np.where(has_target_U, of_targets.total_UG[:, -1], np.nan),
        )
        if self._keeps_only_signal and has_spread_U.any():
            scored = scored.some(np.flatnonzero(has_spread_U.numpy()))
        learned = scored.rollouts
        summary = ChunkSummary(
            policy_version=rollouts.policy_version,
            num_users=len(rollouts.items_UG),
            num_groups=len(learned.items_UG),
            num_candidates=int((learned.items_UG >= 0).sum()),
            num_choices=int((learned.code_log_probs_UGL != 0).sum()),
            entropy_sum=float(-(rollouts.weights_UG[:, :, None] * rollouts.code_log_probs_UGL).sum()),
            reward_metrics={**mixed.metrics, **report.metrics},
            num_zero_variance=int((~has_spread_U).sum()),
            warnings=tuple(report.warnings),
        )
        return summary, scored

    def evaluate(self, sampled: SampledLists) -> EvaluatedLists:
        """Compute metrics of sampled lists, with rewards that are not normalized."""
        return sampled.evaluated(
            lambda items_UK, log_probs_UK: self._rewards(sampled, items_UK, log_probs_UK)
        )

    def _rewards(
        self, sampled: SampledLists, items_UK: np.ndarray, log_probs_UK: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        lists = self._inputs.lists(sampled.prompts, items_UK, log_probs_UK)
        mixed = self._mix.mix(lists, learns=False, normalizes=False)
        return {TOTAL: mixed.total_UG, **mixed.parts}

    def state(self) -> dict[str, Any]:
        """Return the state of rewards and guard, as JSON values."""
        return {"mix": self._mix.state(), "guard": self._guard.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._mix.load(state["mix"])
        self._guard.load(state["guard"])
