"""A trained model in one process, without Ray: what evaluation, the command line and a replica hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.compiled_ranking.job import RankingModel
from rayrec.models.compiled_ranking.ranking import CompiledPrograms, CompiledRanking
from rayrec.models.decoding.beam_policy import BeamPolicy, Beams, by_level
from rayrec.models.program.program import AllowedItems, RankedItems, Rows
from rayrec.models.sequence.config import LongHistoryConfig
from rayrec.models.sequence.sequence_model import CacheMetrics, SequenceModel
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.inference.answers import (
    FULL_BUDGET,
    Answer,
    Budget,
    Query,
    Recommendation,
    Source,
    Wanted,
)
from rayrec.pipelines.inference.control import controlled
from rayrec.pipelines.inference.item_ranker import ItemRanker, give_catalog, item_ranker_of, use_prefix_cache
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.summaries import Summaries, with_known, within_budget
from rayrec.pipelines.tasks.instructions import instruction_of
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.platform.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import UNKNOWN, Label, Part
from rayrec.samples.base.batches import FeatureBatch, SampleBatch
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.dataset.dataset import Dataset, Items
from rayrec.samples.features.neighbors import NO_TIME
from rayrec.samples.features.row_features import RowFeatures

MOST_DENIED = 256
"""Items that a set lacks at most where they are left out one by one."""
_NOTHING: Int64Array = np.zeros(0, dtype=np.int64)


class Recommender:
    """Ranks the catalog for histories. Not thread-safe."""

    def __init__(self, model: TrainedModel, ranker: ItemRanker | None = None) -> None:
        """
        Args:
            ranker: has the weights of this model; None: a network in this process.

        Raises:
            InputError: the model ranks what is shown.
        """
        assembly = model.assembly
        self.run, self.version = model.run, model.version
        self.committed_step, self.snapshot = model.state.committed_step, model.snapshot
        self.method = model.method
        if ranker is None:
            ranker = item_ranker_of(model)
            give_catalog(ranker, model)
        task, features = assembly.task, assembly.features
        assert isinstance(task, NextItemTask), "there is a ranker of it"
        assert isinstance(features, RowFeatures), "those of the task"
        self._task, self._features = task, features
        self.ranking_model = RankingModel(
            task.model.model_dump(mode="json"), task.catalog_known_to(model.state)
        )
        """What versions have in common that may be ranked by the same compiled programs."""
        self._ranker, self._model = ranker, model
        self._tables = model.tables
        self.prefix_cache: CacheMetrics | None = None
        """What the network has read of histories, where that is kept."""

    @classmethod
    def load(
        cls,
        run: str | Path,
        which: str = "best",
        device: str | None = None,
        data: str | Path | None = None,
    ) -> Recommender:
        """Load a run's `best` or `last` snapshot.

        Args:
            device: overrides the device that the run was trained on.
            data: where the run's data set lies now, if it was moved; or a later one, see `TrainedModel.load`.

        Raises:
            InputError: no such run, an incomplete or changed snapshot, or one of other data.
        """
        return cls(TrainedModel.load(run, which, device, data))

    @property
    def dataset(self) -> Dataset:
        return self._task.dataset

    @property
    def trained_on(self) -> str:
        """Fingerprint of the data set; `dataset` is another one where the catalog has grown since."""
        return self._model.state.dataset_fingerprint

    def check_can_be_judged_on(self, later: Dataset) -> None:
        """See `NextItemTask.check_can_be_judged_on`."""
        self._task.check_can_be_judged_on(later, self.run)

    @property
    def semantic_ids(self) -> SemanticIdRegistry | None:
        """Codes of the items in catalog order, as the model has them; None for models that know none."""
        return self._task.registry

    @property
    def needs_times(self) -> bool:
        """Whether the model, or an operation before it, reads when the events of a history were."""
        return self._features.needs_history_times

    @property
    def needs_labels(self) -> tuple[Label, ...]:
        """Labels that the model, or an operation before it, reads of the events of a history."""
        return self._features.history_labels

    @property
    def evaluation_instruction(self) -> Mapping[Part, int]:
        """What users are ranked for in evaluation."""
        return self._task.instruction

    def instruction_of(self, names: Mapping[Part, str | None]) -> dict[Part, int]:
        """What a query may want, from names: scenario and behavior as the log has them, and an item's key.

        Raises:
            InputError: a part that the model does not read, or an unknown name.
        """
        return instruction_of(self._task.model, self.dataset, names, "instruction")

    @property
    def device(self) -> torch.device:
        return get_device(self._task.config.device).torch

    @property
    def network(self) -> SequenceModel:
        """What computes; of a recommender whose network is in this process."""
        assert isinstance(self._ranker, SequenceProgram), "asked where the network is"
        return self._ranker.model

    def use_prefix_cache(self, sizes: CacheSizes) -> None:
        """Keep what the network reads of histories, at most so much of it, for users who return.

        Raises:
            InputError: it reads them again each time, or reads rows of tables, which change beside it.
        """
        assert isinstance(self._ranker, SequenceProgram), "contexts are kept where the network is"
        self.prefix_cache = use_prefix_cache(self._ranker, self._model, sizes)

    def rank_with(self, programs: CompiledPrograms) -> CompiledRanking:
        """Rank by compiled programs from now on, where there is one for a batch.

        Raises:
            ValueError: they are for weights of other shapes.
        """
        assert isinstance(self._ranker, SequenceProgram), "programs are compiled where the network is"
        compiled = CompiledRanking(programs, self._ranker.model)
        self._ranker.compiled = compiled
        return compiled

    def recommend_samples(self, samples: SampleBatch, k: int, exclude_seen: bool) -> RankedItems:
        """Catalog positions of the k best next items of each row; -1 where there are fewer.

        A row without any known item gives the model nothing to go by and gets none.
        """
        features = self._features.ranking(samples)
        return self._rank(features, k, self.seen(samples) if exclude_seen else None)

    def _rank(
        self,
        features: FeatureBatch,
        k: int,
        seen_BE: Int64Array | None,
        beams_B: Sequence[Beams] | None = None,
        allowed: AllowedItems | None = None,
    ) -> RankedItems:
        return self._ranker.recommend(features, self._rows_of(features), k, seen_BE, beams_B, allowed)

    def seen(self, samples: SampleBatch) -> Int64Array:
        """[B, E] catalog positions of each history's items, padded with -1."""
        return self._features.seen(samples)

    def recommend(
        self, queries: Sequence[Query], k: int, exclude_seen: bool = True
    ) -> list[list[Recommendation]]:
        """The k best items for each query, best first; an empty list where its history has no known item."""
        return [answer.items for answer in self.answer(queries, k, exclude_seen)]

    def num_beams(self, k: int, budget: Budget = FULL_BUDGET) -> int:
        """Beams that such a question is answered with; 0 of a model that scores every item."""
        return self._ranker.num_beams(k, budget.max_beams)

    def beams_of(self, wanted: Wanted) -> Beams:
        """Beams that a question is answered with; 0 of a model that scores every item."""
        usual = self.num_beams(wanted.k, wanted.budget)
        if not usual:
            return 0
        if wanted.beams is None:
            return BeamPolicy((usual,), wanted.beam_margin).beams
        policy = BeamPolicy(wanted.beams, wanted.beam_margin)
        return policy.within(wanted.k, wanted.budget.max_beams).beams

    def answer(
        self, queries: Sequence[Query], k: int, exclude_seen: bool = True, budget: Budget = FULL_BUDGET
    ) -> list[Answer]:
        """The same, and how much of each history was read."""
        return self.answer_each(queries, [Wanted(k, exclude_seen, budget)] * len(queries))

    def answer_each(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        """As `answer`, each query as is wanted of it, all together: an answer is the same as alone.

        Raises:
            InputError: diversity is wanted of a model that knows no semantic IDs.
        """
        return controlled(self._answer_each, queries, wanted, self.codes_for(wanted))

    def codes_for(self, wanted: Sequence[Wanted]) -> NDArray[np.integer] | None:
        """[I, L] semantic IDs, by which items are alike, where diversity is wanted.

        Raises:
            InputError: the model knows none.
        """
        if not any(each.control is not None and each.control.diversity for each in wanted):
            return None
        registry = self.semantic_ids
        if registry is None:
            raise InputError(
                "diversity: this run's model has no semantic IDs, which say how alike items are; leave it out"
            )
        return registry.codes_IL[:, : registry.num_codebooks]

    def _answer_each(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        """Without control."""
        answers: dict[int, Answer] = {}
        # Neighbors of about as many beams are found by one search.
        widths_BL = by_level([self.beams_of(each) for each in wanted])
        order = sorted(range(len(queries)), key=lambda place: [-width for width in widths_BL[place]])
        for is_prepared in (False, True):
            places = [place for place in order if queries[place].is_prepared == is_prepared]
            if places:
                some = [queries[place] for place in places]
                found = self._answers(some, [wanted[place] for place in places], is_prepared)
                answers |= zip(places, found, strict=True)
        return [answers[place] for place in range(len(queries))]

    def _answers(self, queries: Sequence[Query], wanted: Sequence[Wanted], is_prepared: bool) -> list[Answer]:
        samples = self._as_samples(queries)
        seen_BE = self.seen(samples)  # of whole histories, however much of them is read
        if any(each.budget.max_events is not None for each in wanted):
            step = self._task.model.windows_begin_at
            newest = [
                self._newest(query, each.budget.max_events, step)
                for query, each in zip(queries, wanted, strict=True)
            ]
            samples = self._as_samples(newest)
        features, lacks_B = self._with_summaries(
            self._features.ranking(samples, is_prepared),
            [query.summaries for query in queries],
            [each.budget.max_new_chunks for each in wanted],
        )
        excludes_B = np.array([each.exclude_seen for each in wanted])
        excluded_BE = np.where(excludes_B[:, None], seen_BE, -1) if excludes_B.any() else None
        sets = [query.allowed_I for query in queries]
        denied = _denied_by([each for each in sets if each is not None])
        if denied:
            excluded_BE = _joined(excluded_BE, [denied.get(id(each), _NOTHING) for each in sets])
            sets = [None if id(each) in denied else each for each in sets]
        most = max(each.k for each in wanted)
        ranked = self._rank(features, most, excluded_BE, self._beams_of(wanted), self._allowed(sets))
        return self._described(features, seen_BE, ranked, wanted, lacks_B)

    def _newest(self, query: Query, most: int | None, step: int) -> Query:
        """The query with no more than so many events, its newest; as windows do, they begin at a multiple of
        `step` of those that the catalog knows, if that leaves any. The others are left out anyway."""
        if most is None or len(query.history_ids) <= most:
            return query
        (places,) = np.nonzero(self.dataset.item_positions(query.history_ids) >= 0)
        num_before = max(len(places) - most, 0)
        if most > step:
            num_before = -(-num_before // step) * step
        if not num_before:
            return query
        first = int(places[num_before])
        return replace(
            query,
            history_ids=query.history_ids[first:],
            times=None if query.times is None else query.times[first:],
            labels={label: codes[first:] for label, codes in query.labels.items()},
        )

    def item_log_probs(self, queries: Sequence[Query], items_BW: Int64Array) -> Float64Array:
        """[B, W] log-probability that each item is the next one, for the whole history of each query.

        Args:
            items_BW: catalog positions; -1 has -inf.

        Raises:
            InputError: the model's scores are no probabilities.
        """
        assert isinstance(self._ranker, SequenceProgram), "asked where the network is"
        log_probs_BW = np.full(items_BW.shape, -np.inf)
        for places, features in self._features_of(queries):
            log_probs_BW[places] = self._ranker.item_log_probs(
                features, self._rows_of(features), items_BW[places]
            )
        return log_probs_BW

    def first_log_probs(self, samples: SampleBatch) -> Float32Array | None:
        """[B, K] log-probability of each choice that the model makes first for each row, see
        `SequenceModel.first_log_probs`; None of a model that does not say."""
        assert isinstance(self._ranker, SequenceProgram), "asked where the network is"
        features = self._features.ranking(samples)
        return self._ranker.first_log_probs(features, self._rows_of(features))

    def _features_of(self, queries: Sequence[Query]) -> Iterator[tuple[list[int], FeatureBatch]]:
        """(Places of queries, their features with all summaries that are known), for whole histories:
        operations run on some, and have run on the others before."""
        for is_prepared in (False, True):
            places = [place for place, query in enumerate(queries) if query.is_prepared == is_prepared]
            if places:
                some = [queries[place] for place in places]
                features = self._features.ranking(self._as_samples(some), is_prepared)
                known = [query.summaries for query in some]
                yield places, self._with_summaries(features, known, [None] * len(some))[0]

    def _rows_of(self, features: FeatureBatch) -> Rows:
        return self._tables.read({name: lookup.ids_M for name, lookup in features.lookups.items()})

    def _with_summaries(
        self,
        features: FeatureBatch,
        known: Sequence[Summaries | None],
        most_new: Sequence[int | None],
    ) -> tuple[FeatureBatch, BoolArray]:
        """Features with the summaries that are there, and whether some chunks of a row are left out."""
        if features.old_chunks is None:
            return features, np.zeros(len(known), dtype=np.bool_)
        chunks, lacks_B = within_budget(with_known(features.old_chunks, known), most_new)
        return replace(features, old_chunks=chunks), lacks_B

    @property
    def long_history(self) -> LongHistoryConfig | None:
        """How the model reads summaries of old events; None: it does not."""
        return self._task.model.summarized

    def summarize(self, queries: Sequence[Query]) -> list[Summaries]:
        """The summaries of all old chunks that an answer to each query reads; those that are in the query and
        still fit are not computed again."""
        assert self.long_history is not None, "asked before"
        assert isinstance(self._ranker, SequenceProgram), "summaries are made where the network is"
        found: dict[int, Summaries] = {}
        for places, features in self._features_of(queries):
            chunks = features.old_chunks
            assert chunks is not None, "of a model that reads them"
            vectors_XKD, hashes_X = self._ranker.summarize(features), chunks.hashes_X
            for place, first, stop in zip(places, chunks.offsets_B1, chunks.offsets_B1[1:], strict=False):
                found[place] = Summaries(hashes_X[first:stop], vectors_XKD[first:stop])
        return [found[place] for place in range(len(queries))]

    def rank_catalog(self, queries: Sequence[Query], k: int, search: int | None = None) -> RankedItems:
        """[B, k] catalog positions of the best items for each query, those of the history among them; -1
        after the last.

        Args:
            search: beams at least; None: as many as there are items, so that nothing is left out of the
                search and each score is exact.
        """
        num_items = len(self.dataset.items)
        wide = num_items if search is None else min(max(search, k), num_items)
        num_found = min(k, wide)
        items_BK = np.full((len(queries), num_found), -1, dtype=np.int64)
        scores_BK = np.full((len(queries), num_found), -np.inf)
        for places, features in self._features_of(queries):
            ranked = self._rank(features, wide, None)
            items_BK[places] = ranked.items_BK[:, :num_found]
            scores_BK[places] = ranked.scores_BK[:, :num_found]
        return RankedItems(items_BK, scores_BK)

    @cached_property
    def identity(self) -> str:
        """Of this version's weights and data, in 32 hexadecimal digits: what was computed with another one is
        told apart by it."""
        hashed = xxhash.xxh3_128()
        hashed.update(f"{self.run} {self.version} {self.committed_step} {self.dataset.fingerprint}".encode())
        for name, weights in sorted(self._model.weights.items()):
            hashed.update(f"{name} {weights.dtype} {weights.shape}".encode())
            hashed.update(np.ascontiguousarray(weights).tobytes())
        return hashed.hexdigest()

    def _beams_of(self, wanted: Sequence[Wanted]) -> list[Beams] | None:
        """Of each query; None where they are those of the most items, or there are none."""
        beams = [self.beams_of(each) for each in wanted]
        usual = self.num_beams(max(each.k for each in wanted))
        return None if all(each == usual for each in beams) else beams

    def _allowed(self, of_queries: Sequence[BoolArray | None]) -> AllowedItems | None:
        """Sets of items, each once, and which of them each query has."""
        if all(allowed_I is None for allowed_I in of_queries):
            return None
        everything_I = np.ones(len(self.dataset.items), dtype=np.bool_)
        masks = [everything_I if allowed_I is None else allowed_I for allowed_I in of_queries]
        sets = {id(mask_I): mask_I for mask_I in masks}
        place_of = {key: place for place, key in enumerate(sets)}
        set_B = np.array([place_of[id(mask_I)] for mask_I in masks], dtype=np.int64)
        return AllowedItems(np.stack(list(sets.values())), set_B)

    def _described(
        self,
        features: FeatureBatch,
        seen_BE: Int64Array,
        ranked: RankedItems,
        wanted: Sequence[Wanted],
        lacks_B: BoolArray,
    ) -> list[Answer]:
        num_read_B = np.diff(features.offsets_B1)
        if (chunks := features.old_chunks) is not None:
            num_read_B = num_read_B + chunks.items_XC.shape[1] * np.diff(chunks.offsets_B1)
        num_unread_B = np.maximum((seen_BE >= 0).sum(1) - num_read_B, 0)
        found = zip(ranked.items_BK.tolist(), ranked.scores_BK.tolist(), wanted, strict=True)
        lists = [
            [
                self._describe(item, score)
                for item, score in zip(items_K[: each.k], scores_K, strict=False)
                if item >= 0
            ]
            for items_K, scores_K, each in found
        ]
        return list(map(Answer, lists, num_read_B.tolist(), num_unread_B.tolist(), lacks_B.tolist()))

    def query_of(self, row: Mapping[str, Any]) -> Query:
        """The query of a row as training rows are before `data.features`, by field name; for its history, the
        same operations run as did in training.

        Raises:
            InputError: a field is missing, unknown or of the wrong type.
            StoreUnavailableError: a store that an operation asks did not answer.
        """
        history = self._features.history_of(row)
        return Query(history.item_ids_N, history.user_id, history.times_N, history.labels, is_prepared=True)

    def query_of_user(self, user_key: str) -> Query | None:
        """The query of a user of the data set with the whole stored history; None for an unknown user."""
        dataset = self.dataset
        history_ids, user_id = dataset.history_of(user_key), dataset.user_by_key(user_key)
        if history_ids is None:
            return None
        times = dataset.history_times_of(user_key) if self.needs_times else None
        labels = {label: dataset.history_labels_of(user_key, label) for label in self.needs_labels}
        known = {label: codes for label, codes in labels.items() if codes is not None}
        return Query(history_ids, user_id, times, known)

    def popular(
        self, k: int, exclude_ids: Int64Array | None = None, allowed_I: BoolArray | None = None
    ) -> list[Recommendation]:
        """The items with most training events; what is left when nothing is known of a user."""
        counts_I, order_I = self.dataset.items.train_counts_I, self._by_popularity_I
        if allowed_I is not None:
            order_I = order_I[allowed_I[order_I]]
        items = self.dataset.items
        if exclude_ids is not None:
            # No more are left out than are excluded: the others need not be compared.
            order_I = order_I[: k + len(exclude_ids)]
            order_I = order_I[~np.isin(items.ids_I[order_I], exclude_ids)]
        return [described(items, item, float(counts_I[item]), "popular") for item in order_I[:k].tolist()]

    @cached_property
    def _by_popularity_I(self) -> Int64Array:
        return np.argsort(-self.dataset.items.train_counts_I, kind="stable")

    def _as_samples(self, queries: Sequence[Query]) -> SampleBatch:
        histories = [np.asarray(query.history_ids, dtype=np.int64) for query in queries]
        user_ids = [self._nobody if query.user_id is None else query.user_id for query in queries]
        lengths = np.array([len(history) for history in histories], dtype=np.int64)
        return SampleBatch(
            step=0,
            row_keys_B=np.arange(len(queries)),
            user_ids_B=np.array(user_ids, dtype=np.int64),
            item_ids_N=np.concatenate(histories) if histories else np.zeros(0, dtype=np.int64),
            offsets_B1=offsets_from_lengths(lengths),
            times_N=self._times_of(queries) if self.needs_times else None,
            labels={label: _labels_of(label, queries) for label in self.needs_labels},
            instruction={
                part: np.array([query.instruction.get(part, UNKNOWN) for query in queries], dtype=np.int64)
                for part in sorted({part for query in queries for part in query.instruction})
            },
        )

    def _times_of(self, queries: Sequence[Query]) -> Int64Array:
        """[N] times of all events; `NO_TIME` within a history without times."""
        times = [np.zeros(0, dtype=np.int64)]
        for query in queries:
            if query.times is None:
                times.append(np.full(len(query.history_ids), NO_TIME))
                continue
            if len(query.times) != len(query.history_ids):
                raise ValueError(
                    f"a query has {len(query.history_ids)} history_ids and {len(query.times)} times; give "
                    "every event its time, or none"
                )
            times.append(np.asarray(query.times, dtype=np.int64))
        return np.concatenate(times)

    @cached_property
    def _nobody(self) -> int:
        """The smallest number from 0 that is the id of no user."""
        ids_U = self.dataset.users["user_id"].to_numpy()
        return int(np.setdiff1d(np.arange(len(ids_U) + 1), ids_U)[0])

    def _describe(self, item: int, score: float) -> Recommendation:
        return described(self.dataset.items, item, score)


def described(items: Items, position: int, score: float, source: Source = "model") -> Recommendation:
    """An item of the catalog, as people know it."""
    key, title = items.keys[position].as_py(), items.titles[position].as_py()
    return Recommendation(key, title, score, source=source, position=position)


def _denied_by(sets: Sequence[BoolArray]) -> dict[int, Int64Array]:
    """By the `id` of a set, the items that it lacks, where these are few: left out one by one they cost less
    than a set, of which something is computed for every item of the catalog."""
    found: dict[int, Int64Array] = {}
    for allowed_I in {id(each): each for each in sets}.values():
        if len(allowed_I) - np.count_nonzero(allowed_I) <= MOST_DENIED:
            found[id(allowed_I)] = np.flatnonzero(~allowed_I)
    return found


def _joined(excluded_BE: Int64Array | None, further: Sequence[Int64Array]) -> Int64Array | None:
    """[B, E] what is left out already, and further items of each row; padded with -1."""
    if not (longest := max(map(len, further))):
        return excluded_BE
    further_BE = np.full((len(further), longest), -1)
    for row, items in enumerate(further):
        further_BE[row, : len(items)] = items
    return further_BE if excluded_BE is None else np.concatenate((excluded_BE, further_BE), axis=1)


def _labels_of(label: Label, queries: Sequence[Query]) -> Int64Array:
    """[N] codes of all events; -1 within a history without."""
    codes = [np.zeros(0, dtype=np.int64)]
    for query in queries:
        found = query.labels.get(label)
        if found is not None and len(found) != len(query.history_ids):
            raise ValueError(
                f"a query has {len(query.history_ids)} history_ids and {len(found)} codes of {label}; give "
                "every event one, or none"
            )
        unknown = np.full(len(query.history_ids), UNKNOWN)
        codes.append(unknown if found is None else np.asarray(found, dtype=np.int64))
    return np.concatenate(codes)
