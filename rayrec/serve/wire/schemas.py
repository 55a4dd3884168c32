"""Requests, events and answers of the HTTP service, as its OpenAPI page describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from rayrec.pipelines.inference.answers import Mode, Query
from rayrec.serve.config.admission import StepName

MAX_HISTORY = 10_000
"""Most items of a request's history: far above what a model reads, far below what would hold up others."""


MAX_FILTER = 10_000
"""Most ids of a filter; longer lists are kept under a name."""

MAX_LEVELS = 64
"""Most codes of an item that a schedule of beams may name: far above those of any semantic ID."""

LATEST_S = 100_000_000_000
"""Farthest time from 1970, the year 5138: a time in milliseconds is beyond it."""


def _encodable(key: str | int) -> str | int:
    """JSON can write half of a surrogate pair, which is no text that a source could hold."""
    if isinstance(key, str) and not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise ValueError("expected text that UTF-8 can encode") from error
    return key


Key = Annotated[StrictStr | StrictInt, AfterValidator(_encodable)]
"""An id as the source of the data writes it; 7 and "7" are the same."""


class _Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Asked(_Schema):
    """What callers send. A body may be wrong in a million places, and is answered with the first: to collect
    them all would take seconds of the event loop. So lists in here are `fail_fast`, too."""

    @model_validator(mode="before")
    @classmethod
    def _first_unknown_alone(cls, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {name: value[name] for name in cls.model_fields if name in value}
        unknown = next(name for name in value if name not in cls.model_fields)
        return {**known, unknown: value[unknown]}


class Instruction(Asked):
    """What the next item is wanted for, for models that were trained with instructions. What is left out is
    not said."""

    scenario: StrictStr | None = None
    """Where it will be shown, as the log has it: home, item page, search ..."""
    behavior: StrictStr | None = None
    """What the user is to do with it, as the log has it: LIKE, BUY ..."""
    trigger_item: Key | None = None
    """The item that the user is looking at. It counts as the newest of the history, so that `exclude_seen`
    leaves it out."""


ListName = Annotated[StrictStr, Field(max_length=100)]
Value = StrictStr | StrictBool | StrictInt | StrictFloat | None
Where = dict[StrictStr, Value | Annotated[list[Value], Field(max_length=1000)]]


class Filter(Asked):
    """What may be recommended: what every part lets through."""

    allow: list[Key] | None = Field(None, max_length=MAX_FILTER, fail_fast=True)
    """Items: nothing else. Ids that are not in the catalog are counted in the answer."""
    deny: list[Key] = Field([], max_length=MAX_FILTER, fail_fast=True)
    """Items: none of these."""
    allow_lists: list[ListName] = Field([], max_length=32)
    """Names of lists that are kept here (`PUT /v1/lists/NAME`): nothing but what is in every one of them."""
    deny_lists: list[ListName] = Field([], max_length=32)
    """Nothing that is in any of these."""
    where: Where = Field({}, max_length=32)
    """Column of the catalog, and its value, or several of which one will do."""


class Quota(Asked):
    """How many items of a category a list has."""

    where: Where = Field(min_length=1, max_length=32)
    """The category: columns of the catalog and their values, as those of a filter."""
    at_least: StrictInt = Field(0, ge=0)
    """So many items, as far as there are; they take the places of better ones."""
    at_most: StrictInt | None = Field(None, ge=0)
    """No more items than these."""

    @model_validator(mode="after")
    def _says_something(self) -> Quota:
        if not self.at_least and self.at_most is None:
            raise ValueError("says neither at_least nor at_most; give one, or leave the quota out")
        if self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least} items are more than at_most {self.at_most}")
        return self


class RecommendRequest(Asked):
    """Whom to recommend to: a known user, a history, or both; or a raw row. Without any of these, popular
    items come back."""

    user_id: Key | None = None
    """The user. A user of the training data brings the history that is stored there."""
    history: list[Key] | None = Field(None, max_length=MAX_HISTORY, fail_fast=True)
    """Items, oldest first. Replaces the stored history, even if it is empty."""
    timestamps: list[Annotated[StrictInt, Field(ge=-LATEST_S, le=LATEST_S)]] | None = Field(
        None, max_length=MAX_HISTORY, fail_fast=True
    )
    """When each item of `history` was, in UNIX seconds, none before the one to its left. Read by models of
    time; without them, such a model takes all items to be of one time. Other models ignore them."""
    row: dict[str, Any] | None = None
    """Instead of user and history: a row as training rows are before any operation, by column name. The
    operations of the run make user and history of it; a column that is left out is null."""
    instruction: Instruction | None = None
    """What is wanted; a model that does not read it refuses the request."""
    k: StrictInt = Field(10, ge=1)
    """How many items; fewer come back where there are not as many."""
    exclude_seen: StrictBool = True
    """Whether items of the history are left out."""
    filter: Filter | None = None
    """What may be recommended; everything, if it is not said."""
    candidates: list[Key] | None = Field(None, max_length=MAX_FILTER, fail_fast=True)
    """Items to score: nothing else is recommended, and each of them has the model's exact score. At most as
    many as an answer may have."""
    quotas: list[Quota] = Field([], max_length=8)
    """How many items of categories the list has."""
    diversity: Annotated[StrictFloat | StrictInt, Field(ge=0, le=1, allow_inf_nan=False)] = 0
    """How much an item counts for being unlike those before it, from 0 (by score alone) to 1, for models with
    semantic IDs: maximal marginal relevance among five times as many items as are asked for."""
    beams: StrictInt | list[StrictInt] | None = None
    """Prefixes that a generative model keeps on the way to an item: so many after every code, or a list of
    numbers, one per code, the last of which holds for the codes after it. More cost more and find better
    lists; the last number is at least `k`, and earlier ones count as at least `k`, since fewer prefixes may
    lead to fewer items. What the service has set, if it is not said."""
    beam_margin: Annotated[StrictFloat | StrictInt, Field(gt=0, allow_inf_nan=False)] | None = None
    """Prefixes whose log-probability is more than this below that of the best one are dropped, which saves
    time where the model is sure. Fewer items may come back."""
    rank: StrictBool | None = None
    """Whether the ranking stage orders the items: if not said, it does where there is one. True is refused
    where there is none; false gives what the model alone would."""

    @field_validator("beams", mode="before")
    @classmethod
    def _are_beams(cls, value: Any) -> Any:
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if len(numbers) > MAX_LEVELS or not numbers:
            raise ValueError(
                f"{len(numbers)} numbers; give one for each code of an item, at most {MAX_LEVELS}"
            )
        if any(type(each) is not int for each in numbers):
            raise ValueError("expected an integer or a list of integers")
        if min(numbers) < 1:
            raise ValueError(f"{min(numbers)} beams find no item; give at least 1")
        return value


class ItemRanking(_Schema):
    """What the ranking stage thinks of an item."""

    score: float
    """The objective that items are ordered by: a weighted sum or product of the probabilities, and of the
    model's own score where the service blends them."""
    probabilities: dict[str, float]
    """That the user would do this if the item were shown, by label of the ranking model."""


class ControlAnswer(_Schema):
    """How the list came to be what was asked for: `exact`, as far as the model's search is, or `reranked`
    among the items that were found. Null of what was not asked for."""

    candidates: Mode | None = None
    quotas: Mode | None = None
    diversity: Mode | None = None
    unmet_quotas: list[int] = []
    """Those, from 0, of which the list has fewer items than it was to have: too few may be recommended."""


_INNER: dict[str, type[BaseModel]] = {"instruction": Instruction, "filter": Filter, "quotas": Quota}


def fields_of(problems: Sequence[Any]) -> list[str]:
    """Fields of the object that the first of pydantic's problems with a request is in."""
    location = problems[0]["loc"]
    inner = _INNER.get(str(location[0])) if len(location) > 1 else None
    return list((inner or RecommendRequest).model_fields)


ItemSource = Literal["model", "neighbors", "popular"]
AnswerSource = Literal["model", "neighbors", "merged", "popular", "nearline", "none"]
Degraded = StepName | Literal["no_recent_events", "no_long_history", "earlier_history"]


class RecommendedItem(_Schema):
    """One item of an answer."""

    item_id: str
    """The id as the source of the data writes it."""
    title: str | None
    score: float
    """Source `model`: log-probability (generative), inner product, or their sum (softmax `hybrid`), whether
    or not the ranking stage has ordered the items; source `neighbors`: the weight of how often it was met
    beside items of the history, or, among candidates of the model, the lowest score of these; source
    `popular`: training events."""
    source: ItemSource
    """What named it: the model, neighbors of items of the history in the graph of users and items, or
    popularity. What the model and neighbors both named is the model's."""
    ranking: ItemRanking | None = None
    """Null where the ranking stage did not rank: there is none, the request turned it off, or the items are
    popular ones."""


class ModelInfo(_Schema):
    """What the answer was computed with."""

    run: str
    """Name of the run's folder."""
    step: int
    """Training steps in the weights."""
    version: int | None = None
    """Number of the published version; null where a run's snapshot answers."""

    @property
    def label(self) -> str:
        """For protocols that name one version of a model by a text."""
        return str(self.step if self.version is None else self.version)


class RankerInfo(_Schema):
    """The model of the ranking stage."""

    run: str
    """Name of the run's folder."""
    step: int
    """Training steps in the weights."""
    candidates: int
    """Items of the recommender that it ranks, or as many as are asked for, if that is more."""


class RecommendAnswer(_Schema):
    """Recommended items, best first."""

    items: list[RecommendedItem]
    source: AnswerSource
    """That of all items; `merged` where some are the model's and some neighbors. Neighbors and else
    `popular` items come where nothing is known of the user: no history, no item of it in the catalog, or none
    that the run's operations leave; and where the model names no item. `popular` also where the service has
    too much to do to ask the model, `nearline` where it then has an answer that was computed before the
    request, `none` where there is no item."""
    ignored_items: list[Key]
    """Items of the request's history that are not in the catalog, each once; of a row, their ids. The model
    does not read them; neighbors know those that are in the graph."""
    unread_events: int
    """Known events of the history, or of what a row was made, that the model did not read: older ones than it
    reads, or such as the run's operations leave out."""
    model: ModelInfo
    allowed_items: int | None = None
    """Items of the catalog that the request's filter and candidates let through; fewer come back than are
    asked for, or none, where it is as few. Null without either."""
    unknown_filter_items: int | None = None
    """Ids of the request's candidates, of its filter and of each list that it names, and values of its
    columns, that are not in the catalog: they allow and deny nothing. Null without either."""
    control: ControlAnswer | None = None
    """What became of candidates, quotas and diversity; null where none were asked for."""
    ranker: RankerInfo | None = None
    """What ordered the items; null where the ranking stage did not."""
    degraded: list[Degraded] = []
    """What was lowered of this answer because the service had much to do: fewer beams, a part of the history
    read, no ranking, an answer given a short while ago, popular items. And `no_recent_events`, where the
    store of the users' events does not answer: what the data set has of the user counts alone;
    `no_long_history`, where summaries of old events are missing, and too many to compute;
    `earlier_history`, where the answer was computed before the user's last events. Empty for an answer in
    full."""
    _query: Query | None = PrivateAttr(None)

    @property
    def query(self) -> Query | None:
        """What the request was understood as, for the log; not part of what is sent."""
        return self._query

    def of(self, query: Query) -> RecommendAnswer:
        """The answer, which remembers what it is an answer to. Answers are kept: without what is as
        large as the catalog, and what was computed before."""
        self._query = replace(query, allowed_I=None, summaries=None, candidates=())
        return self


def _is_seconds(value: float) -> float:
    if value > LATEST_S:
        raise ValueError(
            f"expected seconds since 1970, and {value} of them end after the year 5000; give seconds, not "
            "milliseconds"
        )
    return value


class Event(Asked):
    """Something that a user did with an item."""

    user_id: Key
    item_id: Key
    timestamp: (
        Annotated[StrictInt | StrictFloat, Field(ge=0, allow_inf_nan=False), AfterValidator(_is_seconds)]
        | None
    ) = None
    """UNIX seconds; now, if not given. An event is the same again if user, item, time and behavior are: give
    the time, so that a message that is sent twice counts once."""
    behavior: StrictStr | None = None
    """What the user did, as the log of the data has it."""


class EventsAnswer(_Schema):
    """What became of events."""

    taken: int
    """Events that the next recommendation knows and training will read, or did already."""
    repeated: int
    """Of these, such as were known before."""
    unknown_items: int
    """Of these, events of items that are not in the catalog: they are kept for training and a later
    catalog, and no answer names these items. Where the service has a graph, their neighbors are named."""


class ReadyAnswer(_Schema):
    """The service can answer."""

    status: Literal["ready"] = "ready"
    model: ModelInfo


class LiveAnswer(_Schema):
    """The process runs."""

    status: Literal["live"] = "live"


class ErrorAnswer(_Schema):
    """Why there is no answer."""

    error: str
    """A sentence for people."""
    error_id: str | None = None
    """Status 500 only: the log has the cause under this id."""
