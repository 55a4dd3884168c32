"""What a request means: whose history counts, which items are known, and what is wanted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from rayrec.pipelines.inference import control
from rayrec.pipelines.inference.answers import Control, Query, Wanted
from rayrec.pipelines.inference.item_filter import AllowedByFilter, FilterMasks, ItemFilter, NamedList
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.user_histories import with_events
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.platform.event_labels import Part
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.engine.degradation import NOT_DEGRADED, DegradationLevel
from rayrec.serve.engine.lists import ItemLists
from rayrec.serve.engine.products import NearAnswer
from rayrec.serve.events.intake import ids_of as event_ids_of
from rayrec.serve.events.user_state import UserState
from rayrec.serve.wire.schemas import Filter, Key, RecommendRequest, Where

logger = logging.getLogger(__name__)

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
class Asked:
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


class Understanding:
    """Reads requests to one model. Not thread-safe."""

    def __init__(
        self,
        recommender: Recommender,
        item_keys: pd.Index,
        max_k: int,
        has_stage: bool,
        has_neighbors: bool,
    ) -> None:
        """
        Args:
            item_keys: [I] keys of the catalog.
            max_k: most items of an answer.
            has_stage: a ranking stage ranks what the model gives.
            has_neighbors: neighbors answer where the model does not.
        """
        self._recommender, self.item_keys, self._max_k = recommender, item_keys, max_k
        self._has_stage, self._has_neighbors = has_stage, has_neighbors
        self._masks = FilterMasks(recommender.dataset, item_keys)
        self.item_lists: ItemLists | None = None
        """That filters of requests name."""
        self.user_state: UserState | None = None
        """What users did since the data set was made."""

    def recent_events(self, requests: Sequence[RecommendRequest]) -> dict[str, UserEvents] | None:
        """Events of the state, of users that ask without a history, in one request to it; None: it does not
        answer."""
        if self.user_state is None:
            return {}
        keys = list(dict.fromkeys(str(request.user_id) for request in requests if is_of_user(request)))
        ids = {key: user for key in keys for user in self.ids_of([key], "user")}
        if not ids:
            return {}
        try:
            return dict(zip(ids, self.user_state.histories(list(ids.values())), strict=True))
        except UnavailableError as error:
            logger.warning("recommending without recent events: %s", error)
            return None

    def understood(
        self, request: RecommendRequest, recent: Mapping[str, UserEvents] | None
    ) -> Asked | Exception:
        """What is asked of the model, or why it is not.

        Args:
            recent: events of the state by user; None: it does not answer.
        """
        try:
            if request.k > self._max_k:
                raise RefusedRequestError(
                    f"k: {request.k} items are more than the {self._max_k} of one answer"
                )
            if request.rank and not self._has_stage:
                raise RefusedRequestError("rank: this service has no ranking stage; leave it out")
            instruction = self._instruction_of(request)
            allowed = None if request.filter is None else self._allowed(request.filter)
            if request.candidates is not None:
                allowed = self._among(request.candidates, allowed)
            controls = self._control_of(request)
            self._check_beams(request)
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
        lacks_events = recent is None and is_of_user(request)
        if allowed is not None:
            query = replace(query, allowed_I=allowed.allowed_I)
        num_unknown = 0 if allowed is None else allowed.num_unknown
        query = replace(query, instruction=instruction)
        wanted = replace(self.wanted(request), control=controls)
        asked = Asked(query, wanted, ignored, has_something, lacks_events, num_unknown)
        if not self._has_neighbors or len(query.history_ids):
            return asked
        if is_of_user(request):
            return replace(asked, graph_user=next(iter(self.ids_of([str(request.user_id)], "user")), None))
        strange = ignored if request.row is not None else self.ids_of(ignored[-MOST_STRANGE:], "item")
        return replace(asked, strange_ids=np.array(strange, dtype=np.int64))

    def ids_of(self, keys: Sequence[Key], entity: Literal["user", "item"]) -> list[int]:
        """Ids of keys, without such as none of this data set can have."""
        kind, ids = self._recommender.dataset.manifest.id_kinds[entity], list[int]()
        for key in keys:
            with suppress(InputError):
                ids += event_ids_of([str(key)], kind, entity).tolist()
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
                    _values_of(wanted.where),
                )
            )
        except InputError as error:
            raise RefusedRequestError(f"filter: {error}") from error

    def _among(self, candidates: Sequence[Key], allowed: AllowedByFilter | None) -> AllowedByFilter:
        """Given candidates, as far as the filter lets them through."""
        if len(candidates) > self._max_k:
            raise RefusedRequestError(
                f"candidates: {len(candidates)} items are more than the {self._max_k} of one answer"
            )
        positions = self.item_keys.get_indexer([str(key) for key in candidates])
        mask_I = np.zeros(len(self.item_keys), dtype=np.bool_)
        mask_I[positions[positions >= 0]] = True
        num_unknown = int(np.count_nonzero(positions < 0))
        if allowed is None:
            return AllowedByFilter(mask_I, num_unknown)
        return AllowedByFilter(mask_I & allowed.allowed_I, num_unknown + allowed.num_unknown)

    def _control_of(self, request: RecommendRequest) -> Control | None:
        """What the list has to be besides good."""
        if not has_control(request):
            return None
        if request.diversity and self._recommender.semantic_ids is None:
            raise RefusedRequestError(
                "diversity: this service's model has no semantic IDs, which say how alike items are; leave "
                "it out"
            )
        if (needed := sum(quota.at_least for quota in request.quotas)) > request.k:
            raise RefusedRequestError(
                f"quotas: at least {needed} items in all are more than the k = {request.k} of the list"
            )
        quotas = []
        for place, quota in enumerate(request.quotas):
            try:
                mask_I = self._masks.allowed(ItemFilter(where=_values_of(quota.where))).allowed_I
            except InputError as error:
                raise RefusedRequestError(f"quotas.{place}: {error}") from error
            quotas.append(control.Quota(mask_I, quota.at_least, quota.at_most))
        num_candidates = None if request.candidates is None else len(request.candidates)
        return Control(tuple(quotas), float(request.diversity), num_candidates)

    def _check_beams(self, request: RecommendRequest) -> None:
        """Raises RefusedRequestError for beams that this model or this request cannot have."""
        if request.beams is None and request.beam_margin is None:
            return
        name = "beam_margin" if request.beams is None else "beams"
        if not self._recommender.num_beams(1):
            raise RefusedRequestError(
                f"{name}: this service's model scores every item and has no beams; leave it out"
            )
        if request.candidates is not None:
            raise RefusedRequestError(
                f"{name}: candidates are scored exactly, with as many beams as that takes; leave out one of "
                "the two"
            )
        if (widths := self._widths_of(request)) is None:
            return
        registry = self._recommender.semantic_ids
        if registry is not None and len(widths) > (num_codes := registry.codes_IL.shape[1]):
            raise RefusedRequestError(
                f"beams: {len(widths)} numbers, and an item of this model has {num_codes} codes; give at "
                "most one for each"
            )
        if max(widths) > (most := self._recommender.num_beams(self._max_k)):
            raise RefusedRequestError(f"beams: {max(widths)} are more than the {most} of this service")
        if widths[-1] < (k := min(request.k, len(self.item_keys))):
            raise RefusedRequestError(
                f"beams: {widths[-1]} after the last code find no {k} items (k); give at least as many"
            )

    def _widths_of(self, request: RecommendRequest) -> tuple[int, ...] | None:
        """Beams by level, no more than there are items; None: those of the service."""
        if request.beams is None:
            return None
        widths = request.beams if isinstance(request.beams, list) else [request.beams]
        return tuple(min(width, len(self.item_keys)) for width in widths)

    def num_searched(self, request: RecommendRequest) -> int:
        """Items that are looked for, at most those of the catalog."""
        num_candidates = None if request.candidates is None else len(request.candidates)
        searched = control.num_searched(request.k, float(request.diversity), num_candidates)
        return min(searched, len(self.item_keys))

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
        positions = self.item_keys.get_indexer([str(key) for key in history])
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
        return self.with_recent(key, stored, events)

    def with_recent(self, key: str, stored: Query | None, events: UserEvents) -> Query:
        assert self.user_state is not None, "events are of it"
        return with_events(self._recommender, key, stored, events, self.user_state.behaviors or ())

    def _user_id(self, key: Key | None) -> int | None:
        """Id of a known user; None for others."""
        return None if key is None else self._recommender.dataset.user_by_key(str(key))

    def wanted(self, request: RecommendRequest) -> Wanted:
        return Wanted(
            min(request.k, len(self.item_keys)),
            request.exclude_seen,
            level_of(request).budget,
            beams=self._widths_of(request),
            beam_margin=None if request.beam_margin is None else float(request.beam_margin),
        )


def has_control(request: RecommendRequest) -> bool:
    """Whether the list has to be something besides good."""
    return request.candidates is not None or bool(request.quotas) or request.diversity > 0


def _values_of(where: Where) -> dict[str, list[Any]]:
    return {name: each if isinstance(each, list) else [each] for name, each in where.items()}


def is_of_user(request: RecommendRequest) -> bool:
    """Whether the history is that which is known of the user."""
    return request.user_id is not None and request.history is None and request.row is None


def level_of(request: RecommendRequest) -> DegradationLevel:
    return request.level if isinstance(request, DegradedRequest) else NOT_DEGRADED


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
