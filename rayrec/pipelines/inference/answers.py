"""What is asked of a recommender, and what it answers.

Axes: I items of the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rayrec.pipelines.inference.summaries import Summaries
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.event_labels import Label, Part

Source = Literal["model", "neighbors", "popular"]
Mode = Literal["exact", "reranked"]


@dataclass(frozen=True, eq=False)
class Quota:
    """How many items of a category a list has."""

    mask_I: BoolArray
    """[I] whether an item is of the category."""
    at_least: int = 0
    at_most: int | None = None


@dataclass(frozen=True, eq=False)
class Control:
    """What a list has to be besides good."""

    quotas: tuple[Quota, ...] = ()
    diversity: float = 0.0
    """0: by score alone; 1: by difference alone."""
    num_candidates: int | None = None
    """The query allows so many given items and no others; None: none were given."""


@dataclass(frozen=True)
class ControlReport:
    """How a list came to be what was asked for; None of what was not asked for."""

    candidates: Mode | None = None
    quotas: Mode | None = None
    diversity: Mode | None = None
    unmet_quotas: tuple[int, ...] = ()
    """Those, from 0, of which too few items may be recommended."""


@dataclass(frozen=True)
class Ranking:
    """What a ranking stage thinks of an item."""

    score: float
    """What items are ordered by."""
    probabilities: dict[str, float]
    """That the label is 1 if the item is shown, by label."""


@dataclass(frozen=True)
class Recommendation:
    """One recommended item."""

    item_key: str
    """The id as the source of the data writes it."""
    title: str | None
    score: float
    """As `TopItems.scores_BK`."""
    ranking: Ranking | None = None
    """Of a ranking stage, where there is one."""
    source: Source = "model"
    """What named it."""
    position: int = field(default=-1, compare=False)
    """In the catalog; -1 is not known."""


@dataclass(frozen=True)
class Query:
    """Whom to recommend to."""

    history_ids: Int64Array
    """Item ids, oldest first; ids that are not in the catalog are skipped."""
    user_id: int | None = None
    """Id of a user of the data set; None is nobody of it, whose row no training has touched."""
    times: Int64Array | None = None
    """UNIX seconds of the events of the history, for models and operations that need them. None: nothing is
    known of them, and all are taken to have happened at once, which leaves such a model the order alone."""
    labels: Mapping[Label, Int64Array] = field(default_factory=dict)
    """Codes of the events of the history, for models and operations that need them; of a label that is
    missing, nothing is known."""
    instruction: Mapping[Part, int] = field(default_factory=dict)
    """What is wanted, as `Recommender.instruction_of` has it."""
    allowed_I: BoolArray | None = None
    """What may be recommended, by catalog position; None: everything. Queries that share an array are
    answered with one."""
    is_prepared: bool = False
    """The operations of the run made this history; they do not run on it again."""
    summaries: Summaries | None = None
    """Of its old chunks, of this model, as far as they were computed before."""
    candidates: Sequence[Recommendation] = ()
    """Best first, that were found before; a ranking stage takes them where it is given too few."""


@dataclass(frozen=True)
class Budget:
    """How much is computed of an answer; None is as much as the run's config says."""

    max_beams: int | None = None
    """Beams of a generative model, as far as the items asked for allow; and the candidates of a ranking
    stage behind it, for a beam search finds no more items than it has beams."""
    max_events: int | None = None
    """Newest events of a history that the recommender reads. It still leaves out items of older ones."""
    max_new_chunks: int | None = None
    """Chunks of old events, without summaries in the query, that are summarized for the answer, the newest;
    others are left out (`Answer.lacks_long_history`)."""


FULL_BUDGET = Budget()


@dataclass(frozen=True)
class Wanted:
    """How a query is to be answered."""

    k: int
    """Items at most."""
    exclude_seen: bool = True
    """Leave out items of the history."""
    budget: Budget = FULL_BUDGET
    control: Control | None = None
    """What the list has to be besides good; None: nothing else."""
    beams: tuple[int, ...] | None = None
    """Of a generative model by level, instead of its own, as far as the budget allows, see `BeamPolicy`;
    None: its own."""
    beam_margin: float | None = None
    """Likewise; None: no beam is dropped for being less probable than the best."""


@dataclass(frozen=True)
class Answer:
    """To one query."""

    items: list[Recommendation]
    """Best first."""
    num_read: int
    """Events that the model read, a trigger and those of summarized chunks among them. Without any, there
    are no items."""
    num_unread: int
    """Known events that it did not read: older ones than it reads, or such as operations leave out."""
    lacks_long_history: bool = False
    """Chunks of old events are among those: the budget allowed no more to be summarized."""
    control: ControlReport | None = None
    """How the list came to be what was asked for besides."""
