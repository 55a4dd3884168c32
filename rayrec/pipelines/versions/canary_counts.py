"""What became of the requests of a canary and of the version that serves, by groups of their users.

Requests of one user are alike, and what is drawn are users. So all is counted by groups of users, by a hash
of theirs, and intervals are of how much the groups differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rayrec.pipelines.metrics.clusters import GroupedShare, difference
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.proportions import Z_95

NUM_GROUPS = 64
FORMAT = 1
"""Of the reports that replicas write: another number where groups or bins are others, so that replicas of
other code know that they cannot be added up."""
STEP = 1.05
"""Times an upper bound of a bin of latencies that the next one is."""
FIRST_BIN_S = 1e-4
NUM_BINS = 320
"""The last one begins at ten minutes."""
SKETCH_BITS = 4096
"""Of a linear count of users, which errs by 2 % of 5,000 (Whang et al., TODS 15, 1990)."""
MOST_USERS = 10_000
"""That it tells apart."""


@dataclass
class ArmCounts:
    """What became of the requests of one version."""

    errors_G: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_GROUPS, np.int64))
    """By group of users."""
    bins_GB: NDArray[np.int64] = field(default_factory=lambda: np.zeros((NUM_GROUPS, NUM_BINS), np.int64))
    """Answers by group and time, see `bin_of`."""
    sketch_S: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(SKETCH_BITS, np.bool_))
    """Places that users are hashed to."""

    def add(self, seconds: float | None, user_bits: int) -> None:
        """Count a request.

        Args:
            seconds: until its answer; None: it got an error.
            user_bits: hash of its user.
        """
        group = user_bits % NUM_GROUPS
        if seconds is None:
            self.errors_G[group] += 1
        else:
            self.bins_GB[group, bin_of(seconds)] += 1
        self.sketch_S[user_bits // NUM_GROUPS % SKETCH_BITS] = True

    def plus(self, other: ArmCounts) -> ArmCounts:
        return ArmCounts(
            self.errors_G + other.errors_G, self.bins_GB + other.bins_GB, self.sketch_S | other.sketch_S
        )

    @property
    def num_errors(self) -> int:
        return int(self.errors_G.sum())

    @property
    def num_answers(self) -> int:
        return int(self.bins_GB.sum())

    @property
    def num_requests(self) -> int:
        return self.num_answers + self.num_errors

    @property
    def num_users(self) -> int:
        """About so many, and at most `MOST_USERS`; each request without a user is one."""
        num_free = max(SKETCH_BITS - int(self.sketch_S.sum()), 1)
        return min(round(SKETCH_BITS * math.log(SKETCH_BITS / num_free)), MOST_USERS)

    @property
    def errors(self) -> GroupedShare:
        """Of the requests."""
        return GroupedShare(
            self.errors_G.astype(np.float64), (self.errors_G + self.bins_GB.sum(1)).astype(np.float64)
        )

    def quantile_s(self, share: float) -> float:
        """A quantile of the times, interpolated in its bin; 0 where there are none."""
        ends_B = np.cumsum(self.bins_GB.sum(0))
        if not ends_B[-1]:
            return 0.0
        wanted = share * ends_B[-1]
        number = int(np.searchsorted(ends_B, wanted))
        begin = ends_B[number - 1] if number else 0
        part = (wanted - begin) / (ends_B[number] - begin)
        return float(FIRST_BIN_S * STEP ** (number - 1 + part))

    def above(self, seconds: float) -> GroupedShare:
        """Answers that took longer than a time; of the bin that it is in, the part above it."""
        place = math.log(max(seconds, FIRST_BIN_S / STEP) / FIRST_BIN_S, STEP)
        part_B = np.clip(np.arange(NUM_BINS) - place, 0.0, 1.0)
        return GroupedShare(self.bins_GB @ part_B, self.bins_GB.sum(1).astype(np.float64))

    def to_values(self) -> dict[str, list[int]]:
        """What `of_values` reads."""
        places = np.flatnonzero(self.bins_GB)
        return {
            "errors": self.errors_G.tolist(),
            "places": places.tolist(),
            "answers": self.bins_GB.ravel()[places].tolist(),
            "users": np.flatnonzero(self.sketch_S).tolist(),
        }

    @staticmethod
    def of_values(values: dict[str, list[int]]) -> ArmCounts:
        arm = ArmCounts()
        arm.errors_G[:] = values["errors"]
        arm.bins_GB.ravel()[np.array(values["places"], np.int64)] = values["answers"]
        arm.sketch_S[np.array(values["users"], np.int64)] = True
        return arm


def bin_of(seconds: float) -> int:
    """The number of a time's bin: its upper bound is `FIRST_BIN_S * STEP ** number`."""
    if seconds <= FIRST_BIN_S:
        return 0
    return min(math.ceil(math.log(seconds / FIRST_BIN_S, STEP) - 1e-9), NUM_BINS - 1)


class OtherFormatError(ValueError):
    """A report by a replica of earlier or later code."""


@dataclass(frozen=True)
class CanaryCounts:
    """Of both versions, by one replica or by all."""

    baseline: ArmCounts
    canary: ArmCounts

    def to_json(self) -> str:
        arms = {"baseline": self.baseline.to_values(), "canary": self.canary.to_values()}
        return json.dumps({"format": FORMAT, **arms})

    @staticmethod
    def of_json(content: bytes) -> CanaryCounts:
        """
        Raises:
            OtherFormatError: other code has counted otherwise.
            ValueError: it is something else.
        """
        found = json.loads(content)
        try:
            if (number := found.get("format", FORMAT)) != FORMAT:
                raise OtherFormatError(f"counts of format {number!r}, and {FORMAT} is known here")
            return CanaryCounts(ArmCounts.of_values(found["baseline"]), ArmCounts.of_values(found["canary"]))
        except OtherFormatError:
            raise
        except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
            raise ValueError(f"no counts of a canary: {error!r}") from error

    @staticmethod
    def total(counts: Iterable[CanaryCounts]) -> CanaryCounts:
        baseline, canary = ArmCounts(), ArmCounts()
        for each in counts:
            baseline, canary = baseline.plus(each.baseline), canary.plus(each.canary)
        return CanaryCounts(baseline, canary)

    def more_errors(self, z: float = Z_95) -> Estimate:
        """By which the canary's share of errors is above the other's, with its interval."""
        return difference(self.canary.errors, self.baseline.errors, z)

    def more_beyond(self, share: float, ratio: float, z: float = Z_95) -> Estimate:
        """By which the canary's share of answers beyond so many times a quantile of the other's is above the
        other's share beyond the quantile; both err."""
        bound_s = self.baseline.quantile_s(share)
        return difference(self.canary.above(ratio * bound_s), self.baseline.above(bound_s), z)
