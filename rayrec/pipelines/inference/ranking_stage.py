"""A ranking stage: a recommender names candidates, a ranking model says what would come of showing them.

    queries ─► recommender: candidates of each ─► QueryRows: a row per candidate ─► scorer, all rows at once
                                                                                        │ [R, T] probabilities
    items by the objective  ◄────────────────────────────────────────────── RankingObjective ◄─┘

Axes: B queries, K candidates of each, R rows (candidates of all queries), T labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from rayrec.models.decoding.beam_policy import Beams
from rayrec.models.program.program import RankedItems
from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.inference.answers import FULL_BUDGET, Answer, Budget, Query, Ranking, Wanted
from rayrec.pipelines.inference.control import controlled
from rayrec.pipelines.inference.merged_candidates import MergedCandidates
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.impressions.query_rows import QueryRows

_LEAST = 1e-12
"""A probability of 0 in a product would make all that have one alike."""


class RankingObjective:
    """A weighted sum or product of the labels' probabilities, and of the recommender's score."""

    def __init__(self, config: RankingConfig, labels: tuple[str, ...], run: str) -> None:
        """
        Args:
            run: of the ranking model, for messages.

        Raises:
            InputError: a label that there is not, or none of several.
        """
        weights = config.objective
        if not weights:
            if len(labels) > 1:
                raise InputError(
                    f"{run} predicts {', '.join(labels)}; say what counts with objective (--objective "
                    f"{labels[0]}=1)"
                )
            weights = dict.fromkeys(labels, 1.0)
        if unknown := [label for label in weights if label not in labels]:
            raise InputError(
                f"objective names the label {unknown[0]!r}, but {run} predicts {', '.join(labels)}"
            )
        self._weights_T = np.array([weights.get(label, 0.0) for label in labels])
        self._is_product = config.combine == "product"
        self._generator_weight = config.generator_weight

    def __call__(self, probabilities_BKT: np.ndarray, scores_BK: np.ndarray) -> np.ndarray:
        """[B, K] the larger the better; scores are those of the recommender."""
        of_labels_BK = self.of_labels(probabilities_BKT)
        if not self._generator_weight:  # zero times the -inf of a missing candidate is no number
            return of_labels_BK
        return of_labels_BK + self._generator_weight * scores_BK

    def of_labels(self, probabilities_BKT: np.ndarray) -> np.ndarray:
        """[B, K] the part that depends on the ranking model."""
        if self._is_product:
            return np.log(np.maximum(probabilities_BKT, _LEAST)) @ self._weights_T
        return probabilities_BKT @ self._weights_T


_MOST_ROWS = 8192
"""Scored at once: each brings its history along, and an evaluation asks for thousands of users."""


class Opinion(NamedTuple):
    """What a ranking model thinks of candidates."""

    probabilities_BKT: np.ndarray
    """NaN where there is no candidate."""
    objective_BK: np.ndarray
    """What they are ordered by; -inf where there is no candidate."""


class RankingStage:
    """Ranks what a recommender gives. Not thread-safe."""

    def __init__(
        self,
        recommender: Recommender | MergedCandidates,
        scorer: Scorer,
        config: RankingConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            clock: UNIX seconds now.

        Raises:
            InputError: the objective does not fit the labels, or queries do not tell what the ranking model
                reads.
        """
        self.recommender, self.scorer, self.config = recommender, scorer, config
        self._objective = RankingObjective(config, scorer.labels, scorer.run)
        columns = scorer.features.scored_columns.names
        self._rows = QueryRows(scorer.task.dataset, recommender.dataset, columns)
        self._users = pd.Index(recommender.dataset.users["user_id"].to_numpy())
        self._items = pd.Index(recommender.dataset.items.keys.to_pandas())
        self._clock = clock

    @classmethod
    def load(cls, recommender: Recommender, config: RankingConfig, device: str | None = None) -> RankingStage:
        """Load the run that ranks again.

        Raises:
            InputError: the run cannot be loaded, or cannot rank for this recommender.
        """
        return cls(recommender, Scorer.load(config.run, config.snapshot, device, config.data), config)

    def num_beams(self, k: int, budget: Budget = FULL_BUDGET) -> int:
        """Beams that candidates are found with; 0 where the recommender scores every item."""
        return self.recommender.num_beams(self._num_candidates(Wanted(k, budget=budget)), budget)

    def beams_of(self, wanted: Wanted) -> Beams:
        """As `Recommender.beams_of`, of the candidates."""
        return self.recommender.beams_of(self._of_candidates(wanted))

    def _of_candidates(self, wanted: Wanted) -> Wanted:
        return replace(wanted, k=self._num_candidates(wanted))

    def _num_candidates(self, wanted: Wanted) -> int:
        candidates, budget = self.config.candidates, wanted.budget
        # As many beams as candidates are the least: with fewer of the ones there are fewer of the others.
        if budget.max_beams is not None and self.recommender.num_beams(candidates):
            candidates = min(candidates, budget.max_beams)
        if wanted.beams is not None and self.recommender.num_beams(candidates):
            candidates = min(candidates, wanted.beams[-1])
        return max(wanted.k, candidates)

    def answer(
        self, queries: Sequence[Query], k: int, exclude_seen: bool = True, budget: Budget = FULL_BUDGET
    ) -> list[Answer]:
        """As `Recommender.answer`, the best of `candidates` items by the objective, each with its `ranking`.

        The history of a query is what the ranking model reads of its past; a trigger item is no part of it.
        """
        return self.answer_each(queries, [Wanted(k, exclude_seen, budget)] * len(queries))

    def answer_each(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        """As `Recommender.answer_each`, with items as in `answer`."""
        codes_IL = self._model.codes_for(wanted)
        return controlled(self._answer_each, queries, wanted, codes_IL, reranks=True)

    @property
    def _model(self) -> Recommender:
        of = self.recommender
        return of.recommender if isinstance(of, MergedCandidates) else of

    def _answer_each(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        """Without control."""
        candidates = [self._of_candidates(each) for each in wanted]
        answers = [
            _filled_up(answer, query, self.config.candidates)
            for answer, query in zip(self.recommender.answer_each(queries, candidates), queries, strict=True)
        ]
        most = max((len(answer.items) for answer in answers), default=0)
        items_BK = np.full((len(answers), most), -1)
        scores_BK = np.full((len(answers), most), -np.inf)
        for row, answer in enumerate(answers):
            keys = [item.item_key for item in answer.items]
            items_BK[row, : len(keys)] = self._items.get_indexer(keys)
            scores_BK[row, : len(keys)] = [item.score for item in answer.items]
        opinion = self.opinion(queries, items_BK, scores_BK)
        order_BK = _best_first(opinion.objective_BK)
        return [
            replace(
                answer,
                items=[
                    replace(
                        answer.items[place],
                        ranking=Ranking(
                            float(opinion.objective_BK[row, place]),
                            dict(
                                zip(
                                    self.scorer.labels,
                                    opinion.probabilities_BKT[row, place].tolist(),
                                    strict=True,
                                )
                            ),
                        ),
                    )
                    for place in order_BK[row, : wanted[row].k].tolist()
                    if place < len(answer.items)
                ],
            )
            for row, answer in enumerate(answers)
        ]

    def rerank(
        self, samples: SampleBatch, k: int, exclude_seen: bool, times_B: Int64Array | None = None
    ) -> RankedItems:
        """As `Recommender.recommend_samples`; the scores are those of the objective.

        Args:
            times_B: when each row asks, in UNIX seconds; None is now.
        """
        found = self.recommender.recommend_samples(samples, max(k, self.config.candidates), exclude_seen)
        objective_BK = self.opinion(
            _queries_of(samples), found.items_BK, found.scores_BK, times_B
        ).objective_BK
        order_BK = _best_first(objective_BK)[:, :k]
        return RankedItems(
            np.take_along_axis(found.items_BK, order_BK, axis=1),
            np.take_along_axis(objective_BK, order_BK, axis=1),
        )

    def rewards(
        self, queries: Sequence[Query], items_BK: Int64Array, times_B: Int64Array | None = None
    ) -> np.ndarray:
        """[B, K] what the objective gives for showing these items, the recommender's own score aside: a
        reward for lists that a policy made.

        Args:
            items_BK: catalog positions; where -1 stands, the reward is NaN.
            times_B: when each query is asked, in UNIX seconds; None is now.
        """
        times_B = self._now(len(queries)) if times_B is None else times_B
        probabilities_BKT = self._probabilities(queries, items_BK, times_B)
        return self._objective.of_labels(probabilities_BKT)

    def opinion(
        self,
        queries: Sequence[Query],
        items_BK: Int64Array,
        scores_BK: np.ndarray,
        times_B: Int64Array | None = None,
    ) -> Opinion:
        """What the ranking model thinks of candidates.

        Args:
            items_BK: catalog positions; -1 where there is none.
            scores_BK: the recommender's.
            times_B: when each query is asked, in UNIX seconds; None is now.
        """
        times_B = self._now(len(queries)) if times_B is None else times_B
        probabilities_BKT = self._probabilities(queries, items_BK, times_B)
        objective_BK = self._objective(probabilities_BKT, scores_BK)
        return Opinion(probabilities_BKT, np.where(items_BK >= 0, objective_BK, -np.inf))

    def _probabilities(
        self, queries: Sequence[Query], items_BK: Int64Array, times_B: Int64Array
    ) -> np.ndarray:
        probabilities_BKT = np.full((*items_BK.shape, len(self.scorer.labels)), np.nan)
        queries_R, places_R = np.nonzero(items_BK >= 0)
        if not len(queries_R):
            return probabilities_BKT
        histories = [np.asarray(query.history_ids, dtype=np.int64) for query in queries]
        user_ids = [-1 if query.user_id is None else query.user_id for query in queries]
        is_nobody_B = np.array([query.user_id is None for query in queries])
        users_B = np.where(is_nobody_B, -1, self._users.get_indexer(pd.Index(user_ids, dtype=np.int64)))
        history_N = self.recommender.dataset.item_positions(np.concatenate(histories))
        offsets_B1 = offsets_from_lengths(np.array([len(history) for history in histories]))
        scored = []
        for start in range(0, len(queries_R), _MOST_ROWS):
            of_R = queries_R[start : start + _MOST_ROWS]
            items_R = items_BK[of_R, places_R[start : start + _MOST_ROWS]]
            rows = self._rows.rows(users_B, history_N, offsets_B1, times_B, of_R, items_R)
            scored.append(self.scorer.score(rows))
        probabilities_BKT[queries_R, places_R] = np.concatenate(scored)
        return probabilities_BKT

    def _now(self, num_queries: int) -> Int64Array:
        return np.full(num_queries, int(self._clock()))

    def check_evaluation(self) -> None:
        """Refuse a ranking model that has seen what is to be predicted.

        Raises:
            InputError: the ranking model may have been trained on events that the recommender is tested on.
        """
        dataset, impressions = self.recommender.dataset, self.scorer.task.dataset
        if impressions.manifest.split.held_out_of == dataset.fingerprint:
            return
        raise InputError(
            f"{impressions.root} holds out other events than {dataset.root}, so its training rows may have "
            "the very events that are to be predicted; prepare the impressions with held_out_of "
            f"(--held-out-of {dataset.root}), and train the ranking model on these"
        )


def _filled_up(answer: Answer, query: Query, most: int) -> Answer:
    """The answer with candidates that were found before, after its own, so many in all."""
    if not query.candidates or len(answer.items) >= most:
        return answer
    named = {item.item_key for item in answer.items}
    others = [item for item in query.candidates if item.item_key not in named]
    return replace(answer, items=[*answer.items, *others][:most])


def _best_first(objective_BK: np.ndarray) -> Int64Array:
    """Places by descending objective; what is alike stays in the recommender's order."""
    return np.argsort(-objective_BK, axis=1, kind="stable")


def _queries_of(samples: SampleBatch) -> list[Query]:
    offsets = samples.offsets_B1
    return [
        Query(samples.item_ids_N[start:stop], int(user_id))
        for user_id, start, stop in zip(samples.user_ids_B, offsets[:-1], offsets[1:], strict=True)
    ]
