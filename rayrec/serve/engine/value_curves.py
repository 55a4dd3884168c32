"""What each action finds of what full effort finds, by how much is known of a user.

    replayed requests: mass that each action finds, seconds that it takes ─► ValueCurves.fit ─► curves.json
                                                                                │
    a request with so many events, an action ─► ValueCurves.of ─► share of the mass, or None: not measured

The *mass* of an answer is the probability that the next item of the user is in it, as the model says that
reads everything. A generative model knows it exactly, so no labels are needed. Shares are relative to full
effort, whose own search is not exhaustive: 1 is what this service gives at its best.

Over the cost of the actions, the shares of a bucket are made monotone and concave. Then the choice by price,
argmax v m - λ c, is the optimum of the linear program up to one request (see `allocation`).

Axes: N requests, A actions, B buckets of users, by their number of events.

Source: DCAF, arXiv:2006.09684, section 4 (values that rise with the cost, and ever less so).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.errors import InputError

T = TypeVar("T")

FORMAT = 1
_AGAIN = "measure it again with `rayrec value-curves`"
_MOST_BUCKETS, _LEAST_ROWS = 8, 30
"""Of a bucket: means of fewer requests say little."""


class ActionKey(NamedTuple):
    """What is computed of an answer; None is as much as the model's config says."""

    max_beams: int | None = None
    max_events: int | None = None
    rank: bool = True
    """Whether a ranking stage ranks, where there is one."""
    near_line: bool = False
    """Whether the answer is one that was computed before the request."""


FULL_EFFORT = ActionKey()


def version_of(run: str, step: int) -> str:
    """The identity of a model that curves are of: the name of its run, and the steps that it has taken.

    A run and the version that was published of it have the same one, wherever their folders are.
    """
    return f"{Path(run).name}@{step}"


@dataclass(frozen=True)
class ValueCurves:
    """The share of full effort's mass that each action finds.

    Raises:
        InputError: shares that are none, sizes that do not fit, or edges that do not ascend.
    """

    version: str
    """Of the model, see `version_of`."""
    actions: tuple[ActionKey, ...]
    edges: tuple[int, ...]
    """Numbers of events that separate the buckets: a user with exactly so many is in the bucket above."""
    shares_BA: Float64Array

    def __post_init__(self) -> None:
        expected = (len(self.edges) + 1, len(self.actions))
        if not self.actions or self.shares_BA.shape != expected:
            raise InputError(
                f"value curves of {self.version}: {len(self.actions)} actions and {len(self.edges)} edges "
                f"need shares of the shape {expected}, found {self.shares_BA.shape}; {_AGAIN}"
            )
        if len(set(self.actions)) < len(self.actions):
            raise InputError(f"value curves of {self.version}: an action is there twice; {_AGAIN}")
        if any(after <= before for before, after in zip(self.edges, self.edges[1:], strict=False)):
            raise InputError(
                f"value curves of {self.version}: the edges {list(self.edges)} do not ascend; {_AGAIN}"
            )
        is_wrong_BA = ~((self.shares_BA >= 0) & (self.shares_BA <= 1))  # NaN compares with nothing
        if is_wrong_BA.any():
            bucket, place = np.argwhere(is_wrong_BA)[0].tolist()
            raise InputError(
                f"value curves of {self.version}: bucket {bucket} has the share "
                f"{self.shares_BA[bucket, place]} for {self.actions[place]}; expected one from 0 to 1; "
                f"{_AGAIN}"
            )

    @cached_property
    def _shares_of(self) -> dict[ActionKey, list[float]]:
        """By bucket. Lists: of NumPy, a single number takes as long as all else of a decision."""
        return {action: self.shares_BA[:, place].tolist() for place, action in enumerate(self.actions)}

    def of(self, num_events: int, action: ActionKey) -> float | None:
        """The share that an action finds for a user with so many events; None: it was not measured."""
        shares = self._shares_of.get(action)
        return None if shares is None else shares[bisect_right(self.edges, num_events)]

    @classmethod
    def fit(
        cls,
        version: str,
        actions: Sequence[ActionKey],
        num_events_N: Int64Array,
        masses_NA: Float64Array,
        full_N: Float64Array,
        seconds_NA: Float64Array,
        edges: Sequence[int] | None = None,
    ) -> Self:
        """Curves of replayed requests.

        Args:
            masses_NA: that each action finds.
            full_N: that full effort finds.
            seconds_NA: that each action takes.
            edges: None chooses buckets of about as many requests each, and enough to say something.

        Raises:
            InputError: there is no request, or a mass or a time that is none.
        """
        if not len(num_events_N):
            raise InputError(
                "no request was replayed, so nothing is known of any action; give a log with some"
            )
        masses = {"mass": masses_NA, "mass of full effort": full_N, "time": seconds_NA}
        for name, values in masses.items():
            if (is_wrong := ~(np.isfinite(values) & (values >= 0))).any():
                raise InputError(
                    f"{name}: expected numbers from 0, found {values[is_wrong][0]} ({is_wrong.sum()} such)"
                )
        chosen = _edges_of(num_events_N) if edges is None else tuple(edges)
        bucket_N = np.searchsorted(np.array(chosen, dtype=np.int64), num_events_N, side="right")
        shares = []
        for bucket in range(len(chosen) + 1):
            is_in_N = bucket_N == bucket
            if not full_N[is_in_N].sum() > 0:  # nobody, or nobody for whom anything is found: as all users
                is_in_N = np.ones(len(bucket_N), dtype=np.bool_)
            shares_A = mean_shares(masses_NA[is_in_N], full_N[is_in_N])
            shares.append(concave_over(seconds_NA[is_in_N].mean(axis=0), shares_A))
        return cls(version, tuple(actions), chosen, np.array(shares))

    def to_json(self) -> str:
        """As a file has it."""
        values = {
            "format": FORMAT,
            "version": self.version,
            "actions": [action._asdict() for action in self.actions],
            "edges": list(self.edges),
            "shares": self.shares_BA.tolist(),
        }
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "value curves") -> Self:
        """Read what `to_json` wrote.

        Args:
            where: the file, for messages.

        Raises:
            InputError: it is something else, of another format, or has shares that are none.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"{where}: not valid JSON ({error}); {_AGAIN}") from error
        if not isinstance(values, dict) or "format" not in values:
            raise InputError(f"{where}: expected what `rayrec value-curves` writes, found something else")
        if values["format"] != FORMAT:
            raise InputError(
                f"{where}: format {values['format']}, this version of RayRec reads {FORMAT}; {_AGAIN}"
            )
        try:
            return cls(
                version=_checked(values["version"], str),
                actions=tuple(_action(each) for each in _checked(values["actions"], list)),
                edges=tuple(_checked(edge, int) for edge in _checked(values["edges"], list)),
                shares_BA=np.array(values["shares"], dtype=np.float64),
            )
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{where}: not complete ({type(error).__name__}: {error}); {_AGAIN}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            InputError: there is none, or it cannot be used.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror}); expected curves of `rayrec value-curves`"
            ) from error
        return cls.from_json(text, str(path))


def mean_shares(masses_NA: Float64Array, full_N: Float64Array) -> Float64Array:
    """[A] the mass that each action finds of that of full effort, all requests together; at most 1."""
    shares_A: Float64Array = np.minimum(masses_NA.sum(axis=0) / max(float(full_N.sum()), 1e-300), 1.0)
    return shares_A


def concave_over(costs_A: Float64Array, shares_A: Float64Array) -> Float64Array:
    """The least monotone concave function of the cost, from nothing at no cost, that is no less than the
    shares, at the costs of the actions.

    An action below it is as good as a mixture of its neighbors there, and no better.
    """
    order_A = np.lexsort((shares_A, costs_A))
    hull = [(0.0, 0.0)]
    for cost, share in zip(costs_A[order_A].tolist(), shares_A[order_A].tolist(), strict=True):
        if share <= hull[-1][1]:
            continue  # dearer, and no better
        if cost <= hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (cost, share)):
            hull.pop()
        hull.append((cost, share))
    hull_costs, hull_shares = zip(*hull, strict=True)
    raised_A: Float64Array = np.interp(costs_A, hull_costs, hull_shares)
    return raised_A


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def _edges_of(num_events_N: Int64Array) -> tuple[int, ...]:
    """Between buckets of about as many requests each; users with equally many events share one."""
    num_buckets = min(_MOST_BUCKETS, max(1, len(num_events_N) // _LEAST_ROWS))
    quantiles = np.arange(1, num_buckets) / num_buckets
    edges = np.unique(np.quantile(num_events_N, quantiles, method="higher")).tolist()
    return tuple(edge for edge in edges if edge > num_events_N.min())


def _action(values: Any) -> ActionKey:
    """Of a file.

    Raises:
        TypeError: it has another field, lacks one, or has one of another type.
    """
    fields = dict(_checked(values, dict))
    if fields.keys() != set(ActionKey._fields):
        raise TypeError(f"an action has {', '.join(ActionKey._fields)}, found {', '.join(fields)}")
    for name in ("max_beams", "max_events"):
        if fields[name] is not None and _checked(fields[name], int) < 1:
            raise TypeError(f"{name} is {fields[name]}, expected at least 1 or null")
    for name in ("rank", "near_line"):
        _checked(fields[name], bool)
    return ActionKey(**fields)


def _checked(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:  # True is no number here
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value
