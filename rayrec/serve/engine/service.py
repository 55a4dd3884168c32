"""Requests that were understood, answered: by the model, by what was computed before, or without either.

requests ─► Understanding ─► near-line products ─► model, or ranking stage behind it ─► answers
                                   └ they will do ──────────────────────────────────────┘ │
                            neighbors, else popular items, where the model names none ◄───┘
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from rayrec.models.decoding.beam_policy import Beams, widest
from rayrec.models.sequence.sequence_model import CacheMetrics
from rayrec.pipelines.inference.answers import Answer, ControlReport, Query, Recommendation, Wanted
from rayrec.pipelines.inference.control import controlled
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.versions.gate import check_answers, overlap, probe
from rayrec.pipelines.versions.manifest import Probe
from rayrec.samples.dataset.dataset import Dataset
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.compilation import FIRST_K, CompileService
from rayrec.serve.engine.degradation import NOT_DEGRADED, DegradationLevel
from rayrec.serve.engine.draws import Note
from rayrec.serve.engine.lists import ItemLists
from rayrec.serve.engine.products import NearAnswer, ProductReader
from rayrec.serve.engine.understanding import Asked, DegradedRequest, Understanding, is_of_user, level_of
from rayrec.serve.engine.warm_start import WarmStart
from rayrec.serve.events.user_state import UserState
from rayrec.serve.wire.item_texts import ItemTexts
from rayrec.serve.wire.schemas import (
    AnswerSource,
    ControlAnswer,
    Degraded,
    ItemRanking,
    ModelInfo,
    RankerInfo,
    RecommendAnswer,
    RecommendedItem,
    RecommendRequest,
)

logger = logging.getLogger(__name__)

ANSWER_KINDS = ("model", "merged", "neighbors", "popular", "nearline", "empty", "without_items")
"""That are counted: by their source, or none at all; and such in which the model named no item for a history
that it read, which are among those of neighbors and the popular ones."""
WARN_EVERY_S = 60.0
FEW_ITEMS = 128
"""A power of two. Where every item is scored, answers of as many are computed with those of one: next to the
scores, neither takes long. A thousand do."""


@dataclass(frozen=True)
class KnownEvent:
    """Of a history."""

    item_key: str
    title: str | None
    is_new: bool
    """Came to the service, and is not in the data set."""


@dataclass(frozen=True)
class KnownHistory:
    """Of a user."""

    num_events: int
    newest: list[KnownEvent]
    """Newest first."""
    lacks_events: bool
    """The user's state could not be read."""


@dataclass(frozen=True)
class _Unnamed:
    """A request for which the model names no item."""

    place: int
    asked: Asked
    num_unread: int = 0
    names_nothing: bool = False
    """The model has read a history."""
    degraded: Sequence[Degraded] = ()


class _Counts:
    """Answers by what they hold, of one version after the other; from any thread."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(ANSWER_KINDS, 0.0)
        # Versions follow each other on one thread, while another reads; and adding is two steps.
        self._lock = threading.Lock()

    def add(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def read(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


class RecommendationService:
    """Answers requests with one model, and a ranking stage after it if there is one. Not thread-safe."""

    def __init__(
        self,
        recommender: Recommender,
        max_k: int,
        stage: RankingStage | None = None,
        before: RecommendationService | None = None,
        neighbors: NeighborRecommender | None = None,
    ) -> None:
        """
        Args:
            neighbors: answer where the model does not.
            before: of another version; what it has made of the same catalog is shared, and it counts on.
        """
        self._recommender = recommender
        self._stage, self._neighbors = stage, neighbors
        self.max_k = max_k
        # Of our own: keys are looked up all at once, a thousand take hardly longer than one.
        self._item_keys: pd.Index
        self.item_texts: ItemTexts | None
        """Items as the tokens of their semantic IDs; None for a model that knows none."""
        if before is not None and before._has_catalog_of(recommender):
            # To rebuild them takes the interpreter's lock for a third of a second per million items.
            self._item_keys, self.item_texts = before._item_keys, before.item_texts
        else:
            self._item_keys = pd.Index(recommender.dataset.items.keys.to_pandas())
            registry = recommender.semantic_ids
            self.item_texts = None if registry is None else ItemTexts(self._item_keys, registry.codes_IL)
        self._num_answers: _Counts = _Counts() if before is None else before._num_answers
        self._warned_at = float("-inf")
        self._is_compiled = False
        self.model = ModelInfo(
            run=recommender.run, step=recommender.committed_step + 1, version=recommender.version
        )
        self._understanding = Understanding(
            recommender, self._item_keys, max_k, stage is not None, neighbors is not None
        )
        self.warm_start: WarmStart | None = None
        """Remembers who was answered, for the next replica."""
        self.products: ProductReader | None = None
        """What was computed of users before they ask."""
        self.ranker: RankerInfo | None = None
        if stage is not None:
            self.ranker = RankerInfo(
                run=stage.scorer.run,
                step=stage.scorer.committed_step + 1,
                candidates=stage.config.candidates,
            )

    @property
    def pinned(self) -> RecommendationService:
        """This one: its model does not change."""
        return self

    def drawn_for(self, user: str | int | None) -> tuple[RecommendationService, Note | None]:
        """This one: it answers everybody, and nothing is compared with it."""
        return self, None

    def version(self, label: str) -> RecommendationService | None:
        """This one, if it has the label."""
        return self if self.model.label == label else None

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._recommender.device

    def recommend(self, request: RecommendRequest) -> RecommendAnswer:
        """The k best items for the request's history, or popular ones where there is nothing to read of it:
        it has no known item, or the run's operations leave none.

        Raises:
            RefusedRequestError: more items are asked for than the service gives, they are to be ranked and
                there is no ranking stage, the row is none that the run could have been trained on, the times
                do not belong to a history, or the instruction is one that the model does not read or names
                what the data does not know.
            UnavailableError: an event store that the run's operations ask does not answer.
        """
        (answer,) = self.recommend_all([request])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _has_catalog_of(self, recommender: Recommender) -> bool:
        mine = self._recommender
        return mine.dataset is recommender.dataset and mine.semantic_ids is recommender.semantic_ids

    @property
    def item_lists(self) -> ItemLists | None:
        """That filters of requests name."""
        return self._understanding.item_lists

    @item_lists.setter
    def item_lists(self, lists: ItemLists | None) -> None:
        self._understanding.item_lists = lists

    @property
    def user_state(self) -> UserState | None:
        """What users did since the data set was made."""
        return self._understanding.user_state

    @user_state.setter
    def user_state(self, state: UserState | None) -> None:
        self._understanding.user_state = state

    @property
    def recommender(self) -> Recommender:
        return self._recommender

    @property
    def dataset(self) -> Dataset:
        return self._recommender.dataset

    def group_of(self, request: RecommendRequest) -> Hashable:
        """Requests of one group may be computed together: such as are ranked, or are not; where every item is
        scored, such as want about as many items, or few; and where programs are compiled, which have as many
        beams for all rows, such as have as many."""
        asks_model, beams = level_of(request).asks_model, self._beams(request)
        items = 0 if beams or not asks_model else self._items_to_find(request)
        beams = beams if self._is_compiled else 0
        return asks_model, self._stage_for(request) is None, beams, items

    def width_of(self, request: RecommendRequest) -> int:
        """What it costs by, see `CostsByWidth`: its beams, up to the next power of two; its items, in
        multiples of a few, where every item is scored, and 0 where the model is not asked."""
        if not level_of(request).asks_model:
            return 0
        if num_beams := widest(self._beams(request)):
            return 1 << (num_beams - 1).bit_length()
        return self._items_to_find(request) // FEW_ITEMS

    def _items_to_find(self, request: RecommendRequest) -> int:
        """The items that it wants, up to the next power of two, and a few at least."""
        wanted = max(min(self._understanding.num_searched(request), self.max_k), FEW_ITEMS)
        return 1 << (wanted - 1).bit_length()

    def _beams(self, request: RecommendRequest) -> Beams:
        if not level_of(request).asks_model:
            return 0
        source, wanted = self._stage_for(request) or self._recommender, self._understanding.wanted(request)
        wanted = replace(wanted, k=min(self._understanding.num_searched(request), self.max_k))
        if wanted.beams is None and wanted.beam_margin is None:
            return source.num_beams(wanted.k, wanted.budget)
        return source.beams_of(wanted)

    def _stage_for(self, request: RecommendRequest) -> RankingStage | None:
        return self._stage if level_of(request).ranks and request.rank is not False else None

    def recommend_all(self, requests: Sequence[RecommendRequest]) -> list[RecommendAnswer | Exception]:
        """Answers of requests of one group; what `recommend` would raise stands where an answer would.

        Raises:
            Exception: the model fails, for all of them.
        """
        answers = self._answers_to(requests)
        for answer in answers:
            if isinstance(answer, RecommendAnswer):
                self._num_answers.add("empty" if answer.source == "none" else answer.source)
        if self.warm_start is not None:
            self.warm_start.note(requests)
        return answers

    def _answers_to(self, requests: Sequence[RecommendRequest]) -> list[RecommendAnswer | Exception]:
        """The same, which nobody counts."""
        recent = self._understanding.recent_events(requests)
        asked = self._with_products(
            [self._understanding.understood(request, recent) for request in requests], requests
        )
        level, stage = level_of(requests[0]), self._stage_for(requests[0])
        source = stage or self._recommender
        to_model = [
            (each.query, each.wanted)
            for each in asked
            if isinstance(each, Asked) and each.has_something and level.asks_model and each.near is None
        ]
        found = iter(source.answer_each(*zip(*to_model, strict=True)) if to_model else ())
        answers: list[RecommendAnswer | Exception | None] = []
        unnamed = list[_Unnamed]()
        for place, each in enumerate(asked):
            if isinstance(each, Exception):
                answers.append(each)
            elif each.near is not None:
                answers.append(self._near_answer(each, each.near, requests[place]))
            elif not level.asks_model and (each.has_something or self._neighbors is not None):
                num_unread = len(each.query.history_ids)
                unnamed.append(_Unnamed(place, each, num_unread, degraded=["popular_items"]))
                answers.append(None)
            elif not each.has_something:
                unnamed.append(_Unnamed(place, each))
                answers.append(None)
            else:
                answer = next(found)
                degraded = _degraded(each, source)
                if answer.lacks_long_history:
                    degraded.append("no_long_history")
                if stage is None and self._stage is not None and requests[place].rank is not False:
                    degraded.append("no_ranking")
                if answer.items:
                    ranker = None if stage is None else self.ranker
                    answers.append(self._answer(each, answer, ranker, degraded))
                else:
                    unnamed.append(_Unnamed(place, each, answer.num_unread, answer.num_read > 0, degraded))
                    answers.append(None)
        for one, answered in zip(unnamed, self._without_model(unnamed), strict=True):
            answers[one.place] = answered
        return [answer for answer in answers if answer is not None]

    def _with_products(
        self, asked: Sequence[Asked | Exception], requests: Sequence[RecommendRequest]
    ) -> list[Asked | Exception]:
        """The same with what was computed of their users, which is read in one request."""
        if self.products is None:
            return list(asked)
        reader, recommender = self.products, self._recommender
        users = {
            place: user
            for place, (each, request) in enumerate(zip(asked, requests, strict=True))
            if isinstance(each, Asked) and is_of_user(request) and len(each.query.history_ids)
            for user in self._understanding.ids_of([str(request.user_id)], "user")
        }
        found = reader.read(recommender, self._stage, list(dict.fromkeys(users.values())))
        with_products = list(asked)
        for place, user in users.items():
            each, request = asked[place], requests[place]
            assert isinstance(each, Asked)
            query = reader.applied(recommender, each.query, found[user], request.instruction is not None)
            wanted, near, level = each.wanted, None, level_of(request)
            if recommender.long_history is not None:
                budget = replace(wanted.budget, max_new_chunks=reader.config.max_new_chunks)
                wanted = replace(wanted, budget=budget)
            stage = self._stage_for(request)
            # What was computed before knows nothing of instructions and control.
            if level.takes_cached and not query.instruction and wanted.control is None:
                near = reader.answer(recommender, query, wanted, found[user], stage is not None)
            elif stage is not None:
                query = replace(query, candidates=reader.candidates(recommender, query, found[user]))
            with_products[place] = replace(each, query=query, wanted=wanted, near=near)
        return with_products

    def _near_answer(self, asked: Asked, near: NearAnswer, request: RecommendRequest) -> RecommendAnswer:
        degraded: list[Degraded] = ["cached_answer"]
        if near.is_earlier:
            degraded.append("earlier_history")
        if self._stage is not None and request.rank is not False and not near.is_ranked:
            degraded.append("no_ranking")
        found = Answer(near.items, 0, 0)
        answer = self._answer(asked, found, self.ranker if near.is_ranked else None, degraded)
        return answer.model_copy(update={"source": "nearline"}) if near.items else answer

    def _without_model(self, unnamed: Sequence[_Unnamed]) -> list[RecommendAnswer]:
        """Neighbors, else popular items."""
        queries = self._queries_for_neighbors(unnamed)
        near = self._near({place: (query, unnamed[place].asked.wanted) for place, query in queries.items()})
        answers = []
        for place, one in enumerate(unnamed):
            found = near.get(place)
            if found is None or not found.items:
                query, wanted = queries.get(place, one.asked.query), one.asked.wanted
                codes_IL = self._codes_for([wanted])
                (found,) = controlled(self._popular, [query], [wanted], codes_IL)
            if one.names_nothing and found.items:  # else there is nothing that the user has not seen
                self._note_lack(one.asked)
            found = replace(found, num_unread=one.num_unread)
            answers.append(self._answer(one.asked, found, degraded=one.degraded))
        return answers

    def _codes_for(self, wanted: Sequence[Wanted]) -> NDArray[np.integer] | None:
        """As `Recommender.codes_for`."""
        has_control = any(each.control is not None for each in wanted)
        return self._recommender.codes_for(wanted) if has_control else None

    def _popular(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        answers = []
        for query, each in zip(queries, wanted, strict=True):
            seen = query.history_ids if each.exclude_seen else None
            allowed = () if query.allowed_I is None else (query.allowed_I,)
            answers.append(Answer(self._recommender.popular(each.k, seen, *allowed), 0, 0))
        return answers

    def _queries_for_neighbors(self, unnamed: Sequence[_Unnamed]) -> dict[int, Query]:
        """By place: of the history, of items that the catalog lacks, or of what the graph knows of the
        user."""
        if self._neighbors is None:
            return {}
        queries: dict[int, Query] = {}
        users: dict[int, int] = {}
        for place, one in enumerate(unnamed):
            query = one.asked.query
            if "popular_items" in one.degraded:
                continue
            if len(query.history_ids):
                queries[place] = query
            elif len(one.asked.strange_ids):
                queries[place] = replace(query, history_ids=one.asked.strange_ids)
            elif one.asked.graph_user is not None:
                users[place] = one.asked.graph_user
        if users:
            histories = self._neighbors.histories_of(list(users.values()))
            for place, history_ids in zip(users, histories, strict=True):
                queries[place] = replace(unnamed[place].asked.query, history_ids=history_ids)
        return queries

    def _near(self, asked: Mapping[int, tuple[Query, Wanted]]) -> dict[int, Answer]:
        """Neighbors by place."""
        if self._neighbors is None or not asked:
            return {}
        queries, wanted = zip(*asked.values(), strict=True)
        codes_IL = self._codes_for(wanted)
        return dict(zip(asked, controlled(self._neighbors_of, queries, wanted, codes_IL), strict=True))

    def _neighbors_of(self, queries: Sequence[Query], wanted: Sequence[Wanted]) -> list[Answer]:
        assert self._neighbors is not None, "the caller looks"
        excludes_B = np.array([each.exclude_seen for each in wanted])
        answers = self._neighbors.answer(queries, max(each.k for each in wanted), exclude_seen=excludes_B)
        return [
            replace(answer, items=answer.items[: each.k])
            for answer, each in zip(answers, wanted, strict=True)
        ]

    def _note_lack(self, asked: Asked) -> None:
        """The model names no item for a history that it reads: counted, and said once a minute."""
        self._num_answers.add("without_items")
        if (now := time.monotonic()) - self._warned_at > WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                "the model of version %s names no item for a history of %d events; others are given "
                "instead, and counted as rayrec_serving_answers_without_items_total",
                self.model.label,
                len(asked.query.history_ids),
            )

    def check_answers(self, published: Sequence[Probe] = ()) -> float | None:
        """Check that the model answers to users of its data as a model does.

        Args:
            published: answers of the version when it was published.

        Returns:
            Mean share of those items that it gives now; None where there is nothing to compare.

        Raises:
            GateError: it does not.
        """
        probed = probe(self._recommender, [each.user for each in published] or None)
        check_answers(probed, f"{self.model.run}, version {self.model.label}")
        return overlap(probed.kept, published)

    def users_like(self, text: str, limit: int) -> list[str]:
        """The first users of the run's data whose key begins with a text, in order."""
        keys = self._recommender.dataset.sorted_user_keys
        first = bisect_left(keys, text)
        stop = bisect_left(keys, text + chr(sys.maxunicode), lo=first)
        return keys[first : min(stop, first + limit)]

    def known_history(self, user_key: str, limit: int) -> KnownHistory | None:
        """What is known of a user: the newest events of the data set and of the state; None for one of whom
        nothing is known. May wait for the state, as no event loop should."""
        dataset = self._recommender.dataset
        recent = self._understanding.recent_events([RecommendRequest(user_id=user_key)])
        history_ids = dataset.history_of(user_key)
        is_new = np.zeros(0 if history_ids is None else len(history_ids), dtype=np.bool_)
        events = None if recent is None else recent.get(user_key)
        if events is not None and len(events.items_E):
            stored = self._recommender.query_of_user(user_key)
            merged = self._understanding.with_recent(user_key, stored, events)
            times = dataset.history_times_of(user_key)
            there = Counter[tuple[int, int]]()
            if history_ids is not None and times is not None:
                there.update(zip(history_ids.tolist(), times.tolist(), strict=True))
            if merged.times is not None:  # else there is nothing new
                new = []
                for pair in zip(merged.history_ids.tolist(), merged.times.tolist(), strict=True):
                    new.append(there[pair] == 0)  # of equal times, what the data set has comes first
                    there[pair] -= there[pair] > 0
                is_new = np.array(new, dtype=np.bool_)
            history_ids = merged.history_ids
        if history_ids is None:
            return None
        positions = dataset.item_positions(history_ids[::-1][:limit])
        titles = dataset.items.titles
        newest = [
            KnownEvent(self._understanding.item_keys[position], titles[position].as_py(), new)
            for position, new in zip(positions.tolist(), is_new[::-1].tolist(), strict=False)
            if position >= 0
        ]
        return KnownHistory(len(history_ids), newest, lacks_events=recent is None)

    def warm_up(self) -> None:
        """Take every path once, so that the first request does not wait for tables and compilers."""
        some_item = self._recommender.dataset.items.keys[0].as_py()
        if self._neighbors is not None:
            self._neighbors.warm_up()
        for request in (self._users_request(0), RecommendRequest(history=[some_item]), RecommendRequest()):
            for answer in self._answers_to([request]):
                if isinstance(answer, Exception):
                    raise answer

    @property
    def kept(self) -> tuple[float, float, float] | None:
        """(Histories in the prefix cache; events that were read so far, and reused); None: there is none."""
        cache = self._recommender.prefix_cache
        if cache is None:
            return None
        found = cache.metrics()
        names = ("prefix_cache_histories", "prefix_cache_events_read", "prefix_cache_events_reused")
        histories, read, reused = (found[name] for name in names)
        return histories, read, reused

    def warm(self, users: Sequence[str]) -> int:
        """Answer users as if they had asked, so that what is kept of them is there when they do; how many
        got an answer."""
        groups: dict[Hashable, list[RecommendRequest]] = {}
        for user in users:
            request = RecommendRequest(user_id=user)
            groups.setdefault(self.group_of(request), []).append(request)
        answers = [answer for requests in groups.values() for answer in self._answers_to(requests)]
        return sum(isinstance(answer, RecommendAnswer) for answer in answers)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        kept = self._recommender.prefix_cache
        answers = {f"serving_answers_{name}_total": count for name, count in self._num_answers.read().items()}
        return answers if kept is None else answers | prefix_cache_metrics(kept)

    def compile(self, compilation: CompileService, waits: bool = True) -> None:
        """Have batches ranked by compiled programs.

        Args:
            waits: for the first of them, see `CompileConfig`; recordings are always waited for, since they
                are of one version.
        """
        ranking = compilation.give(self._recommender)
        self._is_compiled = True
        if not waits and not compilation.records:
            return
        self.warm_up()  # from which the programs' inputs are learned
        # A ranking stage looks for its candidates, and requests may leave it out.
        usual = () if self._stage is None else (self._stage.config.candidates,)
        compilation.warm_up(ranking, (*usual, FIRST_K))

    def measured_costs(self, max_batch: int, most_s: float = float("inf"), repeats: int = 2) -> BatchCosts:
        """What batches of users' requests take, at sizes 1, 2, 4, ... and `max_batch`.

        Args:
            most_s: no larger batches than the first that takes longer.
        """
        costs: dict[int, float] = {}
        for size in sorted({min(2**power, max_batch) for power in range(max_batch.bit_length() + 1)}):
            costs[size] = min(self._seconds_for(size) for _ in range(repeats))
            if costs[size] > most_s:
                break
        return BatchCosts(costs, self.width_of(self._users_request(0)))

    def num_events_of(self, request: RecommendRequest) -> int:
        """Events of the history that a request gives, or of the user's in the data set; 0 of a row."""
        if request.history is not None:
            return len(request.history)
        if request.user_id is None or request.row is not None:
            return 0
        history = self._recommender.dataset.history_of(str(request.user_id))
        return 0 if history is None else len(history)

    def request_seconds(self, level: DegradationLevel, size: int, repeats: int = 3) -> float:
        """What a user's request takes at a degradation level, in batches of a size."""
        return min(self._seconds_for(size, level) for _ in range(repeats)) / size

    def _seconds_for(self, size: int, level: DegradationLevel = NOT_DEGRADED) -> float:
        requests: list[RecommendRequest] = [self._users_request(position) for position in range(size)]
        if level != NOT_DEGRADED:
            requests = [DegradedRequest.of(request, level) for request in requests]
        began = time.perf_counter()
        self._answers_to(requests)
        return time.perf_counter() - began

    def _users_request(self, position: int) -> RecommendRequest:
        keys = self._recommender.dataset.users["user_key"]
        return RecommendRequest(user_id=keys[position % len(keys)].as_py())

    def _answer(
        self,
        asked: Asked,
        found: Answer,
        ranker: RankerInfo | None = None,
        degraded: Sequence[Degraded] = (),
    ) -> RecommendAnswer:
        allowed_I = asked.query.allowed_I
        return RecommendAnswer(
            items=[_item(item) for item in found.items],
            source=_source_of(found.items),
            ignored_items=asked.ignored,
            unread_events=found.num_unread,
            model=self.model,
            allowed_items=None if allowed_I is None else int(np.count_nonzero(allowed_I)),
            unknown_filter_items=None if allowed_I is None else asked.num_unknown,
            control=None if asked.wanted.control is None else _control_of(found),
            ranker=ranker,
            degraded=[*degraded, *(["no_recent_events"] if asked.lacks_events else [])],
        ).of(asked.query)


def _control_of(found: Answer) -> ControlAnswer:
    report = found.control or ControlReport()
    return ControlAnswer(
        candidates=report.candidates,
        quotas=report.quotas,
        diversity=report.diversity,
        unmet_quotas=list(report.unmet_quotas),
    )


def _degraded(asked: Asked, source: Recommender | RankingStage) -> list[Degraded]:
    """What is computed less of an answer than was asked for."""
    wanted, degraded = asked.wanted, list[Degraded]()
    if wanted.budget.max_beams is not None:
        in_full = replace(wanted, budget=replace(wanted.budget, max_beams=None))
        if source.beams_of(wanted) != source.beams_of(in_full):
            degraded.append("fewer_beams")
    most = wanted.budget.max_events
    if most is not None and len(asked.query.history_ids) > most:
        degraded.append("shorter_history")
    return degraded


def _source_of(items: Sequence[Recommendation]) -> AnswerSource:
    sources = {item.source for item in items}
    if len(sources) > 1:
        return "merged"
    return next(iter(sources), "none")


def _item(item: Recommendation) -> RecommendedItem:
    ranking = None
    if item.ranking is not None:
        ranking = ItemRanking(score=item.ranking.score, probabilities=item.ranking.probabilities)
    return RecommendedItem(
        item_id=item.item_key, title=item.title, score=item.score, source=item.source, ranking=ranking
    )


def prefix_cache_metrics(cache: CacheMetrics) -> dict[str, float]:
    """What a meter watches of a cache: what it has read so far is counted."""
    return {f"{name}_total" if "_events_" in name else name: value for name, value in cache.metrics().items()}
