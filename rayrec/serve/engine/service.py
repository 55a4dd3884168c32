"""What a request means: whose history counts, which items are known, and what to do when nothing is."""

from __future__ import annotations

import logging
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from rayrec.models.sequence.sequence_model import CacheMetrics
from rayrec.pipelines.inference.item_filter import AllowedByFilter, FilterMasks, ItemFilter, NamedList
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Query, Recommendation, Recommender, Wanted
from rayrec.pipelines.inference.user_histories import with_events
from rayrec.pipelines.versions.gate import check_answers, overlap, probe
from rayrec.pipelines.versions.manifest import Probe
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.platform.event_labels import Part
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.compilation import CompileService
from rayrec.serve.engine.degradation import NOT_DEGRADED, DegradationLevel
from rayrec.serve.engine.lists import ItemLists
from rayrec.serve.engine.products import NearAnswer, ProductReader
from rayrec.serve.events.intake import ids_of
from rayrec.serve.events.user_state import UserState
from rayrec.serve.wire.item_texts import ItemTexts
from rayrec.serve.wire.schemas import (
    AnswerSource,
    Degraded,
    Filter,
    ItemRanking,
    Key,
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
MOST_STRANGE = 20
"""Items that the catalog lacks, of which neighbors are looked for: the last."""


class RefusedRequestError(ValueError):
    """A well-formed request that this service does not answer; the message is for the caller."""


class DegradedRequest(RecommendRequest):
    """A request of which less is computed than it asks for."""

    level: DegradationLevel

    @classmethod
    def of(cls, request: RecommendRequest, level: DegradationLevel) -> DegradedRequest:
        # It was checked already, and is shared as it is: a history may have thousands of items.
        return cls.model_construct(**dict(request), level=level)


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
class _Asked:
    """A request that was understood."""

    query: Query
    wanted: Wanted
    ignored: list[Key]
    has_something: bool
    """Whether the model has anything to go by."""
    lacks_events: bool = False
    """The user's state could not be read."""
    num_unknown: int = 0
    """Ids of the filter that are not in the catalog."""
    strange_ids: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Items of the request that are not in the catalog, which neighbors may know."""
    graph_user: int | None = None
    """Whose events neighbors may know, where no other history is."""
    near: NearAnswer | None = None
    """What was computed before, and will do."""


@dataclass(frozen=True)
class _Unnamed:
    """A request for which the model names no item."""

    place: int
    asked: _Asked
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
        self._masks = FilterMasks(recommender.dataset, self._item_keys)
        self.item_lists: ItemLists | None = None
        """That filters of requests name."""
        self.user_state: UserState | None = None
        """What users did since the data set was made."""
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
    def recommender(self) -> Recommender:
        return self._recommender

    @property
    def dataset(self) -> Dataset:
        return self._recommender.dataset

    def group_of(self, request: RecommendRequest) -> Hashable:
        """Requests of one group may be computed together: such as are ranked, or are not; where every item is
        scored, such as want about as many items, or few; and where programs are compiled, which have as many
        beams for all rows, such as have as many."""
        asks_model, num_beams = _level_of(request).asks_model, self._num_beams(request)
        items = 0 if num_beams or not asks_model else self._items_to_find(request)
        beams = num_beams if self._is_compiled else 0
        return asks_model, self._stage_for(request) is None, beams, items

    def width_of(self, request: RecommendRequest) -> int:
        """What it costs by, see `CostsByWidth`: its beams, up to the next power of two; its items, in
        multiples of a few, where every item is scored, and 0 where the model is not asked."""
        if not _level_of(request).asks_model:
            return 0
        if num_beams := self._num_beams(request):
            return 1 << (num_beams - 1).bit_length()
        return self._items_to_find(request) // FEW_ITEMS

    def _items_to_find(self, request: RecommendRequest) -> int:
        """The items that it wants, up to the next power of two, and a few at least."""
        wanted = max(min(self._wanted(request).k, self.max_k), FEW_ITEMS)
        return 1 << (wanted - 1).bit_length()

    def _num_beams(self, request: RecommendRequest) -> int:
        if not _level_of(request).asks_model:
            return 0
        source, wanted = self._stage_for(request) or self._recommender, self._wanted(request)
        return source.num_beams(min(wanted.k, self.max_k), wanted.budget)

    def _stage_for(self, request: RecommendRequest) -> RankingStage | None:
        return self._stage if _level_of(request).ranks and request.rank is not False else None

    def _wanted(self, request: RecommendRequest) -> Wanted:
        return Wanted(min(request.k, len(self._item_keys)), request.exclude_seen, _level_of(request).budget)

    def recommend_all(self, requests: Sequence[RecommendRequest]) -> list[RecommendAnswer | Exception]:
        """Answers of requests of one group; what `recommend` would raise stands where an answer would.

        Raises:
            Exception: the model fails, for all of them.
        """
        answers = self._answers_to(requests)
        for answer in answers:
            if isinstance(answer, RecommendAnswer):
                self._num_answers.add("empty" if answer.source == "none" else answer.source)
        return answers

    def _answers_to(self, requests: Sequence[RecommendRequest]) -> list[RecommendAnswer | Exception]:
        """The same, which nobody counts."""
        recent = self._recent_events(requests)
        asked = self._with_products([self._understood(request, recent) for request in requests], requests)
        level, stage = _level_of(requests[0]), self._stage_for(requests[0])
        source = stage or self._recommender
        to_model = [
            (each.query, each.wanted)
            for each in asked
            if isinstance(each, _Asked) and each.has_something and level.asks_model and each.near is None
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
                    answers.append(self._answer(each, answer.items, answer.num_unread, ranker, degraded))
                else:
                    unnamed.append(_Unnamed(place, each, answer.num_unread, answer.num_read > 0, degraded))
                    answers.append(None)
        for one, answered in zip(unnamed, self._without_model(unnamed), strict=True):
            answers[one.place] = answered
        return [answer for answer in answers if answer is not None]

    def _with_products(
        self, asked: Sequence[_Asked | Exception], requests: Sequence[RecommendRequest]
    ) -> list[_Asked | Exception]:
        """The same with what was computed of their users, which is read in one request."""
        if self.products is None:
            return list(asked)
        reader, recommender = self.products, self._recommender
        users = {
            place: user
            for place, (each, request) in enumerate(zip(asked, requests, strict=True))
            if isinstance(each, _Asked) and _is_of_user(request) and len(each.query.history_ids)
            for user in self._ids_of([str(request.user_id)], "user")
        }
        found = reader.read(recommender, self._stage, list(dict.fromkeys(users.values())))
        with_products = list(asked)
        for place, user in users.items():
            each, request = asked[place], requests[place]
            assert isinstance(each, _Asked)
            query = reader.applied(recommender, each.query, found[user], request.instruction is not None)
            wanted, near, level = each.wanted, None, _level_of(request)
            if recommender.long_history is not None:
                budget = replace(wanted.budget, max_new_chunks=reader.config.max_new_chunks)
                wanted = replace(wanted, budget=budget)
            stage = self._stage_for(request)
            if level.takes_cached and not query.instruction:  # which candidates know nothing of
                near = reader.answer(recommender, query, wanted, found[user], stage is not None)
            elif stage is not None:
                query = replace(query, candidates=reader.candidates(recommender, query, found[user]))
            with_products[place] = replace(each, query=query, wanted=wanted, near=near)
        return with_products

    def _near_answer(self, asked: _Asked, near: NearAnswer, request: RecommendRequest) -> RecommendAnswer:
        degraded: list[Degraded] = ["cached_answer"]
        if near.is_earlier:
            degraded.append("earlier_history")
        if self._stage is not None and request.rank is not False and not near.is_ranked:
            degraded.append("no_ranking")
        answer = self._answer(asked, near.items, 0, self.ranker if near.is_ranked else None, degraded)
        return answer.model_copy(update={"source": "nearline"}) if near.items else answer

    def _without_model(self, unnamed: Sequence[_Unnamed]) -> list[RecommendAnswer]:
        """Neighbors, else popular items."""
        queries = self._queries_for_neighbors(unnamed)
        near = self._near({place: (query, unnamed[place].asked.wanted) for place, query in queries.items()})
        answers = []
        for place, one in enumerate(unnamed):
            items: list[Recommendation] = near.get(place, [])
            if not items:
                query, wanted = queries.get(place, one.asked.query), one.asked.wanted
                seen = query.history_ids if wanted.exclude_seen else None
                if query.allowed_I is None:
                    items = self._recommender.popular(wanted.k, seen)
                else:
                    items = self._recommender.popular(wanted.k, seen, query.allowed_I)
            if one.names_nothing and items:  # else there is nothing that the user has not seen
                self._note_lack(one.asked)
            answers.append(self._answer(one.asked, items, one.num_unread, degraded=one.degraded))
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

    def _near(self, asked: Mapping[int, tuple[Query, Wanted]]) -> dict[int, list[Recommendation]]:
        """Neighbors by place."""
        if self._neighbors is None or not asked:
            return {}
        queries, wanted = zip(*asked.values(), strict=True)
        excludes_B = np.array([each.exclude_seen for each in wanted])
        answers = self._neighbors.answer(queries, max(each.k for each in wanted), exclude_seen=excludes_B)
        found = zip(asked, answers, wanted, strict=True)
        return {place: answer.items[: each.k] for place, answer, each in found}

    def _note_lack(self, asked: _Asked) -> None:
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
        recent = self._recent_events([RecommendRequest(user_id=user_key)])
        history_ids = dataset.history_of(user_key)
        is_new = np.zeros(0 if history_ids is None else len(history_ids), dtype=np.bool_)
        events = None if recent is None else recent.get(user_key)
        if events is not None and len(events.items_E):
            stored = self._recommender.query_of_user(user_key)
            merged = self._with_recent(user_key, stored, events)
            times = dataset.history_times_of(user_key)
            there = set[tuple[int, int]]()
            if history_ids is not None and times is not None:
                there.update(zip(history_ids.tolist(), times.tolist(), strict=True))
            if merged.times is not None:  # else there is nothing new
                pairs = zip(merged.history_ids.tolist(), merged.times.tolist(), strict=True)
                is_new = np.array([pair not in there for pair in pairs], dtype=np.bool_)
            history_ids = merged.history_ids
        if history_ids is None:
            return None
        positions = dataset.item_positions(history_ids[::-1][:limit])
        titles = dataset.items.titles
        newest = [
            KnownEvent(self._item_keys[position], titles[position].as_py(), new)
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

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        kept = self._recommender.prefix_cache
        answers = {f"serving_answers_{name}_total": count for name, count in self._num_answers.read().items()}
        return answers if kept is None else answers | prefix_cache_metrics(kept)

    def compile(self, compilation: CompileService, waits: bool = True) -> None:
        """Have batches ranked by compiled programs.

        Args:
            waits: for the first of them, see `CompileConfig`.
        """
        ranking = compilation.give(self._recommender)
        self._is_compiled = True
        if not waits:
            return
        self.warm_up()  # from which the programs' inputs are learned
        compilation.warm_up(ranking)

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

    def _recent_events(self, requests: Sequence[RecommendRequest]) -> dict[str, UserEvents] | None:
        """Events of the state, of users that ask without a history, in one request to it; None: it does not
        answer."""
        if self.user_state is None:
            return {}
        keys = list(dict.fromkeys(str(request.user_id) for request in requests if _is_of_user(request)))
        ids = {key: user for key in keys for user in self._ids_of([key], "user")}
        if not ids:
            return {}
        try:
            return dict(zip(ids, self.user_state.histories(list(ids.values())), strict=True))
        except UnavailableError as error:
            logger.warning("recommending without recent events: %s", error)
            return None

    def _understood(
        self, request: RecommendRequest, recent: Mapping[str, UserEvents] | None
    ) -> _Asked | Exception:
        """What is asked of the model, or why it is not.

        Args:
            recent: events of the state by user; None: it does not answer.
        """
        try:
            if request.k > self.max_k:
                raise RefusedRequestError(
                    f"k: {request.k} items are more than the {self.max_k} of one answer"
                )
            if request.rank and self._stage is None:
                raise RefusedRequestError("rank: this service has no ranking stage; leave it out")
            instruction = self._instruction_of(request)
            allowed = None if request.filter is None else self._allowed(request.filter)
            if request.row is not None:
                query, ignored = self._of_row(request)
            elif request.history is not None:
                query, ignored = self._of_history(request, request.history)
            else:
                query, ignored = self._of_user(request, recent or {}), []
        except RefusedRequestError as error:
            # Without the frames it came through, which have the model: futures keep their errors.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except Exception as error:  # of this request alone, whatever it is
            return error
        has_something = len(query.history_ids) > 0 or "trigger_item" in instruction
        lacks_events = recent is None and _is_of_user(request)
        if allowed is not None:
            query = replace(query, allowed_I=allowed.allowed_I)
        num_unknown = 0 if allowed is None else allowed.num_unknown
        query = replace(query, instruction=instruction)
        asked = _Asked(query, self._wanted(request), ignored, has_something, lacks_events, num_unknown)
        if self._neighbors is None or len(query.history_ids):
            return asked
        if _is_of_user(request):
            return replace(asked, graph_user=next(iter(self._ids_of([str(request.user_id)], "user")), None))
        strange = ignored if request.row is not None else self._ids_of(ignored[-MOST_STRANGE:], "item")
        return replace(asked, strange_ids=np.array(strange, dtype=np.int64))

    def _ids_of(self, keys: Sequence[Key], entity: Literal["user", "item"]) -> list[int]:
        """Ids of keys, without such as none of this data set can have."""
        kind, ids = self._recommender.dataset.manifest.id_kinds[entity], list[int]()
        for key in keys:
            with suppress(InputError):
                ids += ids_of([str(key)], kind, entity).tolist()
        return ids

    def _allowed(self, wanted: Filter) -> AllowedByFilter:
        """What the request's filter lets through."""
        try:
            return self._masks.allowed(
                ItemFilter(
                    None if wanted.allow is None else tuple(map(str, wanted.allow)),
                    tuple(map(str, wanted.deny)),
                    self._lists(wanted.allow_lists),
                    self._lists(wanted.deny_lists),
                    {name: each if isinstance(each, list) else [each] for name, each in wanted.where.items()},
                )
            )
        except InputError as error:
            raise RefusedRequestError(f"filter: {error}") from error

    def _lists(self, names: Sequence[str]) -> tuple[NamedList, ...]:
        found = []
        for name in names:
            kept = None if self.item_lists is None else self.item_lists.get(name)
            if kept is None:  # to pass over it would show what may not be shown
                raise InputError(f"there is no list {name!r}; PUT /v1/lists/{name} makes it")
            found.append(kept)
        return tuple(found)

    def _instruction_of(self, request: RecommendRequest) -> dict[Part, int]:
        wanted = request.instruction
        if wanted is None:
            return {}
        trigger = None if wanted.trigger_item is None else str(wanted.trigger_item)
        try:
            return self._recommender.instruction_of(
                {"scenario": wanted.scenario, "behavior": wanted.behavior, "trigger_item": trigger}
            )
        except InputError as error:
            raise RefusedRequestError(str(error)) from error

    def _of_row(self, request: RecommendRequest) -> tuple[Query, list[Key]]:
        """The query of a raw row, and the ids of its items that are unknown."""
        assert request.row is not None
        if request.user_id is not None or request.history is not None or request.timestamps is not None:
            raise RefusedRequestError("row: stands for user_id and history; give it without them")
        try:
            query = self._recommender.query_of(request.row)
        except InputError as error:
            raise RefusedRequestError(f"row: {error}") from error
        is_known = self._recommender.dataset.item_positions(query.history_ids) >= 0
        unknown: list[Key] = list(dict.fromkeys(query.history_ids[~is_known].tolist()))
        times = None if query.times is None else query.times[is_known]
        labels = {label: codes[is_known] for label, codes in query.labels.items()}
        known = replace(query, history_ids=query.history_ids[is_known], times=times, labels=labels)
        return known, unknown

    def _of_history(self, request: RecommendRequest, history: Sequence[Key]) -> tuple[Query, list[Key]]:
        """The query of a history that came along, and the items of it that are unknown."""
        positions = self._item_keys.get_indexer([str(key) for key in history])
        is_known = positions >= 0
        unknown = [key for key, known in zip(history, is_known.tolist(), strict=True) if not known]
        times = None
        if request.timestamps is not None:
            times = _checked_times(request.timestamps, len(history))[is_known]
        history_ids = self._recommender.dataset.items.ids_I[positions[is_known]]
        return Query(history_ids, self._user_id(request.user_id), times), list(dict.fromkeys(unknown))

    def _of_user(self, request: RecommendRequest, recent: Mapping[str, UserEvents]) -> Query:
        """The query of a user with the stored history, which is empty for one who is unknown, and what the
        state has besides."""
        if request.timestamps is not None:
            raise RefusedRequestError("timestamps: are those of a history; give it, or leave them out")
        if request.user_id is None:
            return Query(np.zeros(0, dtype=np.int64))
        key = str(request.user_id)
        stored = self._recommender.query_of_user(key)
        events = recent.get(key)
        if events is None or not len(events.items_E):
            return Query(np.zeros(0, dtype=np.int64)) if stored is None else stored
        return self._with_recent(key, stored, events)

    def _with_recent(self, key: str, stored: Query | None, events: UserEvents) -> Query:
        assert self.user_state is not None, "events are of it"
        return with_events(self._recommender, key, stored, events, self.user_state.behaviors or ())

    def _user_id(self, key: Key | None) -> int | None:
        """Id of a known user; None for others."""
        return None if key is None else self._recommender.dataset.user_by_key(str(key))

    def _answer(
        self,
        asked: _Asked,
        found: Sequence[Recommendation],
        num_unread: int,
        ranker: RankerInfo | None = None,
        degraded: Sequence[Degraded] = (),
    ) -> RecommendAnswer:
        allowed_I = asked.query.allowed_I
        return RecommendAnswer(
            items=[_item(item) for item in found],
            source=_source_of(found),
            ignored_items=asked.ignored,
            unread_events=num_unread,
            model=self.model,
            allowed_items=None if allowed_I is None else int(np.count_nonzero(allowed_I)),
            unknown_filter_items=None if allowed_I is None else asked.num_unknown,
            ranker=ranker,
            degraded=[*degraded, *(["no_recent_events"] if asked.lacks_events else [])],
        ).of(asked.query)


def _degraded(asked: _Asked, source: Recommender | RankingStage) -> list[Degraded]:
    """What is computed less of an answer than was asked for."""
    wanted, degraded = asked.wanted, list[Degraded]()
    if wanted.budget.max_beams is not None and source.num_beams(wanted.k, wanted.budget) < source.num_beams(
        wanted.k
    ):
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


def _is_of_user(request: RecommendRequest) -> bool:
    """Whether the history is that which is known of the user."""
    return request.user_id is not None and request.history is None and request.row is None


def _level_of(request: RecommendRequest) -> DegradationLevel:
    return request.level if isinstance(request, DegradedRequest) else NOT_DEGRADED


def _item(item: Recommendation) -> RecommendedItem:
    ranking = None
    if item.ranking is not None:
        ranking = ItemRanking(score=item.ranking.score, probabilities=item.ranking.probabilities)
    return RecommendedItem(
        item_id=item.item_key, title=item.title, score=item.score, source=item.source, ranking=ranking
    )


def _checked_times(timestamps: Sequence[int], num_items: int) -> Int64Array:
    times = np.array(timestamps, dtype=np.int64)
    if len(times) != num_items:
        raise RefusedRequestError(
            f"timestamps: {len(times)} times for the {num_items} items of the history; give every item one"
        )
    if (earlier := np.diff(times) < 0).any():
        position = int(np.argmax(earlier)) + 1
        raise RefusedRequestError(
            f"timestamps: {times[position]} is before {times[position - 1]}; give history and times "
            "oldest first"
        )
    return times


def prefix_cache_metrics(cache: CacheMetrics) -> dict[str, float]:
    """What a meter watches of a cache: what it has read so far is counted."""
    return {f"{name}_total" if "_events_" in name else name: value for name, value in cache.metrics().items()}
