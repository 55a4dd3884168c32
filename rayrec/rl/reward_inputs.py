"""What rewards are told of users and items, from the data set of the supervised run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import pandas as pd

from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Query, Recommender
from rayrec.platform.arrays import Int64Array
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import Prompts
from rayrec.rl.rewards.build import CatalogFacts, build_rewards
from rayrec.rl.rewards.candidates import CandidateLists
from rayrec.rl.rewards.config import RankerConfig, RewardsConfig
from rayrec.rl.rewards.mix import RewardMix


class RewardInputs:
    """Names of users and scenarios, and histories for rankers, of prompts."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._dataset = policy.task.dataset
        self._needs_queries = False

    def build(self, config: RewardsConfig) -> RewardMix:
        """
        Raises:
            InputError: a reward does not fit the data set, or its ranking model is of other items or
                impressions.
        """
        codes_IL = self._policy.task.catalog.codes_IL
        assert codes_IL is not None, "the policy generates them"
        items = self._dataset.items
        facts = CatalogFacts(
            codes_IL=np.asarray(codes_IL),
            train_counts_I=items.train_counts_I,
            item_keys=pd.Index(items.keys.to_pandas()),
            scenarios=tuple(self._dataset.manifest.labels["scenario"]),
        )
        rankers = {
            name: self._ranker(part) for name, part in config.named.items() if isinstance(part, RankerConfig)
        }
        self._needs_queries = bool(rankers)
        return build_rewards(config, facts, rankers)

    def lists(self, prompts: Prompts, items_UG: Int64Array, log_probs_UG: np.ndarray) -> CandidateLists:
        """Candidates of some prompts, for a mix of rewards."""
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

    def _ranker(self, part: RankerConfig) -> Callable[..., np.ndarray]:
        stage = RankingStage.load(Recommender(self._policy.trained), part.ranking)
        stage.check_evaluation()  # nor may it have learned what the policy is rewarded for, and judged by
        self._dataset.check_times()

        def rewards(queries: Sequence[Query], items_UG: Int64Array) -> np.ndarray:
            # Lists are shown right behind the newest event: a clock would make every run another one.
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
        places_U = self._users.get_indexer(pd.Index(user_ids_U))
        keys = self._dataset.users["user_key"].to_pandas()
        return [
            str(user_id) if place < 0 else str(keys.iloc[place])
            for user_id, place in zip(user_ids_U.tolist(), places_U.tolist(), strict=True)
        ]

    @cached_property
    def _users(self) -> pd.Index:
        return pd.Index(self._dataset.users["user_id"].to_numpy())
