"""Which keys a query sees, as data that any backend can evaluate.

Every mask here lets a query see at most two stretches of its own row's keys: all keys up to its own
place, say, or a shared context and the query's own codes. So a mask comes down to a few integers per
query (`Spans`), which a dense backend compares with an arange, a kernel loads beside the query, and
block-sparse backends turn into lists of blocks. Masks are joined with `&`.

Row b of the queries always belongs to row b of the keys. Where a row has more keys than queries, its
queries stand at the end, as in a decoding step: the last query's own key is the last one.

Axes: N queries, M keys, B rows, W the one or two spans of each query, T and S the longest row of queries
and of keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout

MAX_SPANS = 2


@dataclass(frozen=True, eq=False)
class Spans:
    """Query n sees the keys `first_WN[w, n] <= place < stop_WN[w, n]` of its row, for every w.

    Places count from 0 in the row. The spans of a query do not overlap; empty ones have stop <= first.
    """

    first_WN: Tensor
    """int32, not negative."""
    stop_WN: Tensor
    """int32, not past the end of the row."""

    def padded(self, queries: JaggedLayout) -> tuple[Tensor, Tensor]:
        """First and stop as [B, T, W]; what is past the end of a row sees nothing."""
        return queries.pad(self.first_WN.T), queries.pad(self.stop_WN.T)

    def dense(self, queries: JaggedLayout, keys: JaggedLayout) -> Tensor:
        """[B, T, S] bool: whether the query sees the key."""
        return visible(*self.padded(queries), torch.arange(keys.longest, device=keys.device))


def visible(first_W: Tensor, stop_W: Tensor, place_S: Tensor) -> Tensor:
    """[..., W] spans and [S] places to [..., S] bool."""
    spans = zip(first_W.unbind(-1), stop_W.unbind(-1), strict=True)
    inside = [(place_S >= first[..., None]) & (place_S < stop[..., None]) for first, stop in spans]
    return inside[0] if len(inside) == 1 else inside[0] | inside[1]


@dataclass(frozen=True)
class Mask(ABC):
    """What all masks can do."""

    @abstractmethod
    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        """
        Raises:
            ValueError: the mask does not fit the layouts.
        """

    @property
    def kind(self) -> str:
        """Name under which backends and measurements know the mask."""
        return type(self).__name__

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)


@dataclass(frozen=True)
class Full(Mask):
    """Every key of the row."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        stop_N = _key_lengths_N(queries, keys)
        return _spans(queries, keys, (torch.zeros_like(stop_N), stop_N))


@dataclass(frozen=True)
class Causal(Mask):
    """The query's own key and those before it."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        own_N = own_places_N(queries, keys)
        return _spans(queries, keys, (torch.zeros_like(own_N), own_N + 1))


@dataclass(frozen=True)
class CausalGroups(Mask):
    """As many queries for every key: those of a key see it and the ones before it.

    What is predicted behind each event of a history has several tokens, all of which see the events so far.
    """

    size: int
    """Queries of each key."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        if (queries.lengths_B != self.size * keys.lengths_B).any():
            raise ValueError(
                f"CausalGroups: rows of {queries.lengths_B.tolist()} queries do not hold {self.size} for "
                f"each of {keys.lengths_B.tolist()} keys"
            )
        stop_N = queries.place_N // self.size + 1
        return _spans(queries, keys, (torch.zeros_like(stop_N), stop_N))


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """The query's own key and the `size - 1` before it."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"SlidingWindow.size must be at least 1, got {self.size}: nothing would be seen")

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        own_N = own_places_N(queries, keys)
        return _spans(queries, keys, (own_N + 1 - self.size, own_N + 1))


@dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    """Causal, but a row's first keys are seen by all of its queries."""

    prefix_B: Tensor
    """[B] keys in each row's prefix."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        _expect_rows("PrefixLM.prefix_B", self.prefix_B, queries)
        own_N = own_places_N(queries, keys)
        stop_N = torch.maximum(own_N + 1, self.prefix_B.index_select(0, queries.row_N))
        return _spans(queries, keys, (torch.zeros_like(own_N), stop_N))


@dataclass(frozen=True, eq=False)
class TargetAware(Mask):
    """A history and, at the end of the row, candidates: these see the history and themselves alone.

    So that any number of candidates is ranked in one pass over the history, each as if it were alone.

    Source: Zhai et al., ICML 2024, arXiv:2402.17152, section 3.2.
    """

    num_targets_B: Tensor
    """[B] candidates at the end of each row."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        _expect_rows("TargetAware.num_targets_B", self.num_targets_B, queries)
        own_N = own_places_N(queries, keys)
        history_N = (keys.lengths_on_device_B() - self.num_targets_B).index_select(0, queries.row_N)
        is_target_N = own_N >= history_N
        # An event of the history has its own key in the first span; its second one is empty.
        return _spans(
            queries,
            keys,
            (torch.zeros_like(own_N), torch.where(is_target_N, history_N, own_N + 1)),
            (own_N, own_N + is_target_N),
        )


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Several documents packed into one row; each token sees those of its own. For self attention."""

    document_N: Tensor
    """[N] integers; neighbors of a row with the same number belong to one document."""

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        if queries is not keys:
            raise ValueError(
                "Documents: queries and keys must have one layout; it is for self attention alone"
            )
        if self.document_N.shape != queries.row_N.shape:
            raise ValueError(
                f"Documents.document_N must have one number for each of {queries.num_tokens} tokens, "
                f"got shape {tuple(self.document_N.shape)}"
            )
        token_N = torch.arange(queries.num_tokens, device=queries.device)
        starts_N = queries.place_N == 0
        starts_N[1:] |= self.document_N[1:] != self.document_N[:-1]
        first_N = torch.where(starts_N, token_N, 0).cummax(0).values
        # The document's end is the next start: looked for from the back.
        next_N = torch.where(starts_N, token_N, queries.num_tokens).roll(-1)
        next_N[-1:] = queries.num_tokens
        stop_N = next_N.flip(0).cummin(0).values.flip(0)
        row_start_N = token_N - queries.place_N
        return _spans(queries, keys, (first_N - row_start_N, stop_N - row_start_N))


@dataclass(frozen=True)
class SharedContextBeams(Mask):
    """Beams of a row share its context; each sees it and its own earlier codes, not another beam's.

    A row's keys are the context and then the codes of each beam, beam after beam; its queries are those
    of each beam, the beam's last codes. The context's length follows: it is what the beams leave.
    """

    queries_per_beam: int
    codes_per_beam: int
    """Keys of each beam, the query's own included."""

    def __post_init__(self) -> None:
        if not 1 <= self.queries_per_beam <= self.codes_per_beam:
            raise ValueError(
                "SharedContextBeams.queries_per_beam must be at least 1 and at most codes_per_beam, got "
                f"{self.queries_per_beam} and {self.codes_per_beam}: a query sees its own key"
            )

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        beams_B, left_B = divmod(queries.lengths_B, self.queries_per_beam)
        if left_B.any() or (beams_B * self.codes_per_beam > keys.lengths_B).any():
            raise ValueError(
                f"SharedContextBeams: rows of {queries.lengths_B.tolist()} queries and "
                f"{keys.lengths_B.tolist()} keys do not hold whole beams of {self.queries_per_beam} queries "
                f"and {self.codes_per_beam} keys"
            )
        beam_N = queries.place_N // self.queries_per_beam
        code_N = queries.place_N % self.queries_per_beam + self.codes_per_beam - self.queries_per_beam
        beams_on_device_B = queries.lengths_on_device_B() // self.queries_per_beam
        context_B = keys.lengths_on_device_B() - beams_on_device_B * self.codes_per_beam
        context_N = context_B.index_select(0, queries.row_N)
        first_N = context_N + beam_N * self.codes_per_beam
        return _spans(queries, keys, (torch.zeros_like(first_N), context_N), (first_N, first_N + code_N + 1))


@dataclass(frozen=True)
class Both(Mask):
    """What both masks let be seen; one of them must need a single span per query."""

    one: Mask
    other: Mask

    @property
    def kind(self) -> str:
        return f"{self.one.kind}&{self.other.kind}"

    def spans(self, queries: JaggedLayout, keys: JaggedLayout) -> Spans:
        one, other = self.one.spans(queries, keys), self.other.spans(queries, keys)
        if len(one.first_WN) + len(other.first_WN) > 1 + MAX_SPANS:
            raise ValueError(
                f"{self.kind}: both masks have {MAX_SPANS} spans per query, and their intersection may have "
                "more than any backend takes; join only one of them with a mask of single spans"
            )
        return Spans(torch.maximum(one.first_WN, other.first_WN), torch.minimum(one.stop_WN, other.stop_WN))


def own_places_N(queries: JaggedLayout, keys: JaggedLayout) -> Tensor:
    """[N] place of each query's own key in its row of keys; negative where the row has too few keys."""
    if queries is keys:
        return queries.place_N
    shift_B = keys.lengths_on_device_B() - queries.lengths_on_device_B()
    return queries.place_N + shift_B.index_select(0, queries.row_N)


def _key_lengths_N(queries: JaggedLayout, keys: JaggedLayout) -> Tensor:
    return keys.lengths_on_device_B().index_select(0, queries.row_N)


def _spans(queries: JaggedLayout, keys: JaggedLayout, *spans: tuple[Tensor, Tensor]) -> Spans:
    length_N = _key_lengths_N(queries, keys)
    first_WN = torch.stack([first_N.clamp(min=0) for first_N, _ in spans])
    stop_WN = torch.stack([torch.minimum(stop_N.clamp(min=0), length_N) for _, stop_N in spans])
    return Spans(first_WN.int(), stop_WN.int())


def _expect_rows(field: str, values_B: Tensor, queries: JaggedLayout) -> None:
    if values_B.shape != (queries.num_rows,):
        raise ValueError(
            f"{field} must have one number for each of {queries.num_rows} rows, got {tuple(values_B.shape)}"
        )
